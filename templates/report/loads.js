/* The loads: how long a microbatch keeps each resource busy, beside the step time, and the traffic of each link. */

function loadsSection(report) {
  const loads = report.loads || [];
  if (!loads.length) return null;
  const known = (name) => loads.some((one) => one[name] !== null && one[name] !== undefined);
  const measured = known("measured_busy");
  const rows = loads.map((one) => ({
    name: one.name,
    share: one.share,
    mark: one.measured_busy,
    value: `${showTime(one.seconds)} · ${showShare(one.share)}`,
    class: one.binds ? "full" : "",
  }));
  const figures = ["a microbatch", "of the step time", "rate", "sent", "busy, simulated"];
  const columns = [...texts("resource"), ...numbers(...figures, ...(measured ? ["busy, measured"] : []))];
  const cells = () =>
    loads.map((one) => [
      one.name,
      showTime(one.seconds),
      showShare(one.share),
      one.rate ? showRate(one.rate) : "–",
      showSize(one.bytes_per_minibatch),
      showShare(one.simulated_busy),
      ...(measured ? [showShare(one.measured_busy)] : []),
    ]);
  const first = loads.slice(0, 5).map((one) => `${one.name} ${showShare(one.share)}`);
  return section(
    "loads",
    "Why: what limits the step time",
    wordsOf(report, "loads"),
    figure(
      `The line is the step time by the formulas.${measured ? " The mark is what the run measured." : ""}`,
      el("div", {}, barList(rows, { line: 1, label: `What limits the step time: ${first.join(", ")}` })),
      chartTable("Resources and links", columns, cells),
    ),
  );
}
