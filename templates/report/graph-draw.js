/*
 * Draws the cards and edges of the model as SVG. Cards that are too small to read are plain blocks in their stage's
 * colour.
 */

function shorten(name, most) {
  return name.length <= most ? name : "…" + name.slice(1 - most);
}

function drawEdges(graph) {
  const bends = new Map(graph.bends.map((one) => [one[0], one]));
  const path = graph.edges.map((edge, at) => edgePath(graph, edge, bends.get(at) || []));
  return svg("path", { d: path.join(""), class: "edge" });
}

function drawCard(graph, at, longest) {
  const { nodes, w, h } = graph;
  const stage = nodes.stage[at];
  const seconds = nodes.forward_s[at] + nodes.backward_s[at];
  const share = longest > 0 ? (seconds / longest) * (w - 30) : 0;
  const many = nodes.layers && nodes.layers[at] > 1 ? `${nodes.layers[at]} layers` : shorten(String(nodes.op[at]), 12);
  return svg(
    "g",
    {
      class: `card stage-${Math.max(0, stage) % STAGES.length}`,
      transform: `translate(${nodes.x[at]},${nodes.y[at]})`,
      "data-at": at,
    },
    svg("rect", { class: "body", width: w, height: h, rx: 5 }),
    svg("path", { class: "tab", d: `M5,0 H25 V${h} H5 A5,5 0 0 1 0,${h - 5} V5 A5,5 0 0 1 5,0 Z` }),
    svg("text", { class: "number", x: 12.5, y: h / 2 + 4.5 }, String(stage + 1)),
    svg("text", { class: "stage-far", x: w / 2, y: h / 2 + 9 }, String(stage + 1)),
    svg("text", { class: "name", x: 31, y: 13 }, shorten(String(nodes.name[at]), Math.floor((w - 34) / 6.4))),
    svg("text", { class: "figures", x: 31, y: 25 }, [many, showTime(seconds)].filter(Boolean).join(" · ")),
    svg("rect", { class: "share", x: 25, y: h - 4, width: Math.max(0, share).toFixed(1), height: 3.5 }),
  );
}

/* All figures of a layer, as rows of name and value. */
function layerFacts(nodes, at) {
  return [
    ["stage", String(nodes.stage[at] + 1)],
    ["operation", String(nodes.op[at])],
    ["layers", String(nodes.layers ? nodes.layers[at] : 1)],
    ["forward", showTime(nodes.forward_s[at])],
    ["backward", showTime(nodes.backward_s[at])],
    ["parameters", showSize(nodes.parameter_bytes[at])],
    ["output", showSize(nodes.output_bytes[at])],
  ];
}
