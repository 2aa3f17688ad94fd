/* The section with the model: its layers and the tensors between them, coloured by stage, and the table of stages. */

function modelSection(report) {
  const { graph } = report;
  if (!graph) return section("model", "Model", wordsOf(report, "graph"), stageTable(report));
  const lead =
    "Each layer has the number and colour of its stage; the bar at its foot is its time beside that of the longest.";
  const label = `The model as a graph of ${plural(graph.nodes.name.length, "layer")}`;
  const box = { class: "graph-box", tabindex: "0", role: "region", "aria-label": label };
  const figures = ["forward", "backward", "parameters", "output"].map((name) => [name, "number"]);
  const columns = [["layer", "text"], ["stage", "text"], ["operation", "text"], ["layers", "number"], ...figures];
  const rows = () => graph.nodes.name.map((name, at) => [name, ...layerFacts(graph.nodes, at).map(([, fact]) => fact)]);
  return section(
    "model",
    "Model",
    [lead, ...wordsOf(report, "graph")],
    figure(null, el("div", box, drawGraph(graph)), chartTable("Layers of the model", columns, rows)),
    stageTable(report),
  );
}

const GRAPH_MARGIN = 26;

function drawGraph(graph) {
  const { nodes } = graph;
  const longest = Math.max(...nodes.forward_s.map((seconds, at) => seconds + nodes.backward_s[at]));
  const [wide, tall] = [graph.width + 2 * GRAPH_MARGIN, graph.height + 2 * GRAPH_MARGIN];
  const bends = new Map(graph.bends.map((one) => [one[0], one]));
  const path = graph.edges.map((edge, at) => edgePath(graph, edge, bends.get(at) || []));
  return svg(
    "svg",
    {
      class: "graph",
      viewBox: `${-GRAPH_MARGIN} ${-GRAPH_MARGIN} ${wide} ${tall}`,
      width: wide,
      height: tall,
      role: "img",
      "aria-label": `${plural(nodes.name.length, "layer")}, whose figures are in the table below`,
    },
    svg("path", { d: path.join(""), class: "edge" }),
    nodes.name.map((_, at) => drawCard(graph, at, longest)),
  );
}

function shorten(name, most) {
  return name.length <= most ? name : "…" + name.slice(1 - most);
}

function drawCard(graph, at, longest) {
  const { nodes, w, h } = graph;
  const seconds = nodes.forward_s[at] + nodes.backward_s[at];
  const share = longest > 0 ? (seconds / longest) * (w - 30) : 0;
  const what = nodes.layers[at] > 1 ? `${nodes.layers[at]} layers` : shorten(String(nodes.op[at]), 12);
  const facts = layerFacts(nodes, at).map(([name, value]) => `${name} ${value}`);
  return svg(
    "g",
    { class: `card stage-${nodes.stage[at] % STAGES.length}`, transform: `translate(${nodes.x[at]},${nodes.y[at]})` },
    svg("title", {}, [nodes.name[at], ...facts].join("\n")),
    svg("rect", { class: "body", width: w, height: h, rx: 5 }),
    svg("path", { class: "tab", d: `M5,0 H25 V${h} H5 A5,5 0 0 1 0,${h - 5} V5 A5,5 0 0 1 5,0 Z` }),
    svg("text", { class: "number", x: 12.5, y: h / 2 + 4.5 }, String(nodes.stage[at] + 1)),
    svg("text", { class: "name", x: 31, y: 13 }, shorten(String(nodes.name[at]), Math.floor((w - 34) / 6.4))),
    svg("text", { class: "figures", x: 31, y: 25 }, [what, showTime(seconds)].filter(Boolean).join(" · ")),
    svg("rect", { class: "share", x: 25, y: h - 4, width: share.toFixed(1), height: 3.5 }),
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

/* An edge leads from the right of its producer, through the bends of a long edge, to the left of its consumer. */
function edgePath(graph, [from, to], bends) {
  const { x, y } = graph.nodes;
  const middle = graph.h / 2;
  const points = [];
  for (let at = 1; at + 1 < bends.length; at += 2) points.push([bends[at], bends[at + 1]]);
  points.push([x[to], y[to] + middle]);
  let here = [x[from] + graph.w, y[from] + middle];
  let path = `M${here}`;
  for (const point of points) {
    path += lineTo(here, point, graph.width);
    here = point;
  }
  return path;
}

/* Edges are curves. An edge from the end of a row to the start of the next one has corners. */
function lineTo([x1, y1], [x2, y2], width) {
  if (y1 === y2) return `H${x2}`;
  if (x2 > width) return `H${x2}V${y2}`;
  if (x1 < 0) return `V${y2}H${x2}`;
  const middle = (x1 + x2) / 2;
  return `C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
}

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
