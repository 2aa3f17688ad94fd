/* The plan compared with others, and with the best plans for clusters of other sizes. */

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
  const told = others.map((row) => `this plan is ${showGain(row.gain)} as fast as ${row.name}`);
  const label = `Speed of other plans: ${told.join("; ")}`;
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

/* The best plan, and data parallelism, by size of the cluster. */
function scalingSection(report) {
  const { points, here } = report.scaling || { points: { workers: [] } };
  const rows = rowsOf(points)
    .map((one, at) => ({ ...one, here: at === here }))
    .filter((one) => one.minibatch_s);
  if (rows.length < 2) return null;
  const best = Math.min(...rows.map((one) => one.minibatch_s));
  const rate = (one) => `${digits(1 / one.minibatch_s)} a second`;
  const drawn = rows.map((one) => ({
    name: el("span", {}, el("b", {}, plural(one.workers, "worker")), " ", el("span", { class: "config" }, one.config)),
    note: one.here ? "this plan" : "",
    share: best / one.minibatch_s,
    mark: one.data_parallelism_s ? best / one.data_parallelism_s : null,
    value: rate(one),
    class: one.here ? "full" : "",
  }));
  const told = rows.map((one) => `${plural(one.workers, "worker")} ${rate(one)}`);
  const label = `Minibatches a second: ${told.join(", ")}`;
  const columns = [
    ["workers", "text"],
    ["servers", "number"],
    ["configuration", "text"],
    ["a minibatch", "number"],
    ["data parallelism", "number"],
    ["gain", "number"],
  ];
  const parallel = (one) => showTime(one.data_parallelism_s) + (one.fits === false ? " (does not fit)" : "");
  const cells = () =>
    rows.map((one) => [
      String(one.workers) + (one.here ? ", this plan" : ""),
      String(one.servers),
      one.config || "–",
      showTime(one.minibatch_s),
      one.data_parallelism_s ? parallel(one) : "–",
      one.data_parallelism_s ? showGain(one.data_parallelism_s / one.minibatch_s) : "–",
    ]);
  return section(
    "scaling",
    "Scaling",
    [],
    figure(
      "Minibatches a second of the best plan that the dynamic program finds for each size of the cluster, by the " +
        "formulas. The mark is data parallelism.",
      bars(drawn, { label, class: "wide-names" }),
      chartTable("The best plans by workers", columns, cells),
    ),
  );
}
