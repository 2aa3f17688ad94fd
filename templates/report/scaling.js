/* How the pace grows with workers: the best plan for each count, and data parallelism. */

function scalingSection(report) {
  const points = report.scaling && report.scaling.points ? report.scaling.points.filter((one) => one.minibatch_s) : [];
  if (points.length < 2) return null;
  const unit = report.scaling.unit || "workers";
  const count = (one) => one[unit] ?? one.workers;
  const [first, last] = [points[0], points.at(-1)];
  const lead = `From ${count(first)} to ${count(last)} ${unit} the pace grows ${digits(first.minibatch_s / last.minibatch_s)} times; a straight line would be ${digits(count(last) / count(first))} times.`;
  const columns = [[unit, "text"], ["configuration", "text"], ["a minibatch", "number"], ["minibatches a second", "number"], ["data parallelism", "number"], ["gain", "number"]];
  const rows = () =>
    points.map((one) => [
      String(count(one)), one.config || "–", showTime(one.minibatch_s), digits(1 / one.minibatch_s),
      one.data_parallelism_s ? digits(1 / one.data_parallelism_s) : "–",
      one.data_parallelism_s ? showGain(one.data_parallelism_s / one.minibatch_s) : "–",
    ]);
  return section("scaling", "Scaling", lead, figure(null, scalingChart(points, count, unit), chartTable("Pace by " + unit, columns, rows)));
}

function scalingChart(points, count, unit) {
  const frame = frameOf(720, 330, { left: 66, right: 128, top: 26, bottom: 48 });
  const rates = points.flatMap((one) => [1 / one.minibatch_s, one.data_parallelism_s ? 1 / one.data_parallelism_s : null]).filter(Boolean);
  const most = Math.max(...rates);
  const logarithmic = count(points.at(-1)) / count(points[0]) > 12;
  const place = (value) => (logarithmic ? Math.log2(value) : value);
  const across = scaleOf(place(count(points[0])), place(count(points.at(-1))), frame.left + 8, frame.right);
  const x = (one) => across(place(count(one)));
  const y = scaleOf(0, 1.1 * most, frame.bottom, frame.top);
  const known = points.filter((one) => one.data_parallelism_s);
  const path = (rows, rate) => rows.map((one, at) => `${at ? "L" : "M"}${x(one).toFixed(1)},${y(rate(one)).toFixed(1)}`).join("");
  const best = (one) => 1 / one.minibatch_s;
  const data = (one) => 1 / one.data_parallelism_s;
  const label = `Minibatches a second by ${unit}: ${points.map((one) => `${count(one)}: ${digits(best(one))}`).join(", ")}`;
  const spread = apart(y(best(points.at(-1))), known.length ? y(data(known.at(-1))) : frame.bottom);
  return svg(
    "svg",
    { class: "chart scaling", viewBox: `0 0 ${frame.width} ${frame.height}`, role: "img", "aria-label": label },
    svg("title", {}, label),
    svg("text", { class: "tick", x: 4, y: 14 }, "minibatches a second"),
    grid(frame, ticks(0, 1.1 * most, 5), y, (value) => digits(value)),
    footerOf(points, frame, x, count),
    svg("text", { class: "tick", x: (frame.left + frame.right) / 2, y: frame.height - 8, "text-anchor": "middle" }, unit + (logarithmic ? " (logarithmic)" : "")),
    svg("path", { class: "curve other", d: path(known, data) }),
    known.map((one) => svg("rect", { class: "dot other", x: x(one) - 4, y: y(data(one)) - 4, width: 8, height: 8 })),
    svg("path", { class: "curve", d: path(points, best) }),
    points.map((one) => scalingDot(one, x(one), y(best(one)), unit, count)),
    svg("text", { class: "direct", x: frame.right + 12, y: spread[0] + 4 }, "best plan"),
    known.length ? svg("text", { class: "direct other", x: frame.right + 12, y: spread[1] + 4 }, "data parallelism") : null,
  );
}

/* Two labels that do not run into each other. */
function apart(upper, lower) {
  return lower - upper >= 16 ? [upper, lower] : [(upper + lower) / 2 - 8, (upper + lower) / 2 + 8];
}

/* Counts below the axis, as many as there is room for. */
function footerOf(points, frame, x, count) {
  let last = -Infinity;
  const shown = points.filter((one) => {
    if (x(one) - last < 34) return false;
    last = x(one);
    return true;
  });
  return footer(frame, shown, x, shown.map((one) => String(count(one))));
}

function scalingDot(one, x, y, unit, count) {
  const lines = [
    `${count(one)} ${unit}: ${one.config || ""}`,
    `${digits(1 / one.minibatch_s)} minibatches a second, ${showTime(one.minibatch_s)} each`,
    ...(one.data_parallelism_s ? [`${showGain(one.data_parallelism_s / one.minibatch_s)} over data parallelism`] : []),
  ];
  return svg("circle", { class: "dot", cx: x, cy: y, r: 5, onpointermove: (event) => showTooltip(event, lines), onpointerleave: hideTooltip });
}
