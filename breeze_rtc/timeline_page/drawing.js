// The canvases: the machine's row, the streams' rows and the overview.

/** A tick distance of 1, 2 or 5 times a power of ten, at least `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least);
}

function drawPlot() {
  const { context: c, width, height } = plot;
  c.clearRect(0, 0, width, height);
  c.font = `12px ${colour.sans}`;
  c.textBaseline = "middle";
  drawGrid(c, width, height);
  c.save();
  c.beginPath();
  c.rect(0, TOP, width, height - TOP);
  c.clip();
  for (const stream of spoken) {
    if (stream.end < view.from || stream.begin > view.to) continue;
    const y = TOP + lanes[stream.index] * rowHeight() - view.scroll;
    if (y > height || y + rowHeight() < TOP) continue;
    drawStream(c, stream, y, width);
  }
  c.restore();
  drawMachine(c, width);
  drawScrollbar(c, width, height);
  drawPointer(c, width, height);
}

function drawGrid(c, width, height) {
  const step = niceStep(((view.to - view.from) / width) * 110);
  const digits = Math.max(0, Math.ceil(6 - Math.log10(step) - 1e-9));
  c.strokeStyle = colour.faint;
  c.fillStyle = colour["ink-3"];
  c.textAlign = "left";
  c.lineWidth = 1;
  c.beginPath();
  for (let n = Math.ceil(Math.max(0, view.from) / step); n * step <= view.to; n++) {
    const x = Math.round(xOf(n * step)) + 0.5;
    c.moveTo(x, 6);
    c.lineTo(x, height);
    const label = step >= 1e3 ? `${((n * step) / 1e6).toFixed(Math.min(digits, 3))} s` : clock(n * step);
    c.fillText(label, x + 4, AXIS / 2 + 1);
  }
  c.stroke();
}

/** One for each stage, and one for the time in which the process was not given a processor. */
const COLUMNS = STAGES.length + 1;

/** Per pixel, the share of time of each of `COLUMNS`. */
function stageShares(from, to, width) {
  const shares = new Float64Array(width * COLUMNS);
  const perPixel = (to - from) / width;
  const add = (column, stepBegin, stepEnd) => {
    let begin = Math.max(stepBegin, from);
    const end = Math.min(stepEnd, to);
    for (let x = Math.floor((begin - from) / perPixel); x < width && begin < end; x++) {
      const until = Math.min(end, from + (x + 1) * perPixel);
      if (until > begin) shares[x * COLUMNS + column] += (until - begin) / perPixel;
      begin = Math.max(begin, until);
    }
  };
  for (let i = firstStep(from); i < steps.count && steps.begin[i] - steps.overslept[i] < to; i++) {
    if (steps.overslept[i] > OVERSLEPT) add(STAGES.length, steps.begin[i] - steps.overslept[i], steps.begin[i]);
    add(steps.stage[i], steps.begin[i], ranUntil(i));
  }
  return shares;
}

/** The first step that may reach past `t`. */
function firstStep(t) {
  return Math.max(0, lowerBound(steps.begin, t) - 1);
}

function drawShares(c, shares, width, top, height) {
  for (let x = 0; x < width; x++) {
    let y = top + height;
    for (let stage = 0; stage < COLUMNS; stage++) {
      const share = shares[x * COLUMNS + stage];
      if (!share) continue;
      const tall = Math.min(share, 1) * height;
      y -= tall;
      c.fillStyle = colour.stage[stage] ?? colour["ink-3"];
      c.fillRect(x, y, 1, tall);
    }
  }
}

/** Single steps can be told apart. */
const isFine = () => (lowerBound(steps.begin, view.to) - firstStep(view.from)) * 4 < plot.width;

const BAR = { top: AXIS + 22, height: 40 };

function drawMachine(c, width) {
  c.fillStyle = colour.panel;
  c.fillRect(0, AXIS, width, MACHINE);
  c.fillStyle = colour.line;
  c.fillRect(0, AXIS, width, 1);
  c.fillRect(0, TOP - 1, width, 1);
  c.textAlign = "left";
  c.fillStyle = colour["ink-2"];
  // One step more on either side: the time before the last may be in sight.
  const first = firstStep(view.from);
  const last = Math.min(lowerBound(steps.begin, view.to) + 1, steps.count);
  c.fillText(isFine() ? "Machine: steps back to back" : "Machine: share of time per stage", 8, AXIS + 12);
  c.fillStyle = colour.paper;
  c.fillRect(Math.max(0, xOf(0)), BAR.top, Math.max(0, xOf(data.span) - Math.max(0, xOf(0))), BAR.height);
  if (!isFine()) {
    drawShares(c, stageShares(view.from, view.to, Math.ceil(width)), Math.ceil(width), BAR.top, BAR.height);
  } else {
    for (let i = first; i < last; i++) {
      const x = xOf(steps.begin[i]);
      const wide = Math.max(1, xOf(ranUntil(i)) - x);
      c.fillStyle = colour.stage[steps.stage[i]];
      c.fillRect(x, BAR.top, wide, BAR.height);
      if (i > 0) {
        // What was neither a step nor waiting is the driver's own work.
        const from = xOf(ranUntil(i - 1));
        c.fillStyle = colour.line;
        c.fillRect(from, BAR.top, Math.max(0, xOf(steps.begin[i] - steps.idle[i]) - from), BAR.height);
      }
      if (steps.overslept[i] > OVERSLEPT) {
        const from = xOf(steps.begin[i] - steps.overslept[i]);
        c.fillStyle = colour["ink-3"];
        c.fillRect(from, BAR.top, x - from, BAR.height);
      }
      drawOverrun(c, i, x, wide);
      drawStepLabel(c, i, x, wide);
      const before = xOf(steps.begin[i] - steps.idle[i]);
      if (steps.idle[i] && x - before > 52) {
        c.fillStyle = steps.overslept[i] > OVERSLEPT ? colour.paper : colour["ink-3"];
        c.textAlign = "center";
        const middle = (Math.max(0, before) + Math.min(width, x)) / 2;
        c.fillText(`idle ${duration(steps.idle[i])}`, middle, BAR.top + BAR.height / 2);
        c.textAlign = "left";
      }
    }
  }
  for (const stream of refused) {
    const x = xOf(stream.opened);
    c.fillStyle = colour.panel;
    c.fillRect(x - 7, AXIS + 3, 14, 16);
    c.strokeStyle = colour.fault;
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(x - 4, AXIS + 8);
    c.lineTo(x + 4, AXIS + 16);
    c.moveTo(x + 4, AXIS + 8);
    c.lineTo(x - 4, AXIS + 16);
    c.stroke();
  }
  if (view.step >= 0) {
    const x = xOf(steps.begin[view.step]);
    c.strokeStyle = colour.ink;
    c.lineWidth = 2;
    c.strokeRect(x - 1, BAR.top - 2, Math.max(3, xOf(ranUntil(view.step)) - x + 2), BAR.height + 4);
  }
}

/** Where the prediction ended: a notch, and what went past it darker. */
function drawOverrun(c, i, x, wide) {
  if (wide < 14 || !steps.predicted[i]) return;
  const at = xOf(steps.begin[i] + steps.predicted[i]);
  if (at < x + wide) {
    c.fillStyle = "rgb(0 0 0 / .28)";
    c.fillRect(at, BAR.top + BAR.height - 6, x + wide - at, 6);
  }
  c.fillStyle = colour.ink;
  c.fillRect(at - 0.75, BAR.top + BAR.height - 6, 1.5, 9);
}

function drawStepLabel(c, i, x, wide) {
  if (wide < 46) return;
  const n = steps.firstRow[i + 1] - steps.firstRow[i];
  c.fillStyle = "#fff";
  if (STAGES[steps.stage[i]] === "depth" || STAGES[steps.stage[i]] === "prefill") c.fillStyle = "#10181c";
  c.save();
  c.beginPath();
  c.rect(x, BAR.top, wide - 4, BAR.height);
  c.clip();
  c.fillText(STAGES[steps.stage[i]], Math.max(x, 0) + 6, BAR.top + 13);
  const time = duration(steps.took[i]);
  c.fillText(wide > 90 ? `${plural(n, "row")}, ${time}` : time, Math.max(x, 0) + 6, BAR.top + 28);
  c.restore();
}

/** The lead axis reaches a little over the cap: what is made further ahead leaves the row at its top. */
const LEAD_TOP = (() => {
  let most = 4e5;
  for (const stream of spoken) {
    for (let k = 0; k < stream.at.length; k++) most = Math.max(most, micros(stream.delivered[k] - stream.heard[k]));
  }
  return Math.min(most * 1.05, (data.lead_cap ?? 1_200_000) * 1.3);
})();

function drawStream(c, stream, y, width) {
  const tall = rowHeight();
  const left = Math.max(-2, xOf(stream.begin));
  const right = Math.min(width + 2, Math.max(xOf(stream.end), left + 3));
  const bottom = y + tall - 8;
  const top = y + 36;
  if (stream.index === view.stream) {
    c.fillStyle = colour.panel;
    c.fillRect(left - 4, y + 1, right - left + 8, tall - 2);
  }
  // Of a stream a few pixels wide the outline is all that can be read.
  const isSmall = xOf(stream.end) - xOf(stream.begin) < 90;
  drawStrip(c, stream, y + 20, left, right);
  if (view.shows === "lead") drawLead(c, stream, top, bottom, left, right, isSmall);
  else drawPosition(c, stream, top, bottom, left, right);
  drawMarks(c, stream, y, top, bottom, left, right, isSmall);
  drawName(c, stream, y, left, right);
}

function drawName(c, stream, y, left, right) {
  const space = right - Math.max(left, 0) - 10;
  if (space < 22) return;
  const first = stream.sounds.length && stream.texts.length ? stream.sounds[0][0] - stream.texts[0][0] : null;
  const parts = [
    `#${stream.id}`,
    stream.class === "live" ? "" : stream.class,
    first === null ? "" : `first sound ${duration(first)}`,
    stream.samples ? `${(micros(stream.samples) / 1e6).toFixed(1)} s of sound` : "",
    stream.missed ? `${stream.missed} late` : "",
    stream.ending === "cancelled" ? "cancelled" : stream.ending === "failed" ? `failed: ${stream.error}` : "",
  ].filter(Boolean);
  c.textAlign = "left";
  const x = Math.max(left, 0) + 5;
  let used = 0;
  parts.forEach((part, i) => {
    const text = i ? ` · ${part}` : part;
    const wide = c.measureText(text).width;
    if (used + wide > space) {
      used = Infinity;
      return;
    }
    const isFault = part.endsWith(" late") || part.startsWith("failed");
    c.fillStyle = isFault ? colour.fault : colour[i === 0 ? "ink" : "ink-3"];
    c.fillText(text, x + used, y + 11);
    used += wide;
  });
}

/** The steps that carried the stream. */
function drawStrip(c, stream, y, left, right) {
  c.fillStyle = colour.faint;
  c.fillRect(left, y, right - left, 10);
  const { steps: mine, stepBegins } = stream;
  let k = Math.max(0, lowerBound(stepBegins, view.from) - 1);
  const perPixel = (view.to - view.from) / plot.width;
  let drawnTo = -1;
  while (k < mine.length && stepBegins[k] < view.to) {
    const i = mine[k];
    const x = xOf(steps.begin[i]);
    const end = xOf(ranUntil(i));
    c.fillStyle = colour.stage[steps.stage[i]];
    const from = Math.max(x, drawnTo);
    c.fillRect(from, y, Math.max(end - from, 0.8), 10);
    drawnTo = Math.max(from + 0.8, end);
    // What begins in this same pixel would not be seen.
    k = end - x < 0.5 && k + 1 < mine.length && xOf(stepBegins[k + 1]) < x + 0.5
      ? Math.max(k + 1, lowerBound(stepBegins, steps.begin[i] + perPixel / 2, k + 1))
      : k + 1;
  }
  if (view.step >= 0) {
    for (let r = steps.firstRow[view.step]; r < steps.firstRow[view.step + 1]; r++) {
      if (rows.stream[r] !== stream.index) continue;
      const x = xOf(steps.begin[view.step]);
      c.strokeStyle = colour.ink;
      c.lineWidth = 2;
      c.strokeRect(x - 1, y - 1, Math.max(3, xOf(ranUntil(view.step)) - x + 2), 12);
    }
  }
}

/** Indexes [first, last) of the positions that matter for the visible part. */
function visiblePositions(stream) {
  const first = Math.max(0, lowerBound(stream.at, view.from) - 1);
  return [first, lowerBound(stream.at, view.to, first)];
}

/** Corners of a line that falls as sound is heard: at each position a value, from there on one microsecond per one. */
function fallingLine(stream, valueAt) {
  const [first, last] = visiblePositions(stream);
  const corners = [];
  for (let k = first; k < last; k++) {
    const until = k + 1 < stream.at.length ? stream.at[k + 1] : stream.end;
    const value = valueAt(k);
    if (stream.isHeld[k]) {
      corners.push([stream.at[k], value], [until, value]);
      continue;
    }
    corners.push([stream.at[k], value]);
    if (value > 0 && stream.at[k] + value < until) corners.push([stream.at[k] + value, 0]);
    corners.push([until, Math.max(0, value - (until - stream.at[k]))]);
  }
  return corners;
}

function drawLead(c, stream, top, bottom, left, right, isSmall) {
  const yOf = (us) => bottom - (Math.min(Math.max(us, 0), LEAD_TOP) / LEAD_TOP) * (bottom - top);
  if (data.lead_cap !== null && data.lead_cap < LEAD_TOP && stream.interactive) {
    c.strokeStyle = colour.line;
    c.setLineDash([2, 4]);
    c.beginPath();
    c.moveTo(left, yOf(data.lead_cap));
    c.lineTo(right, yOf(data.lead_cap));
    c.stroke();
    c.setLineDash([]);
    if (left > 44 && !view.isPacked) {
      c.textAlign = "right";
      c.fillStyle = colour["ink-3"];
      c.fillText(duration(data.lead_cap).replace("0 s", " s"), left - 5, yOf(data.lead_cap));
      c.textAlign = "left";
    }
  }
  const [first, last] = visiblePositions(stream);
  const isDense = last - first > 2 * (right - left);
  const unheard = isDense
    ? sampledLead(stream, left, right)
    : fallingLine(stream, (k) => micros(stream.delivered[k] - stream.heard[k]));
  if (unheard.length) {
    const band = (corners, fill) => {
      c.fillStyle = fill;
      c.beginPath();
      c.moveTo(xOf(corners[0][0]), bottom);
      for (const [t, us] of corners) c.lineTo(xOf(t), yOf(us));
      c.lineTo(xOf(corners[corners.length - 1][0]), bottom);
      c.fill();
    };
    if (!isDense && !isSmall) band(withPending(stream, unheard), colour.pending);
    band(unheard, colour.lead);
  }
  if (unheard.length && !isDense && !isSmall) {
    c.strokeStyle = colour.accent;
    c.lineWidth = 1.25;
    c.beginPath();
    fallingLine(stream, (k) => Math.max(0, stream.dry[k] - stream.at[k])).forEach(([t, us], i) =>
      i ? c.lineTo(xOf(t), yOf(us)) : c.moveTo(xOf(t), yOf(us)),
    );
    c.stroke();
  }
  c.fillStyle = colour["ink-3"];
  c.fillRect(left, bottom, right - left, 1);
}

/** The unheard sound, once per pixel. */
function sampledLead(stream, left, right) {
  const corners = [];
  for (let x = left; x <= right; x++) {
    const t = Math.min(tOf(x), stream.end);
    const p = positionAt(stream, t);
    if (p) corners.push([t, micros(p.delivered - p.heard)]);
  }
  return corners;
}

/** The line of unheard sound with the frames that are made and not yet sound on top. */
function withPending(stream, corners) {
  const frameUs = micros(data.frame_samples);
  const lifted = [];
  let f = lowerBound(stream.frames, corners[0][0]);
  corners.forEach(([t, us], i) => {
    const next = corners[i + 1];
    const pending = (at) => {
      const p = positionAt(stream, at);
      return p ? micros(p.made - p.delivered) : 0;
    };
    lifted.push([t, us + (next && next[0] === t ? pendingBefore(stream, t) : pending(t))]);
    for (; next && f < stream.frames.length && stream.frames[f] < next[0]; f++) {
      if (stream.frames[f] <= t) continue;
      const share = (stream.frames[f] - t) / (next[0] - t);
      const base = us + (next[1] - us) * share;
      const lift = base + pending(stream.frames[f]);
      lifted.push([stream.frames[f], lift - frameUs], [stream.frames[f], lift]);
    }
  });
  return lifted;
}

/** Frames in hand just before `t`, as time. */
function pendingBefore(stream, t) {
  const k = lowerBound(stream.at, t) - 1;
  return micros(lowerBound(stream.frames, t) * data.frame_samples - (k < 0 ? 0 : stream.delivered[k]));
}

function drawPosition(c, stream, top, bottom, left, right) {
  const most = Math.max(stream.samples, stream.frames.length * data.frame_samples, 1);
  const yOf = (samples) => bottom - (samples / most) * (bottom - top);
  const [first, last] = visiblePositions(stream);
  if (last > first) {
    const heard = [];
    c.fillStyle = colour.lead;
    c.beginPath();
    for (let k = first; k < last; k++) {
      const until = k + 1 < stream.at.length ? stream.at[k + 1] : stream.end;
      const { delivered } = stream;
      const reaches = stream.isHeld[k] ? until : Math.min(until, stream.at[k] + micros(delivered[k] - stream.heard[k]));
      const at = (t) => {
        const since = stream.isHeld[k] ? 0 : ((t - stream.at[k]) * data.sample_rate) / 1e6;
        return Math.min(delivered[k], stream.heard[k] + since);
      };
      heard.push([stream.at[k], stream.heard[k]], [reaches, at(reaches)], [until, at(until)]);
      c.lineTo(xOf(stream.at[k]), yOf(delivered[k]));
      c.lineTo(xOf(until), yOf(delivered[k]));
    }
    for (let i = heard.length - 1; i >= 0; i--) c.lineTo(xOf(heard[i][0]), yOf(heard[i][1]));
    c.fill();
    c.strokeStyle = colour.accent;
    c.lineWidth = 1.5;
    c.beginPath();
    heard.forEach(([t, samples], i) => (i ? c.lineTo(xOf(t), yOf(samples)) : c.moveTo(xOf(t), yOf(samples))));
    c.stroke();
    // On each tread of the delivered sound, where it would have run dry.
    c.fillStyle = colour.ink;
    for (let k = first; k < last; k++) {
      const isLastOfTread = k + 1 >= stream.at.length || stream.delivered[k + 1] !== stream.delivered[k];
      if (!isLastOfTread || stream.isHeld[k]) continue;
      c.fillRect(xOf(stream.dry[k]) - 0.5, yOf(stream.delivered[k]) - 4, 1.5, 8);
    }
    c.strokeStyle = colour["ink-3"];
    c.setLineDash([1, 3]);
    c.beginPath();
    const firstFrame = Math.max(0, lowerBound(stream.frames, view.from) - 1);
    for (let f = firstFrame; f < stream.frames.length && stream.frames[f] < view.to; f++) {
      c.lineTo(xOf(stream.frames[f]), yOf(f * data.frame_samples));
      c.lineTo(xOf(stream.frames[f]), yOf((f + 1) * data.frame_samples));
    }
    c.stroke();
    c.setLineDash([]);
  }
  c.fillStyle = colour["ink-3"];
  c.fillRect(left, bottom, right - left, 1);
}

function drawMarks(c, stream, y, top, bottom, left, right, isSmall) {
  // Until the first sound: the wait.
  const firstText = stream.texts.length ? stream.texts[0][0] : stream.begin;
  const firstSound = stream.sounds.length ? stream.sounds[0][0] : null;
  if (firstSound !== null) {
    const x = xOf(firstSound);
    const from = xOf(firstText);
    c.fillStyle = colour.faint;
    c.fillRect(from, top, x - from, bottom - top);
    c.fillStyle = isSmall ? colour["ink-3"] : colour.ink;
    c.fillRect(x - 0.75, top - 4, isSmall ? 1 : 1.5, bottom - top + 4);
    if (!isSmall) {
      c.beginPath();
      c.arc(x, top - 4, 3.2, 0, 2 * Math.PI);
      c.fill();
    }
    if (x - from > 70) {
      c.fillStyle = colour["ink-2"];
      c.textAlign = "center";
      c.fillText(duration(firstSound - firstText), (x + from) / 2, (top + bottom) / 2);
      c.textAlign = "left";
    }
  }
  if (stream.admitted !== null && xOf(stream.admitted) - left > 1) {
    c.fillStyle = colour.line;
    c.fillRect(left, bottom - 12, xOf(stream.admitted) - left, 12);
    if (xOf(stream.admitted) - left > 60) {
      c.fillStyle = colour["ink-2"];
      c.fillText("queued", left + 4, bottom - 6);
    }
  }
  // Text that came in.
  c.fillStyle = colour.text;
  for (const [t] of isSmall ? [] : stream.texts) {
    const x = xOf(t);
    if (x < -5 || x > plot.width + 5) continue;
    c.beginPath();
    c.moveTo(x - 4, y + 15);
    c.lineTo(x + 4, y + 15);
    c.lineTo(x, y + 20);
    c.fill();
  }
  // Chunks, as long as there is room for them; and the silence before a late one.
  const isRoomy = plot.width / (view.to - view.from) > 8 / 1e5;
  let writtenTo = -99;
  let lateTo = xOf(firstSound ?? stream.begin) + 4;
  for (const [at, samples, late] of stream.sounds) {
    const x = xOf(at);
    if (x < -60 || xOf(at - late) > plot.width + 60) continue;
    if (late > 0) {
      const from = xOf(at - late);
      c.fillStyle = colour["fault-soft"];
      c.fillRect(from, top, Math.max(x - from, 1), bottom - top);
      c.fillStyle = colour.fault;
      c.fillRect(Math.min(from, x - 2), bottom - 1, Math.max(x - from, 2), 4);
      c.fillRect(x - 1, top - 4, 2, bottom - top + 6);
      c.textAlign = "right";
      const label = `${duration(late)} late`;
      const end = Math.min(from, x) - 4;
      if (end - c.measureText(label).width > Math.max(left, lateTo, 0)) {
        c.fillText(label, end, top + 5);
        lateTo = x;
      }
      c.textAlign = "left";
    } else if (isRoomy) {
      c.fillStyle = colour["ink-3"];
      c.fillRect(x - 0.5, bottom - 5, 1, 5);
      if (x - writtenTo < 16 || right - x < 12) continue;
      writtenTo = x;
      c.fillText(Math.round(samples / data.frame_samples), x + 3, bottom - 8);
    }
  }
  // Reports.
  c.fillStyle = colour.accent;
  const [first, last] = visiblePositions(stream);
  let drawnTo = -9;
  for (let k = first; k < last; k++) {
    const x = xOf(stream.at[k]);
    if (isSmall || !stream.isReported[k] || x - drawnTo < 2) continue;
    drawnTo = x;
    c.fillRect(x - 0.75, bottom + 2, 1.5, 4);
  }
  // Pauses.
  for (let k = first; k < last; k++) {
    if (!stream.isHeld[k]) continue;
    const from = Math.max(left, xOf(stream.at[k]));
    const until = Math.min(right, xOf(k + 1 < stream.at.length ? stream.at[k + 1] : stream.end));
    c.fillStyle = colour["ink-3"];
    c.globalAlpha = 0.18;
    c.fillRect(from, top, until - from, bottom - top);
    c.globalAlpha = 1;
    const isFirst = k === 0 || !stream.isHeld[k - 1] || xOf(stream.at[k]) < 0;
    if (isFirst && !isSmall) {
      c.fillStyle = colour["ink-2"];
      c.fillText("paused", from + 4, top + 6);
    }
  }
  if (stream.ending === "cancelled" || stream.ending === "failed") {
    const x = xOf(stream.end);
    c.strokeStyle = stream.ending === "failed" ? colour.fault : colour.ink;
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(x, y + 18);
    c.lineTo(x, bottom);
    c.moveTo(x - 5, y + 6);
    c.lineTo(x + 5, y + 16);
    c.moveTo(x + 5, y + 6);
    c.lineTo(x - 5, y + 16);
    c.stroke();
    const p = positionAt(stream, stream.end);
    if (stream.ending === "cancelled" && p && !view.isPacked && x < plot.width - 20) {
      c.fillStyle = colour["ink-2"];
      c.textAlign = "left";
      c.fillText(`${duration(micros(p.delivered - p.heard))} unheard`, x + 8, y + 25);
    }
  } else if (stream.ended !== null && stream.end > stream.ended) {
    // All of it is made; what follows is only heard.
    c.fillStyle = colour["ink-3"];
    c.fillRect(xOf(stream.ended) - 0.5, y + 18, 1, 14);
  }
}

function drawScrollbar(c, width, height) {
  const all = laneCount * rowHeight();
  const seen = height - TOP;
  if (all <= seen) return;
  c.fillStyle = colour.line;
  c.fillRect(width - 6, TOP + (view.scroll / all) * seen + 2, 4, (seen / all) * seen - 4);
}

function drawPointer(c, width, height) {
  if (!view.pointer) return;
  const x = Math.round(view.pointer.x) + 0.5;
  c.strokeStyle = colour["ink-3"];
  c.globalAlpha = 0.6;
  c.beginPath();
  c.moveTo(x, AXIS);
  c.lineTo(x, height);
  c.stroke();
  c.globalAlpha = 1;
  const label = clock(tOf(view.pointer.x));
  const wide = c.measureText(label).width + 10;
  const at = Math.min(Math.max(x - wide / 2, 0), width - wide);
  c.fillStyle = colour.ink;
  c.fillRect(at, 3, wide, AXIS - 6);
  c.fillStyle = colour.paper;
  c.textAlign = "center";
  c.fillText(label, at + wide / 2, AXIS / 2 + 1);
  c.textAlign = "left";
}

let overviewPicture = null;
function drawOverview() {
  const { context: c, width, height } = overview;
  if (overview.isNew || !overviewPicture) {
    overview.isNew = false;
    c.clearRect(0, 0, width, height);
    const wide = Math.ceil(width);
    drawShares(c, stageShares(-SPAN * 0.02, SPAN * 1.02, wide), wide, 8, height - 16);
    c.fillStyle = colour.fault;
    for (const { at } of misses) c.fillRect(overviewX(at) - 1, height - 7, 2, 7);
    overviewPicture = document.createElement("canvas");
    overviewPicture.width = overview.canvas.width;
    overviewPicture.height = overview.canvas.height;
    overviewPicture.getContext("2d").drawImage(overview.canvas, 0, 0);
  }
  c.clearRect(0, 0, width, height);
  c.drawImage(overviewPicture, 0, 0, width, height);
  const from = overviewX(view.from);
  const to = Math.max(overviewX(view.to), from + 2);
  c.fillStyle = colour.paper;
  c.globalAlpha = 0.72;
  c.fillRect(0, 0, from, height);
  c.fillRect(to, 0, width - to, height);
  c.globalAlpha = 1;
  c.strokeStyle = colour.accent;
  c.lineWidth = 1.5;
  c.strokeRect(from + 0.75, 0.75, Math.max(1, to - from - 1.5), height - 1.5);
}
const overviewX = (t) => ((t + SPAN * 0.02) / (SPAN * 1.04)) * overview.width;
