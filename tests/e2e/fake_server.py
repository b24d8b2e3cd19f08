"""Scripted server for work on the page's layout: speaks the call protocol, sends a tone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from pathlib import Path

import uvicorn
from aiortc import AudioStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from starlette.applications import Starlette
from starlette.routing import Mount, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect

WEB = Path(__file__).parents[2] / "web"
GREETING = "Hello! I am the voice of breeze. Ask me something, or cut in whenever you like: I will know exactly which word you heard last."
LONG = ("The wind rises early over the bay, and by the time the boats are out the water is already dark and ruffled. "
        "Sailors call this the morning breeze, and they trust it more than any forecast, because it has never been late.")


async def call(ws: WebSocket) -> None:
    await ws.accept()
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    peer.addTrack(AudioStreamTrack())
    last_report: dict = {}
    stream = 0
    interrupt = asyncio.Event()
    gaps = 0
    tasks = []

    async def send(**message: object) -> None:
        with contextlib.suppress(Exception):
            await ws.send_text(json.dumps(message))

    async def say(text: str) -> None:
        nonlocal stream
        stream += 1
        mine = stream
        interrupt.clear()
        await send(type="state", state="speaking")
        half = text.find(" ", len(text) // 2) + 1
        await send(type="speech", stream=mine, text=text[:half])
        await asyncio.sleep(0.2)
        await send(type="speech", stream=mine, text=text[half:])
        chars = 0
        speaking.update(since=time.monotonic(), chars=len(text))
        while chars < len(text) and not interrupt.is_set():
            await asyncio.sleep(0.1)
            chars = min(int((time.monotonic() - speaking["since"]) * 16), len(text))
            await send(type="heard", stream=mine, chars=chars)
        if interrupt.is_set():
            await send(type="flush", resume_rtp=(last_report.get("rtp") or 0) + 9600 & 0xFFFFFFFF)
        speaking.clear()
        await send(type="speech_end", stream=mine, interrupted=interrupt.is_set(), chars=chars)
        await send(type="state", state="listening")

    speaking: dict = {}

    async def stats() -> None:
        nonlocal gaps
        k = 0
        while True:
            await asyncio.sleep(0.2)
            k += 1
            on = bool(speaking)
            if on and k % 61 == 0:
                gaps += 1
            await send(type="stats", t_ms=time.monotonic() * 1e3, lead_ms=900 + 250 * math.sin(k / 6) if on else None,
                       slack_ms=260 + 180 * math.sin(k / 5 + 1) - (400 if k % 60 < 3 else 0) if on else None,
                       jitter_ms=last_report.get("jitter_buffer_ms"), gaps=gaps, first_sound_ms=318.0, stop_ms=41.0 if stream > 1 else None,
                       path_ms=97.0 + 6 * math.sin(k / 9), source="measured", error_ms=11.0)

    try:
        await send(type="hello", listens=True, listen_fix="", model="nano", voice="heart", ice_servers=[], sample_rate=24000)
        async for raw in ws.iter_text():
            message = json.loads(raw)
            match message["type"]:
                case "offer":
                    await peer.setRemoteDescription(RTCSessionDescription(sdp=message["sdp"], type="offer"))
                    await peer.setLocalDescription(await peer.createAnswer())
                    await send(type="answer", sdp=peer.localDescription.sdp)
                    tasks.append(asyncio.create_task(stats()))
                    tasks.append(asyncio.create_task(say(GREETING)))
                case "ping":
                    await send(type="pong", id=message["id"], t_ms=message["t_ms"], server_ms=time.monotonic() * 1e3)
                case "report":
                    if "-v" in sys.argv:
                        print(raw, flush=True)
                    last_report.update(message)
                case "flushed":
                    print(raw, flush=True)
                case "interrupt":
                    interrupt.set()
                case "text":
                    interrupt.set()
                    await send(type="user", text=message["text"], final=True)
                    await send(type="state", state="thinking")
                    await asyncio.sleep(0.8)
                    tasks.append(asyncio.create_task(say(LONG)))
    except WebSocketDisconnect:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await peer.close()


app = Starlette(routes=[WebSocketRoute("/call", call), Mount("/", StaticFiles(directory=WEB, html=True))])
if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
