/**
 * What leaves this loudspeaker, told to the server.
 *
 * The browser says which RTP timestamp R it pulled from its jitter buffer, and when (T).  The sound then waits in the output
 * device for D, which the browser also counts.  At page time t the speaker plays the sample whose RTP timestamp is
 *
 *     R + 48 * (t - T - D)          48 ticks a millisecond, the RTP clock of Opus (RFC 7587, section 4.1)
 *
 * The jitter buffer's delay is no part of it, because R is read behind that buffer.  The page sends the three numbers and
 * lets the server do the sum, for only the server knows what it put under each timestamp.
 */

const TICKS_PER_MS = 48;
const PACKET_MS = 20; // one Opus packet: R changes no faster
// How often to look.  Each look at R waits for another thread of the browser, and costs 0.08 ms.
const QUICK_TICK_MS = 20; // for the first packet, and for the one that ends a flush
const SPEECH_TICK_MS = 40; // sees a stall within two looks, and six packets in a quarter of a second
const IDLE_TICK_MS = 250;
const STATS_MS = 250;
const STRETCHING_STATS_MS = 100;
const STALE_MS = 60; // R has stopped moving when it is older than this
const WINDOW_MS = 1000; // the device delay is an average over this long
const GOOD_ROUND_TRIP_MS = 20; // bounds the clock's error to half of it, which is below what else is uncertain
const CLOCK_DRIFT = 1e-4; // of two machines' clocks; quartz is better, but warms up
const PING_MEMORY_MS = 300_000;
const BUSY_PING_MS = 1000; // while reports are frequent: they must not pile up on a slow line
const BEHIND_MS = 500;
const PULL_WINDOW_MS = 250; // longer would blur what happens when the buffer stretches time
const PULL_JUMP_MS = 40; // further apart than packets that play one after the other
const LEFT_OVER_MS = 4.5; // of earlier packets, when the jitter buffer takes one: between nothing and its block of 10 ms
const UNMUTE_LIMIT_MS = 2500; // no fault of ours may leave the listener deaf for longer

/** Signed distance from RTP timestamp `b` to `a`, right across the 32-bit wrap. */
export function rtpDistance(a, b) {
  return (a - b) | 0;
}

/** RTP timestamp `ticks` after `rtp`. */
export function rtpAfter(rtp, ticks) {
  return (rtp + Math.round(ticks)) >>> 0;
}

/** Page time as milliseconds since the Unix epoch, steady while the page lives. */
export function pageMs() {
  return performance.timeOrigin + performance.now();
}

/**
 * How long to wait before the next report.
 * @param {{isSpeaking: boolean, isStretching: boolean}} now `isStretching`: the browser conceals, adds or drops samples
 */
export function reportPeriodMs({ isSpeaking, isStretching }) {
  if (!isSpeaking) return 1000;
  return isStretching ? 100 : 250;
}

/**
 * How long to wait before the next ping: short at first, and while every answer so far was held up on its way, as happens
 * on a machine that is busy starting the call.
 */
export function pingPeriodMs(sent, bestRoundTripMs) {
  if (sent < 6) return 120;
  if (bestRoundTripMs <= GOOD_ROUND_TRIP_MS) return 5000;
  return sent < 40 ? 250 : 1000;
}

/** Server clock minus page clock, from the ping that bounds it best: a short way there and back, not too long ago. */
export class ClockOffset {
  #samples = [];
  #unanswered = []; // when each ping left that has not come back

  /** A ping leaves. */
  sent(atMs) {
    this.#unanswered.push(atMs);
  }

  /** True while a ping is away for much longer than pings need: what is sent now would only wait behind it. */
  isBehind(nowMs) {
    return this.isKnown && nowMs - (this.#unanswered[0] ?? nowMs) > this.roundTripMs + BEHIND_MS;
  }

  /** A ping left at `sentMs` (page clock), was answered at `serverMs` (server clock), and came back at `receivedMs`. */
  add(sentMs, serverMs, receivedMs) {
    this.#unanswered = this.#unanswered.filter((atMs) => atMs > sentMs);
    const kept = this.#samples.filter((sample) => receivedMs - sample.at < PING_MEMORY_MS);
    kept.push({
      at: receivedMs,
      roundTrip: receivedMs - sentMs,
      offset: serverMs - (sentMs + receivedMs) / 2,
    });
    this.#samples = kept;
  }

  get #best() {
    // Half the round trip, and what the clocks may have drifted apart since; the newest is as good as now.
    const error = ({ at, roundTrip }) => roundTrip / 2 - CLOCK_DRIFT * at;
    return this.#samples.reduce((best, sample) => (error(sample) < error(best) ? sample : best));
  }

  /** True once a ping has come back. */
  get isKnown() {
    return this.#samples.length > 0;
  }

  /** Milliseconds to add to page time to get server time; half the round trip bounds its error. */
  get offsetMs() {
    return this.#best.offset;
  }

  get roundTripMs() {
    return this.#best.roundTrip;
  }
}

/** The mean of `total / count` over the last second, for a pair of counters that only grow, from 0 on. */
export class WindowedMean {
  static #ORIGIN = Object.freeze({ atMs: -Infinity, total: 0, count: 0 });
  #points = [WindowedMean.#ORIGIN];

  add(atMs, total, count) {
    if (count < (this.#points.at(-1)?.count ?? 0)) this.#points = [WindowedMean.#ORIGIN]; // another device counts anew
    this.#points.push({ atMs, total, count });
    while (this.#points.length > 2 && atMs - this.#points[1].atMs >= WINDOW_MS) this.#points.shift();
  }

  /** Forget what was counted so far. */
  clear() {
    this.#points = [];
  }

  /** The mean, or null until the counters have moved. */
  get value() {
    const first = this.#points[0];
    const last = this.#points.at(-1);
    if (!first || last.count === first.count) return null;
    return (last.total - first.total) / (last.count - first.count);
  }
}

/**
 * When the newest packet began to play, told by all packets of the last quarter of a second.
 *
 * A browser's sound output asks for 10 ms at a time, yet not each 10 ms, so one packet's time is off by up to 14 ms; the mean
 * is within 3.  A packet is taken while up to 10 ms of those before it still wait, which is no counter's business.
 */
export class PullTimes {
  #pulls = []; // { rtp, atMs }, oldest first

  add(rtp, atMs) {
    const last = this.#pulls.at(-1);
    if (last?.rtp === rtp) return;
    if (last && Math.abs(atMs - last.atMs - rtpDistance(rtp, last.rtp) / TICKS_PER_MS) > PULL_JUMP_MS) this.#pulls = [];
    this.#pulls.push({ rtp, atMs });
    while (atMs - this.#pulls[0].atMs > PULL_WINDOW_MS) this.#pulls.shift();
  }

  /** Page time at which the newest packet began to leave the jitter buffer; null before the first. */
  get newestMs() {
    const newest = this.#pulls.at(-1);
    if (!newest) return null;
    const times = this.#pulls.map(({ rtp, atMs }) => atMs + rtpDistance(newest.rtp, rtp) / TICKS_PER_MS);
    return times.reduce((sum, ms) => sum + ms, 0) / times.length + LEFT_OVER_MS;
  }
}

/**
 * The playback of one call: reads the position, reports it, and silences the speaker when the server asks.
 *
 * The audible path is a plain audio element.  A detour through Web Audio would add a delay that no counter shows, and would
 * take the sound from the echo canceller.
 */
export class Playback {
  #audio;
  #receiver;
  #microphone;
  #send;
  #onChange;
  #signal;
  #timer = 0; // ticks while the page is visible
  #ticker; // a worker that ticks while it is hidden
  #pace = ""; // of which of them, in words that can be compared
  #countsDevice = null; // whether the browser counts the device's delay; null: not known yet
  #context = null; // asked for the device's delay where the browser does not count it
  #contextDelayMs = null; // what it said last
  #sinkId = ""; // of the output device; "": the system's choice

  #clock = new ClockOffset();
  #pingId = 0;
  #pingDueMs = 0;

  #seq = 0;
  #reportDueMs = 0;
  #source = null; // newest { rtp, atMs } pulled from the jitter buffer
  #pulls = new PullTimes();
  #isStalled = false;

  #statsDueMs = 0;
  #isReadingStats = false;
  #counters = { concealed: 0, inserted: 0, removed: 0, lost: 0 }; // since the call began
  #countersBefore = this.#counters; // what earlier receivers had counted
  #stretchedAtMs = -Infinity;
  #deviceDelay = new WindowedMean();
  #jitterDelay = new WindowedMean();
  #jitterTarget = new WindowedMean();

  #openStreams = new Set();
  #isVisible;
  #isSilenced = false; // by the listener
  #isFrozen = false;
  #flush = null; // { resumeRtp, sinceMs } while the server's flush keeps us quiet

  /**
   * @param {object} parts
   * @param {HTMLAudioElement} parts.audio the element that plays the call; it must stay attached, or nothing is pulled
   * @param {RTCRtpReceiver} parts.receiver
   * @param {RTCRtpSender | null} parts.microphone read for its level only
   * @param {boolean} parts.isVisible
   * @param {(message: object) => void} parts.send
   * @param {(change: object) => void} parts.onChange gets { isFirst } when the first packet of a receiver is played, and
   *   { agentLevel, microphoneLevel, packets } now and then
   * @param {AbortSignal} parts.signal ends everything started here
   */
  constructor({ audio, receiver, microphone, isVisible, send, onChange, signal }) {
    this.#audio = audio;
    this.#isVisible = isVisible;
    this.#send = send;
    this.#onChange = onChange;
    this.#signal = signal;

    const reportNow = () => this.#report(pageMs());
    for (const type of ["volumechange", "pause", "playing"]) audio.addEventListener(type, reportNow, { signal });
    navigator.mediaDevices?.addEventListener("devicechange", () => this.#forgetDevice(), { signal });

    this.#ticker = new Worker(new URL("ticker.js", import.meta.url));
    this.#ticker.onmessage = () => this.#tick();
    signal.addEventListener("abort", () => {
      clearInterval(this.#timer);
      this.#ticker.terminate();
      this.#context?.close();
      this.#audio.muted = false;
    });
    this.attach(receiver, microphone);
  }

  /**
   * The call goes on over another peer connection: from now on the sound comes from `receiver`.  Call it before the new
   * offer leaves, so that a position which is reported later is one of the new connection.  Streams, mute, the clocks'
   * offset and all counters go on; there is no position until the first packet is played.
   * @param {RTCRtpReceiver} receiver
   * @param {RTCRtpSender | null} microphone
   */
  attach(receiver, microphone) {
    this.#receiver = receiver;
    this.#microphone = microphone;
    this.#source = null;
    this.#pulls = new PullTimes();
    this.#isStalled = false;
    this.#jitterDelay = new WindowedMean();
    this.#jitterTarget = new WindowedMean();
    this.#countersBefore = this.#counters;
    this.#statsDueMs = 0;
    this.#setPace();
  }

  /** Speech of `stream` is on its way: look often. */
  speechBegins(stream) {
    this.#openStreams.add(stream);
    this.#reportDueMs = 0;
    this.#setPace();
  }

  /** `stream` has been heard or cut. */
  speechEnds(stream) {
    this.#openStreams.delete(stream);
    this.#setPace();
  }

  /** The listener turns the sound off or on; the server learns at once that nothing is heard. */
  setSilenced(isSilenced) {
    this.#isSilenced = isSilenced;
    this.#applyMute();
  }

  /** The page comes to the front or goes behind: say where we are, and wake what the system put to sleep. */
  setVisible(isVisible) {
    this.#isVisible = isVisible;
    this.#setPace();
    if (isVisible) this.#wake();
    this.#report(pageMs());
  }

  /** The browser is about to stop the page's scripts and sound, or has let them go on: the last word, and the first. */
  setFrozen(isFrozen) {
    this.#isFrozen = isFrozen;
    this.#report(pageMs());
  }

  /** The server answered a ping. */
  pong({ t_ms: sentMs, server_ms: serverMs }) {
    this.#clock.add(sentMs, serverMs, pageMs());
  }

  /** Silence now; sound again from RTP timestamp `resumeRtp` on. */
  flush(resumeRtp) {
    const nowMs = pageMs();
    this.#poll(nowMs);
    this.#flush = { resumeRtp, sinceMs: nowMs };
    this.#applyMute();
    const rtp = this.#pulledRtp(nowMs);
    if (rtp !== null) this.#send({ type: "flushed", rtp, t_ms: nowMs });
    this.#setPace();
  }

  /** RTP timestamp that leaves the jitter buffer now; null before the first packet of a receiver. */
  get pulledRtp() {
    return this.#pulledRtp(pageMs());
  }

  /** Where the numbers of the page's own panel come from. */
  get delays() {
    return {
      deviceMs: this.#deviceDelayMs().ms,
      jitterMs: seconds(this.#jitterDelay.value),
      roundTripMs: this.#clock.isKnown ? this.#clock.roundTripMs : null,
    };
  }

  get #isSpeaking() {
    return this.#openStreams.size > 0;
  }

  #setPace() {
    const isQuick = this.#flush !== null || this.#source === null;
    const periodMs = isQuick ? QUICK_TICK_MS : this.#isSpeaking ? SPEECH_TICK_MS : IDLE_TICK_MS;
    const pace = `${periodMs} ms, ${this.#isVisible ? "page" : "worker"}`;
    if (pace === this.#pace) return;
    this.#pace = pace;
    // A tick of the worker costs twice as much as one of the page, whose own timers run once a second when it is hidden.
    clearInterval(this.#timer);
    if (this.#isVisible) this.#timer = setInterval(() => this.#tick(), periodMs);
    this.#ticker.postMessage(this.#isVisible ? 0 : periodMs);
  }

  #tick() {
    const nowMs = pageMs();
    this.#poll(nowMs);
    if (this.#flush) this.#checkFlush(nowMs);
    if (nowMs >= this.#pingDueMs) this.#ping(nowMs);
    if ((this.#audio.sinkId ?? "") !== this.#sinkId) this.#forgetDevice();
    if (nowMs >= this.#statsDueMs) this.#readStats(nowMs);
    if (nowMs >= this.#reportDueMs && !this.#clock.isBehind(nowMs)) this.#report(nowMs);
  }

  #poll(nowMs) {
    // The entry that ticked last is the one that plays.
    const newest = this.#receiver
      .getSynchronizationSources()
      .reduce((best, entry) => (!best || entry.timestamp > best.timestamp ? entry : best), null);
    if (!newest) return;
    const isFirst = this.#source === null;
    this.#source = { rtp: newest.rtpTimestamp, atMs: toPageMs(newest.timestamp, nowMs) };
    this.#pulls.add(this.#source.rtp, this.#source.atMs);
    const isStalled = nowMs - this.#source.atMs > STALE_MS;
    if (isStalled !== this.#isStalled) {
      this.#isStalled = isStalled;
      // What is missing is made up, and what comes late is squeezed in afterwards.
      this.#stretchedAtMs = nowMs;
      this.#statsDueMs = 0;
      if (this.#isSpeaking) this.#reportDueMs = 0;
    }
    if (isFirst) this.#reportDueMs = 0;
    if (isFirst) {
      this.#setPace();
      this.#statsDueMs = 0;
      this.#onChange({ isFirst: true });
    }
  }

  /** The browser conceals, adds or drops samples, or did so a moment ago. */
  #isStretching(nowMs) {
    return nowMs - this.#stretchedAtMs < 2 * STRETCHING_STATS_MS;
  }

  /** RTP timestamp leaving the jitter buffer at `nowMs`, at most one packet past the last one seen. */
  #pulledRtp(nowMs) {
    if (!this.#source) return null;
    const ageMs = Math.min(Math.max(nowMs - this.#source.atMs, 0), PACKET_MS);
    return rtpAfter(this.#source.rtp, ageMs * TICKS_PER_MS);
  }

  #checkFlush(nowMs) {
    const pulled = this.#pulledRtp(nowMs);
    const hasPassed = pulled !== null && rtpDistance(pulled, this.#flush.resumeRtp) >= 0;
    if (!hasPassed && nowMs - this.#flush.sinceMs < UNMUTE_LIMIT_MS) return;
    this.#flush = null;
    this.#applyMute();
    this.#setPace();
  }

  /** The element stays attached: a detached one stops the pull, and two stale seconds play when it comes back. */
  #applyMute() {
    this.#audio.muted = this.#isSilenced || this.#flush !== null;
    this.#report(pageMs());
  }

  #ping(nowMs) {
    this.#pingId += 1;
    const periodMs = pingPeriodMs(this.#pingId, this.#clock.isKnown ? this.#clock.roundTripMs : Infinity);
    this.#pingDueMs = nowMs + (this.#isSpeaking ? Math.min(periodMs, BUSY_PING_MS) : periodMs);
    this.#clock.sent(nowMs);
    this.#send({ type: "ping", id: this.#pingId, t_ms: nowMs });
  }

  async #readStats(nowMs) {
    this.#statsDueMs = nowMs + (this.#isSpeaking && this.#isStretching(nowMs) ? STRETCHING_STATS_MS : STATS_MS);
    if (this.#isReadingStats) return;
    this.#isReadingStats = true;
    const receiver = this.#receiver;
    try {
      const [received, sent] = await Promise.all([receiver.getStats(), this.#microphone?.getStats()]);
      if (this.#signal.aborted || receiver !== this.#receiver) return;
      let agentLevel = 0;
      let packets = 0;
      let microphoneLevel = 0;
      let countsDevice = false;
      let samples = 0;
      for (const entry of received.values()) {
        if (entry.type === "inbound-rtp" && entry.kind === "audio") {
          this.#readInbound(entry, nowMs);
          agentLevel = entry.audioLevel ?? 0;
          packets = entry.packetsReceived ?? 0;
          samples = entry.totalSamplesReceived ?? 0;
        } else if (entry.type === "media-playout") {
          countsDevice = true;
          this.#deviceDelay.add(nowMs, entry.totalPlayoutDelay, entry.totalSamplesCount);
        }
      }
      for (const entry of sent?.values() ?? []) {
        if (entry.type === "media-source") microphoneLevel = entry.audioLevel ?? 0;
      }
      // A browser that counts the device begins to with the first sample it plays, not before.
      if (samples > 0) this.#countsDevice = countsDevice;
      this.#onChange({ agentLevel: this.#audio.muted ? 0 : agentLevel, microphoneLevel, packets });
    } catch (error) {
      // A connection that closes under us has no statistics any more; the call ends through its own events.
      if (!this.#signal.aborted && error.name !== "InvalidStateError") throw error;
    } finally {
      this.#isReadingStats = false;
    }
  }

  #readInbound(entry, nowMs) {
    this.#jitterDelay.add(nowMs, entry.jitterBufferDelay, entry.jitterBufferEmittedCount);
    this.#jitterTarget.add(nowMs, entry.jitterBufferTargetDelay ?? 0, entry.jitterBufferEmittedCount);
    const before = this.#countersBefore;
    const counters = {
      concealed: before.concealed + (entry.concealedSamples ?? 0),
      inserted: before.inserted + (entry.insertedSamplesForDeceleration ?? 0),
      removed: before.removed + (entry.removedSamplesForAcceleration ?? 0),
      lost: before.lost + Math.max(entry.packetsLost ?? 0, 0), // duplicates can make it negative (RFC 3550, section 6.4.1)
    };
    const hasMoved = ["concealed", "inserted", "removed"].some((name) => counters[name] !== this.#counters[name]);
    this.#counters = counters;
    if (!hasMoved) return;
    const wasStretching = this.#isStretching(nowMs);
    this.#stretchedAtMs = nowMs;
    if (this.#isSpeaking && !wasStretching) this.#reportDueMs = nowMs;
  }

  /** The output device's delay and who said so. */
  #deviceDelayMs() {
    const measured = seconds(this.#deviceDelay.value);
    if (measured !== null) return { ms: measured, source: "playout" };
    if (this.#countsDevice !== false) return { ms: 0, source: "none" };
    // Firefox counts nothing, but any audio context knows its device.  It makes no sound and is connected to nothing.
    this.#context ??= typeof AudioContext === "function" ? new AudioContext({ latencyHint: "interactive" }) : null;
    const latency = (this.#context?.outputLatency ?? 0) + (this.#context?.baseLatency ?? 0);
    // A suspended context says 0 or repeats itself; a real device never says 0.  What it said before still holds.
    if (this.#context?.state === "running" && latency > 0) this.#contextDelayMs = latency * 1000;
    if (this.#contextDelayMs === null) return { ms: 0, source: "none" };
    return { ms: this.#contextDelayMs, source: "context" };
  }

  /** Another output device: its delay is not known yet. */
  #forgetDevice() {
    this.#sinkId = this.#audio.sinkId ?? "";
    this.#deviceDelay.clear();
    this.#contextDelayMs = null;
    this.#wake();
    this.#report(pageMs());
  }

  /** The system suspends audio contexts, for a phone call or behind the lock screen; some stay so until asked. */
  #wake() {
    // Refused without a user's gesture, or once it is closed: then there is no delay to tell, and the call goes on.
    if (this.#context !== null && this.#context.state !== "running") this.#context.resume().catch(() => {});
  }

  #report(nowMs) {
    this.#reportDueMs =
      nowMs + reportPeriodMs({ isSpeaking: this.#isSpeaking, isStretching: this.#isStretching(nowMs) });
    if (!this.#clock.isKnown) {
      this.#reportDueMs = nowMs + QUICK_TICK_MS; // without the clock's offset a position means nothing
      return;
    }
    const device = this.#source ? this.#deviceDelayMs() : { ms: 0, source: "none" };
    this.#seq += 1;
    this.#send({
      type: "report",
      seq: this.#seq,
      t_ms: nowMs,
      rtp: this.#source?.rtp ?? null,
      rtp_t_ms: this.#pulls.newestMs,
      device_delay_ms: device.ms,
      device_delay_source: device.source,
      age_ms: this.#source ? Math.max(nowMs - this.#source.atMs, 0) : 0,
      jitter_buffer_ms: seconds(this.#jitterDelay.value) ?? 0,
      jitter_target_ms: seconds(this.#jitterTarget.value) ?? 0,
      ...this.#counters,
      muted: this.#audio.muted || !this.#receiver.track.enabled,
      paused: this.#audio.paused || this.#isFrozen,
      volume: this.#audio.volume,
      visible: this.#isVisible,
      offset_ms: this.#clock.offsetMs,
    });
  }
}

/** Seconds to milliseconds, null stays null. */
function seconds(value) {
  return value === null ? null : value * 1000;
}

/** Some browsers stamp sources on the Unix clock, older Safari on the page's own: tell them apart by size. */
function toPageMs(timestampMs, nowMs) {
  const isUnix = Math.abs(timestampMs - nowMs) < 3_600_000;
  return isUnix ? timestampMs : performance.timeOrigin + timestampMs;
}
