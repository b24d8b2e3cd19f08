/**
 * The last 30 seconds as small plots, one quantity each, drawn on canvas in device pixels.
 *
 * Every plot has its own name, unit and value beside it in the document, so no colour is needed to tell them apart.
 */

const SPAN_MS = 30_000;
const STEPS = [1, 2, 5, 10];
const FRAME_MS = 100; // a plot moves about ten pixels a second: drawing more often only warms the machine

/** The smallest of 1, 2, 5, 10, 20, 50 ... that is not below `value`. */
export function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * STEPS.find((step) => power * step >= value);
}

/** Points of one quantity over the last 30 s; null breaks the line. */
class Trace {
  points = [];

  push(atMs, value) {
    this.points.push({ atMs, value });
    // One point before the left edge is kept, so that the line enters from outside.
    while (this.points.length > 1 && this.points[1].atMs < atMs - SPAN_MS) this.points.shift();
  }
}

/** A canvas that is sharp on every screen: one unit is one CSS pixel, one dot one device pixel. */
class Sheet {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.#resize();
  }

  #resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.width = width;
    this.height = height;
  }

  /** A colour of the style sheet, so that plots follow light and dark. */
  colour(name) {
    return getComputedStyle(this.canvas).getPropertyValue(name).trim();
  }
}

export class Plots {
  #sheets;
  #traces;
  #gaps = []; // times at which the gap counter grew
  #gapCount = 0;
  #bands = []; // { fromMs, toMs } while the agent spoke; toMs null: still speaking
  #timer = 0;
  #isCalm;

  /**
   * @param {{lead: HTMLCanvasElement, slack: HTMLCanvasElement, jitter: HTMLCanvasElement, gaps: HTMLCanvasElement}} canvases
   * @param {() => boolean} isCalm true when the user asked for less motion: then plots move with the data, not in between
   */
  constructor(canvases, isCalm) {
    this.#sheets = Object.fromEntries(Object.entries(canvases).map(([name, canvas]) => [name, new Sheet(canvas)]));
    this.#traces = { lead: new Trace(), slack: new Trace(), jitter: new Trace() };
    this.#isCalm = isCalm;
  }

  start() {
    for (const name of Object.keys(this.#traces)) this.#traces[name] = new Trace();
    this.#gaps = [];
    this.#gapCount = 0;
    this.#bands = [];
    clearInterval(this.#timer);
    // A hidden page gets no frame, so nothing is drawn there.
    this.#timer = setInterval(() => this.#isCalm() || requestAnimationFrame(() => this.draw()), FRAME_MS);
    this.draw();
  }

  stop() {
    clearInterval(this.#timer);
  }

  /** Values in ms, null where there is none; `gaps` counts from the start of the call. */
  push({ lead, slack, jitter, gaps }) {
    const nowMs = performance.now();
    this.#traces.lead.push(nowMs, lead);
    this.#traces.slack.push(nowMs, slack);
    this.#traces.jitter.push(nowMs, jitter);
    if (gaps > this.#gapCount) this.#gaps.push(nowMs);
    this.#gapCount = gaps;
    this.#gaps = this.#gaps.filter((atMs) => atMs > nowMs - SPAN_MS);
    if (this.#isCalm()) this.draw();
  }

  /** The agent's voice is behind the plots as a band. */
  setSpeaking(isSpeaking) {
    const nowMs = performance.now();
    const last = this.#bands.at(-1);
    const isOpen = last !== undefined && last.toMs === null;
    if (isSpeaking && !isOpen) this.#bands.push({ fromMs: nowMs, toMs: null });
    if (!isSpeaking && isOpen) last.toMs = nowMs;
    this.#bands = this.#bands.filter(({ toMs }) => toMs === null || toMs > nowMs - SPAN_MS);
  }

  draw() {
    const nowMs = performance.now();
    for (const [name, trace] of Object.entries(this.#traces)) this.#drawTrace(this.#sheets[name], trace, name, nowMs);
    this.#drawGaps(this.#sheets.gaps, nowMs);
  }

  #clear(sheet, nowMs) {
    const { context, width, height } = sheet;
    context.clearRect(0, 0, width, height);
    context.fillStyle = sheet.colour("--band");
    for (const { fromMs, toMs } of this.#bands) {
      const left = Math.max(xOf(fromMs, nowMs, width), 0);
      const right = toMs === null ? width : xOf(toMs, nowMs, width);
      context.fillRect(left, 0, Math.max(right - left, 0), height);
    }
  }

  #drawTrace(sheet, { points }, name, nowMs) {
    const { context, width, height } = sheet;
    this.#clear(sheet, nowMs);
    const values = points.map(({ value }) => value).filter((value) => value !== null);
    const top = niceCeiling(Math.max(50, ...values));
    const lowest = Math.min(0, ...values);
    const bottom = lowest < 0 ? -niceCeiling(-lowest) : 0;
    const yOf = (value) => 3 + ((height - 6) * (top - value)) / (top - bottom);

    context.strokeStyle = sheet.colour("--line");
    context.lineWidth = 1;
    for (const value of bottom < 0 ? [top, 0, bottom] : [top, 0]) {
      const y = Math.round(yOf(value)) + 0.5;
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width, y);
      context.stroke();
    }
    context.strokeStyle = sheet.colour(`--plot-${name}`);
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    let isDown = false;
    for (const { atMs, value } of points) {
      if (value === null) {
        isDown = false;
        continue;
      }
      const x = xOf(atMs, nowMs, width);
      if (isDown) context.lineTo(x, yOf(value));
      else context.moveTo(x, yOf(value));
      isDown = true;
    }
    context.stroke();

    context.fillStyle = sheet.colour("--ink-2");
    context.font = `11px ${getComputedStyle(sheet.canvas).fontFamily}`;
    context.textBaseline = "top";
    // A halo keeps the words readable where a line runs through them.
    context.strokeStyle = sheet.colour("--panel");
    context.lineWidth = 3;
    const write = (text, y) => {
      context.strokeText(text, 2, y);
      context.fillText(text, 2, y);
    };
    write(`${top} ms`, yOf(top) + 3);
    if (bottom < 0) {
      context.textBaseline = "bottom";
      write(`${bottom} ms`.replace("-", "−"), yOf(bottom) - 1);
    }
  }

  #drawGaps(sheet, nowMs) {
    const { context, width, height } = sheet;
    this.#clear(sheet, nowMs);
    context.strokeStyle = sheet.colour("--line");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(0, Math.round(height / 2) + 0.5);
    context.lineTo(width, Math.round(height / 2) + 0.5);
    context.stroke();
    context.fillStyle = sheet.colour("--plot-gaps");
    for (const atMs of this.#gaps) context.fillRect(xOf(atMs, nowMs, width) - 1.5, 2, 3, height - 4);
  }
}

function xOf(atMs, nowMs, width) {
  return width * (1 - (nowMs - atMs) / SPAN_MS);
}
