/* Elements by hand. Strings become text, never markup, whatever they hold. */

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, one]) => element.style.setProperty(key, one));
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/* A section of the page, with a heading that the list of contents links to. */
function section(id, title, lead, ...children) {
  return el(
    "section",
    { id, "aria-labelledby": id + "-title" },
    el("h2", { id: id + "-title" }, title),
    lead ? el("p", { class: "lead" }, lead) : null,
    ...children,
  );
}

/* A chart with its caption; `table` is its text alternative. */
function figure(caption, chart, table) {
  return el("figure", {}, chart, caption ? el("figcaption", {}, caption) : null, table);
}

function stageChip(stage, title) {
  if (stage < 0) return el("span", { class: "chip idle", title: title || "idle" }, "–");
  return el("span", { class: "chip stage-" + (stage % STAGES.length), title: title || null }, String(stage + 1));
}

function stageName(stage) {
  return stage < 0 ? "idle" : "stage " + (stage + 1);
}

let lastId = 0;

function freshId(stem) {
  lastId += 1;
  return stem + "-" + lastId;
}
