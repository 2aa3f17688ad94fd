/* Builds the page, section by section. */

const PARTS = [
  ["placement", placementSection],
  ["model", graphSection],
  ["timeline", timelineSection],
  ["memory", memorySection],
  ["bounds", boundsSection],
  ["comparisons", comparisonsSection],
  ["scaling", scalingSection],
  ["links", linksSection],
  ["certificate", certificateSection],
];

function start(report) {
  const button = themeButton();
  stageStyles();
  const found = PARTS.map(([, make]) => make(report)).filter(Boolean);
  const contents = found.map((part) =>
    el("li", {}, el("a", { href: "#" + part.id }, part.querySelector("h2").textContent)),
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
