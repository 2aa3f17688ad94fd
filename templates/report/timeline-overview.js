/*
 * A strip with the whole run: the share of workers that compute over time, and the window that the panels show, which
 * can be dragged.
 */

const STRIP = 46;

function overview(panel, lanes, view) {
  const shares = busyShares(lanes, view.end, 200);
  const points = shares.map((share, at) => `${at},${(1 - share).toFixed(3)} ${at + 1},${(1 - share).toFixed(3)}`);
  const area = svg("polygon", { points: `0,1 ${points.join(" ")} 200,1`, class: "busy" });
  const part = (time) => (200 * time) / view.end;
  const lens = svg("rect", { class: "lens", y: 0, height: 1 });
  const picture = svg(
    "svg",
    { class: "strip", viewBox: "0 0 200 1", preserveAspectRatio: "none", role: "img", height: STRIP },
    svg(
      "title",
      {},
      "Share of the workers that compute, as predicted, over the whole time; the frame is what the panels show",
    ),
    area,
    lens,
  );
  view.listen(() => {
    const all = view.to - view.from > 0.999 * view.end;
    lens.setAttribute("visibility", all ? "hidden" : "visible");
    picture.style.marginLeft = panel.gutter + "px";
    picture.style.width = `calc(100% - ${panel.gutter}px)`;
    lens.setAttribute("x", part(view.from));
    lens.setAttribute("width", Math.max(0.4, part(view.to - view.from)));
  });
  stripInput(picture, view);
  return picture;
}

function stripInput(picture, view) {
  let held = null;
  const timeAt = (event) => {
    const box = picture.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * view.end;
  };
  picture.addEventListener("pointerdown", (event) => {
    const time = timeAt(event);
    const length = view.to - view.from;
    const inside = time >= view.from && time <= view.to && length < 0.999 * view.end;
    held = inside ? { grip: time - view.from } : { start: time };
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    if (!held) return;
    const time = timeAt(event);
    if ("grip" in held) view.pan(time - held.grip - view.from);
    else if (Math.abs(time - held.start) > view.shortest)
      view.show(Math.min(time, held.start), Math.max(time, held.start));
  });
  for (const end of ["pointerup", "pointercancel"]) picture.addEventListener(end, () => (held = null));
}

/* The time axis above the panels, at their scale, with ticks and with the fill and the steady state of the pipeline. */
function timeAxis(panel, facts, view) {
  const foot = facts.steady ? 46 : 26;
  const axis = svg("svg", { class: "axis", height: foot, "aria-hidden": "true" });
  view.listen(() => {
    panel.measure();
    const count = Math.max(2, Math.floor((panel.width - panel.gutter) / 96));
    const values = ticks(view.from, view.to, count);
    const labels = timeLabels(values, values.length > 1 ? values[1] - values[0] : view.to - view.from);
    axis.setAttribute("width", panel.width);
    axis.replaceChildren(
      ...phases(panel, facts),
      ...values.flatMap((value, at) => {
        const x = panel.xOf(value);
        const anchor = x > panel.width - 30 ? "end" : x < panel.gutter + 8 ? "start" : "middle";
        return [
          svg("line", { x1: x, x2: x, y1: foot - 6, y2: foot }),
          svg("text", { x: anchor === "end" ? panel.width : x, y: foot - 11, "text-anchor": anchor }, labels[at]),
        ];
      }),
    );
  });
  return axis;
}

/* Labels a phase in full if there is room, else in short. */
function phases(panel, facts) {
  if (!facts.steady) return [];
  const [from, to] = facts.steady;
  const steady = facts.measured ? "predicted steady state" : "steady state";
  return [
    phase(panel, ["fill"], 0, from),
    phase(panel, [steady, "steady"], from, to),
    phase(panel, ["drain"], to, facts.end_s),
  ].flat();
}

function phase(panel, names, start, end) {
  const [left, right] = [start, end].map((time) => Math.min(Math.max(panel.xOf(time), panel.gutter), panel.width));
  if (right - left < 3) return [];
  const kind = names.length > 1 ? "phase steady" : "phase";
  const name = names.find((one) => right - left > 6.5 * one.length + 8);
  return [
    svg("rect", { class: kind, x: left + 0.5, y: 2.5, width: right - left - 1, height: 17, rx: 3 }),
    svg("text", { class: "phase-name", x: (left + right) / 2, y: 15, "text-anchor": "middle" }, name),
  ];
}
