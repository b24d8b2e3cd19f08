"""How often does speech stutter at the ear, while the nano voice speaks to N listeners at once?

The real server, as a process of its own with the real engine, tells each caller a long story without an end.  Callers
are real peers over UDP, ICE, DTLS and SRTP; their page talks over a WebSocket and reports where its player is.  Some of
them may be real Chromium tabs with the real page.

What a caller's ear gets, per minute and call, after the first five seconds:

sent     times that the server's own queue ran dry in mid-speech (it says so itself)
gaps     holes of more than 40 ms: sound that was not sent, was lost, or came too late for a player that keeps 40 ms;
         in Chromium, sound that its own player had to make up between two of its reports, 40 ms of it or more
made up  milliseconds of all such sound, the short holes too

    python bench/gaps.py [--quick] [--calls N ...] [--seconds N] [--chromium N] [--seed N] [--json FILE]

Whoever measures must not stutter itself: how long the callers' own event loop stood still at worst is printed beside.
On a machine with other work to do, `chrt -f 1 python bench/gaps.py` gives server, engine and callers priority over it.

`--chromium N`: so many of the calls are tabs of a real Chromium (each costs as much processor as several others).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from origin import origin

sys.path.insert(0, str(Path(__file__).parent.parent))
from media_capacity import LightListener
from python_listener import Heard, clock
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from breeze_rtc import Agent, AgentSession
from breeze_rtc.clock import MS
from breeze_rtc.media import rtp

WARM_UP_S = 5.0
BUFFER_MS = 40.0
"""What a caller's player holds: Chromium's target where nothing jitters."""
GAP_MS = 40.0
SLOT_MS = 20
SENTENCES = (Path(__file__).parent.parent / "examples" / "nano_voice" / "heldout.txt").read_text().splitlines()


def serve(port: int, calls: int) -> None:
    """The server's process: an agent that tells stories."""
    agent = Agent()

    @agent.on_enter
    async def tell(session: AgentSession) -> AsyncGenerator[str, None]:
        while True:
            for sentence in SENTENCES:
                yield sentence + " "

    agent.run(port=port, max_calls=calls, listens=False)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Ear:
    """What one caller heard."""

    kind: str
    seconds: float
    sent_gaps: int
    gaps: int
    made_up_ms: float
    refused: str = ""


class Caller:
    """A page in Python that plays into nothing, from a buffer of `BUFFER_MS`."""

    kind = "python"

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = LightListener()
        self._sent_gaps = 0
        self._sent_gaps_before = 0
        self._since_ns = 0
        self._refused = ""

    async def hold(self) -> None:
        """The call, until it is cancelled."""
        async with connect(self._address.replace("http", "ws") + "/call", max_size=None) as socket:
            reading = asyncio.create_task(self._read(socket))
            try:
                while True:
                    await asyncio.sleep(0.25)
                    if self._listener.arrived_ns:
                        self._play()
                        report = self._listener._listener.report()
                        await socket.send(json.dumps({"type": "report", **asdict(report)}))
            finally:
                reading.cancel()
                await self._listener.close()

    def start(self) -> None:
        self._since_ns, self._sent_gaps_before = clock.now(), self._sent_gaps

    async def ear(self) -> Ear:
        arrived, ticks, is_speech = self._packets()
        late_ms = arrived / 1e6 - ticks / 48
        # The player began with the fastest packet, and speech counts from its first packet to its last.
        late_ms -= late_ms.min()
        keep = arrived >= self._since_ns
        slots, played = ticks[keep] // 960, (is_speech & (late_ms <= BUFFER_MS))[keep]
        speech = slots[is_speech[keep]]
        heard = np.zeros(int(speech.max() - speech.min()) + 1 if speech.size else 0, bool)
        inside = (slots >= speech.min()) & (slots <= speech.max()) if speech.size else np.zeros(0, bool)
        heard[(slots[inside] - speech.min())[played[inside]]] = True
        holes = [SLOT_MS * (end - start) for start, end in _runs(~heard)]
        return Ear(
            self.kind,
            heard.size * SLOT_MS / 1000,
            self._sent_gaps - self._sent_gaps_before,
            sum(hole > GAP_MS for hole in holes),
            float(sum(holes)),
            self._refused,
        )

    def _packets(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """When each packet came, its ticks from the first one's, and whether it is more than a packet of silence."""
        listener = self._listener
        arrived, sizes = np.array(listener.arrived_ns, np.int64), np.array(listener.sizes, np.int64)
        first = listener.timestamps[0] if listener.timestamps else 0
        ticks = np.array([rtp.distance(first, timestamp) for timestamp in listener.timestamps], np.int64)
        return arrived, ticks, sizes > sizes.min() + 2

    def _play(self) -> None:
        """Which packet the player took last, for the report."""
        listener = self._listener
        arrived = np.array(listener.arrived_ns[-100:], np.int64)
        ticks = np.array([rtp.distance(listener.timestamps[0], t) for t in listener.timestamps[-100:]], np.int64)
        base_ns = (arrived - ticks * 1_000_000 // 48).min() + round(BUFFER_MS * MS)
        pulled = np.maximum(arrived, base_ns + ticks * 1_000_000 // 48)
        taken = np.flatnonzero(pulled <= clock.now())
        if taken.size:
            at = int(taken[-1])
            timestamp = int(listener.timestamps[len(listener.timestamps) - len(arrived) + at])
            listener._listener.heard = [Heard(timestamp, int(pulled[at]), np.zeros(960, np.int16))]

    async def _read(self, socket: Any) -> None:
        with suppress(ConnectionClosed):
            async for raw in socket:
                message = json.loads(raw)
                match message["type"]:
                    case "hello":
                        offer = await self._listener.offer()
                        await socket.send(json.dumps({"type": "offer", "sdp": offer, "microphone": False}))
                    case "answer":
                        await self._listener.accept(message["sdp"])
                    case "stats":
                        self._sent_gaps = message["gaps"]
                    case "error":
                        self._refused = message["message"]


class Tab:
    """A tab of a real Chromium, with the real page."""

    kind = "chromium"

    def __init__(self, browser: Any, address: str) -> None:
        self._browser = browser
        self._address = address
        self._made_up: list[tuple[int, int]] = []
        self._sent_gaps: list[tuple[int, int]] = []
        self._since_ns = 0
        self._refused = ""

    async def hold(self) -> None:
        page = await self._browser.new_page()
        page.on("websocket", self._follow)
        try:
            await page.goto(self._address)
            await page.click("#start-typing")
            await asyncio.Event().wait()
        finally:
            await page.close()

    def _follow(self, socket: Any) -> None:
        def sent(frame: str) -> None:
            message = json.loads(frame)
            if message["type"] == "report":
                self._made_up.append((clock.now(), message["concealed"]))

        def received(frame: str) -> None:
            message = json.loads(frame)
            if message["type"] == "stats":
                self._sent_gaps.append((clock.now(), message["gaps"]))
            elif message["type"] == "error":
                self._refused = message["message"]

        socket.on("framesent", sent)
        socket.on("framereceived", received)

    def start(self) -> None:
        self._since_ns = clock.now()

    async def ear(self) -> Ear:
        made_up = np.diff([samples for at, samples in self._made_up if at >= self._since_ns]) / 48
        sent_gaps = [gaps for at, gaps in self._sent_gaps if at >= self._since_ns] or [0]
        return Ear(
            self.kind,
            (clock.now() - self._since_ns) / 1e9,
            sent_gaps[-1] - sent_gaps[0],
            int((made_up > GAP_MS).sum()),
            float(made_up.sum()),
            self._refused,
        )


def _runs(is_set: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Start and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_set, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def cpu_s(pid: int) -> dict[str, float]:
    """Processor time so far of the server's process and of the engine's, which is its child."""

    def of(process: int) -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return {"server": of(pid), "engine": sum(of(int(child)) for child in children)}


@asynccontextmanager
async def server(calls: int) -> AsyncIterator[tuple[int, str]]:
    """Its process and its address."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--serve", str(port), "--calls", str(calls)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            while b"http://" not in (line := await process.stdout.readline()):
                if not line:
                    raise SystemExit("the server did not start")
        yield process.pid, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


class Watch:
    """How long the callers' own event loop has stood still."""

    def __init__(self) -> None:
        self.worst_ms = 0.0

    async def run(self) -> None:
        while True:
            began_ns = clock.now()
            await asyncio.sleep(0.005)
            self.worst_ms = max(self.worst_ms, (clock.now() - began_ns) / 1e6 - 5)


async def measure(calls: int, seconds: float, tabs: int) -> tuple[list[Ear], dict[str, float]]:
    """The ears of so many calls; the processor time of server and engine as a share of a core, and our own stalls."""
    async with AsyncExitStack() as stack:
        pid, address = await stack.enter_async_context(server(calls))
        callers: list[Caller | Tab] = [Caller(address) for _ in range(calls - tabs)]
        if tabs:
            from playwright.async_api import async_playwright

            from tests.e2e.conftest import CHROMIUM, network_flags

            playwright = await stack.enter_async_context(async_playwright())
            flags = ["--autoplay-policy=no-user-gesture-required", *network_flags()]
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
            stack.push_async_callback(browser.close)
            callers += [Tab(browser, address) for _ in range(tabs)]
        tasks = []
        for caller in callers:
            tasks.append(asyncio.create_task(caller.hold()))
            await asyncio.sleep(0.3)
        await asyncio.sleep(WARM_UP_S)
        for caller in callers:
            caller.start()
        tasks.append(asyncio.create_task((watch := Watch()).run()))
        before, began = cpu_s(pid), time.monotonic()
        await asyncio.sleep(seconds)
        span_s = time.monotonic() - began
        used = {part: (after - before[part]) / span_s for part, after in cpu_s(pid).items()}
        used["own_stall_ms"] = watch.worst_ms
        ears = [await caller.ear() for caller in callers]
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ears, used


async def main(args: argparse.Namespace) -> None:
    results = []
    print(f"{'':10} {'seconds':>8} {'sent':>5} {'gaps':>5} {'made up':>10}")
    for calls in args.calls:
        tabs = min(args.chromium, calls)
        ears, used = await measure(calls, args.seconds, tabs)
        results.append({"calls": calls, "ears": [asdict(ear) for ear in ears], "cores": used})
        print(
            f"{calls} calls; of a core, the server {used['server']:.2f}, the engine {used['engine']:.2f};"
            f" the callers stood still for {used['own_stall_ms']:.0f} ms at worst"
        )
        for ear in ears:
            print(
                f"{ear.kind:10} {ear.seconds:8.1f} {ear.sent_gaps:5} {ear.gaps:5} {ear.made_up_ms:7.0f} ms"
                f"  {ear.refused}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(origin("aiortc", "torch", "uvloop") | {"results": results}, indent=1))
    parts = []
    for result in results:
        ears = [Ear(**ear) for ear in result["ears"]]
        minutes = sum(ear.seconds for ear in ears) / 60
        name = f"calls_{result['calls']}"
        parts += [
            f"{name}_gaps_per_call_minute={sum(ear.gaps for ear in ears) / max(minutes, 1e-9):.2f}",
            f"{name}_made_up_ms_per_call_minute={sum(ear.made_up_ms for ear in ears) / max(minutes, 1e-9):.0f}",
        ]
    print("RESULT", *parts)


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="8 calls for 20 s")
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--chromium", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1, help="nothing here is random; taken for the convention's sake")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.calls[0])
    else:
        if arguments.quick:
            arguments.calls, arguments.seconds = [8], 20.0
        uvloop.run(main(arguments))
