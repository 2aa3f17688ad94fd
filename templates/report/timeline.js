/* The section with the timeline from the fill to the steady state: predicted above measured, on one scale. */

const TIMELINE_HELP =
  "With the focus on a panel: arrow left and right move, plus and minus zoom, 0 shows everything, Home and End go to " +
  "the ends; arrow up and down choose a worker, comma and full stop step through what it does, Escape lets go. The " +
  "wheel zooms once a panel has the focus, or with Ctrl held; dragging moves; a click on a pass marks its minibatch " +
  "everywhere.";

function timelineSection(report) {
  if (!report.timeline || !report.timeline.predicted) return null;
  const facts = { ...report.timeline, lanes: rowsOf(report.timeline.lanes) };
  const sources = ["predicted", "measured"].filter((name) => facts[name]);
  const lanes = sources.map((name) => lanesOf(facts[name], facts.lanes.length));
  const view = new TimeView(Math.max(facts.end_s, facts.measured_end_s || 0), shortestOf(facts));
  const panels = sources.map((name, at) => new Panel(name, lanes[at], facts, view));
  const status = el("p", { class: "status", role: "status" });
  const say = (text) => (status.textContent = text);
  panels.forEach((panel) => panelInput(panel, panels, say));
  const box = el(
    "div",
    { class: "timeline", id: "timeline-box" },
    timelineButtons(view, facts, say),
    timelineLegend(lanes),
    overview(panels[0], lanes[0], view),
    timeAxis(panels[0], facts, view),
    panels.map((panel) => panel.element),
    status,
    el("p", { class: "help", id: "timeline-help" }, TIMELINE_HELP),
  );
  const redraw = () => view.redraw();
  onTheme(redraw);
  new ResizeObserver(redraw).observe(box);
  view.redraw();
  const lead = wordsOf(report, "timeline");
  return section(
    "timeline",
    "Timeline",
    lead,
    facts.omitted ? el("p", { class: "note" }, facts.omitted) : null,
    figure(null, box, null),
    sources.map((name, at) => timelineTables(name, lanes[at], facts)),
  );
}

/* The narrowest window: a hundredth of a typical interval. */
function shortestOf(facts) {
  const { start_s: starts, end_s: ends } = facts.predicted;
  const lengths = starts.map((start, at) => ends[at] - start).filter((length) => length > 0);
  lengths.sort((a, b) => a - b);
  return (lengths[lengths.length >> 1] || facts.end_s) / 100;
}

function timelineButtons(view, facts, say) {
  const button = (text, label, act) =>
    el(
      "button",
      {
        type: "button",
        "aria-label": label,
        title: label,
        onclick: () => {
          act();
          say(`From ${showTime(view.from)} to ${showTime(view.to)}`);
        },
      },
      text,
    );
  const fill = facts.steady ? facts.steady[0] : 0;
  return el(
    "div",
    { class: "buttons", role: "group", "aria-label": "Zoom of the timeline" },
    button("−", "Zoom out", () => view.zoom(2)),
    button("+", "Zoom in", () => view.zoom(0.5)),
    button("◂", "Earlier", () => view.pan(-(view.to - view.from) / 3)),
    button("▸", "Later", () => view.pan((view.to - view.from) / 3)),
    button("All", "Show everything", () => view.reset()),
    fill > 0 ? button("Fill", "Show the fill of the pipeline", () => view.show(0, 1.3 * fill)) : null,
    facts.steady
      ? button("Steady", "Show the steady state", () => showSteady(view, facts))
      : button("Begin", "Show the first passes", () => view.show(0, view.shortest * 2000)),
  );
}

/* The first window: a few rounds of the steady state, so that single passes can be read. */
function showSteady(view, facts) {
  const [from, to] = facts.steady;
  view.show(from, Math.min(to, from + Math.max((to - from) / 4, view.shortest * 400)));
}

function timelineLegend(lanes) {
  const present = new Set(
    lanes.flatMap((rows) => rows.flatMap((row) => [...row.work, ...row.behind].map((one) => one.kind))),
  );
  const words = ["forward", "backward", "gradients of weights", "update", "waiting", "all-reduce, behind the rest"];
  const items = KINDS.map((_, kind) => (present.has(kind) ? el("li", {}, swatch(kind), words[kind]) : null));
  return el("ul", { class: "legend" }, items);
}

function timelineTables(source, lanes, facts) {
  const steady = source === "predicted" && facts.steady;
  const [from, to] = steady || [0, source === "measured" ? facts.measured_end_s : facts.end_s];
  const heading = source === "measured" ? "Measured" : "Predicted";
  const rows = () =>
    facts.lanes.map((lane, at) => {
      const sums = secondsOf(lanes[at], from, to);
      return [
        `worker ${lane.worker}`,
        stageName(lane.stage),
        ...sums.map((sum) => showTime(sum)),
        showShare((sums[FORWARD] + sums[BACKWARD] + sums[WEIGHTS] + sums[UPDATE]) / (to - from)),
      ];
    });
  const columns = [
    ["worker", "text"],
    ["stage", "text"],
    ...KINDS.map((kind) => [kind, "number"]),
    ["computing", "number"],
  ];
  return [
    details(`${heading}, as a table: every worker${steady ? " in the steady state" : ""}`, () =>
      table(`${heading}: seconds of every worker from ${showTime(from)} to ${showTime(to)}`, columns, rows()),
    ),
    details(`${heading}, as a table: what one worker does, in order`, () => laneTable(heading, lanes, facts)),
  ];
}

function laneTable(heading, lanes, facts) {
  const holder = el("div", {});
  const choose = el(
    "select",
    { onchange: () => show(Number(choose.value)) },
    facts.lanes.map((lane, at) => el("option", { value: at }, `worker ${lane.worker}, ${stageName(lane.stage)}`)),
  );
  const show = (at) => {
    const all = [...lanes[at].work, ...lanes[at].behind].sort((a, b) => a.from - b.from);
    const columns = [
      ["what", "text"],
      ["minibatch or group", "number"],
      ["from", "number"],
      ["to", "number"],
      ["takes", "number"],
    ];
    const rows = all.map((one) => [
      KINDS[one.kind],
      one.number,
      showTime(one.from),
      showTime(one.to),
      showTime(one.to - one.from),
    ]);
    holder.replaceChildren(table(`${heading}: worker ${facts.lanes[at].worker}`, columns, rows));
  };
  show(0);
  return el("div", {}, el("label", { class: "choose" }, "Worker ", choose), holder);
}
