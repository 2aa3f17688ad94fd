/* The window of time that all parts of the timeline share, so that they zoom together. */

class TimeView {
  constructor(end, shortest) {
    this.end = end;
    this.shortest = Math.min(end, shortest);
    this.from = 0;
    this.to = end;
    /* The highlighted minibatch, counted from 0, or null. */
    this.chosen = null;
    this.listeners = [];
    this.waiting = false;
  }

  listen(draw) {
    this.listeners.push(draw);
  }

  /* Draws once per frame, however often the window changes. */
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.listeners.forEach((draw) => draw());
    });
  }

  show(from, to) {
    const length = Math.min(this.end, Math.max(this.shortest, to - from));
    const start = Math.min(Math.max(0, from + (to - from - length) / 2), this.end - length);
    this.from = start;
    this.to = start + length;
    this.redraw();
  }

  /* Zooms so that the time `around` keeps its position. A factor below 1 shows less. */
  zoom(factor, around = (this.from + this.to) / 2) {
    const length = Math.min(this.end, Math.max(this.shortest, (this.to - this.from) * factor));
    const share = (around - this.from) / (this.to - this.from);
    this.show(around - share * length, around + (1 - share) * length);
  }

  pan(seconds) {
    const moved = Math.min(Math.max(seconds, -this.from), this.end - this.to);
    this.show(this.from + moved, this.to + moved);
  }

  reset() {
    this.show(0, this.end);
  }
}
