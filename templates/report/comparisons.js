/* The plan compared with others at the same batch: the throughput of each. */

/* Samples per second of a row. The row's time is for as many samples as a microbatch of the plan has. */
function showThroughput(report, row) {
  if (!row.minibatch_s) return "none fits";
  const rate = (report.made || {}).minibatch / row.minibatch_s;
  return (rate < 100 ? digits(rate) : showCount(Math.round(rate))) + " samples/s";
}

function comparisonsSection(report) {
  const rows = report.comparisons || [];
  if (!rows.length) return null;
  const own = report.prediction.minibatch_s;
  const isOwn = (row) => row === rows[0];
  const drawn = rows.map((row) => ({
    name: el("span", {}, el("b", {}, row.name), " ", el("span", { class: "config" }, row.config || "")),
    note: row.remark,
    share: row.minibatch_s ? own / row.minibatch_s : 0,
    value: showThroughput(report, row) + (isOwn(row) || !row.gain ? "" : ` · ${showGain(row.gain)}`),
    class: isOwn(row) ? "full" : /not fit/.test(row.remark || "") ? "unfit" : "",
  }));
  const others = rows.filter((row) => !isOwn(row) && row.gain);
  const sentences = others.map((row) => `this plan is ${showGain(row.gain)} as fast as ${row.name}`);
  const label = `Speed of other plans: ${sentences.join("; ")}`;
  const columns = [
    ...texts("plan", "configuration"),
    ...numbers("throughput", "gain of this plan"),
    ...texts("remark"),
  ];
  const cells = () =>
    rows.map((row) => [
      row.name,
      el("span", { class: "breakable" }, row.config || "–"),
      showThroughput(report, row),
      isOwn(row) ? "" : showGain(row.gain),
      row.remark || "",
    ]);
  return section(
    "comparisons",
    "Also: other plans",
    wordsOf(report, "comparisons"),
    figure(
      "Longer bars are faster. Behind the throughput stands how many times as fast this plan is.",
      bars(drawn, { label, class: "wide-names" }),
      chartTable("This plan and others", columns, cells),
    ),
  );
}
