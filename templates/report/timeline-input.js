/* Handles wheel, drag, pinch and keys on a panel. Until the panel has the focus, the wheel alone scrolls the page. */

/* The distance of a wheel event in pixels. Some browsers report lines. */
function turn(event, way) {
  return event[way] * (event.deltaMode === 1 ? 33 : 1);
}

function panelInput(panel, panels, say) {
  const { canvas, view } = panel;
  const offset = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      const turned = sideways ? turn(event, "deltaX") || turn(event, "deltaY") : turn(event, "deltaY");
      if (sideways) view.pan((turned / panel.width) * (view.to - view.from));
      else view.zoom(Math.exp(Math.max(-200, Math.min(200, turned)) / 400), panel.timeAt(offset(event)[0]));
    },
    { passive: false },
  );
  pointerInput(panel, offset);
  canvas.addEventListener("keydown", (event) => {
    const act = keyActions(panel, say)[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  panel.scroller.addEventListener("scroll", () => {
    for (const other of panels) {
      if (other.scroller.scrollTop !== panel.scroller.scrollTop) other.scroller.scrollTop = panel.scroller.scrollTop;
    }
  });
}

function pointerInput(panel, offset) {
  const { canvas, view } = panel;
  const pointers = new Map();
  let travelled = 0;
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, offset(event));
    travelled = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const here = offset(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      hover(panel, event, here);
      return;
    }
    hideTooltip();
    travelled += Math.abs(here[0] - before[0]);
    const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    if (others.length === 1) {
      const [was, is] = [Math.abs(before[0] - others[0][0]), Math.abs(here[0] - others[0][0])];
      if (was > 4 && is > 4) view.zoom(was / is, panel.timeAt((here[0] + others[0][0]) / 2));
    } else view.pan(((before[0] - here[0]) / (panel.width - panel.gutter)) * (view.to - view.from));
    pointers.set(event.pointerId, here);
  });
  const release = (event) => {
    if (!pointers.delete(event.pointerId) || event.type === "pointercancel" || travelled > 3) return;
    const found = panel.at(...offset(event));
    const chosen = found && found.interval.kind <= WEIGHTS ? found.interval.number : null;
    view.chosen = chosen === view.chosen ? null : chosen;
    view.redraw();
    if (event.pointerType === "touch") hover(panel, event, offset(event));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", hideTooltip);
}

function hover(panel, event, [x, y]) {
  const found = panel.at(x, y);
  if (found) showTooltip(event, describe(found.interval, panel.facts.lanes[found.lane], panel.source));
  else hideTooltip();
}

function keyActions(panel, say) {
  const { view } = panel;
  const step = (view.to - view.from) / 8;
  const tell = (act) => () => {
    act();
    say(`From ${showTime(view.from)} to ${showTime(view.to)}`);
  };
  return {
    ArrowLeft: tell(() => view.pan(-step)),
    ArrowRight: tell(() => view.pan(step)),
    "+": tell(() => view.zoom(0.7)),
    "=": tell(() => view.zoom(0.7)),
    "-": tell(() => view.zoom(1 / 0.7)),
    0: tell(() => view.reset()),
    Home: tell(() => view.show(0, view.to - view.from)),
    End: tell(() => view.show(view.end - (view.to - view.from), view.end)),
    ArrowUp: () => moveCursor(panel, -1, 0, say),
    ArrowDown: () => moveCursor(panel, 1, 0, say),
    ",": () => moveCursor(panel, 0, -1, say),
    ".": () => moveCursor(panel, 0, 1, say),
    Escape: () => chooseNone(panel),
  };
}

function chooseNone(panel) {
  panel.cursor = null;
  panel.view.chosen = null;
  panel.view.redraw();
}

/* Moves from interval to interval by keys, and highlights the minibatch under the cursor. */
function moveCursor(panel, lanes, steps, say) {
  const { view } = panel;
  const cursor = panel.cursor || { lane: 0, time: (view.from + view.to) / 2 };
  const lane = Math.min(panel.lanes.length - 1, Math.max(0, panel.cursor ? cursor.lane + lanes : 0));
  const { work } = panel.lanes[lane];
  if (!work.length) return;
  const at = Math.min(work.length - 1, Math.max(0, Math.min(work.length - 1, firstAfter(work, cursor.time)) + steps));
  const one = work[at];
  panel.cursor = { lane, time: (one.from + one.to) / 2 };
  view.chosen = one.kind <= WEIGHTS ? one.number : null;
  if (panel.cursor.time < view.from || panel.cursor.time > view.to) {
    const half = (view.to - view.from) / 2;
    view.show(panel.cursor.time - half, panel.cursor.time + half);
  }
  const top = lane * panel.row;
  const { scrollTop, clientHeight } = panel.scroller;
  if (top < scrollTop || top + panel.row > scrollTop + clientHeight) panel.scroller.scrollTop = top - clientHeight / 2;
  view.redraw();
  say(describe(one, panel.facts.lanes[lane], panel.source).join(", "));
}
