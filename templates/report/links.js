/* The section with the load of the links in the steady state. */

function linksSection(report) {
  const links = report.links || [];
  if (!links.length) return null;
  const measured = links.some((one) => one.measured_busy !== null && one.measured_busy !== undefined);
  const sorted = links;
  const lead = [...wordsOf(report, "links"), ...(measured ? ["The mark on a bar is what the run measured."] : [])];
  const rows = sorted.map((one) => ({
    name: one.name,
    share: one.busy,
    mark: one.measured_busy,
    value: showShare(one.busy) + (measured ? ` → ${showShare(one.measured_busy)}` : ""),
  }));
  const columns = [
    ["link", "text"],
    ["rate", "number"],
    ["a minibatch", "number"],
    ["busy", "number"],
    ...(measured ? [["measured", "number"]] : []),
  ];
  const cells = () =>
    sorted.map((one) => [
      one.name,
      showRate(one.rate),
      showSize(one.bytes_per_minibatch),
      showShare(one.busy),
      ...(measured ? [showShare(one.measured_busy)] : []),
    ]);
  const label = `Links: ${sorted
    .slice(0, 5)
    .map((one) => `${one.name} ${showShare(one.busy)}`)
    .join(", ")}`;
  return section(
    "links",
    "Links",
    lead,
    figure(
      "The line is all of the time.",
      el("div", {}, barList(rows, { line: 1, label })),
      chartTable("Links in the steady state", columns, cells),
    ),
  );
}
