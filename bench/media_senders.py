"""One process that speaks to many listeners, one way or another: the measured side of `media_capacity.py`.

    python bench/media_senders.py KIND SECONDS [hears]

`hears`: it also receives and decodes each listener's microphone, 16 kHz for whoever would listen to it.

Lines of JSON: `{"offer": SDP}` is answered by `{"answer": SDP}`, `{"usage": true}` by CPU seconds and memory so far,
and `{"burn": NAME}` starts what a user's code may do to the process (`BURNS`).
It imports nothing but what its kind needs, so that each kind can run in a virtual environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from fractions import Fraction
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE = 24_000
PACKAGES = {"ours": "breeze_rtc", "detecting": "breeze_rtc", "pipecat": "pipecat-ai", "fastrtc": "fastrtc"}

Answer = Callable[[str], Awaitable[str]]


def voice(seconds: float) -> NDArray[np.int16]:
    """Something that costs an encoder what speech costs: a hum with overtones, vibrato, syllables and breath."""
    t = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * 140 * t + 2 * np.sin(2 * np.pi * 5 * t)
    hum = sum(np.sin(k * phase) / k for k in range(1, 12))
    breath = np.random.default_rng(1).normal(size=t.size) * 0.1
    return ((hum + breath) * (1.1 + np.sin(2 * np.pi * 3 * t)) * 3_000).astype(np.int16)


# Samples read of all microphones, at 16 kHz.
HEARD = {"samples": 0}


async def ours(seconds: float, *, hears: bool, detects: bool = False) -> Answer:
    """breeze_rtc: packets made ahead, one ticker, our own way onto the wire."""
    from breeze_rtc.agent.vad import VoiceActivity
    from breeze_rtc.media.opus import SpeechEncoder
    from breeze_rtc.transport.pacer import Pacer
    from breeze_rtc.transport.signaling import Offer
    from breeze_rtc.transport.webrtc import WebRtcCall

    packets, pacer, kept = SpeechEncoder(RATE).encode(voice(seconds)), Pacer(), []

    activity = VoiceActivity() if detects else None

    async def read(call: WebRtcCall) -> None:
        track = activity.open() if activity is not None else None
        async for block in call.uplink():
            HEARD["samples"] += block.samples.size
            if track is not None:
                await track.feed(block.samples)

    async def answer(sdp: str) -> str:
        call = WebRtcCall(pacer=pacer, first_report_timeout_s=0.1)
        kept.append((call, asyncio.create_task(read(call)) if hears else None))
        call.sink.write(1, packets)
        return await call.answer(Offer(sdp, hears))

    return answer


async def detecting(seconds: float, *, hears: bool) -> Answer:
    """The same with the voice activity model on each microphone, as the server has it."""
    return await ours(seconds, hears=hears, detects=True)


async def packets(seconds: float, *, hears: bool) -> Answer:
    """aiortc as it is, given packets made ahead, each track with a timer of its own."""
    import av
    from aiortc import MediaStreamTrack

    from breeze_rtc.clock import MS, MonotonicClock
    from breeze_rtc.media.opus import SpeechEncoder
    from breeze_rtc.transport.playout import Playout

    made, clock = SpeechEncoder(RATE).encode(voice(seconds)), MonotonicClock()

    class Track(MediaStreamTrack):
        kind = "audio"

        def __init__(self) -> None:
            super().__init__()
            self.playout = Playout()
            self.playout.write(1, made)
            self.playout.open()

        async def recv(self) -> av.Packet[Any]:
            if self.playout.clock is None:
                self.playout.start(clock.now())
            while (early_ns := self.playout.next_at() - clock.now()) > 0:  # noqa: ASYNC110 - it waits for the time
                await asyncio.sleep(-(-early_ns // MS) / 1000)
            slot = self.playout.next_slot(clock.now())
            packet = av.Packet(slot.payload)
            packet.pts, packet.time_base = slot.ticks, Fraction(1, 48_000)
            return packet

    return _aiortc(Track, hears)


async def frames(seconds: float, *, hears: bool) -> Answer:
    """aiortc as it is, given sound, which it encodes."""
    import av
    from aiortc.mediastreams import AudioStreamTrack

    sound = voice(seconds)

    class Track(AudioStreamTrack):
        def __init__(self) -> None:
            super().__init__()
            self.at = 0

        async def recv(self) -> av.AudioFrame:
            loop = asyncio.get_running_loop()
            if self.at == 0:
                self.start_s = loop.time()
            await asyncio.sleep(max(0.0, self.start_s + self.at / RATE - loop.time()))
            frame = av.AudioFrame.from_ndarray(sound[None, self.at : self.at + 480], format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE, self.at, Fraction(1, RATE)
            self.at += 480
            return frame

    return _aiortc(Track, hears)


def _aiortc(make_track: Callable[[], Any], hears: bool) -> Answer:
    import av
    from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

    kept: list[Any] = []

    async def read(track: Any) -> None:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=16_000)
        while True:
            frame = await track.recv()
            HEARD["samples"] += sum(part.samples for part in resampler.resample(frame))

    async def answer(sdp: str) -> str:
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        kept.append(peer)
        if hears:
            peer.on("track", lambda track: kept.append(asyncio.create_task(read(track))))
        peer.addTrack(make_track())
        await peer.setRemoteDescription(RTCSessionDescription(sdp, "offer"))
        await peer.setLocalDescription(await peer.createAnswer())
        return peer.localDescription.sdp

    return answer


async def pipecat(seconds: float, *, hears: bool) -> Answer:
    """Pipecat: a pipeline per session that ends in the SmallWebRTC output and has all of its sound at once.  Where it
    hears, it begins with the SmallWebRTC input, and a stage between takes the sound."""
    from loguru import logger
    from pipecat.frames.frames import Frame, InputAudioRawFrame, TTSAudioRawFrame
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.runner import PipelineRunner
    from pipecat.pipeline.task import PipelineParams, PipelineTask
    from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
    from pipecat.transports.base_transport import TransportParams
    from pipecat.transports.smallwebrtc.connection import SmallWebRTCConnection
    from pipecat.transports.smallwebrtc.transport import SmallWebRTCTransport

    logger.remove()
    sound, running = voice(seconds), []

    class Ear(FrameProcessor):  # type: ignore[misc]
        async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
            await super().process_frame(frame, direction)
            if isinstance(frame, InputAudioRawFrame):
                HEARD["samples"] += len(frame.audio) // 2
            else:
                await self.push_frame(frame, direction)

    async def answer(sdp: str) -> str:
        connection = SmallWebRTCConnection()
        await connection.initialize(sdp=sdp, type="offer")
        transport = SmallWebRTCTransport(connection, TransportParams(audio_out_enabled=True, audio_in_enabled=hears))
        task = PipelineTask(
            Pipeline([transport.input(), Ear(), transport.output()] if hears else [transport.output()]),
            params=PipelineParams(audio_out_sample_rate=RATE, audio_in_sample_rate=16_000),
            cancel_on_idle_timeout=False,
        )

        @transport.event_handler("on_client_connected")
        async def on_client_connected(transport: Any, client: Any) -> None:
            for at in range(0, sound.size, RATE):
                await task.queue_frame(TTSAudioRawFrame(sound[at : at + RATE].tobytes(), RATE, 1))

        running.append(asyncio.create_task(PipelineRunner(handle_sigint=False).run(task)))
        return connection.get_answer()["sdp"]

    return answer


async def fastrtc(seconds: float, *, hears: bool) -> Answer:
    """FastRTC: a `Stream` that only speaks, from a generator that has all of its sound at once; where it hears, an
    asynchronous handler that gives a second of its sound whenever it is asked."""
    from fastrtc import AsyncStreamHandler, Stream
    from fastrtc.stream import Body

    sound = voice(seconds)

    def speak(*_: object) -> Any:
        for at in range(0, sound.size, RATE):
            yield RATE, sound[None, at : at + RATE]

    class Both(AsyncStreamHandler):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(output_sample_rate=RATE, input_sample_rate=16_000)
            self.sound = speak()

        async def receive(self, frame: tuple[int, NDArray[np.int16]]) -> None:
            HEARD["samples"] += frame[1].size

        async def emit(self) -> Any:
            return next(self.sound, None)

        def copy(self) -> Both:
            return Both()

    stream = Stream(
        Both() if hears else speak,
        modality="audio",
        mode="send-receive" if hears else "receive",
        concurrency_limit=10_000,
        server_rtc_configuration={"iceServers": []},
    )

    async def answer(sdp: str) -> str:
        name = uuid.uuid4().hex
        reply = await stream.offer(Body(sdp=sdp, type="offer", webrtc_id=name))
        if not hears:
            stream.set_input(name)
        return reply["sdp"]

    return answer


def _burn(until: Callable[[], bool]) -> None:
    while not until():
        sum(range(1000))


def burn_thread() -> None:
    """A callback computes in a thread, in Python, without end."""
    threading.Thread(target=_burn, args=(lambda: False,), daemon=True).start()


def burn_thread_short_switch() -> None:
    """The same, with the switch interval that `breeze_rtc.server` sets."""
    from breeze_rtc.server.app import SWITCH_INTERVAL_S

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    burn_thread()


def burn_loop() -> None:
    """A callback computes on the event loop itself: 30 ms, twice a second."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 0.03
    _burn(lambda: time.monotonic() > end)
    loop.call_later(0.5, burn_loop)


BURNS = {"thread": burn_thread, "thread, short switch": burn_thread_short_switch, "loop": burn_loop}


async def lines() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def main() -> None:
    kinds = {
        "ours": ours,
        "detecting": detecting,
        "packets": packets,
        "frames": frames,
        "pipecat": pipecat,
        "fastrtc": fastrtc,
    }
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the libraries print is not for the other side.
    answer = await kinds[sys.argv[1]](float(sys.argv[2]), hears="hears" in sys.argv)
    async for message in lines():
        if "offer" in message:
            reply: dict[str, Any] = {"answer": await answer(message["offer"])}
        elif "burn" in message:
            BURNS[message["burn"]]()
            reply = {}
        else:
            used = resource.getrusage(resource.RUSAGE_SELF)
            reply = {
                "cpu_s": used.ru_utime + used.ru_stime,
                "peak_rss_kb": used.ru_maxrss,
                "heard_s": HEARD["samples"] / 16_000,
                "version": version(PACKAGES.get(sys.argv[1], "aiortc")),
            }
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
