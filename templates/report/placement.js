/* The section with the placement: the stage of each worker of each server. */

const ALL_SERVERS = 64;

function placementSection(report) {
  const servers = report.placement;
  if (!servers || !servers.length) return null;
  const lead = [...wordsOf(report, "placement"), "The number at each worker is its stage."];
  const rows = () =>
    servers.flatMap((one) =>
      one.workers.map(([worker, stage]) => [`worker ${worker}`, `server ${one.server}`, stageName(stage)]),
    );
  return section(
    "placement",
    "Placement",
    lead,
    figure(
      null,
      serverGrid(servers, placementWords(report)),
      chartTable("The stage of every worker", texts("worker", "server", "stage"), rows),
    ),
  );
}

/* Many servers scroll in a box of their own, which can take the keyboard focus. */
function serverGrid(servers, label) {
  const widest = Math.min(8, Math.max(...servers.map((one) => one.workers.length)));
  const style = { "--chips": String(widest) };
  const grid = el("div", { class: "servers", role: "img", "aria-label": label, style }, servers.map(serverBox));
  if (servers.length <= 24) return grid;
  return el("div", { class: "many", tabindex: "0", role: "region", "aria-label": "Servers" }, grid);
}

function placementWords(report) {
  const words = (report.stages || [])
    .slice(0, ALL_SERVERS)
    .map(
      (stage) =>
        `${stageName(stage.index)} on ${plural((stage.workers || []).length, "worker")} of servers ${stage.servers}`,
    );
  return `Placement: ${words.join("; ")}`;
}

function serverBox(server) {
  const chips = server.workers.map(([worker, stage]) => stageChip(stage, `worker ${worker}: ${stageName(stage)}`));
  return el(
    "div",
    { class: "server" },
    el("span", { class: "name" }, "server " + server.server),
    el("span", { class: "chips" }, chips),
  );
}
