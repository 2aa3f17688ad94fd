/*
 * Colours of stages. Neighbours differ with every kind of colour blindness (the tests compute it), and a stage's
 * number is shown wherever its colour is. After twelve stages the colours repeat.
 */

const STAGES = [
  { light: "#4477aa", dark: "#6ca6e0" },
  { light: "#dd8833", dark: "#f2a65a" },
  { light: "#aa3377", dark: "#c862a0" },
  { light: "#44aa99", dark: "#4fc7b0" },
  { light: "#332288", dark: "#7f76e6" },
  { light: "#ccbb44", dark: "#e8da70" },
  { light: "#882255", dark: "#a8507c" },
  { light: "#66ccee", dark: "#a5e8ff" },
  { light: "#228833", dark: "#3da857" },
  { light: "#9988cc", dark: "#cdbff5" },
  { light: "#ee6677", dark: "#ff8a96" },
  { light: "#999933", dark: "#a9a83e" },
];

const INK = { dark: "#000000", light: "#ffffff" };

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/* Relative luminance and contrast as WCAG 2 defines them. */
function luminance(colour) {
  const [red, green, blue] = channels(colour).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

/* The colour of text on a background of the given colour. */
function inkOn(colour) {
  return contrast(colour, INK.dark) >= contrast(colour, INK.light) ? INK.dark : INK.light;
}

/* Mixes `share` of the second colour into the first. */
function mix(one, other, share) {
  const [a, b] = [channels(one), channels(other)];
  return (
    "#" +
    a
      .map((value, at) =>
        Math.round(value + (b[at] - value) * share)
          .toString(16)
          .padStart(2, "0"),
      )
      .join("")
  );
}

/*
 * The colours of a stage in a theme: its own colour; the darker background of backward passes and the lines of their
 * hatching; the edge that separates it from the page; and the colours of text on it and on the darker background.
 */
function stageColours(stage, name) {
  const colour = STAGES[stage % STAGES.length][name];
  const other = name === "dark" ? "#ffffff" : "#000000";
  const deep = mix(colour, "#000000", 0.22);
  return {
    stage: colour,
    deep,
    hatch: mix(colour, name === "dark" ? "#000000" : "#ffffff", 0.6),
    edge: mix(colour, other, 0.4),
    ink: inkOn(colour),
    "deep-ink": inkOn(deep),
  };
}

/* Defines the classes .stage-0, .stage-1, … for both themes. */
function stageStyles() {
  const rules = STAGES.flatMap((_, at) =>
    ["light", "dark"].map((name) => {
      const colours = Object.entries(stageColours(at, name)).map(
        ([part, colour]) => `--${part === "stage" ? part : "stage-" + part}: ${colour};`,
      );
      return `[data-theme=${name}] .stage-${at} { ${colours.join(" ")} }`;
    }),
  );
  document.head.append(el("style", {}, rules.join("\n")));
}

/* The light or dark theme: the system's theme until the reader chooses one. Printed pages are always light. */
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  if (button) button.textContent = name === "dark" ? "Light theme" : "Dark theme";
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
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    remember(chosen);
    setTheme(chosen);
  };
  return el(
    "button",
    { id: "theme", type: "button", onclick: toggle },
    wanted() === "dark" ? "Light theme" : "Dark theme",
  );
}
