"""A path that loses packets and delays each by another time, between a telephone and whoever it calls.

Stands in for `tc netem`, which not every kernel has.  SIP is delayed but never lost, and its session descriptions name
this relay, so that RTP and RTCP come through here, both ways.
"""

from __future__ import annotations

import heapq
import re
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from random import Random


@dataclass(frozen=True)
class Bend:
    """What a path does.  delay_s: one way; jitter_s: up to so much more, for each packet anew; loss: a share."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        jitter = f" + 0 to {self.jitter_s * 1_000:.0f}" if self.jitter_s else ""
        return f"{100 * self.loss:.0f} % lost, {self.delay_s * 1_000:.0f}{jitter} ms each way"


class BentPath:
    """`with BentPath(port, Bend(loss=0.05)) as path`: call `path.uri` instead of sip:agent@127.0.0.1:port."""

    def __init__(self, port: int, bend: Bend, *, seed: int = 1) -> None:
        self.carried = self.lost = 0
        """Packets of sound, of both directions."""
        self._bend = bend
        self._random = Random(seed)
        self._door = ("127.0.0.1", port)
        self._phone: tuple[str, int] | None = None
        # SIP towards the telephone and towards the door; RTP and RTCP of each side.
        self._near, self._far = _bound(), _bound()
        self._sound = {"phone": _pair(), "door": _pair()}
        # Where each side wants its sound.
        self._wanted: dict[str, tuple[str, int]] = {}
        self._flying: list[tuple[float, int, socket.socket, bytes, tuple[str, int]]] = []
        self._count = count()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BentPath:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join()
        for made in self._sockets():
            made.close()

    @property
    def uri(self) -> str:
        return f"sip:agent@127.0.0.1:{self._near.getsockname()[1]}"

    def _sockets(self) -> list[socket.socket]:
        return [self._near, self._far, *self._sound["phone"], *self._sound["door"]]

    def _run(self) -> None:
        while not self._ends.is_set():
            now = time.monotonic()
            while self._flying and self._flying[0][0] <= now:
                _, _, out, data, to = heapq.heappop(self._flying)
                with suppress(OSError):
                    out.sendto(data, to)
            wait_s = min(0.05, max(0.0, self._flying[0][0] - now)) if self._flying else 0.05
            for ready in select.select(self._sockets(), [], [], wait_s)[0]:
                with suppress(OSError):  # A port that was closed says so by ICMP.
                    data, source = ready.recvfrom(65_536)
                    self._carry(ready, data, source)

    def _carry(self, ready: socket.socket, data: bytes, source: tuple[str, int]) -> None:
        if ready is self._near:
            self._phone = source
            self._late(self._far, self._renamed(data, "phone"), self._door)
        elif ready is self._far:
            if self._phone is not None:
                self._late(self._near, self._renamed(data, "door"), self._phone)
        else:
            # What comes in on the side of one leaves on the side of the other, for that is where it is expected from.
            for side, other in (("phone", "door"), ("door", "phone")):
                if ready in self._sound[side] and other in self._wanted:
                    number = self._sound[side].index(ready)
                    host, port = self._wanted[other]
                    self._bent(self._sound[other][number], data, (host, port + number))

    def _bent(self, out: socket.socket, data: bytes, to: tuple[str, int]) -> None:
        self.carried += 1
        if self._random.random() < self._bend.loss:
            self.lost += 1
            return
        self._late(out, data, to, self._random.random() * self._bend.jitter_s)

    def _late(self, out: socket.socket, data: bytes, to: tuple[str, int], more_s: float = 0.0) -> None:
        at = time.monotonic() + self._bend.delay_s + more_s
        heapq.heappush(self._flying, (at, next(self._count), out, data, to))

    def _renamed(self, data: bytes, side: str) -> bytes:
        """A message of `side` whose sound is to come here: on the side of the other."""
        head, gap, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"m=audio (\d+)", body)
        if not found or not int(found[1]):
            return data
        other = "door" if side == "phone" else "phone"
        port = self._sound[other][0].getsockname()[1]
        self._wanted[side] = ("127.0.0.1", int(found[1]))
        body = body.replace(found[0], b"m=audio %d" % port)
        body = re.sub(rb"a=rtcp:\d+", b"a=rtcp:%d" % (port + 1), body)
        return re.sub(rb"(?im)^(content-length|l)\s*:\s*\d+", b"Content-Length: %d" % len(body), head) + gap + body


def _bound(port: int = 0) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", port))
    return made


def _pair() -> tuple[socket.socket, socket.socket]:
    """An even port, and the next."""
    while True:
        first = _bound()
        port = first.getsockname()[1]
        if port % 2 == 0:
            with suppress(OSError):
                return first, _bound(port + 1)
        first.close()
