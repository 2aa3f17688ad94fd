/* Tables. The text alternatives of charts are inside a <details>, and are built when it is opened. */

/*
 * `columns` are [heading, kind], with kind "text" or "number". Cells are text or elements; the first cell names the
 * row.
 */
function table(caption, columns, rows) {
  const head = columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title));
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, at) =>
        el(at ? "td" : "th", at ? { class: columns[at][1] } : { scope: "row", class: columns[at][1] }, cell ?? "–"),
      ),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)),
  );
}

/* `make` builds the content of the <details>, and is called when it is first opened. */
function details(summary, make) {
  const found = el("details", {}, el("summary", {}, summary));
  const open = () => {
    if (found.open && found.childElementCount === 1) found.append(make());
  };
  found.addEventListener("toggle", open);
  return found;
}

function chartTable(caption, columns, rows) {
  return details("As a table", () => table(caption, columns, rows()));
}
