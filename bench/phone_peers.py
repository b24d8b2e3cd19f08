"""Strangers at our test carrier: do servers that others wrote for Twilio, Telnyx, Plivo and Vonage talk to it?

    python bench/phone_peers.py --pipecat VENV/bin/python --fastrtc VENV/bin/python --plivo VENV/bin/python

Each stranger runs in its own environment (pipecat-ai; fastrtc; plivo-stream-sdk, plivo and websockets), unmodified.
baresip calls the carrier of tests/carrier, which opens the stranger's socket.  After a second the stranger says 12 s of
a tone; the caller says another; when a key is pressed the stranger clears.  What is checked: the tone it heard, the
tone that came out of the telephone, the key it got, that nothing it sent was against the rules, that the clear emptied
what was held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

CALLER_HZ, STRANGER_HZ = 500, 900
HERE = Path(__file__).resolve().parent.parent


# --- the strangers' side: this file again, run by their interpreters, and so without any of ours


def tone(hz: int, seconds: float) -> bytes:
    count = int(8_000 * seconds)
    return b"".join(struct.pack("<h", int(9_000 * math.sin(2 * math.pi * hz * at / 8_000))) for at in range(count))


def strength(pcm: bytes, hz: int) -> float:
    samples = struct.unpack(f"<{len(pcm) // 2}h", pcm[: len(pcm) // 2 * 2])
    wave = [sum(s * f(2 * math.pi * hz * at / 8_000) for at, s in enumerate(samples)) for f in (math.sin, math.cos)]
    return 2 * math.hypot(*wave) / max(1, len(samples))


class Stranger:
    """What it heard; `say` and `clear` are its own ways."""

    def __init__(self) -> None:
        self.heard = b""
        self.keys = ""
        self.others: list[str] = []
        self.has_answered = False

    def told(self) -> None:
        # The caller is silent for a second, and speaks for one and a half.
        found = {"tone": round(max(strength(self.heard[at : at + 8_000], CALLER_HZ) for at in range(0, 80_000, 8_000)))}
        found |= {"keys": self.keys, "others": self.others}
        print(json.dumps(found), flush=True)


async def pipecat(carrier: str, port: int) -> None:
    from pipecat.frames import frames
    from pipecat.serializers import plivo, telnyx, twilio, vonage
    from websockets.asyncio.server import serve

    def serializer(start: dict[str, Any]) -> Any:
        match carrier:
            case "twilio":
                params = twilio.TwilioFrameSerializer.InputParams(auto_hang_up=False)
                return twilio.TwilioFrameSerializer(start["start"]["streamSid"], params=params)
            case "telnyx":
                encoding = start["start"]["media_format"]["encoding"]
                params = telnyx.TelnyxFrameSerializer.InputParams(auto_hang_up=False)
                return telnyx.TelnyxFrameSerializer(start["stream_id"], "PCMU", encoding, params=params)
            case "plivo":
                params = plivo.PlivoFrameSerializer.InputParams(auto_hang_up=False)
                return plivo.PlivoFrameSerializer(start["start"]["streamId"], params=params)
        return vonage.VonageFrameSerializer(vonage.VonageFrameSerializer.InputParams(vonage_sample_rate=8_000))

    async def call(socket: Any) -> None:
        me, mine = Stranger(), None
        async for raw in socket:
            message = json.loads(raw) if isinstance(raw, str) else {}
            if message.get("event") in ("start", "websocket:connected"):
                mine = serializer(message)
                await mine.setup(frames.StartFrame(audio_in_sample_rate=8_000, audio_out_sample_rate=8_000))
            if mine is None:
                continue
            frame = await mine.deserialize(raw)
            if isinstance(frame, frames.InputAudioRawFrame):
                me.heard += frame.audio
                if len(me.heard) > 16_000 and not me.has_answered:
                    me.has_answered = True
                    for _ in range(12):
                        out = await mine.serialize(frames.OutputAudioRawFrame(tone(STRANGER_HZ, 1), 8_000, 1))
                        for at in range(0, len(out), 8_000) if isinstance(out, bytes) else (0,):
                            await socket.send(out[at : at + 8_000] if isinstance(out, bytes) else out)
            elif isinstance(frame, frames.InputDTMFFrame):
                me.keys += frame.button.value
                await socket.send(await mine.serialize(frames.InterruptionFrame()))
        me.told()

    async with serve(call, "127.0.0.1", port):
        await asyncio.Future()


async def plivo_sdk(carrier: str, port: int) -> None:
    import audioop

    from plivo_stream.websockets import PlivoWebsocketStreamingHandler
    from websockets.asyncio.server import serve

    async def call(socket: Any) -> None:
        me, handler = Stranger(), PlivoWebsocketStreamingHandler()

        @handler.on_media
        async def media(event: Any) -> None:
            me.heard += audioop.ulaw2lin(event.get_raw_media(), 2)
            if len(me.heard) > 16_000 and not me.has_answered:
                me.has_answered = True
                for number in range(12):
                    await handler.send_media(audioop.lin2ulaw(tone(STRANGER_HZ, 1), 2))
                    await handler.send_checkpoint(f"second {number}")

        @handler.on_dtmf
        async def key(event: Any) -> None:
            me.keys += event.dtmf.digit
            await handler.send_clear_audio()

        @handler.on_played_stream
        async def played(event: Any) -> None:
            me.others.append("played")

        @handler.on_cleared_audio
        async def cleared(event: Any) -> None:
            me.others.append("cleared")

        @handler.on_error
        async def wrong(error: Exception) -> None:
            me.others.append(repr(error))

        await handler.handle(socket)
        me.told()

    async with serve(call, "127.0.0.1", port):
        await asyncio.Future()


async def fastrtc(carrier: str, port: int) -> None:
    import numpy as np
    import uvicorn
    from fastapi import FastAPI
    from fastrtc import AsyncStreamHandler, Stream

    class Handler(AsyncStreamHandler):
        def __init__(self) -> None:
            super().__init__("mono", output_sample_rate=8_000, input_sample_rate=8_000)
            self.me, self.said = Stranger(), 0

        async def receive(self, frame: Any) -> None:
            self.me.heard += frame[1].tobytes()
            if len(self.me.heard) > 60_000 and not self.me.has_answered:
                self.me.has_answered = True
                self.me.told()

        async def emit(self) -> Any:
            if len(self.me.heard) < 16_000 or self.said >= 12:
                await asyncio.sleep(0.02)
                return None
            self.said += 1
            return 8_000, np.frombuffer(tone(STRANGER_HZ, 1), np.int16)[None]

        def copy(self) -> Any:
            return Handler()

        async def start_up(self) -> None:
            pass

        async def shutdown(self) -> None:
            pass

    app = FastAPI()
    Stream(Handler(), modality="audio", mode="send-receive").mount(app)
    await uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error")).serve()


STRANGERS = {"pipecat": pipecat, "plivo": plivo_sdk, "fastrtc": fastrtc}


# --- our side


async def meet(name: str, interpreter: str, carrier: str, port: int, folder: Path) -> dict[str, Any]:
    sys.path[:0] = [str(HERE), str(HERE / "tests" / "carrier")]
    import numpy as np
    from softphone import Softphone

    path = "/telephone/handler" if name == "fastrtc" else "/"
    pipe = asyncio.subprocess.PIPE
    stranger = await asyncio.create_subprocess_exec(
        interpreter, __file__, "--as", name, "--carrier", carrier, "--port", str(port), stdout=pipe
    )
    for _ in range(200):
        try:
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            break
        except OSError:
            await asyncio.sleep(0.2)
    url = f"ws://127.0.0.1:{port}{path}"
    ours = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "tests/carrier/carrier.py"), carrier, url, stdout=pipe
    )
    assert ours.stdout is not None
    assert stranger.stdout is not None
    told: list[dict[str, Any]] = []
    uri = ""
    while not uri:
        line = (await ours.stdout.readline()).decode()
        uri = line.split()[-1] if "answered" in line else ""

    async def read() -> None:
        async for line in ours.stdout or ():
            if line.startswith(b"{"):
                told.append(json.loads(line))

    reading = asyncio.create_task(read())
    try:
        with Softphone(folder / f"{name}-{carrier}", uri) as phone:
            await asyncio.sleep(1.0)
            phone.say(np.frombuffer(tone(CALLER_HZ, 1.5), np.int16).astype(np.float32) / 32_768)
            await asyncio.sleep(4.0)
            phone.press("5")
            await asyncio.sleep(2.0)
            heard = (phone.heard() * 32_768).astype(np.int16)
        async with asyncio.timeout(5):
            found = {}
            while "tone" not in found:
                line = await stranger.stdout.readline()
                found = json.loads(line) if line.startswith(b"{") else {}
    except TimeoutError:
        found = {"tone": 0, "keys": "", "others": ["it told nothing"]}
    finally:
        for program in (ours, stranger):
            program.terminate()
            await program.wait()
        await reading
    loud = np.flatnonzero(np.abs(heard) > 2_000)
    middle = heard[loud[0] : loud[-1]][2_000:10_000].tobytes() if len(loud) else b""
    clears = [item["held_ms"] for item in told if item["event"] == "clear"]
    return {
        "stranger": name,
        "carrier": carrier,
        "hears": found["tone"] > 2_000,
        "is_heard": strength(middle, STRANGER_HZ) > 2_000,
        "heard_s": len(loud) and round((loud[-1] - loud[0]) / 8_000, 2),
        "key": found["keys"],
        "cleared_ms": clears[0] if clears else None,
        "refused": [item["why"] for item in told if item["event"] == "refused"][:2],
        "others": sorted(set(found["others"])),
    }


async def main(options: argparse.Namespace) -> None:
    import tempfile

    meetings = [("pipecat", carrier) for carrier in ("twilio", "telnyx", "plivo", "vonage")]
    meetings += [("plivo", "plivo"), ("fastrtc", "twilio")]
    with tempfile.TemporaryDirectory() as folder:
        for port, (name, carrier) in enumerate(meetings, 18_400):
            if interpreter := getattr(options, name):
                print(json.dumps(await meet(name, interpreter, carrier, port, Path(folder))), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in STRANGERS:
        parser.add_argument(f"--{each}", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--as", dest="role", help=argparse.SUPPRESS)
    parser.add_argument("--carrier", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(STRANGERS[given.role](given.carrier, given.port) if given.role else main(given))
