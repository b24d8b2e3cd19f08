"""A path between a listener and a server that can be cut: a UDP relay, and an answer that names it."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress


class UdpRelay:
    """Carries datagrams between whoever writes to `port` and one address of the server; runs in a thread."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.is_cut = False
        self._server = server
        self._near = self._socket(server[0])
        self._far = self._socket(server[0])
        self.port: int = self._near.getsockname()[1]
        self._listener: tuple[str, int] | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def _socket(host: str) -> socket.socket:
        new = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        new.bind((host, 0))
        return new

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._near.close()
        self._far.close()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            for ready in select.select([self._near, self._far], [], [], 0.1)[0]:
                with suppress(OSError):  # A port that was closed says so by ICMP.
                    data, address = ready.recvfrom(65_536)
                    if ready is self._near:
                        self._listener = address
                    if self.is_cut:
                        continue
                    if ready is self._near:
                        self._far.sendto(data, self._server)
                    elif self._listener is not None:
                        self._near.sendto(data, self._listener)


def through_a_relay(answer: str) -> tuple[str, UdpRelay]:
    """The answer with a relay in the place of its first IPv4 address, and without its other addresses."""
    lines = answer.split("\r\n")
    candidates = [line for line in lines if line.startswith("a=candidate:")]
    chosen = next(line for line in candidates if ":" not in line.split()[4])
    fields = chosen.split()
    relay = UdpRelay((fields[4], int(fields[5])))
    fields[5] = str(relay.port)
    rewritten = " ".join(fields)
    return "\r\n".join(
        rewritten if line == chosen else line for line in lines if line == chosen or line not in candidates
    ), relay
