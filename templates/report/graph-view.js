/* Pan and zoom of the model, by wheel, drag, pinch, buttons and keys. */

class GraphView {
  /* `card` has w and h of every card; `size` is what the whole model takes. */
  constructor(picture, card) {
    Object.assign(this, { picture, card, size: { width: 1, height: 1 }, scale: 1, x: 0, y: 0, fitted: true });
    this.moved = () => {};
  }

  frame() {
    return { width: this.picture.clientWidth || 800, height: this.picture.clientHeight || 480 };
  }

  fit() {
    const { width, height } = this.frame();
    this.scale = Math.min(1, (width - 64) / this.size.width, (height - 36) / this.size.height);
    this.x = (width - this.size.width * this.scale) / 2;
    this.y = (height - this.size.height * this.scale) / 2;
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

  /* Some of the model always stays in the frame. */
  pan(dx, dy) {
    const { width, height } = this.frame();
    const [wide, tall] = [this.size.width * this.scale, this.size.height * this.scale];
    this.x = Math.min(width - 40, Math.max(40 - wide, this.x + dx));
    this.y = Math.min(height - 40, Math.max(40 - tall, this.y + dy));
    this.apply();
  }

  /* Bring a card into the frame, large enough to read. */
  reveal(card, readable) {
    const { width, height } = this.frame();
    if (readable) this.scale = Math.max(this.scale, 0.8);
    const [left, top] = [this.x + card.x * this.scale, this.y + card.y * this.scale];
    const [wide, tall] = [this.card.w * this.scale, this.card.h * this.scale];
    const inside = left > 0 && top > 0 && left + wide < width && top + tall < height;
    if (!inside || readable) {
      this.x = width / 2 - (card.x + this.card.w / 2) * this.scale;
      this.y = height / 2 - (card.y + this.card.h / 2) * this.scale;
    }
    this.apply();
  }

  apply() {
    this.fitted = false;
    const layer = this.picture.querySelector(".world");
    layer.setAttribute("transform", `translate(${this.x.toFixed(2)},${this.y.toFixed(2)}) scale(${this.scale.toFixed(5)})`);
    this.picture.classList.toggle("far", this.scale < 0.5);
    this.picture.dataset.scale = this.scale.toFixed(4);
    this.moved();
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
      view.zoom(Math.exp(-Math.max(-200, Math.min(200, event.deltaY)) / 400), ...offset(event));
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
