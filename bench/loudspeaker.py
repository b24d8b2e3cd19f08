"""A loudspeaker that can be listened to: what leaves it and when, and speech whose places are known again in it.

Not a benchmark itself.  A PulseAudio server of our own with a sink that makes no sound, a recording of what goes into
it, and a hum with marks that tell where in it one is.  Clicks of a player that asks this server for its latency are in
the recording where the player puts them: half of them within 1 ms, 95 % within 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import SECOND, MonotonicClock

RATE = 24_000
"""Of what is spoken."""
SINK_RATE = 48_000
MARK_SAMPLES = RATE // 10
MARK_HZ = [900 + 220 * k for k in range(12)]
MARK_S = 0.010

Samples = NDArray[np.float32]


def missing() -> list[str]:
    """What is not installed."""
    return [name for name in ("pulseaudio", "pacat", "parec") if shutil.which(name) is None]


class Loudspeaker:
    """A sound server of our own with one sink, and a recording of what leaves it."""

    def __init__(self, folder: Path) -> None:
        (folder / "daemon.conf").write_text(f"default-sample-rate = {SINK_RATE}\n")
        self.env = os.environ | {
            "PULSE_CONFIG": str(folder / "daemon.conf"),
            "PULSE_RUNTIME_PATH": str(folder),
            "PULSE_STATE_PATH": str(folder),
            "PULSE_SERVER": f"unix:{folder}/native",
            "XDG_RUNTIME_DIR": str(folder),
        }
        self._socket = folder / "native"
        self._processes: list[asyncio.subprocess.Process] = []
        self._reader: asyncio.Task[None] | None = None
        # What was recorded: (monotonic time of arrival in s, bytes).
        self._blocks: list[tuple[float, bytes]] = []

    async def start(self) -> None:
        clock = MonotonicClock()
        await self._spawn(
            *("pulseaudio", "-n", "--daemonize=no", "--use-pid-file=no", "--exit-idle-time=-1", "--log-level=error"),
            *("-L", f"module-null-sink sink_name=ear rate={SINK_RATE} channels=1 format=s16le"),
            *("-L", f"module-native-protocol-unix auth-anonymous=1 socket={self._socket}"),
        )
        async with asyncio.timeout(10):
            while not self._socket.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)
        # A sink that nobody keeps awake renders seconds ahead and stalls each new player.
        form = ("--raw", "--latency-msec=10", f"--rate={SINK_RATE}", "--channels=1", "--format=s16le")
        await self._spawn("pacat", "--playback", *form, "/dev/zero")
        recorder = await self._spawn("parec", "-d", "ear.monitor", *form)

        async def read() -> None:
            assert recorder.stdout is not None
            while block := await recorder.stdout.read(1 << 16):
                self._blocks.append((clock.now() / SECOND, block))

        self._reader = asyncio.create_task(read())
        async with asyncio.timeout(10):
            while not self._blocks:  # noqa: ASYNC110 - the reader only fills it
                await asyncio.sleep(0.05)

    async def _spawn(self, *command: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *command, env=self.env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        self._processes.append(process)
        return process

    async def stop(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
        if self._reader is not None:
            await self._reader

    def take(self) -> Recording:
        """What was recorded since the last take."""
        blocks, self._blocks = self._blocks, self._blocks[-1:]
        return Recording(blocks)


class Recording:
    """Sound, and when each sample of it left the loudspeaker."""

    def __init__(self, blocks: Sequence[tuple[float, bytes]]) -> None:
        self.samples: Samples = np.frombuffer(b"".join(block for _, block in blocks), "<i2").astype(np.float32) / 32768
        arrived_s = np.array([at for at, _ in blocks])
        first = np.cumsum([0, *(len(block) // 2 for _, block in blocks)])[:-1].astype(float)
        # The sink renders a block when the first sample of it is due, and the reader comes late at times, never early.
        # So the line through the earliest arrivals is the sink's clock: a straight one, and what it wanders in seconds.
        slope, offset = np.polyfit(first, arrived_s, 1)
        late = arrived_s - (slope * first + offset)
        window = np.floor(arrived_s - arrived_s[0]).astype(int)
        early = np.array([(first[window == w].mean(), np.percentile(late[window == w], 20)) for w in np.unique(window)])
        self._times = lambda index: slope * index + offset + np.interp(index, early[:, 0], early[:, 1])
        self.sink_ppm = (1 / slope / SINK_RATE - 1) * 1e6

    def times_s(self, index: NDArray[Any]) -> NDArray[np.float64]:
        return np.asarray(self._times(np.asarray(index, float)))

    def index_of(self, at_s: float) -> int:
        """The sample that left at `at_s`, within a block."""
        ends = self.times_s(np.array([0, self.samples.size - 1]))
        return round(np.interp(at_s, ends, [0, self.samples.size - 1]))


# ---- what is spoken, and finding it again ----------------------------------------------------------------------------


def speech(seconds: float) -> NDArray[np.int16]:
    """A hum like a voice's, with a mark of 10 ms each 100 ms; twelve pitches in turn tell the marks apart."""
    t = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(118 + 9 * np.sin(2 * np.pi * 0.7 * t)) / RATE
    sound = 0.09 * (np.sin(phase) + 0.7 * np.sin(2 * phase) + 0.5 * np.sin(3 * phase))
    burst = np.arange(-round(MARK_S * RATE / 2), round(MARK_S * RATE / 2))
    window = np.cos(np.pi * burst / burst.size) ** 2
    for mark, centre in enumerate(range(MARK_SAMPLES, t.size - MARK_SAMPLES, MARK_SAMPLES), 1):
        sound[centre + burst] += 0.5 * window * np.cos(2 * np.pi * MARK_HZ[mark % 12] * burst / RATE)
    return (np.clip(sound, -1, 1) * 32_000).astype(np.int16)


def find_marks(samples: Samples) -> list[tuple[float, int, float]]:
    """(sample, pitch, strength) of each mark in sound at 48 kHz."""
    half = round(MARK_S * SINK_RATE / 2)
    window = np.hanning(2 * half + 1)
    size = 1 << 18
    step = size - 2 * half
    heights = np.zeros((12, samples.size), np.float32)
    offset = np.arange(-half, half + 1)
    window /= window.sum()
    kernels = [np.fft.fft(window * np.exp(2j * np.pi * hz * offset / SINK_RATE), size) for hz in MARK_HZ]
    for start in range(0, samples.size, step):
        spectrum = np.fft.fft(samples[max(0, start - half) : start + step + half], size)
        skip = half + min(start, half)
        for k, kernel in enumerate(kernels):
            part = np.abs(np.fft.ifft(spectrum * kernel))[skip : skip + step]
            room = min(part.size, samples.size - start)
            heights[k, start : start + room] = part[:room]
    loudest = heights.argmax(axis=0)
    top = heights.max(axis=0)
    found = []
    above = np.flatnonzero(top > 0.03)
    for group in np.split(above, np.flatnonzero(np.diff(above) > half) + 1):
        if group.size == 0:
            continue
        peak = int(group[top[group].argmax()])
        k = int(loudest[peak])
        inside = slice(max(0, peak - half), peak + half + 1)
        # The peak is flat; the middle of the hill above its half is sharper.
        hill = np.arange(*inside.indices(samples.size))
        weight = np.maximum(0, heights[k, inside] - heights[k, peak] / 2)
        found.append((float((hill * weight).sum() / weight.sum()), k, float(top[peak])))
    return found
