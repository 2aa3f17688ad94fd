/* Which stage each worker of each server has. */

const ALL_SERVERS = 64;

function placementSection(report) {
  const servers = report.placement;
  if (!servers || !servers.length) return null;
  const lead = [...wordsOf(report, "placement"), "The number at each worker is its stage."];
  const rows = () => servers.flatMap((one) => one.workers.map(([worker, stage]) => [`worker ${worker}`, `server ${one.server}`, stageName(stage)]));
  return section(
    "placement",
    "Placement",
    lead,
    figure(
      null,
      el("div", { class: "servers" + (servers.length > 16 ? " many" : ""), role: "img", "aria-label": placementWords(report) }, servers.map(serverBox)),
      chartTable("The stage of every worker", [["worker", "text"], ["server", "text"], ["stage", "text"]], rows),
    ),
  );
}

function placementWords(report) {
  const words = (report.stages || []).slice(0, ALL_SERVERS).map((stage) => `${stageName(stage.index)} on ${plural((stage.workers || []).length, "worker")} of servers ${stage.servers}`);
  return `Placement: ${words.join("; ")}`;
}

function serverBox(server) {
  const chips = server.workers.map(([worker, stage]) => stageChip(stage, `worker ${worker}: ${stageName(stage)}`));
  return el("div", { class: "server" }, el("span", { class: "name" }, "server " + server.server), el("span", { class: "chips" }, chips));
}
