// What the page says in words: the figures at its head, what is under the pointer, and the panel.

function figure(name, value, small = "", className = "") {
  const dl = document.createElement("dl");
  dl.className = `figure ${className}`;
  dl.innerHTML = `<dt>${name}</dt><dd>${value} ${small ? `<small>${small}</small>` : ""}</dd>`;
  document.querySelector("header").append(dl);
  return dl;
}

function head() {
  const sum = data.summary;
  document.title = `${data.name ?? "Scheduler trace"} · timeline`;
  $("name").textContent = data.name ?? "Scheduler trace";
  $("length").textContent = `${duration(data.span)} recorded`;
  figure("Streams", sum.streams.toLocaleString("en"), sum.refused ? `${sum.refused} refused` : "");
  figure("Steps", sum.steps.toLocaleString("en"));
  const [p50, p95] = [sum.first_sound_p50_ns, sum.first_sound_p95_ns];
  const [unit, ns, digits] = p95 < 1e10 ? ["ms", 1e6, p95 < 1e7 ? 1 : 0] : ["s", 1e9, 1];
  const firsts = p50 === null ? "–" : `${(p50 / ns).toFixed(digits)} / ${(p95 / ns).toFixed(digits)}`;
  figure("First packet p50 / p95", firsts, p50 === null ? "" : unit);
  const missed = figure(
    "Missed deadlines",
    sum.missed ? `<button>${sum.missed.toLocaleString("en")}</button>` : "0",
    sum.missed ? `in ${plural(sum.missed_streams, "stream")}` : "",
    sum.missed ? "fault" : "",
  );
  missed.querySelector("button")?.addEventListener("click", () => nextMiss(1));
  figure("Machine busy", percent(sum.busy), "while a stream was open");
  const box = document.createElement("div");
  box.id = "stages";
  const ran = sum.stages.reduce((total, stage) => total + stage.ran_ns, 0) || 1;
  const shown = sum.stages.filter((stage) => stage.steps);
  box.innerHTML =
    `<dl class="figure"><dt>Time per stage</dt></dl><div class="bar">` +
    shown
      .map((s) => `<span style="width:${(100 * s.ran_ns) / ran}%;background:var(--${STAGES[s.stage]})"></span>`)
      .join("") +
    "</div><ul>" +
    shown
      .map(
        (s) =>
          `<li title="${plural(s.steps, "step")}, ${(s.rows / s.steps).toFixed(1)} rows each; ` +
          `${percent(s.over / s.steps)} took longer than predicted">` +
          `${chip(s.stage)}${STAGES[s.stage]} <b>${percent(s.ran_ns / ran)}</b></li>`,
      )
      .join("") +
    "</ul>";
  document.querySelector("header").append(box);
}

// ---- what is under the pointer ---------------------------------------------------------------------------------------

/** The step that ran at `t`, or -1. */
function stepAt(t, slackUs) {
  const k = lowerBound(steps.begin, t) - 1;
  for (const i of [k, k + 1]) {
    if (i >= 0 && i < steps.count && t >= steps.begin[i] - slackUs && t <= ranUntil(i) + slackUs) return i;
  }
  return -1;
}

function hit(x, y) {
  const t = tOf(x);
  const pixelUs = (view.to - view.from) / plot.width;
  if (y < TOP) {
    const refusal = refused.find((stream) => Math.abs(xOf(stream.opened) - x) < 6);
    if (refusal && y < AXIS + 20) return { kind: "refused", stream: refusal };
    if (y > AXIS && !isFine()) return t >= 0 && t <= data.span ? { kind: "share", t, pixelUs } : null;
    const i = y > AXIS ? stepAt(t, pixelUs) : -1;
    if (i >= 0) return { kind: "step", step: i };
    const next = lowerBound(steps.begin, t);
    if (y > AXIS && next < steps.count && next > 0) return { kind: "gap", next };
    return null;
  }
  const lane = Math.floor((y - TOP + view.scroll) / rowHeight());
  const within = (y - TOP + view.scroll) % rowHeight();
  const stream = spoken.find(
    (s) => lanes[s.index] === lane && t >= s.begin - 4 * pixelUs && t <= s.end + 4 * pixelUs,
  );
  if (!stream) return null;
  if (within < 34) {
    const text = stream.texts.find(([at]) => Math.abs(xOf(at) - x) < 5);
    if (text && within < 22) return { kind: "text", stream, text };
    const k = lowerBound(stream.stepBegins, t + pixelUs) - 1;
    if (within >= 16 && isFine() && k >= 0 && t <= ranUntil(stream.steps[k]) + pixelUs) {
      return { kind: "step", step: stream.steps[k], stream };
    }
  }
  const sound = stream.sounds.find(([at, , late]) => x >= xOf(at - late) - 3 && x <= xOf(at) + 3);
  return sound ? { kind: "sound", stream, sound } : { kind: "stream", stream, t };
}

const chip = (stage) => `<span class="chip" style="background:var(--${STAGES[stage]})"></span>`;
const stepTitle = (i) =>
  `${chip(steps.stage[i])}<b>${STAGES[steps.stage[i]]}</b>, ` +
  `${plural(steps.firstRow[i + 1] - steps.firstRow[i], "row")}`;
const whyOf = (i) => {
  const why = data.whys[steps.why[i]];
  return why ? `${why[0].toUpperCase()}${why.slice(1)}.` : "";
};
/** What the scheduler had before it when it chose. */
function figuresOf(i) {
  const slack = steps.slack[i];
  const first = steps.firstSound[i];
  let tight = "";
  if (slack < 0) tight = `somebody was already ${duration(-slack)} past saving in time`;
  else if (slack !== null) tight = `everybody who had spoken had at least ${duration(slack)} to spare`;
  const way = !first ? "" : `the first sounds that waited needed ${duration(first)}`;
  const both = [tight, way].filter(Boolean).join("; ");
  return both ? `${both[0].toUpperCase()}${both.slice(1)}.` : "";
}
const oversleptText = (i) =>
  steps.overslept[i] > OVERSLEPT
    ? ` It was to be woken ${duration(steps.overslept[i])} earlier: its process was not given a processor.`
    : "";
const took = (i) => (steps.total[i] ? duration(steps.took[i]) : "still out at the end of the trace");

function tipText(found) {
  switch (found.kind) {
    case "step":
      return `${stepTitle(found.step)} · ${took(found.step)}<br>${escaped(whyOf(found.step))}`;
    case "share": {
      const around = stageShares(found.t - 2 * found.pixelUs, found.t + 2 * found.pixelUs, 1);
      const shares = [...around.slice(0, STAGES.length)];
      const busy = Math.min(1, shares.reduce((sum, share) => sum + share, 0));
      const parts = shares.map((share, stage) => (share > 0.005 ? `${STAGES[stage]} ${percent(share)}` : ""));
      if (around[STAGES.length] > 0.005) parts.push(`without a processor ${percent(around[STAGES.length])}`);
      const said = parts.filter(Boolean).join(", ") || "nothing ran";
      return `<b>${percent(busy)} busy</b>: ${said}. Zoom in for the steps.`;
    }
    case "gap": {
      const i = found.next;
      const gap = steps.begin[i] - ranUntil(i - 1);
      const idle = steps.idle[i];
      if (idle) {
        return `<b>Idle ${duration(idle)}.</b> Nothing was due; then ${WOKEN[steps.wokenBy[i]]}.${oversleptText(i)}`;
      }
      return `<b>${duration(gap)}</b> of the driver's own: text, packets, messages.`;
    }
    case "refused":
      return `<b>#${found.stream.id} was refused:</b> ${escaped(found.stream.refused)}`;
    case "text":
      return `<b>Text for #${found.stream.id}:</b> ${plural(found.text[1], "token")}`;
    case "sound": {
      const [at, samples, late] = found.sound;
      const frames = Math.round(samples / data.frame_samples);
      const isFirst = found.stream.sounds[0] === found.sound && found.stream.texts.length;
      const first = isFirst ? `First sound, ${duration(at - found.stream.texts[0][0])} after the first text. ` : "";
      const missed = late > 0 ? `, <b class="late">${duration(late)} after the listener had run dry</b>` : "";
      const what = `${plural(frames, "frame")}</b> (${duration(micros(samples))})`;
      return `<b>#${found.stream.id}: ${first}${what} to the sink${missed}`;
    }
    default: {
      const p = positionAt(found.stream, found.t);
      const isQueued = found.stream.admitted !== null && found.t < found.stream.admitted;
      if (!p) return `<b>#${found.stream.id}</b> ${isQueued ? "waits for room" : "has not spoken yet"}`;
      const said = [
        `<b>#${found.stream.id}</b> has heard ${(micros(p.heard) / 1e6).toFixed(2)} s`,
        `<b>${duration(micros(p.delivered - p.heard))}</b> made and unheard`,
      ];
      const pending = Math.round((p.made - p.delivered) / data.frame_samples);
      if (pending > 0) said.push(`${plural(pending, "frame")} on the way to sound`);
      if (p.isHeld) said.push("The listener is paused");
      else if (found.stream.ended !== null && found.t > found.stream.ended) said.push("All of it has been made");
      else if (p.toDry >= 0) said.push(`Runs dry in ${duration(p.toDry)}`);
      else said.push(`<span class="late">Dry for ${duration(-p.toDry)}</span>`);
      return said.join("<br>");
    }
  }
}

function drawTip() {
  const tip = $("tip");
  const found = view.pointer && !drag && hit(view.pointer.x, view.pointer.y);
  tip.hidden = !found;
  if (!found) return;
  tip.innerHTML = tipText(found);
  const below = overview.height + view.pointer.y;
  tip.style.left = `${Math.max(4, Math.min(view.pointer.x + 14, plot.width - tip.offsetWidth - 6))}px`;
  const isAbove = below + 18 + tip.offsetHeight > overview.height + plot.height;
  tip.style.top = `${isAbove ? below - tip.offsetHeight - 14 : below + 18}px`;
}

// ---- the panel -------------------------------------------------------------------------------------------------------

function pick(i) {
  view.step = Math.min(Math.max(i, 0), steps.count - 1);
  view.stream = -1;
  history.replaceState(null, "", `#step=${view.step}`);
  panel();
  draw();
}

function panel() {
  if (view.step >= 0 && steps.count) stepPanel(view.step);
  else if (view.stream >= 0) streamPanel(streams[view.stream]);
  else legend();
}

/** A list of [name, value]; what has no value is left out. */
function factList(facts) {
  const shown = facts.filter(([, value]) => value).map(([name, value]) => `<dt>${name}</dt><dd>${value}</dd>`);
  return `<dl class="facts">${shown.join("")}</dl>`;
}

/** When a listener runs dry, for a table. */
function dryText(position) {
  if (!position) return "not spoken";
  if (position.isHeld) return "paused";
  return position.toDry < 0 ? `<span class="late">dry ${duration(-position.toDry)}</span>` : duration(position.toDry);
}

function idleText(i) {
  const woken = `idle ${duration(steps.idle[i])}, until ${WOKEN[steps.wokenBy[i]]}.`;
  return steps.idle[i] ? woken + oversleptText(i) : "";
}

function predictedText(i) {
  if (!steps.predicted[i]) return "nothing was known yet";
  const ratio = steps.took[i] / steps.predicted[i];
  const error = ratio > 1 ? `${percent(ratio - 1)} over` : `${percent(1 - ratio)} to spare`;
  return duration(steps.predicted[i]) + (steps.total[i] ? ` (${error})` : "");
}

function stepPanel(i) {
  const t = steps.begin[i];
  const padded = steps.bucket[i] - (steps.firstRow[i + 1] - steps.firstRow[i]);
  const mine = new Map();
  for (let r = steps.firstRow[i]; r < steps.firstRow[i + 1]; r++) mine.set(rows.stream[r], r);
  // Everybody who was there, whoever runs dry first on top: what the choice was between.
  const urgency = (position) => (position && !position.isHeld ? position.toDry : -1e12);
  const there = spoken
    .filter((stream) => stream.opened <= t && (stream.ended === null || stream.ended > t))
    .map((stream) => ({ stream, position: positionAt(stream, t) }))
    .sort((a, b) => urgency(a.position) - urgency(b.position) || a.stream.index - b.stream.index)
    .slice(0, 64)
    .map(({ stream, position }) => {
      const r = mine.get(stream.index);
      const part = r === undefined ? "" : work(steps.stage[i], rows.start[r], rows.count[r]);
      const link = `<a href="#" data-stream="${stream.index}">#${stream.id}</a>`;
      const className = r === undefined ? "" : "in";
      return `<tr class="${className}"><td>${link}</td><td>${part}</td><td class="n">${dryText(position)}</td></tr>`;
    });
  $("panel").innerHTML = `
    <div class="walk">
      <button data-go="${i - 1}" aria-label="Previous step">&larr;</button>
      <button data-go="${i + 1}" aria-label="Next step">&rarr;</button>
      <button data-close>Legend</button>
    </div>
    <h2>Step ${i}: ${stepTitle(i).replace(/<\/?b>/g, "")}</h2>
    <p class="why">${escaped(whyOf(i))} <span>${figuresOf(i)}</span></p>
    ${factList([
      ["Chosen at", clock(t)],
      ["Took", took(i)],
      ["Predicted", predictedText(i)],
      ["Bucket", `${steps.bucket[i]}${padded > 0 ? ` (${padded} padded)` : ""}`],
      ["Before it", idleText(i)],
    ])}
    <table>
      <thead><tr><th>stream</th><th>in this step</th><th class="n">runs dry in</th></tr></thead>
      <tbody>${there.join("")}</tbody>
    </table>`;
}

function endText(stream) {
  const last = stream.at.length ? positionAt(stream, stream.end) : null;
  switch (stream.ending) {
    case "finished": return "made in full";
    case "cancelled": return `cancelled${last ? `, with ${duration(micros(last.delivered - last.heard))} unheard` : ""}`;
    case "failed": return `<span class="late">failed: ${escaped(stream.error)}</span>`;
    default: return "open when the trace ended";
  }
}

function streamPanel(stream) {
  const { sounds, texts } = stream;
  const tokens = texts.reduce((sum, text) => sum + text[1], 0);
  const chunks = sounds.slice(0, 40).map(([, samples]) => Math.round(samples / data.frame_samples));
  $("panel").innerHTML = `
    <div class="walk"><button data-close>Legend</button></div>
    <h2>Stream #${stream.id}</h2>
    ${factList([
      ["Class", stream.class + (stream.interactive ? "" : ", not interactive: no lead cap")],
      ["Opened", clock(stream.opened)],
      ["Queued", stream.admitted !== null && `for ${duration(stream.admitted - stream.opened)}, until there was room`],
      ["Text", `${plural(tokens, "token")} in ${plural(texts.length, "piece")}`],
      ["First sound", sounds.length && texts.length ? `after ${duration(sounds[0][0] - texts[0][0])}` : "none"],
      ["Sound", `${duration(micros(stream.samples))} in ${plural(sounds.length, "chunk")}`],
      ["Chunks", sounds.length && `${chunks.join(" ")}${sounds.length > 40 ? " …" : ""} frames`],
      ["Late", stream.missed ? `<span class="late">${plural(stream.missed, "chunk")}</span>` : "never"],
      ["Reports", String(stream.isReported.reduce((sum, isOne) => sum + isOne, 0))],
      ["Steps", String(stream.steps.length)],
      ["End", endText(stream)],
    ])}`;
}

/** [drawing, words] for what both ways of showing a stream have in common, and for each way. */
const KEY = {
  lead: [
    [
      '<path d="M0 18V4L30 16V18Z" fill="var(--lead)"/><path d="M0 18H34" stroke="var(--ink-3)"/>',
      "Sound handed to the sink and not yet heard. It falls as the listener hears; the bottom is the ear.",
    ],
    [
      '<path d="M0 12V4H10V8H20V12Z" fill="var(--pending)"/><path d="M0 18V12L30 18Z" fill="var(--lead)"/>',
      "Frames made that are not sound yet.",
    ],
    [
      '<path d="M0 4L30 17" stroke="var(--accent)" stroke-width="1.5" fill="none"/>',
      "Time left to the deadline: at the bottom the listener runs dry. It lies below the band by the way to the ear.",
    ],
    ['<path d="M0 8H34" stroke="var(--ink-3)" stroke-dasharray="2 4"/>', "The lead cap."],
  ],
  position: [
    [
      '<path d="M0 10H16V4H34V6L0 18Z" fill="var(--lead)"/>' +
        '<path d="M0 18L34 6" stroke="var(--accent)" stroke-width="1.5"/>',
      "The line is the listener's playhead, the stair above it what was handed to the sink: between them is sound " +
        "not yet heard.",
    ],
    [
      '<path d="M0 10H34" stroke="var(--lead)" stroke-width="3"/>' +
        '<path d="M22 5v10" stroke="var(--ink)" stroke-width="1.5"/>',
      "On each step of the stair, the deadline: when the listener runs dry if it climbs no more.",
    ],
    [
      '<path d="M0 16H10V10H22V4H34" fill="none" stroke="var(--ink-3)" stroke-dasharray="1 3"/>',
      "Frames made.",
    ],
  ],
  both: [
    [
      '<path d="M4 0h22v18H4z" fill="var(--fault-soft)"/><path d="M4 16h22v4H4zM25 0h2v20h-2z" fill="var(--fault)"/>',
      "A missed deadline: nothing to hear until the late chunk came.",
    ],
    [
      '<path d="M12 3V20" stroke="var(--ink)" stroke-width="1.5"/><circle cx="12" cy="4" r="3.2" fill="var(--ink)"/>',
      "First sound; grey before it is the wait.",
    ],
    ['<path d="M6 5h9l-4.500 6z" fill="var(--text)"/>', "Text came."],
    [
      '<path d="M6 14v5M14 14v5M22 14v5" stroke="var(--accent)" stroke-width="1.5"/>',
      "The listener reported its position; the band jumps where the estimate was wrong.",
    ],
    [
      '<path d="M12 8V20M7 0L17 9M17 0L7 9" stroke="var(--ink)" stroke-width="2"/>',
      "Cancelled, as by a barge-in.",
    ],
    [
      '<path d="M8 6l8 8M16 6l-8 8" stroke="var(--fault)" stroke-width="2"/>',
      "Above the machine: a stream was refused.",
    ],
    [
      '<path d="M0 4h20v12H0z" fill="var(--depth)"/><path d="M14 11h6v5h-6z" fill="rgb(0 0 0 / .28)"/>' +
        '<path d="M14 11h1.500v8H14z" fill="var(--ink)"/>',
      "A step; the notch is when it was predicted to end.",
    ],
    [
      '<path d="M0 4h8v12H0zM26 4h8v12h-8z" fill="var(--backbone)"/><path d="M8 4h5v12H8z" fill="var(--line)"/>',
      "Between steps: grey is the driver's own work, white is waiting, for nothing was due.",
    ],
    [
      '<path d="M0 4h4v12H0z" fill="var(--backbone)"/><path d="M14 4h16v12H14z" fill="var(--ink-3)"/>',
      "It was time to go on, and the process was not given a processor.",
    ],
  ],
};

function legend() {
  const keys = [...KEY[view.shows], ...KEY.both].map(
    ([drawing, words]) => `<svg width="34" height="20" aria-hidden="true">${drawing}</svg><span>${words}</span>`,
  );
  const stages = data.summary.stages
    .filter((s) => s.steps)
    .map((s) => {
      const cells = [s.steps.toLocaleString("en"), (s.rows / s.steps).toFixed(1), percent(s.over / s.steps)];
      const figures = cells.map((cell) => `<td class="n">${cell}</td>`).join("");
      return `<tr><td>${chip(s.stage)}${STAGES[s.stage]}</td>${figures}</tr>`;
    });
  $("panel").innerHTML = `
    <h2>How to read it</h2>
    <div class="key">${keys.join("")}</div>
    <p class="hint">Click a step to see why it was chosen, and a stream for its figures.</p>
    <table>
      <thead>
        <tr><th>stage</th><th class="n">steps</th><th class="n">rows</th><th class="n">over predicted</th></tr>
      </thead>
      <tbody>${stages.join("")}</tbody>
    </table>`;
}

$("panel").addEventListener("click", (event) => {
  const target = event.target.closest("[data-go], [data-close], [data-stream]");
  if (!target) return;
  event.preventDefault();
  if (target.dataset.go !== undefined) walkTo(Number(target.dataset.go));
  else if (target.dataset.close !== undefined) deselect();
  else {
    const stream = streams[target.dataset.stream];
    view.step = -1;
    view.stream = stream.index;
    panel();
    show(stream.begin, stream.end, stream);
  }
});

function deselect() {
  view.step = view.stream = -1;
  history.replaceState(null, "", location.pathname + location.search);
  panel();
  draw();
}

/** Select a step and bring it into sight. */
function walkTo(i) {
  if (!steps.count) return;
  pick(i);
  const x = xOf(steps.begin[view.step]);
  const wide = xOf(ranUntil(view.step)) - x;
  if (wide < 3) show(steps.begin[view.step] - 1e5, steps.begin[view.step] + 1.5e5);
  else if (x < 0 || x + wide > plot.width) pan(x + wide / 2 - plot.width / 2);
}

let missAt = -1;
function nextMiss(direction) {
  if (!misses.length) return;
  missAt = (missAt + direction + misses.length) % misses.length;
  const { stream, at, late } = misses[missAt];
  view.step = -1;
  view.stream = stream.index;
  panel();
  show(at - late - 4e5, at + 3e5, stream);
}
