// The document: what is shown, what is pressed.  Nothing else of the page touches it.

import { Call, STEPS } from "./call.js";
import { Plots } from "./plots.js";

const element = (id) => document.getElementById(id);
const STATE_WORDS = { connecting: "Connecting", listening: "Listening", thinking: "Thinking", speaking: "Speaking", ended: "Ended" };
// Who says where the ear is, in the server's word and in ours.
const SOURCES = {
  playout: "measured",
  context: "measured, device as the browser says",
  none: "measured, device guessed",
  held: "last measurement, held",
  rtcp: "estimated from network reports",
  estimate: "estimated",
};
const lessMotion = matchMedia("(prefers-reduced-motion: reduce)");

const log = element("log");
const plots = new Plots(
  {
    lead: element("plot-lead"),
    slack: element("plot-slack"),
    jitter: element("plot-jitter"),
    gaps: element("plot-gaps"),
  },
  () => lessMotion.matches,
);

let call = null;
let speeches = new Map(); // stream -> AgentTurn
let userTurn = null; // the turn whose words are still being recognised
let isConnected = false;
let isPathUp = true; // false while sound packets do not get through

// ---- the transcript ------------------------------------------------------------------------------------------------

/** False while the reader looks at something further up. */
let isFollowing = true;

/** Bring `what` into sight, its end if it fits and its beginning if it does not, unless the reader is elsewhere. */
function follow(what) {
  if (!isFollowing) return;
  const view = log.getBoundingClientRect();
  const box = what.getBoundingClientRect();
  const margin = 28; // a line of text
  if (box.bottom > view.bottom - margin) {
    log.scrollTop += Math.min(box.bottom - view.bottom + margin, box.top - view.top - margin);
  } else if (box.top < view.top) {
    log.scrollTop -= view.top - box.top + margin;
  }
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
for (const type of ["wheel", "touchmove", "keydown"]) {
  log.addEventListener(type, () => requestAnimationFrame(() => (isFollowing = isAtEnd())), { passive: true });
}

function addTurn(speaker, label) {
  const turn = document.createElement("article");
  turn.className = `turn ${speaker}`;
  const name = document.createElement("h3");
  name.textContent = label;
  const words = document.createElement("p");
  turn.append(name, words);
  log.append(turn);
  return words;
}

/** One utterance of the agent: dim until heard, word by word. */
class AgentTurn {
  #line = addTurn("agent", "Agent");
  #words = []; // { span, endChars }
  #chars = 0; // of the whole text so far
  #heardCount = 0;

  append(text) {
    for (const piece of text.match(/\S+|\s+/g) ?? []) {
      this.#chars += piece.length;
      if (piece.trim() === "") {
        this.#line.append(piece);
        continue;
      }
      // A word cut by two messages becomes two spans, which nobody sees.
      const span = document.createElement("span");
      span.textContent = piece;
      this.#words.push({ span, endChars: this.#chars });
      this.#line.append(span);
    }
    if (this.#heardCount === 0) follow(this.#line.parentElement); // later the playhead leads
  }

  /** `chars` of the text have been heard. */
  hear(chars) {
    const before = this.#heardCount;
    while (this.#heardCount < this.#words.length && this.#words[this.#heardCount].endChars <= chars) {
      this.#words[this.#heardCount].span.classList.add("heard");
      this.#heardCount += 1;
    }
    if (this.#heardCount === before) return;
    this.#words[before - 1]?.span.classList.remove("now");
    const { span } = this.#words[this.#heardCount - 1];
    span.classList.add("now");
    follow(span);
  }

  end(chars, isInterrupted) {
    this.hear(chars);
    this.leave();
    if (!isInterrupted) return;
    const mark = document.createElement("span");
    mark.className = "cut";
    mark.textContent = "you interrupted here";
    const unheard = document.createElement("del");
    const first = this.#words[this.#heardCount]?.span ?? null;
    this.#line.insertBefore(mark, first);
    mark.after(" ", unheard);
    while (unheard.nextSibling) unheard.append(unheard.nextSibling);
  }

  /** The playhead is here no more. */
  leave() {
    this.#words[this.#heardCount - 1]?.span.classList.remove("now");
  }
}

function showUser({ text, final: isFinal }) {
  userTurn ??= addTurn("user", "You");
  userTurn.textContent = text;
  userTurn.parentElement.classList.toggle("unsure", !isFinal);
  follow(userTurn.parentElement);
  if (isFinal && text === "") userTurn.parentElement.remove(); // a noise that turned out to be no words
  if (isFinal) userTurn = null;
}

// ---- the connection ------------------------------------------------------------------------------------------------

function showSteps() {
  element("steps").hidden = false;
  element("steps").replaceChildren(
    ...Object.entries(STEPS).map(([step, name]) => {
      const item = document.createElement("li");
      item.dataset.step = step;
      item.textContent = name;
      return item;
    }),
  );
}

function markStep(step, state) {
  const item = element("steps").querySelector(`[data-step="${step}"]`);
  item.dataset.state = state;
  item.setAttribute("aria-label", `${STEPS[step]}: ${state}`);
}

/**
 * A card that says what happened and what to do.
 * @param {{step?: string, message: string, fix?: string}} about
 * @param {{name: string, press: () => void} | null} action
 */
function notify({ step, message, fix }, action = null) {
  const card = document.createElement("section");
  card.className = "notice";
  if (step) {
    card.dataset.step = step;
    card.append(paragraph("where", STEPS[step]));
  }
  card.append(paragraph("what", message));
  if (fix) card.append(paragraph("fix", fix));
  const close = document.createElement("button");
  close.type = "button";
  close.className = "close";
  close.setAttribute("aria-label", "Dismiss");
  close.textContent = "×";
  close.addEventListener("click", () => card.remove());
  card.append(close);
  if (action) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "primary small";
    button.textContent = action.name;
    button.addEventListener("click", () => {
      card.remove();
      action.press();
    });
    card.append(button);
  }
  // The same fault twice is one card.
  for (const old of element("notices").children) if (old.textContent === card.textContent) old.remove();
  element("notices").append(card);
}

function paragraph(className, text) {
  const line = document.createElement("p");
  line.className = className;
  line.textContent = text;
  return line;
}

function setState(state) {
  element("state").dataset.state = state;
  showState();
  element("interrupt").disabled = state !== "speaking" && state !== "thinking";
  plots.setSpeaking(state === "speaking");
}

function setPath(isUp) {
  isPathUp = isUp;
  element("state").dataset.path = isUp ? "up" : "down";
  showState();
}

function showState() {
  const { state } = element("state").dataset;
  let word = STATE_WORDS[state];
  if (state === "listening" && call && !call.hasMicrophone) word = "Your turn";
  else if (state === "listening" && isPressed("microphone")) word = "Microphone off";
  else if (state === "speaking" && isPressed("sound")) word = "Sound off"; // what nobody hears is not said: the agent waits
  element("state-word").textContent = isPathUp || state === "ended" ? word : "Reconnecting…";
}

/** @param {boolean} wantsMicrophone */
function start(wantsMicrophone) {
  call?.end();
  document.body.dataset.view = "call";
  log.replaceChildren();
  element("notices").replaceChildren();
  element("again").hidden = true;
  speeches = new Map();
  userTurn = null;
  isFollowing = true;
  isConnected = false;
  for (const id of ["first-sound", "stop-time", "path", "gap-count", "position"]) element(id).textContent = "–";
  showSteps();
  pressed("microphone", false);
  pressed("sound", false);
  element("microphone").disabled = true;
  element("text").disabled = true;

  const address = new URL("call", location.href);
  address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  if (!element("voices").hidden) address.searchParams.set("voice", element("voice-choice").value);
  const mine = new Call({
    url: address.href,
    audio: element("audio"),
    wantsMicrophone,
    isVisible: document.visibilityState === "visible",
    on: {
      step: markStep,
      notice: (error) =>
        notify(error, error.step === "microphone" && isSecureContext ? { name: "Start again", press: () => start(true) } : null),
      blocked: () =>
        notify(
          { step: "sound", message: "The browser keeps this page silent until you press a button." },
          { name: "Play the sound", press: () => mine.unblock() },
        ),
      path: setPath,
      ended: (error) => ended(mine, error),
      level: showLevels,
      hello: (message) => showHello(message, wantsMicrophone),
      speech({ stream, text }) {
        if (!speeches.has(stream)) speeches.set(stream, new AgentTurn());
        speeches.get(stream).append(text);
      },
      heard: ({ stream, chars }) => speeches.get(stream)?.hear(chars),
      speechEnd({ stream, chars, interrupted }) {
        speeches.get(stream)?.end(chars, interrupted);
        speeches.delete(stream);
      },
      user: showUser,
      state: ({ state }) => setState(state),
      stats: showStats,
    },
  });
  call = mine;
  setPath(true);
  setState("connecting");
  plots.start();
  mine.start().then(() => {
    if (call !== mine) return;
    isConnected = true;
    element("steps").hidden = true;
    element("text").disabled = false;
    element("microphone").disabled = !mine.hasMicrophone;
    if (element("state").dataset.state === "connecting") setState("listening");
    if (!mine.hasMicrophone) element("text").focus();
  });
}

function ended(which, error) {
  if (which !== call) return;
  call = null;
  isConnected = false;
  for (const turn of speeches.values()) turn.leave();
  plots.setSpeaking(false);
  plots.draw();
  plots.stop();
  setState("ended");
  showWay({ lead: null, network: null, jitter: null, device: null });
  element("again").append(element("voices"));
  document.body.dataset.view = "ended";
  element("again").hidden = false;
  element("restart").focus();
  if (!error) return;
  if (error.step && element("steps").hidden === false) markStep(error.step, "failed");
  notify(error);
}

function showHello({ listens, listen_fix: fix, model, voice }, wantsMicrophone) {
  element("voice").hidden = false;
  element("voice").textContent = voice && voice !== model ? `${model} · ${voice}` : model;
  if (!listens && wantsMicrophone) {
    notify({ step: "microphone", message: "This server does not understand speech, so please type.", fix });
  }
}

// ---- the numbers ---------------------------------------------------------------------------------------------------

const ms = (value) => (value === null || value === undefined ? "–" : `${Math.round(value)} ms`.replace("-", "−"));

function showStats(stats) {
  const { lead_ms: lead, slack_ms: slack, jitter_ms: jitter, gaps, path_ms: path, source, error_ms: error } = stats;
  const delays = call?.playback?.delays ?? { deviceMs: null, jitterMs: null };
  const jitterMs = jitter ?? delays.jitterMs;
  plots.push({ lead, slack, jitter: jitterMs, gaps });

  const firstSound = stats.first_sound_ms;
  element("first-sound").textContent = firstSound >= 1000 ? `${(firstSound / 1000).toFixed(2)} s` : ms(firstSound);
  element("stop-time").textContent = ms(stats.stop_ms);
  element("path").textContent = ms(path);
  element("gap-count").textContent = `${gaps}`;
  element("position").classList.toggle("unsure", ["held", "rtcp", "estimate"].includes(source));
  element("position").textContent = path === null ? "–" : `${SOURCES[source] ?? source}${error === null ? "" : `, ± ${ms(error)}`}`;
  element("lead-value").textContent = ms(lead);
  element("slack-value").textContent = ms(slack);
  element("jitter-value").textContent = ms(jitterMs);
  element("gaps-value").textContent = gaps === 1 ? "1 in this call" : `${gaps} in this call`;

  const network = path === null ? null : Math.max(path - (jitterMs ?? 0) - (delays.deviceMs ?? 0), 0);
  showWay({ lead, network, jitter: path === null ? null : jitterMs, device: path === null ? null : delays.deviceMs });
}

/** Where the speech between server and ear is, as lengths of one bar. */
function showWay(parts) {
  for (const [name, value] of Object.entries(parts)) {
    element("way").querySelector(`span[data-part="${name}"]`).style.flexGrow = `${Math.max(value ?? 0, 0)}`;
    element("way").querySelector(`li[data-part="${name}"] b`).textContent = ms(value);
  }
  element("way").setAttribute(
    "aria-label",
    `Ready and unsent ${ms(parts.lead)}, network ${ms(parts.network)}, jitter buffer ${ms(parts.jitter)}, sound device ${ms(parts.device)}`,
  );
}

function showLevels({ agentLevel, microphoneLevel }) {
  // The ear hears in ratios: the square root spreads quiet speech over more of the bar.
  element("state").style.setProperty("--level", Math.sqrt(agentLevel).toFixed(3));
  element("microphone").style.setProperty("--level", Math.sqrt(microphoneLevel).toFixed(3));
}

// ---- the first sight: the sentence under the title lights up as an answer will ---------------------------------------

element("lede").replaceChildren(
  ...element("lede")
    .textContent.trim()
    .split(/\s+/)
    .flatMap((word, index) => {
      const span = document.createElement("span");
      span.textContent = word;
      span.style.setProperty("--index", index);
      return [span, " "];
    }),
);

/** Offer the voices of the server, where it leaves the choice to its pages. */
async function offerVoices() {
  const answer = await fetch(new URL("health", location.href));
  const { page_voices: voices = [] } = await answer.json();
  element("voice-choice").replaceChildren(...voices.map((voice) => new Option(voice)));
  element("voices").hidden = voices.length < 2;
}

offerVoices().catch(() => {}); // a server that is away is named when the call starts

// ---- what is pressed -----------------------------------------------------------------------------------------------

const isPressed = (id) => element(id).getAttribute("aria-pressed") === "true";
const pressed = (id, value) => element(id).setAttribute("aria-pressed", `${value}`);

function toggleMicrophone() {
  if (!isConnected || !call.hasMicrophone) return;
  pressed("microphone", !isPressed("microphone"));
  call.setMicrophoneMuted(isPressed("microphone"));
  showState();
}

function toggleSound() {
  if (!isConnected) return;
  pressed("sound", !isPressed("sound"));
  call.playback.setSilenced(isPressed("sound"));
  showState();
}

function interrupt() {
  if (isConnected && !element("interrupt").disabled) call.interrupt();
}

element("start").addEventListener("click", () => start(true));
element("restart").addEventListener("click", () => start(true));
element("start-typing").addEventListener("click", () => start(false));
element("restart-typing").addEventListener("click", () => start(false));
element("end").addEventListener("click", () => call?.end());
element("microphone").addEventListener("click", toggleMicrophone);
element("sound").addEventListener("click", toggleSound);
element("interrupt").addEventListener("click", interrupt);

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trim();
  if (!isConnected || text === "") return;
  call.sendText(text);
  element("text").value = "";
  isFollowing = true;
});

// Escape works everywhere; letters only where nobody is typing, and Space not on a button, which it already presses.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const isTyping = event.target instanceof HTMLInputElement;
  const isOnControl = event.target.closest?.("button, summary, a, input, select") !== null;
  if (event.key === "Escape") interrupt();
  else if (event.key === " " && !isOnControl) {
    event.preventDefault();
    if (call === null) start(true);
    else toggleMicrophone();
  } else if (event.key.toLowerCase() === "s" && !isTyping) toggleSound();
  else if (event.key === "/" && !isTyping) {
    event.preventDefault();
    element("text").focus();
  }
});

// A headset's button, a phone call, or the system may pause the sound; the agent waits, and so a person must know.
element("audio").addEventListener("pause", () => {
  if (!isConnected || !isPathUp || element("audio").ended) return; // the sound of a lost connection ends
  notify(
    { step: "sound", message: "The sound is paused, so the agent waits." },
    { name: "Play the sound", press: () => call?.unblock() },
  );
});
element("audio").addEventListener("playing", () => {
  for (const card of element("notices").querySelectorAll('[data-step="sound"]')) card.remove();
});

document.addEventListener("freeze", () => call?.playback?.setFrozen(true));
document.addEventListener("resume", () => {
  call?.playback?.setFrozen(false);
  call?.unblock(); // a frozen page's sound was stopped
});
document.addEventListener("visibilitychange", () => call?.setVisible(document.visibilityState === "visible"));
// A page that is left says goodbye; a reload otherwise looks like a network fault to the server.
addEventListener("pagehide", () => call?.end());
