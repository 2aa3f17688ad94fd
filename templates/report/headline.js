/* The headline: the plan, its predicted step time, and what a run measured. */

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
      "Predicted step time",
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

function headline(report) {
  return el(
    "div",
    { id: "headline", class: "headline" },
    el("h1", {}, report.title),
    el("p", { class: "summary" }, wordsOf(report, "summary").join(" ")),
    tiles(report),
    report.made && report.made.learning ? el("p", { class: "note" }, marked(report.made.learning)) : null,
    runBox(report),
    report.measured ? null : wordsOf(report, "measured").map((one) => el("p", { class: "note" }, marked(one))),
    (report.notes || []).map((note) => el("p", { class: "note" }, marked(note))),
  );
}

/* The step time as predicted and as measured. */
function stepBars(report) {
  const rows = [
    ["predicted", report.prediction.minibatch_s],
    ["measured", report.measured.minibatch_s],
  ];
  const longest = Math.max(...rows.map((row) => row[1]));
  return el(
    "div",
    { class: "paces" },
    rows.map(([name, seconds]) => [
      el("span", { class: "name" }, name),
      el(
        "span",
        { class: "track" },
        el("span", { class: "bar " + name, style: { width: (100 * seconds) / longest + "%" } }),
      ),
      el("span", { class: "value" }, showTime(seconds)),
    ]),
  );
}

/* One time relative to another, in words: longer by a share, or by a factor. */
function relativeTime(ratio) {
  if (Math.abs(ratio - 1) < 0.005) return "as long as";
  if (ratio > 1.5 || ratio < 0.5) return `${digits(ratio)} times as long as`;
  return `${showShare(Math.abs(ratio - 1))} ${ratio > 1 ? "longer" : "less"} than`;
}

function runBox(report) {
  const { measured, prediction } = report;
  if (!measured) return null;
  const words = relativeTime(measured.minibatch_s / prediction.minibatch_s);
  return el(
    "div",
    { class: "run", id: "run" },
    el("h2", {}, `The run: a minibatch takes ${words} predicted`),
    stepBars(report),
    wordsOf(report, "measured").map((sentence) => el("p", {}, marked(sentence))),
    measuredTable(measured),
  );
}

const MEASURES = {
  forward_s: "forward",
  backward_s: "backward",
  update_s: "update",
  sync_s: "synchronisation",
  memory_bytes: "memory",
  wait_s: "waiting",
  load_s: "loading",
  send_s: "sending",
  other_s: "other",
};

function showMeasure(name, value) {
  return name.endsWith("_bytes") ? showSize(value) : showTime(value);
}

/* Predicted and measured value, or only the measured one if there is no prediction. */
function measureCell(name, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "object") return el("b", {}, showMeasure(name, value));
  return el(
    "span",
    { class: "pair" },
    showMeasure(name, value.predicted),
    " → ",
    el("b", {}, showMeasure(name, value.measured)),
  );
}

function measuredTable(measured) {
  const rows = measured.stages || [];
  const names = Object.keys(MEASURES).filter((name) =>
    rows.some((row) => row[name] !== null && row[name] !== undefined),
  );
  if (!rows.length) return null;
  return details("Every stage, predicted → measured", () =>
    table(
      "Predicted → measured, a minibatch on one worker",
      [["stage", "text"], ...names.map((name) => [MEASURES[name], "number"])],
      rows.map((row) => [stageLabel(row.stage), ...names.map((name) => measureCell(name, row[name]))]),
    ),
  );
}
