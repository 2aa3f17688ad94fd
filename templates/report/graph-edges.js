/*
 * The lines between layers: from the right of the producer, through the bends of a long line, to the left of the
 * consumer.
 */

function edgePath(graph, [from, to], bends) {
  const { x, y } = graph.nodes;
  const middle = graph.h / 2;
  const points = [];
  for (let at = 1; at + 1 < bends.length; at += 2) points.push([bends[at], bends[at + 1]]);
  points.push([x[to], y[to] + middle]);
  let here = [x[from] + graph.w, y[from] + middle];
  let path = `M${here}`;
  for (const point of points) {
    path += lineTo(here, point, graph.width);
    here = point;
  }
  return path;
}

/* Edges are curves. An edge from the end of a row to the start of the next one has corners. */
function lineTo([x1, y1], [x2, y2], width) {
  if (y1 === y2) return `H${x2}`;
  if (x2 > width) return `H${x2}V${y2}`;
  if (x1 < 0) return `V${y2}H${x2}`;
  const middle = (x1 + x2) / 2;
  return `C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
}
