/* Creates DOM elements: sections, tables, bars and chips. Strings always become text, never markup. */

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

/* A sentence in which text between backticks becomes code. */
function marked(sentence) {
  const parts = sentence.split("`");
  if (parts.length % 2 === 0) return [sentence];
  return parts.map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

const LEAD = 4;

/*
 * A section of the page: a heading that the list of contents links to, and sentences, which are folded if there are
 * many.
 */
function section(id, title, sentences, ...children) {
  const [first, rest] = [sentences.slice(0, LEAD), sentences.slice(LEAD)];
  return el(
    "section",
    { id, "aria-labelledby": id + "-title" },
    el("h2", { id: id + "-title" }, title),
    first.length ? el("p", { class: "lead" }, marked(first.join(" "))) : null,
    rest.length > 0
      ? details("More in words", () =>
          el(
            "ul",
            { class: "sentences" },
            rest.map((one) => el("li", {}, marked(one))),
          ),
        )
      : null,
    ...children,
  );
}

/* The report's sentences on a section. */
function wordsOf(report, part) {
  return (report.words || {})[part] || [];
}

/* A chart with its caption. `table` is its text alternative. */
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

function stageLabel(stage) {
  return el("span", { class: "stage-label" }, stageChip(stage), el("span", { class: "hidden" }, stageName(stage)));
}

/* Columns of a table, from their headings: [heading, kind]. */
const texts = (...headings) => headings.map((heading) => [heading, "text"]);
const numbers = (...headings) => headings.map((heading) => [heading, "number"]);

/* A table. Cells are text or elements; the first cell names the row. */
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

/* The text alternative of a chart, which is built when it is opened. */
function chartTable(caption, columns, rows) {
  return details("As a table", () => table(caption, columns, rows()));
}

/* Horizontal bars against a reference line: rows of { name, share, value, mark }, where share 1 reaches the line. */
function bars(rows, options) {
  const most = Math.max(options.line || 0, ...rows.map((row) => Math.max(row.share || 0, row.mark || 0)), 1e-9);
  const percent = (share) => (100 * share) / most + "%";
  return el(
    "div",
    { class: "bars " + (options.class || ""), role: "img", "aria-label": options.label },
    rows.map((row) => barRow(row, percent, options.line)),
  );
}

function barRow(row, percent, line) {
  const known = row.mark !== null && row.mark !== undefined;
  return el(
    "div",
    { class: "row" },
    el("span", { class: "name" }, row.name, row.note ? el("small", {}, row.note) : null),
    el(
      "span",
      { class: "track" },
      row.share ? el("span", { class: "bar " + (row.class || ""), style: { width: percent(row.share) } }) : null,
      known ? el("span", { class: "mark", style: { left: percent(row.mark) } }) : null,
      line ? el("span", { class: "line", style: { left: percent(line) } }) : null,
    ),
    el("span", { class: "value" }, row.value),
  );
}

/* The first rows of a long list, with the others inside a <details>. */
function barList(rows, options, most = 14) {
  if (rows.length <= most + 2) return bars(rows, options);
  return [
    bars(rows.slice(0, most), options),
    details(`${showCount(rows.length - most)} more`, () => bars(rows.slice(most), options)),
  ];
}
