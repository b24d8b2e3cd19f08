"""A real telephone: baresip, with a sound card that is two pipes.

Its player and its microphone are ALSA's, paced by whoever reads and writes the pipes.  So what is read is what came out
of its loudspeaker, behind RTP, its jitter buffer and its own buffers, and when.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import threading
import time
import wave
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy as np
from machine import hurry
from numpy.typing import NDArray

EAR_RATE = 48_000
EAR_PIECE = 960 * 4
"""20 ms, 16 bits, two channels: ALSA's pipe is a page long, which is 21 ms of that."""
MOUTH_PIECE = 320
MODULES = "/usr/lib/baresip/modules"
PAGE = 4_096
LATE_NS = 10_000_000
"""Later than a thread wakes up that plays a sound card, but for a machine that keeps it waiting."""

JITTER_BUFFER_MS = 200
"""Ten packets, what its settings allow it to hold."""

CONFIG = """\
jitter_buffer_delay 5-10
audio_buffer 20-160
sip_listen 127.0.0.1:{port}
audio_player alsa,ear
audio_source alsa,mouth
audio_alert none
auplay_srate 48000
auplay_channels 2
ausrc_srate 8000
ausrc_channels 1
module_path {modules}
module g711.so
module alsa.so
module account.so
module menu.so
module cons.so
cons_listen 127.0.0.1:{keys}
"""
SOUND_CARD = """\
pcm.nothing {{ type null }}
pcm.ear {{ type file slave.pcm nothing file "{folder}/ear" format raw truncate true }}
pcm.mouth {{ type file slave.pcm nothing file "/dev/null" infile "{folder}/mouth" format raw }}
"""


def missing() -> str:
    """Why there is no telephone here; "" when there is."""
    if shutil.which("baresip") is None or not os.path.exists(f"{MODULES}/alsa.so"):
        return "baresip is not installed. On Debian: sudo apt-get install baresip-core"
    try:
        import pjsua2  # noqa: F401
    except ImportError:
        return "PJSIP, the test carrier's, is not installed: pip install pjsua2-python"
    return ""


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Softphone:
    """Calls `uri` and stays in the call: `with Softphone(folder, uri, codec="pcma") as phone`.

    uri: "" for one that waits, at `phone.uri`, and answers.  codec: pcmu or pcma, what it offers.
    """

    def __init__(self, folder: Path, uri: str, *, codec: str = "pcmu") -> None:
        self.folder = folder
        self.uri = ""
        self._uri = uri
        self._codec = codec
        self._pieces: list[bytes] = []
        self._said: deque[bytes] = deque()
        self._began_ns: int | None = None
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self.pid = 0
        self.loud_s = 0.0
        """How long it has been loud."""
        self.late_ns: list[int] = []
        """By how much its sound card was late since the call began, where that was more than `LATE_NS`."""
        self.unready = 0
        """Times that it had less than 20 ms ready for its sound card."""

    def __enter__(self) -> Softphone:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keys, port = _free_port(), 0 if self._uri else _free_port()
        self.uri = f"sip:caller@127.0.0.1:{port}"
        (self.folder / "config").write_text(CONFIG.format(modules=MODULES, keys=self._keys, port=port))
        answers = "" if self._uri else ";answermode=auto"
        account = f"<sip:caller@127.0.0.1>;regint=0;audio_codecs={self._codec}{answers}\n"
        (self.folder / "accounts").write_text(account)
        (self.folder / "contacts").write_text("")
        (self.folder / "asound.conf").write_text(SOUND_CARD.format(folder=self.folder))
        self._pipes = []
        for name in ("ear", "mouth"):
            os.mkfifo(self.folder / name)
            pipe = os.open(self.folder / name, os.O_RDWR | os.O_NONBLOCK)
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PAGE)
            self._pipes.append(pipe)
        self._log = (self.folder / "log").open("wb")
        self._phone = subprocess.Popen(
            ["baresip", "-f", str(self.folder), *(("-e", f"/dial {self._uri}") if self._uri else ())],
            env={**os.environ, "ALSA_CONFIG_PATH": str(self.folder / "asound.conf"), "HOME": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self.pid = self._phone.pid
        hurry(self.pid)
        self._card = threading.Thread(target=self._run, daemon=True)
        self._card.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hang_up()
        self._ends.set()
        self._card.join()
        for pipe in self._pipes:
            os.close(pipe)
        self._log.close()

    def hang_up(self) -> None:
        """By the telephone's own BYE."""
        self._phone.terminate()
        try:
            self._phone.wait(3)
        except subprocess.TimeoutExpired:
            self._phone.kill()
            self._phone.wait()

    def say(self, samples: NDArray[np.float32]) -> None:
        """The caller says this, (N,) in [-1, 1] at 8 kHz, from now on."""
        pcm = (np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes()
        pcm += bytes(-len(pcm) % MOUTH_PIECE)
        self._said.extend(pcm[at : at + MOUTH_PIECE] for at in range(0, len(pcm), MOUTH_PIECE))

    def press(self, key: str) -> None:
        """A key, by RFC 4733."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as keys:
            keys.sendto(key.encode(), ("127.0.0.1", self._keys))

    @property
    def is_in_call(self) -> bool:
        return self._began_ns is not None

    def heard(self) -> NDArray[np.float32]:
        """All that came out of it since the call began, mono at 8 kHz: every sixth sample of what it played at 48."""
        with self._lock:
            pcm = np.frombuffer(b"".join(self._pieces), "<i2")
        return pcm[::12].astype(np.float32) / 32_768

    def at_ns(self, sample: int) -> int:
        """When that sample of `heard` came out, on the monotonic clock."""
        assert self._began_ns is not None
        return self._began_ns + sample * 1_000_000_000 // 8_000

    def save(self, path: Path) -> Path:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8_000)
            file.writeframes((self.heard() * 32_767).astype("<i2").tobytes())
        return path

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _run(self) -> None:
        """The sound card: 20 ms each way each 20 ms, from the telephone's first sound on."""
        hurry(threading.get_native_id())
        ear, mouth = self._pipes
        began = time.monotonic_ns()
        count = 0
        while not self._ends.is_set():
            count += 1
            due = began + count * 20_000_000
            time.sleep(max(0, due - time.monotonic_ns()) / 1e9)
            late_ns = time.monotonic_ns() - due
            try:
                piece = os.read(ear, EAR_PIECE)
            except BlockingIOError:
                piece = b""
            if self._began_ns is None:
                if not piece:
                    continue
                # The next piece comes out 20 ms after this one.
                self._began_ns = began + (count - 1) * 20_000_000
            if late_ns > LATE_NS:
                self.late_ns.append(late_ns)
            self.unready += len(piece) < EAR_PIECE
            if piece and np.abs(np.frombuffer(piece, "<i2")).max() > 1_000:
                self.loud_s += 0.02
            with self._lock:
                self._pieces.append(piece + bytes(EAR_PIECE - len(piece)))
            with suppress(BlockingIOError):
                os.write(mouth, self._said.popleft() if self._said else bytes(MOUTH_PIECE))
