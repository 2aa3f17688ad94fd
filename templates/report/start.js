/* Builds the page, section by section. */

const PARTS = [
  ["placement", placementSection],
  ["model", modelSection],
  ["timeline", timelineSection],
  ["memory", memorySection],
  ["comparisons", comparisonsSection],
  ["loads", loadsSection],
  ["certificate", certificateSection],
];

function start(report) {
  const button = themeButton();
  stageStyles();
  const found = PARTS.map(([, make]) => make(report)).filter(Boolean);
  const contents = found.map((part) =>
    el("li", {}, el("a", { href: "#" + part.id }, part.querySelector("h2").textContent.split(":")[0])),
  );
  document
    .getElementById("report")
    .replaceWith(
      el("header", { class: "top" }, el("span", { class: "brand" }, "pipeplan report"), button),
      el("nav", { "aria-label": "Sections" }, el("ul", {}, contents)),
      el("main", { id: "content", tabindex: "-1" }, headline(report), found),
      el(
        "footer",
        {},
        `Made by pipeplan ${report.pipeplan || ""}. This file is complete in itself: it fetches nothing.`,
      ),
    );
  requestAnimationFrame(() =>
    requestAnimationFrame(() => {
      document.documentElement.dataset.ready = Math.round(performance.now());
    }),
  );
}

/* The section with the proof, in words. */
function certificateSection(report) {
  const { certificate } = report;
  if (!certificate) return null;
  return section(
    "certificate",
    "Trust: what is proven",
    [],
    el(
      "ul",
      { class: "sentences" },
      (certificate.sentences || []).map((sentence) => el("li", {}, marked(sentence))),
    ),
    report.made ? [el("h3", {}, "What this report was made from"), madeFrom(report.made)] : null,
  );
}

const MADE = {
  model: "model",
  mode: "purpose",
  minibatch: "microbatch",
  config: "configuration",
  copies: "copies of the pipeline",
  schedule: "schedule",
  accumulate: "microbatches in an update",
  updates: "updates",
  learning: "learning",
  cluster: "cluster",
  cluster_described: "servers",
  profile_kind: "profile",
  profile_device: "device",
  profile_how: "how the profile was made",
  digest: "plan",
  pipeplan: "pipeplan",
};

function madeFrom(made) {
  const known = Object.keys(MADE).filter(
    (key) =>
      made[key] !== undefined && made[key] !== null && made[key] !== "" && !(key === "copies" && made[key] === 1),
  );
  return el(
    "dl",
    { class: "made" },
    known.map((key) => [el("dt", {}, MADE[key]), el("dd", {}, String(made[key]))]),
  );
}
