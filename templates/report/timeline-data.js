/* The intervals of a timeline, by lane and ordered by time, so that the visible ones are found quickly. */

const KINDS = ["forward", "backward", "weights", "update", "wait", "all-reduce"];
const LETTERS = ["F", "B", "W", "U", "", "R"];
const [FORWARD, BACKWARD, WEIGHTS, UPDATE, WAIT, ALL_REDUCE] = KINDS.keys();

/* Each lane has two lists: the worker's own intervals, and the all-reduces that run in the background. */
function lanesOf(columns, count) {
  const lanes = Array.from({ length: count }, () => ({ work: [], behind: [] }));
  columns.lane.forEach((lane, at) => {
    const one = {
      kind: columns.kind[at],
      number: columns.number[at],
      from: columns.start_s[at],
      to: columns.end_s[at],
    };
    if (lanes[lane]) (one.kind === ALL_REDUCE ? lanes[lane].behind : lanes[lane].work).push(one);
  });
  for (const lane of lanes) {
    lane.work.sort((a, b) => a.from - b.from);
    lane.behind.sort((a, b) => a.from - b.from);
  }
  return lanes;
}

/* The position of the first interval that ends after `time`. */
function firstAfter(intervals, time) {
  let [low, high] = [0, intervals.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (intervals[middle].to > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* The interval of a lane at a time. Computing takes precedence over waiting. */
function intervalAt(lane, time, behind) {
  const list = behind && lane.behind.length ? lane.behind : lane.work;
  const one = list[firstAfter(list, time)];
  return one && one.from <= time ? one : null;
}

/* The share of workers that compute, for `count` equal parts of the time until `end`. */
function busyShares(lanes, end, count) {
  const shares = new Float64Array(count);
  const step = end / count;
  for (const { work } of lanes) {
    for (const one of work) {
      if (one.kind === WAIT) continue;
      const last = Math.min(count - 1, Math.floor(one.to / step));
      for (let at = Math.max(0, Math.floor(one.from / step)); at <= last; at += 1) {
        shares[at] += Math.max(0, Math.min(one.to, (at + 1) * step) - Math.max(one.from, at * step));
      }
    }
  }
  return Array.from(shares, (sum) => Math.min(1, sum / (step * lanes.length)));
}

/* Seconds of each kind within the window. */
function secondsOf(lane, from, to) {
  const sums = KINDS.map(() => 0);
  for (const list of [lane.work, lane.behind]) {
    for (let at = firstAfter(list, from); at < list.length && list[at].from < to; at += 1) {
      sums[list[at].kind] += Math.min(to, list[at].to) - Math.max(from, list[at].from);
    }
  }
  return sums;
}

function describe(one, lane, source) {
  const what =
    one.kind === WAIT
      ? "waiting"
      : `${KINDS[one.kind]} ${one.kind >= UPDATE ? "of group" : "of minibatch"} ${one.number}`;
  return [
    what,
    `worker ${lane.worker}, ${stageName(lane.stage)}, ${source}`,
    `${showTime(one.to - one.from)}, from ${showTime(one.from)} to ${showTime(one.to)}`,
  ];
}
