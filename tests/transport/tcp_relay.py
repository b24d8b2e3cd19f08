"""A way to a server over TCP that can go dead, as a network does: sockets stay open and carry nothing."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class TcpRelay:
    """Listens on `port` of 127.0.0.1 and carries connections to another port there; runs in threads."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._sockets: list[socket.socket] = []
        # Connections up to this number carry nothing.
        self._dead = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Whatever is connected now goes dead; new connections work."""
        self._dead = len(self._sockets)

    def close(self) -> None:
        self._door.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target, len(self._sockets)), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, number: int) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if number > self._dead:
                    target.sendall(data)
            if number > self._dead:
                target.shutdown(socket.SHUT_WR)
