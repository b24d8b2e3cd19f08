"""How close is the position a call believes to what leaves the loudspeaker?

A real Chromium plays a call of this server with this project's page code, over a network that is bent in nine ways,
into a sound server of our own.  The speech carries a mark each 100 ms; what the loudspeaker gets is recorded, the marks
are found in it, and thirty times a second the call's position is compared with them.  The same inputs then go through
three more playheads: one whose page falls silent for five seconds out of ten, one that never has a report but the
receiver's RTCP, and one that has nothing at all.  Last, speech is cut in the middle, and the time from the decision to
the last sound is taken from the recording.

    python bench/playout_truth.py [--quick] [--ways NAME ...] [--seed N] [--json FILE] [--plot FILE]

Needs Debian's chromium, pulseaudio and pulseaudio-utils.  `--json` keeps the ways of an earlier run that this one
leaves out.  The sound server's clock is about 440 ppm fast, as no sound card is: a drift on top of all that is bent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from loudspeaker import MARK_SAMPLES, RATE, SINK_RATE, Loudspeaker, Recording, find_marks, missing, speech
from origin import origin
from playwright.async_api import async_playwright
from simulated import pyplot
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from breeze_rtc.clock import MS, SECOND, MonotonicClock
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.server.app import web_folder
from breeze_rtc.transport import signaling
from breeze_rtc.transport.playhead import Playhead, ReceiverReport
from breeze_rtc.transport.playout import SlotClock
from breeze_rtc.transport.webrtc import WebRtcCall
from tests.e2e.conftest import CHROMIUM, network_flags

LOOK_EVERY_S = 0.033
SILENT_EVERY_S, SILENT_S = 10.0, 5.0
"""The page that falls silent: five seconds of reports, five without."""
CUTS = 20


# ---- the network -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One direction of the path.  Order is kept."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    """Each packet takes between nothing and this longer."""
    loss: float = 0.0
    spike_every_s: float = 0.0
    """Each so often nothing passes for 300 ms, and then all of it."""
    bytes_per_s: float = 0.0
    """0: no limit."""


@dataclass(frozen=True)
class Way:
    """What lies between server and listener; messages of the WebSocket take the same way as sound."""

    name: str
    says: str
    down: Link = Link()
    up: Link = Link()
    server_ppm: float = 0.0
    """How much faster the server's clock runs than the page's."""


WAYS = [
    Way("clean", "nothing bent"),
    Way("loss", "5 % lost, both directions", Link(loss=0.05), Link(loss=0.05)),
    Way("jitter", "0 to 40 ms jitter, both directions", Link(jitter_ms=40), Link(jitter_ms=40)),
    Way("delay", "40 ms each way", Link(delay_ms=40), Link(delay_ms=40)),
    Way("asymmetric", "120 ms down, 20 ms up", Link(delay_ms=120), Link(delay_ms=20)),
    Way("asymmetric_up", "20 ms down, 120 ms up", Link(delay_ms=20), Link(delay_ms=120)),
    Way("spikes", "300 ms without a packet each 6 s", Link(spike_every_s=6)),
    Way("drift", "the server's clock 400 ppm slow", server_ppm=-400),
    Way("slow_uplink", "2.5 kB/s for the page's reports", up=Link(bytes_per_s=2_500)),
]
RESEND_S = 0.2
"""A message of a WebSocket that is lost comes this much later, and holds up those behind it (TCP)."""


class Pipe:
    """When what enters a link leaves it."""

    def __init__(self, link: Link, chance: random.Random) -> None:
        self._link = link
        self._chance = chance
        self._start_s: float | None = None
        # When the last datagram leaves, and the last message: each kind waits for its own.
        self._last_s = [0.0, 0.0]
        self._busy_s = 0.0

    def leaves_at(self, size: int, now_s: float, *, is_datagram: bool) -> float | None:
        """None where it is lost."""
        link = self._link
        if self._start_s is None:
            self._start_s = now_s
        at_s = now_s
        if link.bytes_per_s and not is_datagram:
            at_s = self._busy_s = max(now_s, self._busy_s) + size / link.bytes_per_s
        at_s += (link.delay_ms + link.jitter_ms * self._chance.random()) / 1000
        if self._chance.random() < link.loss:
            if is_datagram:
                return None
            at_s += RESEND_S + 2 * link.delay_ms / 1000
        if link.spike_every_s:
            phase_s = (at_s - self._start_s) % link.spike_every_s
            if at_s - self._start_s > link.spike_every_s and phase_s < 0.3:
                at_s += 0.3 - phase_s
        self._last_s[is_datagram] = max(self._last_s[is_datagram], at_s)
        return self._last_s[is_datagram]


class Relay:
    """Stands between the browser's UDP socket and the server's: two sockets, a link each way."""

    def __init__(self, server: tuple[str, int], deliver: Callable[..., None]) -> None:
        self._server = server
        self._browser: tuple[str, int] | None = None
        self._deliver = deliver

    async def open(self) -> tuple[str, int]:
        """The address to tell the browser."""
        loop = asyncio.get_running_loop()
        near, _ = await loop.create_datagram_endpoint(lambda: _Port(self._from_browser), (self._server[0], 0))
        far, _ = await loop.create_datagram_endpoint(lambda: _Port(self._from_server), (self._server[0], 0))
        self._near, self._far = near, far
        host, port = near.get_extra_info("sockname")[:2]
        return host, port

    def _from_browser(self, data: bytes, address: tuple[str, int]) -> None:
        self._browser = address
        self._deliver("up", len(data), lambda: self._pass(self._far, data, self._server), is_datagram=True)

    def _from_server(self, data: bytes, address: tuple[str, int]) -> None:
        self._deliver("down", len(data), lambda: self._pass(self._near, data, self._browser), is_datagram=True)

    @staticmethod
    def _pass(port: asyncio.DatagramTransport, data: bytes, to: tuple[str, int] | None) -> None:
        if not port.is_closing():
            port.sendto(data, to)

    def close(self) -> None:
        self._near.close()
        self._far.close()


class _Port(asyncio.DatagramProtocol):
    def __init__(self, take: Callable[[bytes, tuple[str, int]], None]) -> None:
        self.datagram_received = take  # type: ignore[method-assign]


def through_relay(answer: str, relay: tuple[str, int]) -> str:
    """The answer with one candidate: the relay."""
    lines = answer.split("\r\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("a=candidate:"))
    kept = [line for line in lines if not line.startswith("a=candidate:")]
    kept.insert(first, f"a=candidate:1 1 udp 2130706431 {relay[0]} {relay[1]} typ host")
    return "\r\n".join(kept)


def server_address(answer: str) -> tuple[str, int]:
    """Where the server listens, the first IPv4 address it names."""
    for line in answer.split("\r\n"):
        if line.startswith("a=candidate:") and "." in line.split()[4]:
            return line.split()[4], int(line.split()[5])
    raise AssertionError("the answer has no candidate")


# ---- one call --------------------------------------------------------------------------------------------------------


class SkewedClock:
    """A monotonic clock that runs at another speed."""

    def __init__(self, ppm: float) -> None:
        self._ppm = ppm
        self._clock = MonotonicClock()
        self._start_ns = self._clock.now()

    def now(self) -> int:
        return self.of(self._clock.now())

    def of(self, real_ns: int) -> int:
        """This clock's time at a time of the machine's."""
        return real_ns + round((real_ns - self._start_ns) * self._ppm / 1e6)


@dataclass
class Look:
    """What the call believed at one moment; times on the server's clock."""

    now: int
    ticks: int
    error_ns: int
    path_ns: int
    source: str


@dataclass
class Told:
    """All a call was told, to be told again to other playheads."""

    start_ns: int = 0
    origin_rtp: int = 0
    # (now, sent ticks, what)
    words: list[tuple[int, int, Any]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    sent_ticks: list[int] = field(default_factory=list)
    # Ticks of each packet of speech, in order.
    packets: list[int] = field(default_factory=list)


PAGE = """<!doctype html><audio id="audio" autoplay></audio><script type="module">
import { Call } from "/call.js";
const audio = document.getElementById("audio");
new Call({ url: `ws://${location.host}/call`, audio, wantsMicrophone: false, isVisible: true, on: {} }).start();
</script>"""


class Server:
    """The server's part of one call after the other: signalling, as `server/call.py` does it, without an agent."""

    def __init__(self, way: Way, seed: int) -> None:
        self.clock = SkewedClock(way.server_ppm)
        self.call: WebRtcCall | None = None
        self.told = Told()
        self.is_bent = False
        chance = random.Random(seed)
        self._pipes = {"down": Pipe(way.down, chance), "up": Pipe(way.up, chance)}
        self._relay: Relay | None = None
        self._say: Callable[[str], None] = lambda text: None
        self._inbox = signaling.Inbox()
        self.ready = asyncio.Event()

    def deliver(self, direction: str, size: int, act: Callable[[], None], *, is_datagram: bool) -> None:
        """Let `act` happen when the link lets it."""
        loop = asyncio.get_running_loop()
        if not self.is_bent:
            act()
            return
        at_s = self._pipes[direction].leaves_at(size, loop.time(), is_datagram=is_datagram)
        if at_s is not None:
            loop.call_at(at_s, act)

    def say(self, text: str) -> None:
        self.deliver("down", len(text), lambda: self._say(text), is_datagram=False)

    async def page(self, socket: WebSocket) -> None:
        await socket.accept()
        outbox: asyncio.Queue[str] = asyncio.Queue()
        self._say = outbox.put_nowait

        async def write() -> None:
            while True:
                await socket.send_text(await outbox.get())

        async def tell() -> None:
            """Figures five times a second; a page takes a socket that says nothing for lost."""
            nothing = dict.fromkeys(
                ("lead_ms", "slack_ms", "jitter_ms", "first_sound_ms", "stop_ms", "path_ms", "error_ms")
            )
            while True:
                await asyncio.sleep(0.2)
                self.say(signaling.stats(**nothing, t_ms=self.clock.now() / MS, gaps=0, source="none"))

        self.call = call = WebRtcCall(clock=self.clock)
        self._listen_in(call)
        about = {"listens": False, "listen_fix": "", "model": "", "voice": "", "resume": ""}
        self.say(signaling.hello(**about, ice_servers=(), sample_rate=RATE, received=0))
        tasks = [asyncio.create_task(write()), asyncio.create_task(tell())]
        try:
            async for text in socket.iter_text():
                message = self._inbox.read(text)
                if isinstance(message, signaling.Offer):
                    answer = await call.answer(message)
                    self._relay = Relay(server_address(answer), self.deliver)
                    self.say(signaling.answer(through_relay(answer, await self._relay.open()), message.id))
                else:
                    self.deliver("up", len(text), lambda m=message: self._hear(m), is_datagram=False)
        except WebSocketDisconnect:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await call.close()
            if self._relay is not None:
                self._relay.close()

    def _hear(self, message: signaling.Message | None) -> None:
        assert self.call is not None
        match message:
            case signaling.Report():
                self.call.report(message)
                if self.call.stats().reports >= 2:
                    self.ready.set()
            case signaling.Ping():
                self.say(signaling.pong(message, self.clock.now()))
            case signaling.Flushed():
                self.call.flushed(message)

    def _listen_in(self, call: WebRtcCall) -> None:
        """Write down what the call's playhead is told."""
        next_slot, told = call.sink.next_slot, self.told

        def slot(now: int) -> Any:
            result = next_slot(now)
            if result.stream is not None:
                told.packets.append(result.ticks)
            return result

        call.sink.next_slot = slot  # type: ignore[method-assign]
        report = call.report

        def heard(message: signaling.Report) -> None:
            told.words.append((self.clock.now(), call.sink.sent_ticks, message))
            report(message)

        call.report = heard  # type: ignore[method-assign]
        received = call._sender._on_receiver_report

        def receiver_report(message: ReceiverReport) -> None:
            told.words.append((self.clock.now(), call.sink.sent_ticks, message))
            received(message)

        call._sender._on_receiver_report = receiver_report

    def look(self) -> None:
        assert self.call is not None
        now, call = self.clock.now(), self.call
        where = call._where(now)
        if where is None:
            return
        self.told.looks.append(Look(now, where.ticks, where.error_ns, where.path_delay_ns, where.source))
        self.told.sent_ticks.append(call.sink.sent_ticks)


@contextlib.asynccontextmanager
async def listening(server: Server, browser: Any) -> AsyncIterator[None]:
    """A page that has called and plays."""
    app = Starlette(
        routes=[
            Route("/bench", lambda request: HTMLResponse(PAGE)),
            WebSocketRoute("/call", server.page),
            Mount("/", StaticFiles(directory=web_folder())),
        ]
    )
    web = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws_ping_interval=None))
    serving = asyncio.create_task(web.serve())
    while not web.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.02)
    port = web.servers[0].sockets[0].getsockname()[1]
    page = await browser.new_page()
    try:
        page.on("pageerror", lambda error: print("page:", error, file=sys.stderr))
        await page.goto(f"http://127.0.0.1:{port}/bench")
        async with asyncio.timeout(15):
            await server.ready.wait()
        yield
    finally:
        await page.close()
        web.should_exit = True
        await serving


# ---- figures ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One way's errors, position minus truth, in ms."""

    way: str
    says: str
    seconds: float
    # Of the call as it ran.
    live: list[float]
    # The path delay it believed minus the true one.
    path: list[float]
    # True path delays.
    delays: list[float]
    bounds: list[float]
    # How many positions came from each source.
    sources: dict[str, int]
    times_s: list[float]
    # Of the same call with parts of the inputs taken away: "silent_1s", "silent_later", "rtcp", "nothing".
    without: dict[str, list[float]]
    without_bounds: dict[str, list[float]]
    # How much faster the loudspeaker ran than the server's clock: by the recording, and by the playhead at the end.
    drift_ppm: float
    believed_drift_ppm: float | None
    marks_found: float
    gaps: int


def true_marks(told: Told, recording: Recording, real_ns: Callable[[float], int]) -> tuple[Any, Any, float]:
    """(server time in ns, media sample) of each mark heard, and the share of marks found."""
    found = []
    sent_ns = SlotClock(told.start_ns)
    count = len(told.packets) * 480 // MARK_SAMPLES
    peaks = find_marks(recording.samples)
    times = recording.times_s(np.array([at for at, _, _ in peaks]))
    best: dict[int, tuple[float, int]] = {}
    for at_s, (_, pitch, strength) in zip(times, peaks, strict=True):
        now = real_ns(at_s)
        # The newest mark of this pitch that has left: twelve of them span 1.2 s, more than any path takes.
        newest = int(samples_of(told, sent_ns.ticks_at(now))) // MARK_SAMPLES
        mark = newest - (newest - pitch) % 12
        if 0 < mark < count and strength > best.get(mark, (0.0, 0))[0]:
            best[mark] = (strength, now)
    for mark in sorted(best):
        if not found or best[mark][1] > found[-1][0]:
            found.append((best[mark][1], mark * MARK_SAMPLES))
    marks = np.array(found, float).reshape(-1, 2)
    return marks[:, 0], marks[:, 1], len(found) / max(1, count)


def ticks_of(told: Told, samples: float) -> float:
    packet = min(int(samples) // 480, len(told.packets) - 1)
    return told.packets[packet] + (samples - 480 * packet) * 2


def samples_of(told: Told, ticks: float) -> float:
    """The media position of a place in the call's sound, for a stream that never pauses but for missed slots."""
    slots = np.array(told.packets)
    packet = int(np.searchsorted(slots, ticks, side="right")) - 1
    return 480 * packet + min(480.0, (ticks - slots[packet]) / 2)


def again(told: Told, keep: Callable[[Any, int], bool]) -> Iterator[Look]:
    """What a playhead would have believed that was told only what `keep(word, now)` allows."""
    playhead = Playhead(SlotClock(told.start_ns), told.origin_rtp)
    words = iter([*told.words, (1 << 62, 0, None)])
    word = next(words)
    for look, sent_ticks in zip(told.looks, told.sent_ticks, strict=True):
        while word[0] <= look.now:
            now, ticks, said = word
            if isinstance(said, ReceiverReport) and keep(said, now):
                playhead.receiver_report(said, now)
            elif isinstance(said, signaling.Report) and keep(said, now):
                playhead.report(said, ticks, now)
            word = next(words)
        where = playhead.position(look.now, sent_ticks)
        yield Look(look.now, where.ticks, where.error_ns, where.path_delay_ns, where.source)


def judge(
    way: Way,
    told: Told,
    recording: Recording,
    clock: SkewedClock,
    *,
    gaps: int,
    drift_ppm: float | None,
    seconds: float,
) -> Outcome:
    at, samples, share = true_marks(told, recording, lambda at_s: clock.of(round(at_s * SECOND)))
    assert share > 0.5, f"only {share:.0%} of the marks were found in the recording of {way.name}"

    def error(look: Look) -> float | None:
        """None where no mark is near."""
        after = int(np.searchsorted(at, look.now))
        if not 0 < after < at.size or at[after] - at[after - 1] > 0.6 * SECOND:
            return None
        believed = samples_of(told, look.ticks)
        ear = float(np.interp(look.now, at, samples))
        # Where a mark comes late the player has made sound up, and where in between is not to be seen: any place counts
        # as true from which it could have come without playing faster than it was spoken.
        begun = samples[after - 1] + (look.now - at[after - 1]) * RATE / SECOND
        left = samples[after] - (at[after] - look.now) * RATE / SECOND
        if left < begun:
            ear = float(np.clip(believed, max(left, samples[after - 1]), min(begun, samples[after])))
        return (believed - ear) * 1000 / RATE

    judged = [(look, err) for look in told.looks if (err := error(look)) is not None]
    slots = SlotClock(told.start_ns)
    delays = {}
    for look, _ in judged:
        true = float(np.interp(look.now, at, samples))
        delays[look.now] = (look.now - slots.time_of(round(ticks_of(told, true)))) / MS

    def is_silent(now: int) -> float:
        """Seconds since the page fell silent; negative while it reports."""
        return ((now - told.looks[0].now) / SECOND) % SILENT_EVERY_S - (SILENT_EVERY_S - SILENT_S)

    without: dict[str, list[float]] = {"silent_1s": [], "silent_later": [], "rtcp": [], "nothing": []}
    bounds: dict[str, list[float]] = {name: [] for name in without}

    def note(name: str, look: Look) -> None:
        if (err := error(look)) is not None:
            without[name].append(err)
            bounds[name].append(round(look.error_ns / MS))

    for look in again(told, lambda said, now: isinstance(said, ReceiverReport) or is_silent(now) < 0):
        silent_s = is_silent(look.now)
        # The last report is a quarter of a second older than the silence, at most.
        if silent_s > 0 and look.now - told.looks[0].now > SILENT_S * SECOND:
            note("silent_1s" if silent_s < 1 else "silent_later", look)
    for look in again(told, lambda said, now: isinstance(said, ReceiverReport)):
        note("rtcp", look)
    for look in again(told, lambda said, now: False):
        note("nothing", look)
    names = [look.source for look, _ in judged]
    return Outcome(
        way=way.name,
        says=way.says,
        seconds=seconds,
        live=[round(err, 1) for _, err in judged],
        path=[round(look.path_ns / MS - delays[look.now], 1) for look, _ in judged],
        delays=[round(delay) for delay in delays.values()],
        bounds=[round(look.error_ns / MS) for look, _ in judged],
        sources={name: names.count(name) for name in sorted(set(names))},
        times_s=[round((look.now - told.looks[0].now) / SECOND, 2) for look, _ in judged],
        without={name: [round(e) for e in errors] for name, errors in without.items()},
        without_bounds=bounds,
        drift_ppm=round(recording.sink_ppm - way.server_ppm),
        believed_drift_ppm=drift_ppm,
        marks_found=round(share, 3),
        gaps=gaps,
    )


async def measure(way: Way, seconds: float, seed: int, browser: Any, loudspeaker: Loudspeaker) -> Outcome:
    server = Server(way, seed)
    packets = SpeechEncoder(RATE).encode(speech(seconds + 3))
    async with listening(server, browser):
        call = server.call
        assert call is not None
        assert call.sink.clock is not None
        loudspeaker.take()
        told = server.told
        told.start_ns = call.sink.clock.start_ns
        told.origin_rtp = call._sender.origin_rtp
        server.say(signaling.speech(1, "…"))
        call.sink.write(1, packets)
        server.is_bent = True
        end_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(LOOK_EVERY_S)
            if told.packets:
                server.look()
        server.is_bent = False
        await asyncio.sleep(0.7)
        assert server.call is call, "the page called again in the middle"
        gaps = call.stats().missed_slots
        assert call._playhead is not None
        drift_ppm = call._playhead.drift_ppm
    recording = loudspeaker.take()
    return judge(way, told, recording, server.clock, gaps=gaps, drift_ppm=drift_ppm, seconds=seconds)


async def cut(browser: Any, loudspeaker: Loudspeaker, cuts: int) -> list[float]:
    """From the decision to silence at the ear, in ms, `cuts` times on the loopback."""
    server = Server(Way("cut", ""), 0)
    packets = SpeechEncoder(RATE).encode(speech(4))
    decided: list[float] = []
    async with listening(server, browser):
        call = server.call
        assert call is not None
        loudspeaker.take()
        for stream in range(1, cuts + 1):
            server.say(signaling.speech(stream, "…"))
            call.sink.write(stream, packets)
            await asyncio.sleep(1.2 + 0.013 * (stream % 7))
            decided.append(MonotonicClock().now() / SECOND)
            resume_rtp = call.flush()
            assert resume_rtp is not None
            server.say(signaling.flush(resume_rtp))
            server.say(signaling.speech_end(stream, interrupted=True, chars=0))
            await asyncio.sleep(0.8)
    recording = loudspeaker.take()
    took = []
    loud = np.abs(recording.samples)
    for at_s in decided:
        first = recording.index_of(at_s)
        sound = np.flatnonzero(loud[first : first + round(0.7 * SINK_RATE)] > 0.01)
        if sound.size:
            took.append((recording.times_s(np.array([first + sound[-1]]))[0] - at_s) * 1000)
    return took


def percentiles(errors: Sequence[float]) -> tuple[float, float]:
    size = np.abs(errors) if len(errors) else np.array([np.nan])
    return float(np.percentile(size, 50)), float(np.percentile(size, 95))


def within(errors: Sequence[float], bounds: Sequence[float]) -> float:
    return float(np.mean(np.abs(errors) <= np.array(bounds))) if len(errors) else float("nan")


def line(outcome: Outcome) -> str:
    live, path = percentiles(outcome.live), percentiles(outcome.path)
    text = (
        f"{outcome.way:14} {live[0]:5.1f} {live[1]:6.1f} {np.mean(outcome.live):+6.1f}   {path[1]:6.1f}"
        f"   {np.median(outcome.bounds):5.0f} {within(outcome.live, outcome.bounds):5.0%}  "
    )
    for name, errors in outcome.without.items():
        text += f" {percentiles(errors)[1]:6.0f} ({within(errors, outcome.without_bounds[name]):4.0%})"
    drift = "?" if outcome.believed_drift_ppm is None else f"{outcome.believed_drift_ppm:.0f}"
    return (
        f"{text}   delay {np.median(outcome.delays):.0f} ms, drift {outcome.drift_ppm:.0f} ppm, believed {drift};"
        f" {outcome.marks_found:.0%} of the marks found, {outcome.gaps} slots missed"
    )


async def run(ways: Sequence[Way], seconds: float, cuts: int, seed: int) -> tuple[list[Outcome], list[float], str]:
    outcomes = []
    stop: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        loudspeaker = Loudspeaker(Path(folder))
        try:
            await loudspeaker.start()
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=CHROMIUM,
                    args=["--autoplay-policy=no-user-gesture-required", *network_flags()],
                    ignore_default_args=["--mute-audio"],
                    env=loudspeaker.env,
                )
                print(f"{'':14} {'error, ms':^20}   {'path':>6}   {'bound':^11}   p95 without reports (in bound)")
                print(
                    f"{'way':14} {'p50':>5} {'p95':>6} {'mean':>6}   {'p95':>6}   {'p50':>5} {'held':>5}"
                    f"   {'first second':>13} {'to 5 s':>13} {'RTCP only':>13} {'nothing':>13}"
                )
                for way in ways:
                    outcomes.append(await measure(way, seconds, seed, browser, loudspeaker))
                    print(line(outcomes[-1]), flush=True)
                if cuts:
                    stop = await cut(browser, loudspeaker, cuts)
                    print(f"decision to silence, ms: {' '.join(f'{ms:.0f}' for ms in sorted(stop))}")
                chromium_version = browser.version
                await browser.close()
        finally:
            await loudspeaker.stop()
    return outcomes, stop, chromium_version


def plot(path: Path, outcomes: Sequence[dict[str, Any]], stop: Sequence[float]) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(len(outcomes), 1, figsize=(10, 1.5 * len(outcomes)), sharex=True, layout="constrained")
    for axis, outcome in zip(np.atleast_1d(axes), outcomes, strict=True):
        axis.fill_between(
            outcome["times_s"], -np.array(outcome["bounds"]), outcome["bounds"], color="#0b7680", alpha=0.15, lw=0
        )
        axis.plot(outcome["times_s"], outcome["live"], color="#0b7680", lw=0.8)
        axis.set_ylim(-60, 60)
        p50, p95 = percentiles(outcome["live"])
        axis.set_title(f"{outcome['says']}: p50 {p50:.1f}, p95 {p95:.1f} ms", fontsize=9, loc="left")
        axis.set_ylabel("ms")
    np.atleast_1d(axes)[-1].set_xlabel("s")
    figure.savefig(path)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three ways of 8 s, and a few cuts")
    parser.add_argument("--ways", nargs="*", choices=[way.name for way in WAYS], help="these only, and no cuts")
    parser.add_argument("--cuts", type=int, help=f"how often speech is cut (default {CUTS}; 0 with --ways)")
    parser.add_argument("--seconds", type=float, help="of each way (default 65)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs the extra [bench]")
    args = parser.parse_args()
    if names := [*(["chromium"] if CHROMIUM is None else []), *missing()]:
        sys.exit(f"{', '.join(names)} missing. On Debian: sudo apt-get install chromium pulseaudio pulseaudio-utils")
    chosen = args.ways if args.ways is not None else ["clean", "loss", "jitter"] if args.quick else None
    ways = [way for way in WAYS if chosen is None or way.name in chosen]
    cuts = args.cuts if args.cuts is not None else 0 if args.ways is not None else 5 if args.quick else CUTS
    seconds = args.seconds or (8.0 if args.quick else 65.0)
    outcomes, stop, chromium_version = asyncio.run(run(ways, seconds, cuts, args.seed))
    table = {outcome.way: dataclasses.asdict(outcome) for outcome in outcomes}
    if args.json:
        before = json.loads(args.json.read_text()) if args.json.exists() else {}
        table = {way.name: (before.get("ways", {}) | table).get(way.name) for way in WAYS}
        table = {name: outcome for name, outcome in table.items() if outcome is not None}
        stop = stop or before.get("stop_ms", [])
        args.json.write_text(
            json.dumps(
                origin("aiortc", "aioice", "av", chromium=chromium_version)
                | {
                    "stop_ms": [round(ms, 1) for ms in stop],
                    "ways": table,
                }
            )
        )
    if args.plot:
        plot(args.plot, list(table.values()), stop)
    figures = {f"{name}_p95_ms": f"{percentiles(outcome['live'])[1]:.1f}" for name, outcome in table.items()}
    silent = [e for outcome in table.values() for e in outcome["without"]["silent_1s"] if outcome["way"] == "clean"]
    if silent:
        figures["silent_first_second_p95_ms"] = f"{percentiles(silent)[1]:.1f}"
    if stop:
        figures["stop_p50_ms"] = f"{np.median(stop):.0f}"
    print("RESULT", *(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
