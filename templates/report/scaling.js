/* The section with the scaling: the pace of the best plan, and of data parallelism, by size of the cluster. */

function scalingSection(report) {
  const all = report.scaling
    ? rowsOf(report.scaling.points).map((one, at) => ({ ...one, here: at === report.scaling.here }))
    : [];
  const points = all.filter((one) => one.minibatch_s);
  if (points.length < 2) return null;
  const columns = [
    ["workers", "text"],
    ["servers", "number"],
    ["configuration", "text"],
    ["a minibatch", "number"],
    ["minibatches a second", "number"],
    ["data parallelism", "number"],
    ["gain", "number"],
  ];
  const rows = () =>
    points.map((one) => [
      String(one.workers) + (one.here ? ", this plan" : ""),
      String(one.servers),
      one.config || "–",
      showTime(one.minibatch_s),
      digits(1 / one.minibatch_s),
      one.data_parallelism_s ? showTime(one.data_parallelism_s) + (one.fits === false ? " (does not fit)" : "") : "–",
      one.data_parallelism_s ? showGain(one.data_parallelism_s / one.minibatch_s) : "–",
    ]);
  return section(
    "scaling",
    "Scaling",
    wordsOf(report, "scaling"),
    figure(null, scalingChart(points), chartTable("Pace by workers", columns, rows)),
  );
}

const best = (one) => 1 / one.minibatch_s;
const parallel = (one) => 1 / one.data_parallelism_s;

function scalingChart(points) {
  const narrow = innerWidth < 640;
  const frame = narrow
    ? frameOf(340, 280, { left: 44, right: 16, top: 52, bottom: 48 })
    : frameOf(760, 330, { left: 60, right: 136, top: 26, bottom: 48 });
  const known = points.filter((one) => one.data_parallelism_s);
  const most = Math.max(...points.map(best), ...known.map(parallel));
  const logarithmic = points.at(-1).workers / points[0].workers > 7;
  const place = (one) => (logarithmic ? Math.log2(one.workers) : one.workers);
  const across = scaleOf(place(points[0]), place(points.at(-1)), frame.left + 8, frame.right - 8);
  const x = (one) => across(place(one));
  const y = scaleOf(0, 1.1 * most, frame.bottom, frame.top);
  const told = points.map((one) => `${one.workers}: ${digits(best(one))}`);
  const label = `Minibatches a second by workers: ${told.join(", ")}`;
  return svg(
    "svg",
    { class: "chart scaling", viewBox: `0 0 ${frame.width} ${frame.height}`, role: "img", "aria-label": label },
    svg("title", {}, label),
    svg("text", { class: "tick", x: 4, y: 14 }, "minibatches a second"),
    grid(frame, ticks(0, 1.1 * most, 5), y, (value) => digits(value)),
    footerOf(points, frame, x),
    svg(
      "text",
      { class: "tick", x: (frame.left + frame.right) / 2, y: frame.height - 8, "text-anchor": "middle" },
      "workers" + (logarithmic ? " (logarithmic)" : ""),
    ),
    svg("path", { class: "curve other", d: linePath(known, x, (one) => y(parallel(one))) }),
    known.map((one) =>
      svg("rect", { class: "dot other", x: x(one) - 4, y: y(parallel(one)) - 4, width: 8, height: 8 }),
    ),
    svg("path", { class: "curve", d: linePath(points, x, (one) => y(best(one))) }),
    points.map((one) => scalingDot(one, x(one), y(best(one)))),
    curveNames(frame, narrow, y(best(points.at(-1))), known.length ? y(parallel(known.at(-1))) : null),
  );
}

function linePath(rows, x, y) {
  return rows.map((one, at) => `${at ? "L" : "M"}${x(one).toFixed(1)},${y(one).toFixed(1)}`).join("");
}

/* Labels the curves at their ends, or in a line above if there is no room beside them. */
function curveNames(frame, narrow, upper, lower) {
  const name = (text, x, y, kind) => svg("text", { class: "direct " + kind, x, y }, text);
  if (!narrow) {
    const [first, second] = apart(upper, lower ?? frame.bottom);
    return [
      name("best plan", frame.right + 6, first + 4, ""),
      lower === null ? null : name("data parallelism", frame.right + 6, second + 4, "other"),
    ];
  }
  return [
    svg("circle", { class: "dot", cx: 10, cy: 32, r: 5 }),
    name("best plan", 20, 36, ""),
    lower === null
      ? null
      : [
          svg("rect", { class: "dot other", x: 104, y: 28, width: 8, height: 8 }),
          name("data parallelism", 118, 36, "other"),
        ],
  ];
}

/* Moves two labels apart so that they do not overlap. */
function apart(upper, lower) {
  return lower - upper >= 16 ? [upper, lower] : [(upper + lower) / 2 - 8, (upper + lower) / 2 + 8];
}

/* Labels as many counts below the axis as there is room for. */
function footerOf(points, frame, x) {
  let last = -Infinity;
  const shown = points.filter((one) => {
    if (x(one) - last < 34) return false;
    last = x(one);
    return true;
  });
  return footer(
    frame,
    shown,
    x,
    shown.map((one) => String(one.workers)),
  );
}

function scalingDot(one, x, y) {
  const lines = [
    `${plural(one.workers, "worker")}: ${one.config || ""}${one.here ? " (this plan)" : ""}`,
    `${digits(best(one))} minibatches a second, ${showTime(one.minibatch_s)} each`,
    ...(one.data_parallelism_s ? [`${showGain(one.data_parallelism_s / one.minibatch_s)} over data parallelism`] : []),
  ];
  const name = one.here
    ? svg("text", { class: "tick strong", x: x - 10, y: y - 10, "text-anchor": "end" }, "this plan")
    : null;
  const show = { onpointermove: (event) => showTooltip(event, lines), onpointerleave: hideTooltip };
  return [svg("circle", { class: one.here ? "dot here" : "dot", cx: x, cy: y, r: one.here ? 7 : 5, ...show }), name];
}
