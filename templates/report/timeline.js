/* The section with the timeline from the fill to the steady state: predicted above measured, on one scale. */

const KINDS = ["forward", "backward", "weights", "update", "all-reduce"];
const KIND_NAMES = ["forward", "backward", "gradients of weights", "update", "all-reduce in the background"];
const LETTERS = ["F", "B", "W", "U", ""];
const [FORWARD, BACKWARD, WEIGHTS, UPDATE, ALL_REDUCE] = KINDS.keys();
const GUTTER = 132;
const AXIS = 46;
/* Width of the timeline's box on a wide screen. */
const PAGE_WIDTH = 1100;

function timelineSection(report) {
  if (!report.timeline || !report.timeline.predicted) return null;
  const facts = { ...report.timeline, lanes: rowsOf(report.timeline.lanes) };
  facts.end = Math.max(facts.end_s, facts.measured_end_s || 0);
  const sources = ["predicted", "measured"].filter((name) => facts[name]);
  const intervals = Object.fromEntries(sources.map((name) => [name, rowsOf(facts[name])]));
  const label = `Timeline of ${plural(facts.lanes.length, "worker")} over ${showTime(facts.end)}`;
  const box = el("div", { class: "timeline", tabindex: "0", role: "region", "aria-label": label });
  let width = widthOf(facts, intervals.predicted);
  const draw = (factor) => {
    width = Math.round(Math.min(60000, Math.max(600, width * factor)));
    const middle = (box.scrollLeft + box.clientWidth / 2) * factor;
    const panels = sources.map((name, at) => panel(name, intervals[name], facts, width, at === 0));
    box.replaceChildren(...panels);
    box.scrollLeft = middle - box.clientWidth / 2;
  };
  draw(1);
  return section(
    "timeline",
    "Timeline",
    wordsOf(report, "timeline"),
    facts.omitted ? el("p", { class: "note" }, facts.omitted) : null,
    figure(null, [timelineButtons(box, facts, draw, () => width), timelineLegend(intervals), box], null),
    sources.map((name) => timelineTables(name, intervals[name], facts)),
  );
}

/*
 * The first width leaves room for the number of a forward pass of mean length, and fills the page. The median could be
 * the length of very short passes, and all other passes would then be too wide.
 */
function widthOf(facts, intervals) {
  const lengths = intervals.filter((one) => one.kind === FORWARD).map((one) => one.end_s - one.start_s);
  const mean = lengths.reduce((sum, one) => sum + one, 0) / lengths.length || facts.end;
  return Math.round(Math.min(16000, Math.max(PAGE_WIDTH - GUTTER, (32 * facts.end) / mean)));
}

function timelineButtons(box, facts, draw, width) {
  const button = (text, label, act) =>
    el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const go = (time) => (box.scrollLeft = (time / facts.end) * width());
  return el(
    "div",
    { class: "buttons", role: "group", "aria-label": "Zoom of the timeline" },
    button("−", "Zoom out", () => draw(1 / 1.5)),
    button("+", "Zoom in", () => draw(1.5)),
    button("All", "Show everything", () => draw((box.clientWidth - GUTTER - 4) / width())),
    button("Fill", "Show the fill of the pipeline", () => go(0)),
    facts.steady ? button("Steady", "Show the steady state", () => go(facts.steady[0])) : null,
  );
}

function timelineLegend(intervals) {
  const present = new Set(Object.values(intervals).flatMap((rows) => rows.map((one) => one.kind)));
  const swatch = (kind) =>
    svg("svg", { class: "swatch stage-0", viewBox: "0 0 28 14", "aria-hidden": "true" }, bar(kind, 0, 28, 0, 14));
  const items = KINDS.map((_, kind) => (present.has(kind) ? el("li", {}, swatch(kind), KIND_NAMES[kind]) : null));
  return el("ul", { class: "legend" }, items, el("li", {}, "empty: waiting"));
}

/* A drawing of all lanes over time, `width` pixels wide beside its labels. The first one has the time axis. */
function panel(source, intervals, facts, width, first) {
  const row = facts.lanes.length <= 16 ? 24 : facts.lanes.length <= 40 ? 17 : 13;
  const top = first ? AXIS : 4;
  const height = top + facts.lanes.length * row + 2;
  const x = (time) => (time / facts.end) * width;
  const label = `Timeline, ${source}: ${plural(facts.lanes.length, "worker")} over ${showTime(facts.end)}`;
  return el(
    "div",
    { class: "panel" },
    el("h3", {}, source === "measured" ? "Measured" : "Predicted"),
    el(
      "div",
      { class: "lanes" },
      svg("svg", { class: "labels", width: GUTTER, height, "aria-hidden": "true" }, laneLabels(facts, row, top)),
      svg(
        "svg",
        { class: "drawing", width: width + 2, height, role: "img", "aria-label": label, "data-source": source },
        svg("title", {}, label),
        first ? [phases(facts, x), timeAxis(facts, x, width)] : null,
        facts.lanes.map((_, number) => serverLine(facts, number, top + number * row, width)),
        drawIntervals(intervals, facts, source, { x, row, top }),
      ),
    ),
  );
}

/* A line above the first lane of a server. */
function serverLine(facts, number, y, width) {
  const [before, lane] = [facts.lanes[number - 1], facts.lanes[number]];
  return before && before.server !== lane.server ? svg("path", { class: "grid", d: `M0,${y}H${width}` }) : null;
}

/* Number, worker and colour of every lane, and a line between servers. */
function laneLabels(facts, row, top) {
  const size = Math.min(12, row - 2);
  return facts.lanes.map((lane, number) => {
    const y = top + number * row;
    return svg(
      "g",
      { class: `lane stage-${lane.stage % STAGES.length}`, "font-size": size },
      serverLine(facts, number, y, GUTTER),
      svg("rect", { class: "badge", x: 0.5, y: y + 1.5, width: 21, height: row - 3 }),
      svg("text", { class: "badge-text", x: 11, y: y + row / 2 + size / 3 }, String(lane.stage + 1)),
      svg("text", { x: 28, y: y + row / 2 + size / 3 }, `worker ${lane.worker}`),
    );
  });
}

/* Intervals narrower than a pixel are drawn one pixel wide, and at most one of each kind per pixel of a lane. */
function drawIntervals(intervals, facts, source, { x, row, top }) {
  const drawn = new Map();
  const lanes = facts.lanes.map((lane) => ({ lane, parts: [] }));
  for (const one of intervals) {
    const [left, right] = [x(one.start_s), x(one.end_s)];
    const place = one.lane * KINDS.length + one.kind;
    if (right - left < 1 && drawn.get(place) === Math.floor(left)) continue;
    drawn.set(place, Math.floor(left));
    const { lane, parts } = lanes[one.lane];
    const y = top + one.lane * row + 1;
    parts.push(
      svg(
        "g",
        {},
        svg("title", {}, describe(one, lane, source).join("\n")),
        bar(one.kind, left, right - left, y, row - 2),
        barNumber(one, left, right, y, row),
      ),
    );
  }
  return lanes.map(({ lane, parts }) => svg("g", { class: `lane stage-${lane.stage % STAGES.length}` }, parts));
}

/*
 * Textures distinguish the kinds without colour: forward is plain, backward striped, gradients of weights dark, update
 * solid; an all-reduce is a strip below the passes.
 */
function bar(kind, x, width, y, height) {
  const tall = kind === ALL_REDUCE ? Math.min(5, height / 3) : height;
  const [left, wide] = [x.toFixed(1), Math.max(1, width).toFixed(1)];
  const hatched = kind === BACKWARD && width > 3;
  return [
    svg("rect", { class: KINDS[kind], x: left, y: y + height - tall, width: wide, height: tall }),
    hatched ? svg("path", { class: "hatch", d: `M${left},${y + tall / 2}h${wide}`, "stroke-width": tall - 1 }) : null,
  ];
}

function barNumber(one, left, right, y, row) {
  const text = LETTERS[one.kind] + one.number;
  if (!LETTERS[one.kind] || row < 16 || right - left < 7 * text.length + 4) return null;
  const ground = one.kind === BACKWARD || one.kind === WEIGHTS ? "deep" : one.kind === UPDATE ? "solid" : "plain";
  const middle = ((left + right) / 2).toFixed(1);
  return svg("text", { class: "on-" + ground, x: middle, y: y + row / 2 + 3 }, text);
}

function describe(one, lane, source) {
  return [
    `${KINDS[one.kind]} of ${one.kind >= UPDATE ? "group" : "microbatch"} ${one.number}`,
    `worker ${lane.worker}, ${stageName(lane.stage)}, ${source}`,
    `${showTime(one.end_s - one.start_s)}, from ${showTime(one.start_s)} to ${showTime(one.end_s)}`,
  ];
}

/* Ticks above the lanes. */
function timeAxis(facts, x, width) {
  const values = ticks(0, facts.end, Math.max(2, Math.floor(width / 96)));
  const labels = timeLabels(values, values.length > 1 ? values[1] : facts.end);
  const anchor = (place) => (place > width - 30 ? "end" : place < 30 ? "start" : "middle");
  return values.map((value, at) => [
    svg("line", { class: "axis-line", x1: x(value), x2: x(value), y1: AXIS - 6, y2: AXIS }),
    svg("text", { class: "tick", x: x(value), y: AXIS - 11, "text-anchor": anchor(x(value)) }, labels[at]),
  ]);
}

/* The fill and the steady state of the pipeline. */
function phases(facts, x) {
  if (!facts.steady) return null;
  const steady = facts.measured ? "predicted steady state" : "steady state";
  const found = [
    ["fill", "phase", 0, facts.steady[0]],
    [steady, "phase steady", facts.steady[0], facts.steady[1]],
  ];
  return found
    .filter(([, , start, end]) => x(end) - x(start) > 3)
    .map(([name, kind, start, end]) => [
      svg("rect", { class: kind, x: x(start) + 0.5, y: 2.5, width: x(end) - x(start) - 1, height: 17, rx: 3 }),
      x(end) - x(start) > 6.5 * name.length + 8 ? svg("text", { x: x(start) + 6, y: 15 }, name) : null,
    ]);
}

/* For one source: the seconds of every worker, and the activities of one worker in order. */
function timelineTables(source, intervals, facts) {
  const end = source === "measured" ? facts.measured_end_s : facts.end_s;
  const [from, to] = (source === "predicted" && facts.steady) || [0, end];
  const heading = source === "measured" ? "Measured" : "Predicted";
  const within = (one) => Math.max(0, Math.min(to, one.end_s) - Math.max(from, one.start_s));
  const rows = () => {
    const sums = facts.lanes.map(() => KINDS.map(() => 0));
    for (const one of intervals) sums[one.lane][one.kind] += within(one);
    return facts.lanes.map((lane, at) => [
      `worker ${lane.worker}`,
      stageName(lane.stage),
      ...sums[at].map(showTime),
      showShare(sums[at].slice(0, ALL_REDUCE).reduce((sum, one) => sum + one) / (to - from)),
    ]);
  };
  const columns = [...texts("worker", "stage"), ...numbers(...KINDS, "computing")];
  return [
    details(`${heading}, as a table: every worker`, () =>
      table(`${heading}: seconds of every worker from ${showTime(from)} to ${showTime(to)}`, columns, rows()),
    ),
    details(`${heading}, as a table: what one worker does, in order`, () => laneTable(heading, intervals, facts)),
  ];
}

function laneTable(heading, intervals, facts) {
  const holder = el("div", {});
  const choose = el(
    "select",
    { onchange: () => show(Number(choose.value)) },
    facts.lanes.map((lane, at) => el("option", { value: at }, `worker ${lane.worker}, ${stageName(lane.stage)}`)),
  );
  const show = (at) => {
    const columns = [...texts("what"), ...numbers("microbatch or group", "from", "to", "takes")];
    const rows = intervals
      .filter((one) => one.lane === at)
      .map((one) => [
        KINDS[one.kind],
        one.number,
        ...[one.start_s, one.end_s, one.end_s - one.start_s].map((time) => showTime(time)),
      ]);
    holder.replaceChildren(table(`${heading}: worker ${facts.lanes[at].worker}`, columns, rows));
  };
  show(0);
  return el("div", {}, el("label", { class: "choose" }, "Worker ", choose), holder);
}
