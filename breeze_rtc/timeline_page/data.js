// The data of the page in typed arrays, and its quantities in words.
//
// Everything is derived from the trace by replaying it through the scheduler itself; this page only draws.  All times
// are in microseconds since the first input.  The scripts of the page are joined to one in the order data, view,
// drawing, panel, hands: they see each other's names.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const STAGES = data.stages;

/** Column of differences to column of values. */
function summed(deltas) {
  const values = new Float64Array(deltas.length);
  let value = 0;
  for (let i = 0; i < deltas.length; i++) values[i] = value += deltas[i];
  return values;
}

/** Index of the first element that is not below `value`. */
function lowerBound(sorted, value, from = 0) {
  let low = from;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

const steps = {
  count: data.steps.begin.length,
  begin: summed(data.steps.begin),
  took: Float64Array.from(data.steps.took),
  total: Float64Array.from(data.steps.total),
  predicted: Float64Array.from(data.steps.predicted),
  idle: Float64Array.from(data.steps.idle),
  wokenBy: data.steps.woken_by,
  overslept: Float64Array.from(data.steps.overslept),
  stage: Uint8Array.from(data.steps.stage),
  bucket: Uint16Array.from(data.steps.bucket),
  why: data.steps.why,
  slack: data.steps.slack,
  firstSound: data.steps.first_sound,
  firstRow: new Uint32Array(data.steps.rows.length + 1),
};
data.steps.rows.forEach((rows, i) => { steps.firstRow[i + 1] = steps.firstRow[i] + rows; });
const rows = { stream: Uint32Array.from(data.rows.stream), start: data.rows.start, count: data.rows.count };
/** Time overslept from which it is worth showing: a listener could hear it. */
const OVERSLEPT = 5000;
/** When the step was over for the machine; a step that never came back is drawn to the end of the trace. */
const ranUntil = (i) => (steps.total[i] ? steps.begin[i] + steps.took[i] : data.span);

const streams = data.streams.map((raw, index) => {
  const at = summed(raw.positions.at);
  const stream = {
    ...raw,
    index,
    frames: summed(raw.frames),
    at,
    delivered: summed(raw.positions.delivered),
    heard: summed(raw.positions.heard),
    dry: summed(raw.positions.dry),
    isHeld: raw.positions.is_held,
    isReported: raw.positions.is_reported,
    steps: [],
    begin: Math.min(raw.opened, raw.texts.length ? raw.texts[0][0] : Infinity),
    end: raw.ended ?? data.span,
    samples: raw.sounds.reduce((sum, sound) => sum + sound[1], 0),
    missed: raw.sounds.filter((sound) => sound[2] > 0).length,
  };
  const last = at.length - 1;
  // What has been made is still heard after the scheduler has let go of the stream.
  if (stream.ending === "finished" && last >= 0 && !stream.isHeld[last]) {
    stream.end = Math.max(stream.end, at[last] + micros(stream.delivered[last] - stream.heard[last]));
  }
  return stream;
});
for (let i = 0; i < steps.count; i++) {
  for (let r = steps.firstRow[i]; r < steps.firstRow[i + 1]; r++) streams[rows.stream[r]].steps.push(i);
}
for (const stream of streams) {
  stream.steps = Uint32Array.from(stream.steps);
  stream.stepBegins = Float64Array.from(stream.steps, (i) => steps.begin[i]);
}
const spoken = streams.filter((stream) => !stream.refused);
const refused = streams.filter((stream) => stream.refused);
const misses = spoken
  .flatMap((stream) => stream.sounds.filter((sound) => sound[2] > 0).map(([at, , late]) => ({ stream, at, late })))
  .sort((a, b) => a.at - b.at);
const SPAN = Math.max(1e5, data.span, ...spoken.map((stream) => stream.end));

function micros(samples) {
  return (samples * 1e6) / data.sample_rate;
}

/** Where the listener of a stream is at `t`; null before the first sound. */
function positionAt(stream, t) {
  const k = lowerBound(stream.at, t + 0.5) - 1;
  if (k < 0) return null;
  const delivered = stream.delivered[k];
  const since = stream.isHeld[k] ? 0 : ((t - stream.at[k]) * data.sample_rate) / 1e6;
  const heard = Math.min(delivered, stream.heard[k] + since);
  const made = lowerBound(stream.frames, t + 0.5) * data.frame_samples;
  const toDry = stream.dry[k] - t;
  return { delivered, heard, made: Math.max(made, delivered), toDry, isHeld: Boolean(stream.isHeld[k]) };
}

// ---- words -----------------------------------------------------------------------------------------------------------

function duration(us) {
  const size = Math.abs(us);
  if (size < 1e3) return `${Math.round(us)} µs`;
  if (size < 1e4) return `${(us / 1e3).toFixed(1)} ms`;
  if (size < 1e6) return `${Math.round(us / 1e3)} ms`;
  if (size < 6e7) return `${(us / 1e6).toFixed(2)} s`;
  return `${Math.floor(us / 6e7)} min ${Math.round((us % 6e7) / 1e6)} s`;
}
const clock = (us) => `${(us / 1e6).toFixed(us < 1e8 ? 4 : 3)} s`;
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const percent = (share) => `${share > 0 && share < 0.0095 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const WOKEN = {
  time: "the time had come",
  open: "a stream opened",
  text: "text came",
  end: "a text ended",
  report: "a listener's report came",
  cancel: "a stream was cancelled",
  done: "a step was done",
};
/** What a row of a step was. */
function work(stage, start, count) {
  if (stage === 0) return plural(count, "token");
  if (stage === 1) return plural(count, "position");
  if (stage === 4) return count === 1 ? `frame ${start}` : `frames ${start} to ${start + count - 1}`;
  return `frame ${start}`;
}
