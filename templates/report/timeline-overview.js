/* The whole run in a strip: how many workers compute when, and the window that the panels show. Dragging moves it. */

const STRIP = 46;

function overview(lanes, facts, view) {
  const shares = busyShares(lanes, view.end, 200);
  const points = shares.map((share, at) => `${at},${(1 - share).toFixed(3)} ${at + 1},${(1 - share).toFixed(3)}`);
  const area = svg("polygon", { points: `0,1 ${points.join(" ")} 200,1`, class: "busy" });
  const part = (time) => (200 * time) / view.end;
  const steady = facts.steady
    ? svg("rect", { class: "steady", x: part(facts.steady[0]), y: 0, width: part(facts.steady[1] - facts.steady[0]), height: 1 })
    : null;
  const lens = svg("rect", { class: "lens", y: 0, height: 1 });
  const picture = svg(
    "svg",
    { class: "strip", viewBox: "0 0 200 1", preserveAspectRatio: "none", role: "img", height: STRIP },
    svg("title", {}, "Share of the workers that compute, over the whole time; the frame is what the panels show"),
    steady,
    area,
    lens,
  );
  view.listen(() => {
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
    else if (Math.abs(time - held.start) > view.shortest) view.show(Math.min(time, held.start), Math.max(time, held.start));
  });
  for (const end of ["pointerup", "pointercancel"]) picture.addEventListener(end, () => (held = null));
}

/* The axis of time: its ticks stand over the panels, at the same scale. */
function timeAxis(panel, view) {
  const axis = svg("svg", { class: "axis", height: 24, "aria-hidden": "true" });
  view.listen(() => {
    panel.measure();
    const count = Math.max(2, Math.floor((panel.width - panel.gutter) / 96));
    const values = ticks(view.from, view.to, count);
    const labels = timeLabels(values, values.length > 1 ? values[1] - values[0] : view.to - view.from);
    axis.setAttribute("width", panel.width);
    axis.replaceChildren(
      ...values.flatMap((value, at) => {
        const x = panel.xOf(value);
        const anchor = x > panel.width - 30 ? "end" : x < panel.gutter + 8 ? "start" : "middle";
        return [
          svg("line", { x1: x, x2: x, y1: 18, y2: 24 }),
          svg("text", { x: anchor === "end" ? panel.width : x, y: 13, "text-anchor": anchor }, labels[at]),
        ];
      }),
    );
  });
  return axis;
}
