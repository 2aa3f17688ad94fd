/*
 * A box of figures that follows the pointer. Readers without a pointer find the same figures in the line below the
 * chart.
 */

let tooltipBox = null;

function showTooltip(event, lines) {
  if (!tooltipBox) {
    tooltipBox = el("div", { class: "tooltip", "aria-hidden": "true" });
    document.body.append(tooltipBox);
  }
  tooltipBox.replaceChildren(...lines.map((line, at) => el(at ? "div" : "strong", {}, line)));
  tooltipBox.hidden = false;
  const { width, height } = tooltipBox.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 14 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 14;
  tooltipBox.style.left = Math.max(4, left) + "px";
  tooltipBox.style.top = Math.max(4, top) + "px";
}

function hideTooltip() {
  if (tooltipBox) tooltipBox.hidden = true;
}
