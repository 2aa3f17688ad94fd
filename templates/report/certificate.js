/* The proof in words. */

function certificateSection(report) {
  const { certificate } = report;
  if (!certificate) return null;
  return section(
    "certificate",
    "Certificate",
    certificate.proven ? "✓ This plan is proven to be the fastest." : "This plan is not proven to be the fastest.",
    el("ul", { class: "sentences" }, (certificate.sentences || []).map((sentence) => el("li", {}, sentence))),
    el("h3", {}, "What this report was made from"),
    madeFrom(report.made),
  );
}
