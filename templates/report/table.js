/* Tables: the text alternatives of charts are behind a <details>, and are made when it is opened. */

/* `columns` are [heading, kind], kind "text" or "number"; cells are text or elements, and the first names the row. */
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

/* `make` gives what the <details> holds; it runs when that is opened first. */
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
