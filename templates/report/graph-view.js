/* Pan and zoom of the model, by wheel, drag, pinch, buttons and keys. */

class GraphView {
  /* `graph` has the width and height of the model, and w and h, the size of every card. */
  constructor(picture, graph) {
    Object.assign(this, { picture, graph, scale: 1, x: 0, y: 0, fitted: true });
  }

  frame() {
    return { width: this.picture.clientWidth || 800, height: this.picture.clientHeight || 480 };
  }

  /* The view of the whole model, with room for the lines beside it. Cards are not enlarged beyond their own size. */
  fitting(width, height) {
    return Math.min(1, (width - 64) / this.graph.width, (height - 36) / this.graph.height);
  }

  /* The height of a frame that has the picture's width and shows the whole model, at most `most`. */
  wantedHeight(most) {
    return Math.min(most, Math.max(140, Math.ceil(this.graph.height * this.fitting(this.frame().width, most)) + 36));
  }

  fit() {
    const { width, height } = this.frame();
    this.scale = this.fitting(width, height);
    this.x = (width - this.graph.width * this.scale) / 2;
    this.y = (height - this.graph.height * this.scale) / 2;
    this.apply();
    this.fitted = true;
  }

  zoom(factor, x = this.frame().width / 2, y = this.frame().height / 2) {
    const scale = Math.min(3, Math.max(0.02, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.apply();
  }

  /* A part of the model always stays in the frame. */
  pan(dx, dy) {
    const { width, height } = this.frame();
    const [wide, tall] = [this.graph.width * this.scale, this.graph.height * this.scale];
    this.x = Math.min(width - 40, Math.max(40 - wide, this.x + dx));
    this.y = Math.min(height - 40, Math.max(40 - tall, this.y + dy));
    this.apply();
  }

  /* Brings a layer into the frame, large enough to read. */
  reveal(x, y, readable) {
    const { width, height } = this.frame();
    const { w, h } = this.graph;
    if (readable) this.scale = Math.max(this.scale, 0.8);
    const [left, top] = [this.x + x * this.scale, this.y + y * this.scale];
    const inside = left > 0 && top > 0 && left + w * this.scale < width && top + h * this.scale < height;
    if (!inside || readable) {
      this.x = width / 2 - (x + w / 2) * this.scale;
      this.y = height / 2 - (y + h / 2) * this.scale;
    }
    this.apply();
  }

  apply() {
    this.fitted = false;
    const layer = this.picture.querySelector(".world");
    layer.setAttribute(
      "transform",
      `translate(${this.x.toFixed(2)},${this.y.toFixed(2)}) scale(${this.scale.toFixed(5)})`,
    );
    this.picture.classList.toggle("far", this.scale < 0.5);
    this.picture.dataset.scale = this.scale.toFixed(4);
  }
}

function graphInput(view, picture) {
  const offset = (event) => {
    const box = picture.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  picture.addEventListener(
    "wheel",
    (event) => {
      if (!picture.contains(document.activeElement) && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      view.zoom(Math.exp(-Math.max(-200, Math.min(200, turn(event, "deltaY"))) / 400), ...offset(event));
    },
    { passive: false },
  );
  const pointers = new Map();
  picture.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, offset(event));
  });
  picture.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const here = offset(event);
    if (Math.hypot(here[0] - before[0], here[1] - before[1]) > 3) picture.setPointerCapture(event.pointerId);
    const other = [...pointers].find(([id]) => id !== event.pointerId);
    if (other) {
      const far = (point) => Math.hypot(point[0] - other[1][0], point[1] - other[1][1]);
      if (far(before) > 4) view.zoom(far(here) / far(before), (here[0] + other[1][0]) / 2, (here[1] + other[1][1]) / 2);
    } else view.pan(here[0] - before[0], here[1] - before[1]);
    pointers.set(event.pointerId, here);
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    picture.addEventListener(end, (event) => pointers.delete(event.pointerId));
  }
}
