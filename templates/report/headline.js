/* What the plan is, what it promises, and what a run made of that. */

function figureTile(name, value, note) {
  return el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, el("b", {}, value), note ? el("span", {}, note) : null));
}

function planRow(report) {
  const rows = report.comparisons || [];
  return rows.find((row) => /this plan/i.test(row.name)) || rows[0] || {};
}

function configOf(report) {
  return (report.plan && report.plan.config) || planRow(report).config || "";
}

function baselineTile(report) {
  const row = (report.comparisons || []).find((one) => /data parallel/i.test(one.name));
  if (!row) return null;
  if (row.gain === null || row.gain === undefined) return figureTile("Over data parallelism", "–", row.remark || "no such plan fits");
  return figureTile("Over data parallelism", showGain(row.gain), showTime(row.minibatch_s) + " a minibatch there");
}

function memoryTile(report) {
  const fullest = [...(report.stages || [])].sort(
    (a, b) => b.memory_bytes / b.capacity_bytes - a.memory_bytes / a.capacity_bytes,
  )[0];
  if (!fullest || !fullest.capacity_bytes) return null;
  return figureTile(
    "Fullest memory",
    showShare(fullest.memory_bytes / fullest.capacity_bytes),
    `${showSize(fullest.memory_bytes)} of ${showSize(fullest.capacity_bytes)}, ${stageName(fullest.index)}`,
  );
}

function tiles(report) {
  const { prediction, certificate } = report;
  const proven = certificate && certificate.proven;
  return el(
    "dl",
    { class: "tiles" },
    figureTile("Predicted pace", showTime(prediction.minibatch_s), `a minibatch, ${digits(prediction.minibatches_per_s)} a second`),
    prediction.samples_per_s ? figureTile("Throughput", showCount(Math.round(prediction.samples_per_s)), "samples a second") : null,
    baselineTile(report),
    memoryTile(report),
    certificate
      ? figureTile("Verdict", proven ? "✓ Proven" : "Not proven", proven ? "no plan is faster" : "a faster plan may exist")
      : null,
  );
}

function paceBars(report) {
  const rows = [["predicted", report.prediction.minibatch_s], ["measured", report.measured.minibatch_s]];
  const longest = Math.max(...rows.map((row) => row[1]));
  return el(
    "div",
    { class: "paces" },
    rows.map(([name, seconds]) => [
      el("span", { class: "name" }, name),
      el("span", { class: "track" }, el("span", { class: "bar " + name, style: { width: (100 * seconds) / longest + "%" } })),
      el("span", { class: "value" }, showTime(seconds)),
    ]),
  );
}

function runBox(report) {
  const { measured, prediction } = report;
  if (!measured) return null;
  const ratio = measured.minibatch_s / prediction.minibatch_s;
  const off = Math.abs(ratio - 1);
  const words = off < 0.005 ? "as predicted" : `${showShare(off)} ${ratio > 1 ? "slower" : "faster"} than predicted`;
  return el(
    "div",
    { class: "run", id: "run" },
    el("h2", {}, `The run: ${words}`),
    paceBars(report),
    measured.cause ? el("p", {}, measured.cause) : null,
    measuredTable(measured),
  );
}

const MEASURES = { forward: "forward", backward: "backward", update: "update", sync: "synchronisation", wait: "waiting" };

function measureTitle(name) {
  const stem = name.replace(/_(s|bytes)$/, "");
  return (MEASURES[stem] || stem).replaceAll("_", " ");
}

function showMeasure(name, value) {
  if (value === null || value === undefined) return "–";
  return name.endsWith("_bytes") || /memory/.test(name) ? showSize(value) : showTime(value);
}

function measuredTable(measured) {
  const rows = measured.stages || [];
  if (!rows.length) return null;
  const isPair = (value) => value && typeof value === "object" && ("predicted" in value || "measured" in value);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row).filter((name) => isPair(row[name]))))];
  const cells = (pair, name) => {
    if (!pair) return "–";
    const { predicted, measured: found } = pair;
    return el("span", { class: "pair" }, showMeasure(name, predicted), " → ", el("b", {}, showMeasure(name, found)));
  };
  return details("Every stage, predicted → measured", () =>
    table(
      "Predicted → measured, a minibatch on one worker",
      [["stage", "text"], ...names.map((name) => [measureTitle(name), "number"])],
      rows.map((row, at) => [stageLabel(row.stage ?? row.index ?? at), ...names.map((name) => cells(row[name], name))]),
    ),
  );
}

function stageLabel(stage) {
  return el("span", { class: "stage-label" }, stageChip(stage), el("span", { class: "hidden" }, stageName(stage)));
}

function madeFrom(made) {
  if (!made) return null;
  const parts = Object.entries(made).filter(([, value]) => typeof value !== "object" && value !== "" && value !== null);
  return el("dl", { class: "made" }, parts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}

function headline(report) {
  return el(
    "div",
    { id: "headline", class: "headline" },
    el("h1", {}, report.title),
    el("p", { class: "bound" }, report.prediction.bound_by ? `The pace is bound by ${report.prediction.bound_by}.` : ""),
    tiles(report),
    runBox(report),
  );
}
