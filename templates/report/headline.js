/* The headline: the plan, its predicted pace, and the pace that a run measured. */

function figureTile(name, value, note) {
  return el(
    "div",
    { class: "tile" },
    el("dt", {}, name),
    el("dd", {}, el("b", {}, value), note ? el("span", {}, note) : null),
  );
}

function baselineTile(report) {
  const row = (report.comparisons || []).find((one) => /data parallel/i.test(one.name));
  if (!row) return null;
  if (row.gain === null || row.gain === undefined)
    return figureTile("Over data parallelism", "–", row.remark || "no such plan fits");
  return figureTile(
    "Over data parallelism",
    showGain(row.gain),
    row.remark ? `which ${row.remark}` : `which takes ${showTime(row.minibatch_s)}`,
  );
}

function memoryTile(report) {
  const full = (stage) => stage.memory_bytes / (stage.capacity_bytes || Infinity);
  const fullest = [...(report.stages || [])].sort((a, b) => full(b) - full(a) || b.memory_bytes - a.memory_bytes)[0];
  if (!fullest) return null;
  if (!fullest.capacity_bytes)
    return figureTile("Most memory", showSize(fullest.memory_bytes), `${stageName(fullest.index)}; it is not limited`);
  return figureTile(
    "Fullest memory",
    showShare(fullest.memory_bytes / fullest.capacity_bytes),
    `${showSize(fullest.memory_bytes)} of ${showSize(fullest.capacity_bytes)}, ${stageName(fullest.index)}`,
  );
}

function verdictTile(certificate) {
  if (!certificate) return null;
  const { proven, gap } = certificate;
  if (proven) return figureTile("Verdict", "✓ Proven", "no plan of the searched space is faster");
  return gap
    ? figureTile("Verdict", `Within ${Math.ceil(gap * 1000) / 10}%`, "of the best of the searched space, as is shown")
    : figureTile("Verdict", "Not shown", "a faster plan may exist");
}

function tiles(report) {
  const { prediction } = report;
  return el(
    "dl",
    { class: "tiles" },
    figureTile("Plan", (report.made || {}).config || "–", `bound by ${prediction.bound_by}`),
    figureTile(
      "Predicted pace",
      showTime(prediction.minibatch_s),
      `a minibatch; ${digits(prediction.minibatches_per_s)} a second`,
    ),
    prediction.samples_per_s
      ? figureTile(
          "Throughput",
          showCount(Math.round(prediction.samples_per_s)),
          ["samples a second", ...(prediction.in_units || [])].join("; "),
        )
      : null,
    baselineTile(report),
    memoryTile(report),
    verdictTile(report.certificate),
  );
}

/* The first sentence describes the plan. The figures of the other sentences are in the tiles. */
function headline(report) {
  return el(
    "div",
    { id: "headline", class: "headline" },
    el("h1", {}, report.title),
    el("p", { class: "summary" }, wordsOf(report, "summary").slice(0, 1)),
    tiles(report),
    report.made && report.made.learning ? el("p", { class: "note" }, marked(report.made.learning)) : null,
    runBox(report),
    report.measured ? null : wordsOf(report, "measured").map((one) => el("p", { class: "note" }, marked(one))),
    (report.notes || []).map((note) => el("p", { class: "note" }, marked(note))),
  );
}
