/*
 * Where the layers of the model are drawn. They come with a rank and a place within it. A deep model is far longer than
 * wide, so that its ranks are folded into columns, read like those of a newspaper, of the shape of the frame.
 */

const CARD = { width: 178, height: 38, row: 56, column: 192, gap: 34 };

function foldGraph(graph, frame) {
  const { x, y } = graph.nodes;
  const ranks = 1 + y.reduce((most, one) => Math.max(most, one), 0);
  const places = 1 + x.reduce((most, one) => Math.max(most, one), 0);
  const wide = places * CARD.column + CARD.gap;
  let columns = 1;
  const ratio = (count) => (count * wide) / (Math.ceil(ranks / count) * CARD.row);
  while (columns < ranks && ratio(columns) < frame && ratio(columns + 1) <= 1.15 * frame) columns += 1;
  const each = Math.ceil(ranks / columns);
  const place = (at) => {
    const column = Math.floor(y[at] / each);
    return { x: column * wide + x[at] * CARD.column, y: (y[at] - column * each) * CARD.row, column };
  };
  const cards = y.map((_, at) => place(at));
  return { cards, columns, width: columns * wide - CARD.gap, height: each * CARD.row };
}

/* The line of an edge, from below its first layer to above its last. */
function edgePath(from, to) {
  const [x1, y1] = [from.x + CARD.width / 2, from.y + CARD.height];
  const [x2, y2] = [to.x + CARD.width / 2, to.y];
  if (from.column !== to.column) return betweenColumns(from, to);
  if (Math.abs(x1 - x2) < 1 && y2 - y1 > CARD.row) {
    const out = from.x + CARD.width + 10 + Math.min(16, (y2 - y1) / 40);
    const [top, bottom] = [y1 - CARD.height / 2, y2 + CARD.height / 2];
    const edge = from.x + CARD.width;
    return `M${edge},${top} C${out},${top} ${out},${top} ${out},${top + 14} L${out},${bottom - 14} C${out},${bottom} ${out},${bottom} ${edge},${bottom}`;
  }
  const middle = (y1 + y2) / 2;
  return `M${x1},${y1} C${x1},${middle} ${x2},${middle} ${x2},${y2}`;
}

/* From the foot of a column to the head of a later one, through the gap beside that. */
function betweenColumns(from, to) {
  const [x1, y1] = [from.x + CARD.width / 2, from.y + CARD.height];
  const [x2, y2] = [to.x + CARD.width / 2, to.y];
  const gap = to.x - CARD.gap / 2 - 7;
  const [low, high] = [y1 + 9, y2 - 9];
  return `M${x1},${y1} L${x1},${low} L${gap},${low} L${gap},${high} L${x2},${high} L${x2},${y2}`;
}
