/* The bounds of the pace: the time that each resource spends on a minibatch, compared with the pace. */

function boundsSection(report) {
  const found = report.prediction.bounds || [];
  if (!found.length) return null;
  const rows = found.map((one) => ({
    name: one.what,
    share: one.share,
    value: `${showTime(one.seconds)} · ${showShare(one.share)}`,
    class: one.binds || one.share > 0.9995 ? "full" : "",
  }));
  const label = `What bounds the pace: ${found
    .slice(0, 5)
    .map((one) => `${one.what} ${showShare(one.share)}`)
    .join(", ")}`;
  return section(
    "bounds",
    "What bounds the pace",
    wordsOf(report, "bounds"),
    figure(
      "The line is the pace.",
      el("div", {}, barList(rows, { line: 1, label })),
      chartTable(
        "Resources",
        [
          ["resource", "text"],
          ["a minibatch", "number"],
          ["of the pace", "number"],
        ],
        () => found.map((one) => [one.what, showTime(one.seconds), showShare(one.share)]),
      ),
    ),
  );
}
