/* Memory of the fullest worker of each stage: over time, compared with its capacity, and divided into parts. */

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
  const most = measured ? ["most, predicted", "most, measured"] : ["most, predicted"];
  const columns = [...texts("stage", "worker"), ...numbers(...most, "available")];
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

/* Curves far below the capacity get their own scale, so that small differences remain visible. */
const NEARLY_EMPTY = 0.08;

function memoryTop(capacity, used) {
  return capacity && used > NEARLY_EMPTY * capacity ? Math.max(capacity, used) : used || 1;
}

function memoryChart(row, end) {
  const most = memoryTop(row.capacity_bytes, Math.max(peak(row.predicted), row.measured_peak_bytes || 0));
  const frame = { width: 340, height: 186, left: 58, right: 328, top: 30, bottom: 160 };
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
    row.measured_peak_bytes ? levelLine("measured-peak", row.measured_peak_bytes, "measured", frame, y) : null,
    // If the capacity is far above the picture, only the title shows it.
    0 < row.capacity_bytes && row.capacity_bytes <= most
      ? levelLine("capacity", row.capacity_bytes, "available", frame, y)
      : null,
    footer(frame, times, x, timeLabels(times, times[1] || end)),
  );
}

function chartTitle(row, most) {
  const far = row.capacity_bytes > most ? ` of ${showSize(row.capacity_bytes)}` : "";
  return `worker ${row.worker}, at most ${showSize(peak(row.predicted))}${far}`;
}

function levelLine(kind, bytes, word, frame, y) {
  const [at, right] = [y(bytes), kind === "capacity"];
  const place = { x: right ? frame.right : frame.left + 4, y: at - 5, "text-anchor": right ? "end" : "start" };
  return [
    svg("line", { class: kind, x1: frame.left, x2: frame.right, y1: at, y2: at }),
    svg("text", { class: "tick strong", ...place }, `${showSize(bytes)} ${word}`),
  ];
}

const PATTERNS = 8;

/*
 * The kind of a part without its count, which differs by stage: "weights, 3 versions", "activations of 2 microbatches
 * in flight".
 */
function partName(name) {
  return name.replace(/, \d.*$/, "").replace(/ of \d.*$/, "");
}

function partBytes(stage, name) {
  return stage.memory_parts.filter(([one]) => partName(one) === name).reduce((sum, [, bytes]) => sum + bytes, 0);
}

function memoryParts(report) {
  const rows = (report.stages || []).filter((stage) => (stage.memory_parts || []).length);
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap((stage) => stage.memory_parts.map(([name]) => partName(name))))];
  const used = Math.max(...rows.map((stage) => stage.memory_bytes));
  const most = memoryTop(Math.max(...rows.map((stage) => stage.capacity_bytes || 0)), used);
  const legend = names.map((name, at) => el("li", {}, el("span", { class: "swatch part-" + (at % PATTERNS) }), name));
  const chart = () =>
    el(
      "div",
      { class: "bars parts", role: "img", "aria-label": partsWords(rows) },
      rows.map((stage) => partsBar(stage, names, most)),
    );
  const columns = [...texts("stage"), ...numbers(...names, "together")];
  const cells = () =>
    rows.map((stage) => [
      stageName(stage.index),
      ...names.map((name) => showSize(partBytes(stage, name))),
      showSize(stage.memory_bytes),
    ]);
  return [
    el("h3", {}, "What it is for"),
    el("ul", { class: "legend" }, legend),
    rows.length <= 16 ? chart() : details(`All ${rows.length} stages`, chart),
    chartTable("What the memory of a worker of each stage is for", columns, cells),
  ];
}

function partsBar(stage, names, most) {
  const { memory_parts: parts, capacity_bytes: capacity } = stage;
  const percent = (bytes) => (100 * bytes) / most + "%";
  const piece = ([name, bytes]) =>
    el("span", {
      class: "part part-" + (names.indexOf(partName(name)) % PATTERNS),
      style: { width: percent(bytes) },
      title: `${name}: ${showSize(bytes)}`,
    });
  const line = capacity && capacity <= most ? el("span", { class: "line", style: { left: percent(capacity) } }) : null;
  return el(
    "div",
    { class: "row" },
    el("span", { class: "name" }, stageLabel(stage.index)),
    el("span", { class: "track" }, parts.map(piece), line),
    el("span", { class: "value" }, showSize(stage.memory_bytes)),
  );
}

function partsWords(rows) {
  const one = ([name, bytes]) => `${name} ${showSize(bytes)}`;
  const sentences = rows
    .slice(0, 12)
    .map((stage) => `${stageName(stage.index)}: ${stage.memory_parts.map(one).join(", ")}`);
  return `What memory is for: ${sentences.join("; ")}`;
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

/* The path of a step function: each value holds until the time of the next value. */
function stepPath(times, values, x, y) {
  return times
    .map((time, at) =>
      at ? `H${x(time).toFixed(1)}V${y(values[at]).toFixed(1)}` : `M${x(time).toFixed(1)},${y(values[at]).toFixed(1)}`,
    )
    .join("");
}
