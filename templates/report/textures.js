/*
 * Textures that distinguish the kinds of intervals without colour: forward is plain, backward hatched, gradients of
 * weights dark, update solid, waiting empty, all-reduce dotted.
 */

const textures = new Map();

function tile(size, draw) {
  const scale = devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = Math.round(size * scale);
  const context = canvas.getContext("2d");
  context.scale(canvas.width / size, canvas.height / size);
  draw(context, size);
  return [canvas, size / canvas.width];
}

function hatched(colour, line) {
  return tile(6, (context, size) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, size, size);
    context.strokeStyle = line;
    context.lineWidth = 1.6;
    context.beginPath();
    for (const shift of [-size, 0, size]) {
      context.moveTo(shift - 1, size + 1);
      context.lineTo(shift + size + 1, -1);
    }
    context.stroke();
  });
}

function dotted(colour, dot) {
  return tile(4, (context, size) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, size, size);
    context.fillStyle = dot;
    context.fillRect(0, 0, size / 2, size / 2);
    context.fillRect(size / 2, size / 2, size / 2, size / 2);
  });
}

/* The fill of an interval, by kind and stage. */
function texture(context, kind, stage) {
  const key = [theme(), devicePixelRatio, kind, stage % STAGES.length].join();
  if (!textures.has(key)) {
    const colour = stageColour(stage);
    if (kind === FORWARD) textures.set(key, colour);
    else if (kind === WEIGHTS) textures.set(key, stageDeep(stage));
    else if (kind === UPDATE) textures.set(key, token("ink"));
    else {
      const other = theme() === "dark" ? "#000000" : "#ffffff";
      const [canvas, scale] =
        kind === BACKWARD ? hatched(stageDeep(stage), mix(colour, other, 0.6)) : dotted(token("surface"), token("ink"));
      const pattern = context.createPattern(canvas, "repeat");
      pattern.setTransform(new DOMMatrix([scale, 0, 0, scale, 0, 0]));
      textures.set(key, pattern);
    }
  }
  return textures.get(key);
}

/* The text colour of a label inside an interval. */
function textureInk(kind, stage) {
  if (kind === UPDATE) return token("surface");
  const ground = kind === BACKWARD || kind === WEIGHTS ? stageDeep(stage) : stageColour(stage);
  return once("ink on " + ground, () => inkOn(ground));
}

/* A sample of the kind for the legend. */
function swatch(kind, stage = 0) {
  const canvas = el("canvas", { class: "swatch", width: 56, height: 28, "aria-hidden": "true" });
  const draw = () => {
    const context = canvas.getContext("2d");
    context.setTransform(2, 0, 0, 2, 0, 0);
    context.clearRect(0, 0, 28, 14);
    drawInterval(context, kind, stage, 0.5, 0.5, 27, 13);
  };
  draw();
  onTheme(draw);
  return canvas;
}

function drawInterval(context, kind, stage, x, y, width, height) {
  if (kind === WAIT) {
    context.fillStyle = token("muted");
    for (let at = x + 1; at < x + width - 1; at += 5)
      context.fillRect(at, y + height / 2 - 0.5, Math.min(2, x + width - 1 - at), 1);
    return;
  }
  const behind = kind === ALL_REDUCE;
  context.fillStyle = texture(context, kind, stage);
  const [top, tall] = behind ? [y + height - Math.min(5, height / 3), Math.min(5, height / 3)] : [y, height];
  context.fillRect(x, top, width, tall);
  if (behind || width < 3) return;
  context.strokeStyle = stageEdge(stage);
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, top + 0.5, width - 1, tall - 1);
}
