/*
 * Colours of stages. Neighbours stay apart with every kind of colour blindness (the tests compute it), and a stage's
 * number stands wherever its colour does. After twelve stages the colours repeat.
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

function theme() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

function stageColour(stage) {
  return STAGES[stage % STAGES.length][theme()];
}

/* Colours are needed for every interval that is drawn, so each is computed once per theme. */
const known = new Map();

function once(key, make) {
  const full = theme() + " " + key;
  if (!known.has(full)) known.set(full, make());
  return known.get(full);
}

/* The outline that separates a light colour from a light page, and a dark colour from a dark page. */
function stageEdge(stage) {
  const place = stage % STAGES.length;
  return once("edge " + place, () => mix(stageColour(place), theme() === "dark" ? "#ffffff" : "#000000", 0.4));
}

/* The background of a backward pass, under its hatching. */
function stageDeep(stage) {
  const place = stage % STAGES.length;
  return once("deep " + place, () => mix(stageColour(place), "#000000", 0.22));
}

/* The value of a custom property of the style sheet. */
function token(name) {
  return once("token " + name, () =>
    getComputedStyle(document.documentElement)
      .getPropertyValue("--" + name)
      .trim(),
  );
}

/* Defines the classes .stage-0, .stage-1, … for both themes. */
function stageStyles() {
  const rules = STAGES.flatMap((colours, at) =>
    ["light", "dark"].map((name) => {
      const colour = colours[name];
      const edge = mix(colour, name === "dark" ? "#ffffff" : "#000000", 0.4);
      const rule = `--stage: ${colour}; --stage-ink: ${inkOn(colour)}; --stage-edge: ${edge};`;
      return `[data-theme=${name}] .stage-${at} { ${rule} }`;
    }),
  );
  document.head.append(el("style", {}, rules.join("\n")));
}
