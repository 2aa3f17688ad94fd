/* The headline: the plan, its predicted step time, and what a run measured. */

function figureTile(name, value, note) {
  return el(
    "div",
    { class: "tile" },
    el("dt", {}, name),
    el("dd", {}, el("b", {}, value), note ? el("span", {}, note) : null),
  );
}

/* The plan in words, such as "8-1, 1f1b-flush" or "HSDP on 32 workers". */
function runTile(made) {
  const [, plan, rest] = /^(.*?)(?:(?:, | on )(.*))?$/.exec(made.name || made.config || "–");
  return figureTile("Run", plan, [rest, made.manner].filter(Boolean).join(": "));
}

/* The plan compared with plain data parallelism, or with the best other plan if that does not fit. */
function baselineTile(report) {
  const others = (report.comparisons || []).slice(1).filter((one) => one.gain && !/old/.test(one.remark || ""));
  const plain = others.find((one) => /^(DDP|data parallelism)$/.test(one.name));
  const own = (report.made || {}).data_parallel === "ddp";
  const row = own ? others.filter((one) => one !== plain).sort((a, b) => a.gain - b.gain)[0] : plain || others[0];
  if (!row) return null;
  const missing = own || plain ? "" : "; DDP does not fit";
  return figureTile(`Over ${row.name}`, showGain(row.gain), showThroughput(report, row) + missing);
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

/* The proven bound on faster plans. A plan that may not learn is not called proven. */
function trustTile({ certificate, made }) {
  if (!certificate) return null;
  const { proven, gap } = certificate;
  const [, warning] = WARNING.exec((made || {}).learning) || [];
  if (warning) return figureTile("Trust", warning[0] + warning.slice(1).toLowerCase(), "it may not learn");
  if (proven) return figureTile("Trust", "Proven", "no plan of the searched space is faster");
  if (!gap) return figureTile("Trust", "Not proven", "a faster plan may exist");
  const share = gap < 1e-3 ? Number((gap * 100).toPrecision(1)) : (gap * 100).toFixed(1);
  return figureTile("Trust", `≤ ${share}%`, "no plan of the searched space is faster by more");
}

function tiles(report) {
  const { prediction } = report;
  return el(
    "dl",
    { class: "tiles" },
    runTile(report.made || {}),
    figureTile("Step time", showTime(prediction.minibatch_s), `a microbatch; bound by ${prediction.bound_by}`),
    prediction.samples_per_s
      ? figureTile(
          "Throughput",
          showCount(Math.round(prediction.samples_per_s)),
          ["samples a second", ...(prediction.in_units || [])].join("; "),
        )
      : null,
    baselineTile(report),
    memoryTile(report),
    trustTile(report),
  );
}

function headline(report) {
  return el(
    "div",
    { id: "headline", class: "headline" },
    el("h1", {}, report.title),
    el("p", { class: "summary" }, wordsOf(report, "summary").join(" ")),
    tiles(report),
    learningNote((report.made || {}).learning),
    runBox(report),
    report.measured ? null : wordsOf(report, "measured").map((one) => el("p", { class: "note" }, marked(one))),
    (report.notes || []).map((note) => el("p", { class: "note" }, marked(note))),
  );
}

const WARNING = /^(NOT SAFE|RISKY)/;

/* Measurements of learning with gradients this old; a warning if runs missed their goal. */
function learningNote(text) {
  if (!text) return null;
  return el("p", { class: WARNING.test(text) ? "note warning" : "note" }, marked(text));
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
    el("h2", {}, `The run: a microbatch takes ${words} predicted`),
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
      "Predicted → measured, a microbatch on one worker",
      [...texts("stage"), ...numbers(...names.map((name) => MEASURES[name]))],
      rows.map((row) => [stageLabel(row.stage), ...names.map((name) => measureCell(name, row[name]))]),
    ),
  );
}
