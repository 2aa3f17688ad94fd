function start(report) {
  document.getElementById("report").textContent = report.title;
}
