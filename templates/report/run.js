/* The section with the run: the measured time of a minibatch, the cause of its difference, and every stage. */

function paceBars(report) {
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
function beside(ratio) {
  if (Math.abs(ratio - 1) < 0.005) return "as long as";
  if (ratio > 1.5 || ratio < 0.5) return `${digits(ratio)} times as long as`;
  return `${showShare(Math.abs(ratio - 1))} ${ratio > 1 ? "longer" : "less"} than`;
}

function runBox(report) {
  const { measured, prediction } = report;
  if (!measured) return null;
  const words = beside(measured.minibatch_s / prediction.minibatch_s);
  return el(
    "div",
    { class: "run", id: "run" },
    el("h2", {}, `The run: a minibatch takes ${words} predicted`),
    paceBars(report),
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

function stageLabel(stage) {
  return el("span", { class: "stage-label" }, stageChip(stage), el("span", { class: "hidden" }, stageName(stage)));
}
