/* A drawing of lanes over time, predicted or measured. The canvas stays in place while the lanes scroll. */

const GUTTER = { wide: 132, narrow: 58 };

class Panel {
  constructor(source, lanes, facts, view) {
    Object.assign(this, { source, lanes, facts, view });
    this.row = lanes.length <= 16 ? 24 : lanes.length <= 40 ? 17 : 13;
    this.cursor = null;
    this.canvas = el("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "timeline",
      "aria-label": `Timeline, ${source}: ${plural(lanes.length, "worker")} over ${showTime(view.end)}`,
      "aria-describedby": "timeline-help",
      "data-source": source,
    });
    this.spacer = el("div", { class: "spacer", style: { height: lanes.length * this.row + 2 + "px" } }, this.canvas);
    this.scroller = el("div", { class: "lanes" }, this.spacer);
    this.scroller.addEventListener("scroll", () => view.redraw());
    this.element = el(
      "div",
      { class: "panel" },
      el("h3", {}, source === "measured" ? "Measured" : "Predicted"),
      this.scroller,
    );
    view.listen(() => this.draw());
  }

  measure() {
    this.width = this.scroller.clientWidth;
    this.height = Math.min(this.lanes.length * this.row + 2, this.scroller.clientHeight);
    this.gutter = this.width < 560 ? GUTTER.narrow : GUTTER.wide;
    const scale = devicePixelRatio || 1;
    const [wide, tall] = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (this.canvas.width !== wide || this.canvas.height !== tall) {
      this.canvas.width = wide;
      this.canvas.height = tall;
      this.canvas.style.width = this.width + "px";
      this.canvas.style.height = this.height + "px";
    }
  }

  xOf(time) {
    return this.gutter + ((time - this.view.from) / (this.view.to - this.view.from)) * (this.width - this.gutter);
  }

  timeAt(x) {
    return this.view.from + ((x - this.gutter) / (this.width - this.gutter)) * (this.view.to - this.view.from);
  }

  /* The lane, and its interval or null, at a point of the canvas. */
  at(x, y) {
    const lane = Math.floor((y + this.scroller.scrollTop) / this.row);
    if (x < this.gutter || !this.lanes[lane]) return null;
    const low = (y + this.scroller.scrollTop) % this.row > this.row * 0.72;
    const interval =
      (low && intervalAt(this.lanes[lane], this.timeAt(x), true)) || intervalAt(this.lanes[lane], this.timeAt(x));
    return interval && { lane, interval };
  }

  draw() {
    this.measure();
    if (!this.width) return;
    const scale = devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const top = this.scroller.scrollTop;
    const first = Math.floor(top / this.row);
    const last = Math.min(this.lanes.length - 1, Math.floor((top + this.height) / this.row));
    for (let lane = first; lane <= last; lane += 1) this.drawLane(context, lane, lane * this.row - top);
    this.canvas.dataset.from = this.view.from;
    this.canvas.dataset.to = this.view.to;
  }

  drawLane(context, number, y) {
    const lane = this.facts.lanes[number];
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.width - this.gutter, this.height);
    context.clip();
    this.drawList(context, this.lanes[number].work, lane.stage, y + 1);
    this.drawList(context, this.lanes[number].behind, lane.stage, y + 1);
    context.restore();
    this.drawLabel(context, lane, number, y);
  }

  drawLabel(context, lane, number, y) {
    const [before, size] = [this.facts.lanes[number - 1], Math.min(12, this.row - 2)];
    if (before && before.server !== lane.server) {
      context.fillStyle = token("line");
      context.fillRect(0, Math.round(y), this.width, 1);
    }
    const middle = y + this.row / 2;
    context.fillStyle = stageColour(lane.stage);
    context.strokeStyle = stageEdge(lane.stage);
    context.fillRect(0.5, y + 1.5, 21, this.row - 3);
    context.strokeRect(0.5, y + 1.5, 21, this.row - 3);
    context.font = `600 ${size}px ${token("font")}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.fillStyle = inkOn(stageColour(lane.stage));
    context.fillText(String(lane.stage + 1), 11, middle + 0.5);
    context.textAlign = "left";
    context.font = `${size}px ${token("font")}`;
    context.fillStyle = token(this.cursor && this.cursor.lane === number ? "accent" : "ink");
    context.fillText(this.gutter === GUTTER.narrow ? "w" + lane.worker : `worker ${lane.worker}`, 28, middle + 0.5);
  }

  /* Intervals narrower than a pixel are drawn one pixel wide, and at most one of each kind per pixel. */
  drawList(context, intervals, stage, y) {
    const drawn = [-1, -1, -1, -1, -1];
    const height = this.row - 2;
    for (let at = firstAfter(intervals, this.view.from); at < intervals.length; at += 1) {
      const one = intervals[at];
      if (one.from >= this.view.to) break;
      const left = Math.max(this.gutter - 2, this.xOf(one.from));
      const right = Math.min(this.width + 2, this.xOf(one.to));
      if (right - left < 1 && Math.floor(left) === drawn[one.kind]) continue;
      drawn[one.kind] = Math.floor(left);
      const faded = this.faded(one);
      context.globalAlpha = faded ? 0.28 : 1;
      drawInterval(context, one.kind, stage, left, y, Math.max(1, right - left), height);
      if (!faded) this.drawNumber(context, one, stage, left, right, y);
    }
    context.globalAlpha = 1;
  }

  /* If a minibatch is chosen, all others are dimmed. */
  faded(one) {
    const chosen = this.view.chosen;
    if (chosen === null || one.kind === WAIT) return false;
    return one.kind > WEIGHTS || one.number !== chosen;
  }

  drawNumber(context, one, stage, left, right, y) {
    if (one.kind === WAIT || one.kind === ALL_REDUCE || right - left < 16 || this.row < 16) return;
    const text = LETTERS[one.kind] + one.number;
    context.font = `600 ${this.row > 20 ? 11 : 10}px ${token("font")}`;
    const wide = context.measureText(text).width;
    if (wide + 5 > right - left) return;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const x = (left + right) / 2;
    if (one.kind === BACKWARD) {
      context.fillStyle = stageDeep(stage);
      context.fillRect(x - wide / 2 - 2, y + 3, wide + 4, this.row - 8);
    }
    context.fillStyle = textureInk(one.kind, stage);
    context.fillText(text, x, y + (this.row - 2) / 2 + 0.5);
  }
}
