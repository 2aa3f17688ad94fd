/* The plan compared with others: the time of a minibatch with each. */

function comparisonsSection(report) {
  const rows = report.comparisons || [];
  if (!rows.length) return null;
  const own = report.prediction.minibatch_s;
  const isOwn = (row) => row === rows[0];
  const drawn = rows.map((row) => ({
    name: el("span", {}, el("b", {}, row.name), " ", el("span", { class: "config" }, row.config || "")),
    note: row.remark,
    share: row.minibatch_s ? own / row.minibatch_s : 0,
    value: !row.minibatch_s
      ? "none fits"
      : showTime(row.minibatch_s) + (isOwn(row) || !row.gain ? "" : ` · ${showGain(row.gain)}`),
    class: isOwn(row) ? "full" : /not fit/.test(row.remark || "") ? "unfit" : "",
  }));
  const others = rows.filter((row) => !isOwn(row) && row.gain);
  const texts = others.map((row) => `this plan is ${showGain(row.gain)} as fast as ${row.name}`);
  const label = `Speed of other plans: ${texts.join("; ")}`;
  const columns = [
    ["plan", "text"],
    ["configuration", "text"],
    ["a minibatch", "number"],
    ["gain of this plan", "number"],
    ["remark", "text"],
  ];
  const cells = () =>
    rows.map((row) => [
      row.name,
      el("span", { class: "breakable" }, row.config || "–"),
      row.minibatch_s ? showTime(row.minibatch_s) : "none fits",
      isOwn(row) ? "" : showGain(row.gain),
      row.remark || "",
    ]);
  return section(
    "comparisons",
    "Beside other plans",
    wordsOf(report, "comparisons"),
    figure(
      "Longer bars are faster. The figures are the time of a minibatch, and how many times that of this plan it is.",
      bars(drawn, { label, class: "wide-names" }),
      chartTable("This plan and others", columns, cells),
    ),
  );
}
