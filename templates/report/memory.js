/* Memory over time of the fullest worker of each stage, compared with its capacity. */

const MEMORY_CHARTS = 12;

function memorySection(report) {
  const rows = report.memory || [];
  if (!rows.length) return null;
  const measured = rows.some((row) => row.measured_peak_bytes);
  const end = Math.max(report.timeline ? report.timeline.end_s : 0, ...rows.map((row) => row.predicted.t.at(-1)));
  const lead = [
    "The fullest worker of each stage, while the pipeline fills and runs" +
      (measured ? "; the dotted line is the most that the run measured." : "."),
    ...wordsOf(report, "memory"),
  ];
  const chart = (row) => memoryChart(row, end);
  const shown = el("div", { class: "charts" }, rows.slice(0, MEMORY_CHARTS).map(chart));
  const others = rows.slice(MEMORY_CHARTS);
  const columns = [
    ["stage", "text"],
    ["worker", "text"],
    ["most, predicted", "number"],
    ...(measured ? [["most, measured", "number"]] : []),
    ["has", "number"],
  ];
  return section(
    "memory",
    "Memory",
    lead,
    figure(
      null,
      el(
        "div",
        {},
        shown,
        others.length
          ? details(`${plural(others.length, "more stage")}`, () => el("div", { class: "charts" }, others.map(chart)))
          : null,
      ),
      chartTable("Memory of the fullest worker of each stage", columns, () =>
        rows.map((row) => [
          stageName(row.stage),
          `worker ${row.worker}`,
          showSize(peak(row.predicted)),
          ...(measured ? [showSize(row.measured_peak_bytes)] : []),
          showSize(row.capacity_bytes),
        ]),
      ),
    ),
    memoryParts(report),
  );
}

function peak(curve) {
  return curve.bytes.reduce((most, one) => Math.max(most, one), 0);
}

function memoryTicks(most) {
  for (const step of [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10].flatMap((unit) =>
    [512, 256, 128, 64, 32, 16, 8, 4, 2, 1].map((times) => times * unit),
  )) {
    if (most / step >= 2.9) return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, at) => at * step);
  }
  return [0, most];
}

/* Curves far below the capacity get a scale of their own, so that small differences remain visible. */
const NEARLY_EMPTY = 0.08;

function memoryTop(capacity, used) {
  return capacity && used > NEARLY_EMPTY * capacity ? Math.max(capacity, used) : used || 1;
}

function memoryChart(row, end) {
  const most = memoryTop(row.capacity_bytes, Math.max(peak(row.predicted), row.measured_peak_bytes || 0));
  const frame = frameOf(340, 186, { left: 58, right: 12, top: 30, bottom: 26 });
  const x = scaleOf(0, end, frame.left, frame.right);
  const y = scaleOf(0, 1.08 * most, frame.bottom, frame.top);
  const times = ticks(0, end, 4);
  const path = stepPath(row.predicted.t, row.predicted.bytes, x, y) + `H${x(end).toFixed(1)}`;
  const area = `${path}V${y(0)}H${x(row.predicted.t[0])}Z`;
  const share = row.capacity_bytes
    ? `, ${showShare(peak(row.predicted) / row.capacity_bytes)} of ${showSize(row.capacity_bytes)}`
    : "";
  const words =
    `${stageName(row.stage)}, worker ${row.worker}: at most ${showSize(peak(row.predicted))} predicted${share}` +
    (row.measured_peak_bytes ? `, ${showSize(row.measured_peak_bytes)} measured` : "");
  return svg(
    "svg",
    {
      class: `chart stage-${row.stage % STAGES.length}`,
      viewBox: `0 0 ${frame.width} ${frame.height}`,
      role: "img",
      "aria-label": words,
    },
    svg("title", {}, words),
    svg("rect", { class: "badge", x: 0.5, y: 1.5, width: 24, height: 19, rx: 4 }),
    svg("text", { class: "badge-text", x: 12.5, y: 15.5 }, String(row.stage + 1)),
    svg("text", { class: "chart-title", x: 32, y: 15.5 }, chartTitle(row, most)),
    grid(frame, memoryTicks(1.08 * most), y, showSize),
    svg("path", { class: "area", d: area }),
    svg("path", { class: "curve", d: path }),
    row.measured_peak_bytes ? measuredLine(row, frame, y) : null,
    row.capacity_bytes ? capacityLine(row, frame, y, most) : null,
    footer(frame, times, x, timeLabels(times, times[1] || end)),
  );
}

function chartTitle(row, most) {
  const far = row.capacity_bytes > most ? ` of ${showSize(row.capacity_bytes)}` : "";
  return `worker ${row.worker}, at most ${showSize(peak(row.predicted))}${far}`;
}

/* Draws no line if it would lie far above the picture. The title then states the value. */
function capacityLine(row, frame, y, most) {
  if (most < row.capacity_bytes) return null;
  const at = y(row.capacity_bytes);
  return [
    svg("line", { class: "capacity", x1: frame.left, x2: frame.right, y1: at, y2: at }),
    svg(
      "text",
      { class: "tick strong", x: frame.right, y: at - 5, "text-anchor": "end" },
      `${showSize(row.capacity_bytes)} there`,
    ),
  ];
}

function measuredLine(row, frame, y) {
  const at = y(row.measured_peak_bytes);
  return [
    svg("line", { class: "measured-peak", x1: frame.left, x2: frame.right, y1: at, y2: at }),
    svg(
      "text",
      { class: "tick strong", x: frame.left + 4, y: at - 4 },
      `${showSize(row.measured_peak_bytes)} measured`,
    ),
  ];
}
