/* Creates DOM elements. Strings always become text, never markup. */

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, one]) => element.style.setProperty(key, one));
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/* A sentence in which text between backticks becomes code. */
function marked(sentence) {
  const parts = sentence.split("`");
  if (parts.length % 2 === 0) return [sentence];
  return parts.map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

const LEAD = 4;

/*
 * A section of the page: a heading that the list of contents links to, and sentences, which are folded if there are
 * many.
 */
function section(id, title, sentences, ...children) {
  const [first, rest] = [sentences.slice(0, LEAD), sentences.slice(LEAD)];
  return el(
    "section",
    { id, "aria-labelledby": id + "-title" },
    el("h2", { id: id + "-title" }, title),
    first.length ? el("p", { class: "lead" }, marked(first.join(" "))) : null,
    rest.length > 0
      ? details("More in words", () =>
          el(
            "ul",
            { class: "sentences" },
            rest.map((one) => el("li", {}, marked(one))),
          ),
        )
      : null,
    ...children,
  );
}

/* The report's sentences on a section. */
function wordsOf(report, part, otherwise = []) {
  const found = (report.words || {})[part];
  return found && found.length ? found : otherwise;
}

/* A chart with its caption. `table` is its text alternative. */
function figure(caption, chart, table) {
  return el("figure", {}, chart, caption ? el("figcaption", {}, caption) : null, table);
}

function stageChip(stage, title) {
  if (stage < 0) return el("span", { class: "chip idle", title: title || "idle" }, "–");
  return el("span", { class: "chip stage-" + (stage % STAGES.length), title: title || null }, String(stage + 1));
}

function stageName(stage) {
  return stage < 0 ? "idle" : "stage " + (stage + 1);
}

let lastId = 0;

function freshId(stem) {
  lastId += 1;
  return stem + "-" + lastId;
}
