"""A real coturn on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

import ifaddr
import pytest

SECRET = "north"


def own_address() -> str:
    """An IPv4 address of this machine that ICE uses; the loopback where there is no other."""
    addresses = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips if isinstance(ip.ip, str)]
    return next((address for address in addresses if address != "127.0.0.1"), "127.0.0.1")


@contextmanager
def coturn() -> Iterator[str]:
    """The URL of a TURN server that takes credentials made with `SECRET`."""
    program = shutil.which("turnserver")
    if program is None:
        pytest.skip("coturn is missing. On Debian: sudo apt-get install coturn")
    host = own_address()
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                *(program, "-n", "--listening-ip", host, "--relay-ip", host, "--listening-port", str(port)),
                *("--use-auth-secret", "--static-auth-secret", SECRET, "--realm", "test", "--fingerprint"),
                *("--allow-loopback-peers", "--no-tls", "--no-dtls", "--no-cli", "--no-tcp-relay"),
                *("--log-file", "stdout", "--pidfile", f"{folder}/pid", "--userdb", f"{folder}/db"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )
        try:
            _wait(host, port)
            yield f"turn:{host}:{port}?transport=udp"
        finally:
            process.terminate()
            process.wait(10)


def _wait(host: str, port: int) -> None:
    """Until it answers a STUN request (RFC 8489): binding, empty, of a fixed transaction."""
    request = bytes.fromhex("00010000 2112a442") + b"breeze_rtc!!"
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking:
        asking.bind((host, 0))
        asking.settimeout(0.2)
        for _ in range(100):
            asking.sendto(request, (host, port))
            try:
                if asking.recv(1_000)[8:20] == request[8:20]:
                    return
            except OSError:
                continue
    raise TimeoutError("coturn does not start")
