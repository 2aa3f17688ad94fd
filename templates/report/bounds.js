/* What bounds the pace: the time that each resource needs a minibatch, against the pace. */

function boundsSection(report) {
  const found = report.prediction.bounds || [];
  if (!found.length) return null;
  const pace = report.prediction.minibatch_s;
  const first = found[0];
  const second = found.find((one) => one.share < 0.995);
  const lead =
    `Each resource needs so long for a minibatch. The longest, ${first.what}, sets the pace of ${showTime(pace)}` +
    (second ? `; the next, ${second.what}, is at ${showShare(second.share)} of it.` : ".");
  const rows = found.map((one) => ({
    name: one.what,
    share: one.share,
    value: `${showTime(one.seconds)} · ${showShare(one.share)}`,
    class: one.share >= 0.995 ? "full" : "",
  }));
  const label = `What bounds the pace: ${found.slice(0, 5).map((one) => `${one.what} ${showShare(one.share)}`).join(", ")}`;
  return section(
    "bounds",
    "What bounds the pace",
    lead,
    figure(
      "The line is the pace.",
      el("div", {}, barList(rows, { line: 1, label })),
      chartTable("Resources", [["resource", "text"], ["a minibatch", "number"], ["of the pace", "number"]], () =>
        found.map((one) => [one.what, showTime(one.seconds), showShare(one.share)]),
      ),
    ),
  );
}
