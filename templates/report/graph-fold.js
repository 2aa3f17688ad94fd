/*
 * Where the layers of the model are drawn. They come laid out from left to right. A deep model is far longer than high,
 * so that it is folded into lines, read like those of a text: as many as make it largest in the frame.
 */

const LINE_GAP = 30;

/* `frame` is the width there is, and the height that there may be; text of a card is its best at scale 1. */
function foldGraph(graph, frame) {
  const { x, y } = graph.nodes;
  const step = stepOf(x, graph.w);
  const ranks = 1 + Math.round(x.reduce((most, one) => Math.max(most, one), 0) / step);
  const tall = graph.height + LINE_GAP;
  const scale = (lines) => Math.min(frame.width / (Math.ceil(ranks / lines) * step), frame.height / (lines * tall));
  let lines = 1;
  for (let more = 2; more <= ranks && scale(lines) < 1; more += 1) {
    if (scale(more) > scale(lines)) lines = more;
  }
  const each = Math.ceil(ranks / lines);
  const line = (left) => Math.min(lines - 1, Math.floor((left / step + 1e-6) / each));
  const onto = (left, top, at) => ({ x: left - at * each * step, y: top + at * tall, line: at });
  return {
    cards: x.map((left, at) => onto(left, y[at], line(left))),
    onto,
    tall,
    width: Math.min(ranks, each) * step - (step - graph.w),
    height: lines * tall - LINE_GAP,
  };
}

/* How far ranks are apart. */
function stepOf(lefts, otherwise) {
  const sorted = [...new Set(lefts)].sort((a, b) => a - b);
  const apart = sorted.slice(1).map((left, at) => left - sorted[at]).filter((one) => one > 1);
  return apart.length ? Math.min(...apart) : otherwise;
}

/* The line of an edge, from the right of its first layer to the left of its last. */
function edgePath(graph, folded, [from, to], bends) {
  const [one, other] = [folded.cards[from], folded.cards[to]];
  const [x1, y1] = [one.x + graph.w, one.y + graph.h / 2];
  const [x2, y2] = [other.x, other.y + graph.h / 2];
  if (one.line !== other.line) return betweenLines(folded, one, other, [x1, y1, x2, y2]);
  const points = [];
  for (let at = 1; at + 1 < bends.length; at += 2) points.push(folded.onto(bends[at], bends[at + 1], one.line));
  let [x, y] = [x1, y1];
  let path = `M${x},${y}`;
  for (const point of [...points, { x: x2, y: y2 }]) {
    const middle = (x + point.x) / 2;
    path += ` C${middle},${y} ${middle},${point.y} ${point.x},${point.y}`;
    [x, y] = [point.x, point.y];
  }
  return path;
}

/* From one line to a later one: through the gap below the one, and where they are further apart along the right edge. */
function betweenLines(folded, one, other, [x1, y1, x2, y2]) {
  const below = (one.line + 1) * folded.tall - LINE_GAP / 2;
  const above = other.line * folded.tall - LINE_GAP / 2;
  const aside = other.line > one.line + 1 ? ` H${folded.width + 22} V${above}` : "";
  return `M${x1},${y1} H${x1 + 9} V${below}${aside} H${x2 - 9} V${y2} H${x2}`;
}
