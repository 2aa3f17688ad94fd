/* The table of stages, as in the terminal output. */

function stageTable(report) {
  const rows = report.stages || [];
  if (!rows.length) return null;
  const training = rows.some((stage) => stage.backward_s > 0);
  const columns = [
    ["stage", "text"],
    ["layers", "number"],
    ["first … last", "text"],
    ["replicas", "number"],
    ["servers", "text"],
    ...(training ? [["depth", "number"]] : []),
    ["forward", "number"],
    ...(training
      ? [
          ["backward", "number"],
          ["sync", "number"],
        ]
      : []),
    ["to the next", "number"],
    ["memory", "number"],
  ];
  const make = () =>
    table(
      "The stages of the plan",
      columns,
      rows.map((stage) => stageRow(stage, training)),
    );
  const words = wordsOf(report, "stages").join(" ");
  return [
    words ? el("p", { class: "help" }, marked(words)) : null,
    rows.length <= 12 ? make() : details(`The ${rows.length} stages as a table`, make),
  ];
}

function stageRow(stage, training) {
  const name = stage.first === stage.last ? stage.first : `${stage.first} … ${stage.last}`;
  return [
    stageLabel(stage.index),
    showCount(stage.layers),
    el("span", { class: "breakable" }, String(name), stage.recompute ? el("em", {}, " recomputed") : null),
    showCount((stage.workers || []).length),
    String(stage.servers ?? ""),
    ...(training ? [String(stage.depth)] : []),
    showTime(stage.forward_s),
    ...(training ? [showTime(stage.backward_s), showTime(stage.sync_s)] : []),
    stage.send_bytes ? showSize(stage.send_bytes) : "–",
    stage.capacity_bytes
      ? `${showSize(stage.memory_bytes)} (${showShare(stage.memory_bytes / stage.capacity_bytes)})`
      : showSize(stage.memory_bytes),
  ];
}
