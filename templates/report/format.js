/* Formats quantities for reading, in the same way as the terminal output. */

function digits(value, count = 3) {
  if (!Number.isFinite(value)) return "–";
  const text = value.toPrecision(count);
  return text.includes("e") ? String(Math.round(value)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function showTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0";
  const size = Math.abs(seconds);
  if (size < 1e-3) return digits(seconds * 1e6) + " µs";
  if (size < 10) return (size < 0.1 ? digits(seconds * 1e3) : String(Math.round(seconds * 1e3))) + " ms";
  return digits(seconds) + " s";
}

function showSize(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  if (bytes === 0) return "0";
  for (const [unit, factor] of [
    ["TiB", 2 ** 40],
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ]) {
    if (Math.abs(bytes) >= factor) return digits(bytes / factor) + " " + unit;
  }
  return Math.round(bytes) + " B";
}

function showRate(bytesPerSecond) {
  const bits = bytesPerSecond * 8;
  for (const [unit, factor] of [
    ["Tbit/s", 1e12],
    ["Gbit/s", 1e9],
    ["Mbit/s", 1e6],
    ["Kbit/s", 1e3],
  ]) {
    if (bits >= factor) return digits(bits / factor) + " " + unit;
  }
  return Math.round(bits) + " bit/s";
}

function showShare(share) {
  if (share === null || share === undefined) return "–";
  const percent = share * 100;
  if (percent > 0 && percent < 0.1) return "<0.1%";
  return (percent > 0 && percent < 10 ? digits(percent, 2) : String(Math.round(percent))) + "%";
}

function showGain(gain) {
  return gain === null || gain === undefined ? "–" : gain.toFixed(2) + "×";
}

function showCount(number) {
  return Number(number).toLocaleString("en");
}

function plural(count, word) {
  return showCount(count) + " " + word + (count === 1 ? "" : "s");
}

/* About `count` multiples of 1, 2 or 5 times a power of ten between the two values. */
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count);
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
  const found = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/* The label of a tick. All ticks of an axis have the unit of the largest one, and enough digits to differ. */
function timeLabels(values, step) {
  const largest = Math.max(...values.map(Math.abs), step);
  const [unit, factor] = largest >= 10 ? ["s", 1] : largest >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
  const places = Math.max(0, Math.min(6, -Math.floor(Math.log10(step * factor) + 1e-9)));
  return values.map((value) => (value * factor).toFixed(places) + " " + unit);
}

/* Turns columns of equal length into rows. */
function rowsOf(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, at) => Object.fromEntries(names.map((name) => [name, columns[name][at]])));
}
