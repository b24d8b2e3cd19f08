// Pointer, wheel, keys and buttons; then the start.

let drag = null; // { x, y, moved, pinch } while a pointer is down
const pointers = new Map();
const local = (event, canvas) => {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
};

const surface = $("plot");
surface.addEventListener("wheel", (event) => {
  event.preventDefault();
  const lines = event.deltaMode ? 30 : 1;
  if (event.shiftKey && !event.deltaX) pan(0, event.deltaY * lines);
  else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX * lines);
  else zoom(1.0016 ** (event.deltaY * lines), local(event, surface).x);
}, { passive: false });

surface.addEventListener("pointerdown", (event) => {
  surface.setPointerCapture(event.pointerId);
  const at = local(event, surface);
  pointers.set(event.pointerId, at);
  drag = { ...at, moved: false };
  surface.classList.add("dragging");
});
surface.addEventListener("pointermove", (event) => {
  const at = local(event, surface);
  if (pointers.size === 2 && pointers.has(event.pointerId)) {
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    const before = Math.abs(pointers.get(event.pointerId).x - other.x);
    const now = Math.abs(at.x - other.x);
    if (before > 8 && now > 8) zoom(before / now, (at.x + other.x) / 2);
    if (drag) drag.moved = true;
  } else if (drag && pointers.has(event.pointerId)) {
    if (Math.hypot(at.x - drag.x, at.y - drag.y) > 3 || drag.moved) {
      pan(drag.x - at.x, drag.y - at.y);
      drag = { ...at, moved: true };
    }
  }
  if (pointers.has(event.pointerId)) pointers.set(event.pointerId, at);
  view.pointer = at;
  draw();
  drawTip();
});
for (const kind of ["pointerup", "pointercancel"]) {
  surface.addEventListener(kind, (event) => {
    pointers.delete(event.pointerId);
    surface.classList.remove("dragging");
    const wasClick = drag && !drag.moved && kind === "pointerup";
    if (!pointers.size) drag = null;
    if (!wasClick) return;
    const at = local(event, surface);
    const found = hit(at.x, at.y);
    if (found?.kind === "step") pick(found.step);
    else if (found?.kind === "share") walkTo(Math.min(lowerBound(steps.begin, found.t), steps.count - 1));
    else if (found?.kind === "gap") pick(found.next);
    else if (found?.stream && found.kind !== "refused") {
      view.step = -1;
      view.stream = found.stream.index;
      panel();
      draw();
    } else deselect();
  });
}
surface.addEventListener("pointerleave", () => { view.pointer = null; draw(); drawTip(); });
surface.addEventListener("dblclick", (event) => zoom(0.35, local(event, surface).x));

const strip = $("overview");
let isSliding = false;
function slide(event) {
  const t = (local(event, strip).x / overview.width) * SPAN * 1.04 - SPAN * 0.02;
  const half = (view.to - view.from) / 2;
  view.from = t - half;
  view.to = t + half;
  clampView();
  draw();
}
strip.addEventListener("pointerdown", (event) => {
  isSliding = true;
  strip.setPointerCapture(event.pointerId);
  slide(event);
});
strip.addEventListener("pointermove", (event) => {
  if (isSliding) slide(event);
});
for (const kind of ["pointerup", "pointercancel"]) {
  strip.addEventListener(kind, () => {
    isSliding = false;
  });
}
strip.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(1.0016 ** event.deltaY);
}, { passive: false });

const KEYS = {
  ArrowLeft: () => pan(-plot.width / 8),
  ArrowRight: () => pan(plot.width / 8),
  ArrowUp: () => pan(0, -rowHeight() / 2),
  ArrowDown: () => pan(0, rowHeight() / 2),
  PageUp: () => pan(0, -(plot.height - TOP)),
  PageDown: () => pan(0, plot.height - TOP),
  "+": () => zoom(0.7, view.pointer?.x),
  "=": () => zoom(0.7, view.pointer?.x),
  "-": () => zoom(1 / 0.7, view.pointer?.x),
  0: fit,
  Home: fit,
  ".": () => walkTo(view.step < 0 ? lowerBound(steps.begin, view.from) : view.step + 1),
  ",": () => walkTo(view.step < 0 ? lowerBound(steps.begin, view.to) - 1 : view.step - 1),
  m: () => nextMiss(1),
  M: () => nextMiss(-1),
  v: () => shows(view.shows === "lead" ? "position" : "lead"),
  r: () => packs(!view.isPacked),
  Escape: deselect,
};
window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

function shows(what) {
  view.scroll *= what === view.shows ? 1 : what === "lead" ? 86 / 132 : 132 / 86;
  view.shows = what;
  $("as-lead").setAttribute("aria-pressed", what === "lead");
  $("as-position").setAttribute("aria-pressed", what === "position");
  panel();
  clampView();
  draw();
}
function packs(isPacked) {
  view.isPacked = isPacked;
  $("as-rows").setAttribute("aria-pressed", !isPacked);
  $("as-lanes").setAttribute("aria-pressed", isPacked);
  view.scroll = 0;
  layOut();
  clampView();
  draw();
}
$("in").onclick = () => zoom(0.6);
$("out").onclick = () => zoom(1 / 0.6);
$("fit").onclick = fit;
$("as-lead").onclick = () => shows("lead");
$("as-position").onclick = () => shows("position");
$("as-rows").onclick = () => packs(false);
$("as-lanes").onclick = () => packs(true);
$("missed").onclick = () => nextMiss(1);
$("missed").hidden = !misses.length;

// ---- the start -------------------------------------------------------------------------------------------------------

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  overviewPicture = null;
  draw();
});
readColours();
head();
plot.measure();
overview.measure();
shows("lead");
packs(view.isPacked);
fit();
panel();
const linked = /^#step=(\d+)$/.exec(location.hash);
if (linked) walkTo(Number(linked[1]));
