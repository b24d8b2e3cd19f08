/**
 * One call: a WebSocket, a peer connection and one AbortController.  Aborting it ends everything the call started.
 *
 * The socket carries the offer, the text and the playback reports; the peer connection carries sound only.  Either may die
 * with the network it was made on, and is then replaced by another of the same call: the server waits for us, and its
 * speech goes on where we had heard it.
 */

import { Playback } from "./playback.js";

const SERVER_LIMIT_MS = 6000;
const ANSWER_LIMIT_MS = 8000;
const NETWORK_LIMIT_MS = 8000; // what is wrong is named within ten seconds of the click
const SOUND_LIMIT_MS = 6000;
const COMPLAINT_MS = 2000;
const LOOK_MS = 250; // a hidden page is let look once a second
const SLEEP_MS = 2000;
const SILENT_PATH_MS = 1500; // the server sends a packet each 20 ms, silence too
const SILENT_SOCKET_MS = 2000; // and figures five times a second
const RETURN_LIMIT_MS = 20_000; // the server waits half of that for the next sign of us
const RETRY_PATH_MS = 4000;
const RETRY_PAUSE_MS = 400;
const KEPT_MESSAGES = 50;
const SERVER_FIX = "Is it still running? Start it again, then press “Talk again”.";
const NETWORK_CODES = [1006, 1011]; // closed by nobody, or by a server that got no answer from us

/** What has to work before sound is heard, in this order. */
export const STEPS = Object.freeze({
  page: "Page",
  server: "Server",
  microphone: "Microphone",
  network: "Network path",
  sound: "Sound",
});

/** A step that failed, in words for the person in front of the page: what happened, and what to do about it. */
export class CallError extends Error {
  constructor(step, message, fix, options) {
    super(message, options);
    this.name = "CallError";
    this.step = step;
    this.fix = fix;
  }
}

export class Call {
  /** The call's playback; null until the peer connection exists. */
  playback = null;

  #url;
  #audio;
  #wantsMicrophone;
  #isVisible;
  #on;
  #ending = new AbortController();
  #socket = null;
  #peer = null;
  #transceiver = null;
  #microphone = null; // the MediaStream
  #hasHello = false;
  #complaint = null; // the server's last, and when it came
  #complainedAtMs = -Infinity;
  #isUp = false; // sound packets have got through
  #answer = withResolvers();
  #hello = withResolvers();
  #firstSample = withResolvers();
  #token = null; // with which the call is found again
  #iceServers = [];
  #offerId = 0;
  #heardRtp = null; // what an earlier connection let us hear last
  #receivedCount = 0; // messages of the server
  #sentCount = 0; // messages to it; and of those that matter, the last ones with their numbers
  #sentMessages = [];
  #socketWordMs = 0; // when the server last said something
  #packets = 0; // of sound, and when one came last
  #packetMs = Infinity;
  #lookedMs = 0;
  #needs = { socket: false, peer: false }; // what has to be replaced
  #isReturning = false;

  /**
   * @param {object} parts
   * @param {string} parts.url of the WebSocket
   * @param {HTMLAudioElement} parts.audio plays the call
   * @param {boolean} parts.wantsMicrophone false: the user types
   * @param {boolean} parts.isVisible
   * @param {object} parts.on what to tell the page, all optional:
   *   step(step, "doing" | "done" | "skipped"), notice(CallError), ended(CallError | null), level(levels), blocked(),
   *   path(isUp): packets stop getting through, or do again,
   *   and one for each message of the server: hello, speech, heard, speechEnd, user, state, stats
   */
  constructor({ url, audio, wantsMicrophone, isVisible, on }) {
    this.#url = url;
    this.#audio = audio;
    this.#wantsMicrophone = wantsMicrophone;
    this.#isVisible = isVisible;
    this.#on = on;
    // Whoever waits is told through `ended`; a promise nobody waits for any more is no fault.
    for (const { promise } of [this.#answer, this.#hello, this.#firstSample]) promise.catch(() => {});
  }

  get hasMicrophone() {
    return this.#microphone !== null;
  }

  /** Open the call.  Resolves once sound can be heard; every failure arrives at `on.ended` with the step it happened in. */
  async start() {
    try {
      this.#step("page", "done");
      // The permission question may stay open for a while, so the socket opens meanwhile.
      await Promise.all([this.#openSocket(), this.#openMicrophone()]);
      await this.#openPeer();
      await this.#openSound();
      this.#watch();
    } catch (error) {
      if (!this.#ending.signal.aborted) this.#end(toCallError(error));
    }
  }

  sendText(text) {
    this.#send({ type: "text", text });
  }

  interrupt() {
    this.#send({ type: "interrupt" });
  }

  /** Keep the microphone's track, send silence. */
  setMicrophoneMuted(isMuted) {
    for (const track of this.#microphone?.getAudioTracks() ?? []) track.enabled = !isMuted;
  }

  setVisible(isVisible) {
    this.#isVisible = isVisible;
    this.playback?.setVisible(isVisible);
  }

  /** Try to play again; call it from a click, which lifts the browser's ban on sound nobody asked for. */
  async unblock() {
    await this.#play();
  }

  /** End the call; may be called twice. */
  end() {
    this.#end(null);
  }

  #end(error) {
    if (this.#ending.signal.aborted) return;
    this.#send({ type: "bye" });
    this.#ending.abort();
    this.#audio.srcObject = null;
    for (const track of this.#microphone?.getTracks() ?? []) track.stop();
    this.#peer?.close();
    this.#socket?.close(1000);
    for (const waiting of [this.#answer, this.#hello, this.#firstSample]) waiting.reject(new Error("the call ended"));
    this.#on.ended?.(error);
  }

  #step(step, state) {
    this.#on.step?.(step, state);
  }

  #send(message) {
    const isOpen = this.#socket?.readyState === WebSocket.OPEN;
    if (isOpen) {
      this.#sentCount += 1;
      this.#socket.send(JSON.stringify(message));
    }
    if (message.type !== "text" && message.type !== "interrupt") return;
    this.#sentMessages.push({ number: isOpen ? this.#sentCount : Infinity, message });
    if (this.#sentMessages.length > KEPT_MESSAGES) this.#sentMessages.shift();
  }

  async #openSocket() {
    this.#step("server", "doing");
    this.#connectSocket(this.#url);
    const hello = await within(
      SERVER_LIMIT_MS,
      this.#hello.promise,
      new CallError("server", "The server accepted the connection but did not say hello.", SERVER_FIX),
    );
    this.#hasHello = true;
    this.#step("server", "done");
    this.#on.hello?.(hello);
  }

  #connectSocket(url) {
    const { signal } = this.#ending;
    const socket = new WebSocket(url);
    this.#socket = socket;
    socket.addEventListener("message", ({ data }) => socket === this.#socket && this.#receive(JSON.parse(data)), { signal });
    socket.addEventListener(
      "close",
      ({ code, reason }) => {
        if (socket !== this.#socket) return undefined; // replaced
        const where = new URL(this.#url).host;
        // A server that gives up says why, then closes; what it complained about long before has nothing to do with it.
        const hasComplained = performance.now() - this.#complainedAtMs < COMPLAINT_MS;
        if (hasComplained) return this.#end(this.#complaint);
        if (this.#isUp && NETWORK_CODES.includes(code)) {
          this.#hello.reject(new CallError("server", `The connection to the server at ${where} was lost.`, SERVER_FIX));
          return this.#goBack("socket");
        }
        if (code === 1000 && this.#isUp) return this.#end(null); // goodbye
        if (code === 1000 && this.#peer) return this.#end(networkError(this.#peer));
        const message = this.#hasHello
          ? `The connection to the server at ${where} was lost${reason && ` (${reason})`}.`
          : `The server at ${where} did not take the call${reason && ` (${reason})`}.`;
        return this.#end(new CallError("server", message, SERVER_FIX));
      },
      { signal },
    );
  }

  /** A missing microphone does not end the call: the text box works without one. */
  async #openMicrophone() {
    if (!this.#wantsMicrophone) {
      this.#step("microphone", "skipped");
      return;
    }
    this.#step("microphone", "doing");
    try {
      this.#microphone = await askForMicrophone();
    } catch (error) {
      this.#step("microphone", "skipped");
      this.#on.notice?.(error);
      return;
    }
    if (this.#ending.signal.aborted) {
      for (const track of this.#microphone.getTracks()) track.stop();
      return;
    }
    this.#watchMicrophone();
    this.#step("microphone", "done");
  }

  /** An unplugged microphone is replaced by the next one, in the same call. */
  #watchMicrophone() {
    const [track] = this.#microphone.getAudioTracks();
    track.addEventListener(
      "ended",
      async () => {
        try {
          this.#microphone = await askForMicrophone();
          await this.#transceiver?.sender.replaceTrack(this.#microphone.getAudioTracks()[0]);
          this.#watchMicrophone();
        } catch (error) {
          if (!this.#ending.signal.aborted) this.#on.notice?.(error);
        }
      },
      { signal: this.#ending.signal },
    );
  }

  async #openPeer() {
    this.#step("network", "doing");
    const peer = await this.#connectPeer(NETWORK_LIMIT_MS, (peer) => networkError(peer));
    this.#isUp = true;
    this.#step("network", "done");
    return peer;
  }

  /**
   * A connection in the place of the one before, which is closed.  Resolves once packets get through.
   * @param {number} limitMs
   * @param {(peer: RTCPeerConnection) => CallError} failure what to say if they do not
   */
  async #connectPeer(limitMs, failure) {
    const { signal } = this.#ending;
    const before = this.#peer;
    this.#heardRtp = this.playback?.pulledRtp ?? this.#heardRtp;
    // The server's list and no other: an empty one means no server outside is asked for anything.
    const peer = new RTCPeerConnection({ iceServers: this.#iceServers });
    this.#peer = peer;
    this.#offerId += 1;
    const id = this.#offerId;
    const [track] = this.#microphone?.getAudioTracks() ?? [];
    this.#transceiver = peer.addTransceiver(track ?? "audio", {
      direction: track ? "sendrecv" : "recvonly",
      streams: track ? [this.#microphone] : [],
    });
    const { receiver } = this.#transceiver;
    const microphone = track ? this.#transceiver.sender : null;
    if (this.playback) this.playback.attach(receiver, microphone);
    // Made before the answer comes: the agent may speak at once, and the clocks are compared meanwhile.
    else this.playback = this.#makePlayback(receiver, microphone);
    this.#packets = 0;
    const connected = new Promise((resolve) => {
      peer.addEventListener(
        "connectionstatechange",
        () => {
          if (peer !== this.#peer) return;
          const state = peer.connectionState;
          if (state === "connected") resolve();
          else if (this.#isUp && (state === "disconnected" || state === "failed")) this.#goBack("peer");
          else if (state === "failed") this.#end(networkError(peer));
        },
        { signal },
      );
    });
    // Our addresses follow the offer as they are found; the server mostly learns the one that works from our first check.
    peer.addEventListener(
      "icecandidate",
      ({ candidate }) => candidate && this.#send({ type: "candidate", candidate: candidate.candidate, id }),
      { signal },
    );

    try {
      const offer = await peer.createOffer();
      await peer.setLocalDescription(offer);
      // Sent as it is, with no candidate in it: waiting for candidates would cost 0.1 s here, and a whole second there for
      // each .local name it cannot look up.
      this.#answer = withResolvers();
      this.#answer.promise.catch(() => {});
      this.#send({ type: "offer", sdp: offer.sdp, microphone: track !== undefined, id, heard_rtp: this.#heardRtp });
      before?.close();
      const answer = await within(
        Math.min(limitMs, ANSWER_LIMIT_MS),
        this.#answer.promise,
        new CallError("server", "The server did not answer the call.", "Look at the server's log, then try again."),
      );
      await peer.setRemoteDescription({ type: "answer", sdp: answer.sdp });

      this.#audio.srcObject = new MediaStream([receiver.track]);
      this.#play();
      await within(limitMs, connected, failure(peer));
    } catch (error) {
      peer.close();
      throw error;
    }
    this.#packetMs = performance.now();
    return peer;
  }

  #makePlayback(receiver, microphone) {
    return new Playback({
      audio: this.#audio,
      receiver,
      microphone,
      isVisible: this.#isVisible,
      send: (message) => this.#send(message),
      onChange: ({ isFirst, packets, ...levels }) => {
        if (isFirst) return this.#firstSample.resolve();
        if (packets !== this.#packets) this.#packetMs = performance.now();
        this.#packets = packets;
        return this.#on.level?.(levels);
      },
      signal: this.#ending.signal,
    });
  }

  /** Look now and then whether the server is still there, on both ways. */
  #watch() {
    this.#lookedMs = performance.now();
    const timer = setInterval(() => {
      const nowMs = performance.now();
      // After a sleep of ours nothing has been read yet.
      if (nowMs - this.#lookedMs > SLEEP_MS) this.#packetMs = this.#socketWordMs = nowMs;
      this.#lookedMs = nowMs;
      if (nowMs - this.#socketWordMs > SILENT_SOCKET_MS) {
        this.#answer.reject(new Error("the server is silent")); // whoever waits for it on a dead socket
        this.#goBack("socket");
      }
      if (nowMs - this.#packetMs > SILENT_PATH_MS && !this.#isReturning) this.#goBack("peer");
    }, LOOK_MS);
    this.#ending.signal.addEventListener("abort", () => clearInterval(timer));
  }

  /** The socket or the peer connection is dead: replace it, and try again until the server would not wait any more. */
  async #goBack(what) {
    this.#needs[what] = true;
    if (this.#isReturning || this.#ending.signal.aborted) return;
    this.#isReturning = true;
    this.#on.path?.(false);
    const beganMs = performance.now();
    while (!this.#ending.signal.aborted && (this.#needs.socket || this.#needs.peer)) {
      try {
        if (this.#needs.socket) await this.#reopenSocket();
        if (this.#needs.peer) {
          this.#needs.peer = false;
          await this.#connectPeer(RETRY_PATH_MS, lostError);
        }
      } catch (error) {
        if (this.#ending.signal.aborted) return;
        this.#needs.peer ||= this.#peer.connectionState !== "connected";
        if (performance.now() - beganMs > RETURN_LIMIT_MS) {
          this.#end(toCallError(error, "network"));
          return;
        }
        await new Promise((resolve) => setTimeout(resolve, RETRY_PAUSE_MS));
      }
    }
    this.#isReturning = false;
    if (!this.#ending.signal.aborted) this.#on.path?.(true);
  }

  async #reopenSocket() {
    const old = this.#socket;
    this.#hello = withResolvers();
    this.#hello.promise.catch(() => {});
    const url = new URL(this.#url);
    url.search = new URLSearchParams({ resume: this.#token, received: this.#receivedCount });
    this.#connectSocket(url);
    old?.close();
    const { received } = await within(
      SERVER_LIMIT_MS,
      this.#hello.promise,
      new CallError("server", `The server at ${url.host} cannot be reached any more.`, SERVER_FIX),
    );
    this.#needs.socket = false;
    // What it has not had is said again.
    const unheard = this.#sentMessages.filter(({ number }) => number > received).map(({ message }) => message);
    this.#sentMessages = this.#sentMessages.filter(({ number }) => number <= received);
    this.#sentCount = received;
    for (const message of unheard) this.#send(message);
  }

  /** An address of the server's that was found after its answer. */
  async #addCandidate(candidate) {
    const peer = this.#peer;
    try {
      await this.#answer.promise;
      await peer.addIceCandidate({ candidate, sdpMid: this.#transceiver.mid });
    } catch {
      // The connection was closed meanwhile, or cannot use it: there are others.
    }
  }

  async #openSound() {
    this.#step("sound", "doing");
    await within(
      SOUND_LIMIT_MS,
      this.#firstSample.promise,
      new CallError(
        "sound",
        "The call is connected, but the browser plays nothing.",
        "Check that a loudspeaker is chosen in the system's sound settings and that this tab may play sound.",
      ),
    );
    this.#step("sound", "done");
  }

  async #play() {
    try {
      await this.#audio.play();
    } catch (error) {
      // AbortError: the element got another stream, because the call ended.
      if (error.name === "NotAllowedError") this.#on.blocked?.();
      else if (error.name !== "AbortError") this.#end(toCallError(error, "sound"));
    }
  }

  #receive(message) {
    this.#receivedCount += 1;
    this.#socketWordMs = performance.now();
    switch (message.type) {
      case "hello":
        this.#token = message.resume;
        this.#iceServers = message.ice_servers;
        return this.#hello.resolve(message);
      case "ice":
        this.#iceServers = message.ice_servers;
        return undefined;
      case "answer":
        return message.id === this.#offerId ? this.#answer.resolve(message) : undefined;
      case "candidate":
        if (message.id === this.#offerId) this.#addCandidate(message.candidate);
        return undefined;
      case "reconnect":
        // It may speak of a connection that has been replaced meanwhile.
        return this.#isUp && message.id === this.#offerId ? this.#goBack("peer") : undefined;
      case "pong":
        return this.playback?.pong(message);
      case "speech":
        this.playback?.speechBegins(message.stream);
        return this.#on.speech?.(message);
      case "heard":
        return this.#on.heard?.(message);
      case "speech_end":
        this.playback?.speechEnds(message.stream);
        return this.#on.speechEnd?.(message);
      case "user":
        return this.#on.user?.(message);
      case "state":
        return this.#on.state?.(message);
      case "flush":
        return this.playback?.flush(message.resume_rtp);
      case "stats":
        return this.#on.stats?.(message);
      case "error":
        this.#complaint = new CallError("server", message.message, message.fix);
        this.#complainedAtMs = performance.now();
        return this.#on.notice?.(this.#complaint);
      default:
        return undefined; // a newer server may say more than this page knows
    }
  }
}

async function askForMicrophone() {
  if (!isSecureContext || !navigator.mediaDevices) {
    throw new CallError(
      "microphone",
      "Browsers lend the microphone only to https pages and to localhost.",
      "Open this page over https, or forward its port: ssh -L 8000:localhost:8000 HOST, then http://localhost:8000.",
    );
  }
  try {
    return await navigator.mediaDevices.getUserMedia({
      audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
    });
  } catch (error) {
    const [message, fix] =
      {
        NotAllowedError: [
          "The browser did not get permission to use the microphone.",
          "Allow it with the icon beside the page’s address, then start again; or type.",
        ],
        NotFoundError: ["No microphone was found.", "Plug one in, then start again; or type."],
        NotReadableError: [
          "The microphone is there but does not deliver sound.",
          "Another program may hold it: close that one, then start again; or type.",
        ],
      }[error.name] ?? [`The microphone could not be opened: ${error.message}`, "Start again, or type."];
    throw new CallError("microphone", message, fix, { cause: error });
  }
}

/** @param {RTCPeerConnection} peer */
function networkError(peer) {
  return new CallError(
    "network",
    "The server answers, but no sound packet gets through between it and this browser (ICE found no path).",
    peer.getConfiguration().iceServers.length > 0
      ? "UDP seems to be blocked here, and the relay server did not help. Check the TURN server's address and password, a VPN or a firewall."
      : "UDP seems to be blocked here. Open UDP on the firewall or VPN, or give the server a TURN relay.",
  );
}

function lostError() {
  return new CallError(
    "network",
    "No sound packet gets through any more: the path between this browser and the server is gone.",
    "Check the network, then start again.",
  );
}

function toCallError(error, step = "page") {
  if (error instanceof CallError) return error;
  return new CallError(step, `Something unexpected happened: ${error.message}`, "Reload the page.", { cause: error });
}

/** `promise`, or a rejection with `error` once `limitMs` have passed. */
async function within(limitMs, promise, error) {
  let timer = 0;
  const limit = new Promise((_, reject) => {
    timer = setTimeout(reject, limitMs, error);
  });
  try {
    return await Promise.race([promise, limit]);
  } finally {
    clearTimeout(timer);
  }
}

/** As Promise.withResolvers, which browsers from before 2024 lack. */
function withResolvers() {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  return parts;
}
