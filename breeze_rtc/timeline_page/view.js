// What is in sight: the part of the run, how the streams are laid out, and the canvases it is drawn on.

const AXIS = 24;
const MACHINE = 74;
const TOP = AXIS + MACHINE;
const view = {
  from: 0,
  to: SPAN,
  scroll: 0,
  shows: "lead",
  isPacked: spoken.length > 32,
  step: -1, // selected
  stream: -1, // selected
  pointer: null, // {x, y} in the plot
};
let lanes = []; // of each stream, its row
let laneCount = 0;

function layOut() {
  lanes = new Array(streams.length).fill(-1);
  if (!view.isPacked) {
    spoken.forEach((stream, i) => { lanes[stream.index] = i; });
    laneCount = spoken.length;
    return;
  }
  const free = []; // when each lane is free again
  for (const stream of [...spoken].sort((a, b) => a.begin - b.begin || a.index - b.index)) {
    let lane = free.findIndex((until) => until < stream.begin);
    if (lane < 0) lane = free.length;
    free[lane] = stream.end + SPAN / 500;
    lanes[stream.index] = lane;
  }
  laneCount = free.length;
}

const rowHeight = () => (view.shows === "lead" ? 86 : 132);

/** A canvas in CSS pixels, sharp on every screen. */
class Sheet {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = this.height = 0;
    new ResizeObserver(() => {
      this.measure();
      draw();
    }).observe(canvas);
  }
  measure() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.isNew = true;
  }
}

let colour = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "panel", "line", "faint", "ink", "ink-2", "ink-3", "accent", "lead", "pending", "fault"];
  names.push("fault-soft", ...STAGES);
  colour = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  colour.stage = STAGES.map((stage) => colour[stage]);
  colour.sans = style.getPropertyValue("--sans");
}

const plot = new Sheet($("plot"));
const overview = new Sheet($("overview"));
const xOf = (t) => ((t - view.from) / (view.to - view.from)) * plot.width;
const tOf = (x) => view.from + (x / plot.width) * (view.to - view.from);

let isDue = false;
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (!plot.width) return;
    drawPlot();
    drawOverview();
  });
}

function clampView() {
  const span = Math.min(Math.max(view.to - view.from, 200), SPAN * 1.04);
  const low = -SPAN * 0.02;
  const high = SPAN * 1.02;
  view.from = Math.min(Math.max(view.from, low), high - span);
  view.to = view.from + span;
  const most = Math.max(0, laneCount * rowHeight() + 12 - (plot.height - TOP));
  view.scroll = Math.min(Math.max(view.scroll, 0), most);
}

function zoom(factor, x = plot.width / 2) {
  const t = tOf(x);
  // Zoomed out as far as it goes, the run must not slide to the side.
  const most = SPAN * 1.04;
  const span = Math.min(Math.max((view.to - view.from) * factor, 200), most);
  view.from = span === most ? -SPAN * 0.02 : t - ((t - view.from) / (view.to - view.from)) * span;
  view.to = view.from + span;
  clampView();
  draw();
}

function pan(dx, dy = 0) {
  const dt = (dx / plot.width) * (view.to - view.from);
  view.from += dt;
  view.to += dt;
  view.scroll += dy;
  clampView();
  draw();
}

function fit() {
  view.from = -SPAN * 0.02;
  view.to = SPAN * 1.02;
  view.scroll = 0;
  clampView();
  draw();
}

/** Bring [from, to] and a stream into sight. */
function show(from, to, stream = null) {
  const margin = (to - from) * 0.08;
  view.from = from - margin;
  view.to = to + margin;
  if (stream) view.scroll = lanes[stream.index] * rowHeight() - Math.max(0, (plot.height - TOP - rowHeight()) / 2);
  clampView();
  draw();
}
