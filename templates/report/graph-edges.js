/* The lines between layers: from the right of one, by the points that a long line passes, to the left of the other. */

const CLOSE = 40;

function edgePath(graph, [from, to], bends) {
  const { x, y } = graph.nodes;
  const middle = graph.h / 2;
  const points = [];
  for (let at = 1; at + 1 < bends.length; at += 2) points.push([bends[at], bends[at + 1]]);
  points.push([x[to], y[to] + middle]);
  let here = [x[from] + graph.w, y[from] + middle];
  let path = `M${here}`;
  points.forEach((point, at) => {
    path += lineTo(here, point, at === points.length - 1);
    here = point;
  });
  return path;
}

/* Curves ahead; what goes back to the begin of a new row, or only a little aside, has corners. */
function lineTo([x1, y1], [x2, y2], last) {
  if (y1 === y2) return `H${x2}`;
  if (Math.abs(x2 - x1) < CLOSE && (last || x2 !== x1)) return last ? `V${y2}H${x2}` : `H${x2}V${y2}`;
  const middle = (x1 + x2) / 2;
  return `C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
}
