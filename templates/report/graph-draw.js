/* The cards and edges of the model as SVG. Where they are too small to read, cards are plain blocks of their stage's colour. */

const NAME_LENGTH = 22;

function shorten(name, most) {
  return name.length <= most ? name : "…" + name.slice(1 - most);
}

function drawEdges(graph, cards) {
  const path = graph.edges.map(([from, to]) => edgePath(cards[from], cards[to])).join("");
  return svg("path", { d: path, class: "edge" });
}

function drawCard(nodes, at, card, longest) {
  const stage = nodes.stage[at];
  const seconds = nodes.forward_s[at] + nodes.backward_s[at];
  const bar = longest > 0 ? (seconds / longest) * (CARD.width - 34) : 0;
  return svg(
    "g",
    { class: `card stage-${Math.max(0, stage) % STAGES.length}`, transform: `translate(${card.x},${card.y})`, "data-at": at },
    svg("rect", { class: "body", width: CARD.width, height: CARD.height, rx: 5 }),
    svg("path", { class: "tab", d: `M5,0 H26 V${CARD.height} H5 A5,5 0 0 1 0,${CARD.height - 5} V5 A5,5 0 0 1 5,0 Z` }),
    svg("text", { class: "number", x: 13, y: CARD.height / 2 + 4.5 }, String(stage + 1)),
    svg("text", { class: "name", x: 33, y: 15 }, shorten(String(nodes.name[at]), NAME_LENGTH)),
    svg("text", { class: "figures", x: 33, y: 28 }, `${shorten(String(nodes.op[at]), 14)} · ${showTime(seconds)}`),
    svg("rect", { class: "share", x: 30, y: CARD.height - 5, width: Math.max(0, bar).toFixed(1), height: 3 }),
  );
}

/* Everything that is known of a layer, as rows of name and value. */
function layerFacts(nodes, at) {
  return [
    ["stage", String(nodes.stage[at] + 1)],
    ["operation", String(nodes.op[at])],
    ["forward", showTime(nodes.forward_s[at])],
    ["backward", showTime(nodes.backward_s[at])],
    ["parameters", showSize(nodes.parameter_bytes[at])],
    ["output", showSize(nodes.output_bytes[at])],
  ];
}
