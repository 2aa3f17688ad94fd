/* The lines between layers: from the right of one, by the points that a long line passes, to the left of the other. */

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

/* Curves between layers; what goes around the end of a row to the begin of the next has corners. */
function lineTo([x1, y1], [x2, y2], width) {
  if (y1 === y2) return `H${x2}`;
  if (x2 > width) return `H${x2}V${y2}`;
  if (x1 < 0) return `V${y2}H${x2}`;
  const middle = (x1 + x2) / 2;
  return `C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
}
