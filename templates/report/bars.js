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
