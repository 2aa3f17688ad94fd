/* The section with the model: its layers and the tensors between them, coloured by stage. */

const GRAPH_HELP =
  "With the focus on the picture: arrow keys go from layer to layer, plus and minus zoom, 0 shows everything. " +
  "The wheel zooms once the picture has the focus, or with Ctrl held; dragging moves it.";

function graphSection(report) {
  const { graph } = report;
  const id = "model";
  if (!graph || !graph.nodes || !graph.nodes.name.length) {
    const words = wordsOf(report, "graph", ["The layers of the model are not known, so that they cannot be drawn."]);
    return section(id, "Model", words, stageTable(report));
  }
  const lead =
    "Each layer has the number and colour of its stage; the bar at its foot is its time beside that of the longest.";
  return section(
    id,
    "Model",
    [lead, ...wordsOf(report, "graph").filter((one) => one === graph.note)],
    figure(null, graphBox(graph, report), null),
    chartTable("Layers of the model", layerColumns(), () => layerRows(graph)),
    stageTable(report),
  );
}

function layerColumns() {
  const figures = ["forward", "backward", "parameters", "output"].map((name) => [name, "number"]);
  return [["layer", "text"], ["stage", "text"], ["operation", "text"], ["layers", "number"], ...figures];
}

function layerRows(graph) {
  return graph.nodes.name.map((name, at) => [String(name), ...layerFacts(graph.nodes, at).map(([, value]) => value)]);
}

function graphBox(graph, report) {
  const picture = svg("svg", {
    class: "graph",
    tabindex: "0",
    role: "application",
    "aria-roledescription": "graph",
    "aria-label": `The model as a graph of ${plural(graph.nodes.name.length, "layer")}`,
    "aria-describedby": "graph-help",
  });
  const facts = el(
    "div",
    { class: "facts", role: "status" },
    el("p", { class: "help" }, "Point at a layer for its figures. " + GRAPH_HELP),
  );
  const state = { graph, picture, facts, at: -1, view: new GraphView(picture, graph) };
  lazily(picture, () => drawGraph(state));
  graphInput(state.view, picture);
  graphPointing(state);
  picture.addEventListener("keydown", (event) => graphKey(state, event));
  return el(
    "div",
    { class: "graph-box" },
    graphButtons(state, report),
    picture,
    facts,
    el("p", { class: "hidden", id: "graph-help" }, GRAPH_HELP),
  );
}

/*
 * The picture is drawn once its size is known. It is fitted again when the size changes, unless the reader has moved
 * it.
 */
function lazily(picture, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (picture.clientWidth && picture.clientWidth !== width) {
      width = picture.clientWidth;
      draw();
    }
  }).observe(picture);
}

function drawGraph(state) {
  const { graph, picture, view } = state;
  if (picture.childElementCount && !view.fitted) return;
  picture.style.height = view.wantedHeight(0.8 * innerHeight) + "px";
  const longest = graph.nodes.name.reduce(
    (most, _, at) => Math.max(most, graph.nodes.forward_s[at] + graph.nodes.backward_s[at]),
    0,
  );
  const cards = graph.nodes.name.map((_, at) => drawCard(graph, at, longest));
  picture.replaceChildren(svg("g", { class: "world", "aria-hidden": "true" }, drawEdges(graph), cards));
  view.fit();
}

function graphButtons(state, report) {
  const button = (text, label, act) =>
    el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const stages = (report.stages || []).slice(0, 24).map((stage) =>
    el(
      "button",
      {
        type: "button",
        class: "stage-button",
        "aria-label": `Show ${stageName(stage.index)}`,
        onclick: () => select(state, state.graph.nodes.stage.indexOf(stage.index), true),
      },
      stageChip(stage.index),
      el("span", { class: "count" }, showCount(stage.layers)),
    ),
  );
  return el(
    "div",
    { class: "buttons", role: "group", "aria-label": "Zoom of the model, and its stages" },
    button("−", "Zoom out", () => state.view.zoom(0.7)),
    button("+", "Zoom in", () => state.view.zoom(1 / 0.7)),
    button("All", "Show everything", () => state.view.fit()),
    stages.length > 1 ? [el("span", { class: "between" }, "layers of stage"), stages] : null,
  );
}

function select(state, at, readable) {
  const { graph, picture, facts, view } = state;
  if (!(at in graph.nodes.name)) return;
  picture.querySelectorAll(".card.chosen").forEach((card) => card.classList.remove("chosen"));
  picture.querySelector(`[data-at="${at}"]`).classList.add("chosen");
  state.at = at;
  const rows = layerFacts(graph.nodes, at);
  facts.replaceChildren(
    el("strong", {}, String(graph.nodes.name[at])),
    el(
      "dl",
      {},
      rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    ),
  );
  if (readable !== undefined) view.reveal(graph.nodes.x[at], graph.nodes.y[at], readable);
}

function graphPointing(state) {
  const target = (event) => event.target.closest && event.target.closest(".card");
  state.picture.addEventListener("pointerover", (event) => {
    const card = target(event);
    if (card) select(state, Number(card.dataset.at));
  });
  state.picture.addEventListener("click", (event) => {
    const card = target(event);
    if (card) select(state, Number(card.dataset.at));
  });
}

/* When the reader zooms by keys, the chosen layer stays where it is. */
function zoomAtChosen({ view, graph, at }, factor) {
  if (at < 0) view.zoom(factor);
  else
    view.zoom(
      factor,
      view.x + (graph.nodes.x[at] + graph.w / 2) * view.scale,
      view.y + (graph.nodes.y[at] + graph.h / 2) * view.scale,
    );
}

function graphKey(state, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { view } = state;
  const last = state.graph.nodes.name.length - 1;
  const go = (step) => select(state, Math.min(last, Math.max(0, state.at + step)), false);
  const act = {
    ArrowDown: () => go(1),
    ArrowRight: () => go(1),
    ArrowUp: () => go(-1),
    ArrowLeft: () => go(-1),
    Home: () => select(state, 0, false),
    End: () => select(state, last, false),
    "+": () => zoomAtChosen(state, 1 / 0.7),
    "=": () => zoomAtChosen(state, 1 / 0.7),
    "-": () => zoomAtChosen(state, 0.7),
    0: () => view.fit(),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}
