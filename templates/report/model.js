/* The section with the model: its layers and the tensors between them, coloured by stage, and the table of stages. */

function modelSection(report) {
  const { graph } = report;
  const lead =
    "Each layer has the number and colour of its stage; the bar at its foot is its time beside that of the longest.";
  const label = `The model as a graph of ${plural(graph.nodes.name.length, "layer")}`;
  const picture = document.getElementById("graph");
  picture.removeAttribute("hidden");
  const box = { class: "graph-box", tabindex: "0", role: "region", "aria-label": label };
  const figures = numbers("layers", "forward", "backward", "parameters", "output");
  const columns = [...texts("layer", "stage", "operation"), ...figures];
  const rows = () => graph.nodes.name.map((name, at) => [name, ...layerFacts(graph.nodes, at).map(([, fact]) => fact)]);
  return section(
    "model",
    "Model",
    [lead, ...wordsOf(report, "graph")],
    figure(null, el("div", box, picture), chartTable("Layers of the model", columns, rows)),
    stageTable(report),
  );
}

/* All figures of a layer, as rows of name and value. */
function layerFacts(nodes, at) {
  return [
    ["stage", String(nodes.stage[at] + 1)],
    ["operation", String(nodes.op[at])],
    ["layers", String(nodes.layers[at])],
    ["forward", showTime(nodes.forward_s[at])],
    ["backward", showTime(nodes.backward_s[at])],
    ["parameters", showSize(nodes.parameter_bytes[at])],
    ["output", showSize(nodes.output_bytes[at])],
  ];
}

/* The table of stages, as in the terminal output. */
function stageTable(report) {
  const rows = report.stages || [];
  if (!rows.length) return null;
  const training = rows.some((stage) => stage.backward_s > 0);
  const times = training ? ["depth", "forward", "backward", "sync"] : ["forward"];
  const columns = [
    ...texts("stage"),
    ...numbers("layers"),
    ...texts("first … last"),
    ...numbers("replicas"),
    ...texts("servers"),
    ...numbers(...times, "to the next", "memory"),
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
