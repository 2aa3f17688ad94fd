/* The parts of the memory of a worker, by stage. */

const PATTERNS = 8;

/*
 * The kind of a part without its count, which differs by stage: "weights, 3 versions", "activations of 2 minibatches
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
  const columns = [["stage", "text"], ...names.map((name) => [name, "number"]), ["together", "number"]];
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
  const told = rows.slice(0, 12).map((stage) => `${stageName(stage.index)}: ${stage.memory_parts.map(one).join(", ")}`);
  return `What memory is for: ${told.join("; ")}`;
}
