/* The section with the proof, in words. */

function certificateSection(report) {
  const { certificate } = report;
  if (!certificate) return null;
  return section(
    "certificate",
    "Certificate",
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
  mode: "for",
  minibatch: "minibatch",
  config: "configuration",
  copies: "copies of the pipeline",
  schedule: "schedule",
  accumulate: "minibatches an update",
  updates: "updates",
  learning: "learning",
  cluster: "cluster",
  cluster_described: "its servers",
  profile_kind: "profile",
  profile_device: "its device",
  profile_how: "how it was made",
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
