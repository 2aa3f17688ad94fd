/* The frame of a line chart: scales, grid and axes in an SVG of fixed coordinates that scales with the page. */

function frameOf(width, height, margin) {
  return {
    width,
    height,
    left: margin.left,
    right: width - margin.right,
    top: margin.top,
    bottom: height - margin.bottom,
  };
}

function scaleOf(from, to, start, end) {
  return (value) => start + ((value - from) / (to - from || 1)) * (end - start);
}

/* Horizontal grid lines with their values to the left. */
function grid(frame, values, y, label) {
  return values.flatMap((value) => [
    svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: frame.left - 6, y: y(value) + 4, "text-anchor": "end" }, label(value)),
  ]);
}

/* Values below the horizontal axis. The outermost labels stay inside the picture. */
function footer(frame, values, x, labels) {
  return values.flatMap((value, at) => [
    svg("line", { class: "axis-line", x1: x(value), x2: x(value), y1: frame.bottom, y2: frame.bottom + 4 }),
    svg(
      "text",
      {
        class: "tick",
        x: x(value),
        y: frame.bottom + 16,
        "text-anchor": x(value) > frame.right - 16 ? "end" : "middle",
      },
      labels[at],
    ),
  ]);
}

/* The path of a step function: each value holds until the time of the next. */
function stepPath(times, values, x, y) {
  return times
    .map((time, at) =>
      at ? `H${x(time).toFixed(1)}V${y(values[at]).toFixed(1)}` : `M${x(time).toFixed(1)},${y(values[at]).toFixed(1)}`,
    )
    .join("");
}
