/* The light or dark theme: that of the system until the reader chooses one. Printed pages are always light. */

const themeListeners = [];

function onTheme(draw) {
  themeListeners.push(draw);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  if (button) {
    button.textContent = name === "dark" ? "Light theme" : "Dark theme";
  }
  themeListeners.forEach((draw) => draw());
}

/* A page opened from a file may have no storage. The choice then lasts as long as the page is open. */
function remembered() {
  try {
    return localStorage.getItem("pipeplan-theme");
  } catch {
    return null;
  }
}

function remember(name) {
  try {
    localStorage.setItem("pipeplan-theme", name);
  } catch {
    return;
  }
}

function themeButton() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = remembered();
  const wanted = () => chosen || (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = wanted();
  system.addEventListener("change", () => setTheme(wanted()));
  addEventListener("beforeprint", () => setTheme("light"));
  addEventListener("afterprint", () => setTheme(wanted()));
  const toggle = () => {
    chosen = theme() === "dark" ? "light" : "dark";
    remember(chosen);
    setTheme(chosen);
  };
  return el(
    "button",
    { id: "theme", type: "button", onclick: toggle },
    wanted() === "dark" ? "Light theme" : "Dark theme",
  );
}
