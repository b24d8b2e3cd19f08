"""The STUN and TURN servers of both ends, with credentials that expire.

A TURN server relays for whoever knows a password, and a page shows its password to whoever looks.  So each connection
gets its own, good for an hour: coturn (`use-auth-secret`) and others accept `expiry:name` as the user, and as the
password a signature of that with a secret that only the two servers know (draft-uberti-behave-turn-rest).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import aioice
from aiortc import RTCIceServer
from aiortc.rtcicetransport import connection_kwargs, parse_stun_turn_uri

from breeze_rtc.clock import SECOND, Clock, MonotonicClock, wall_offset_ns
from breeze_rtc.transport.signaling import IceServer

__all__ = ["IceServers", "address_from", "parse_stun_turn_uri"]

LIFE_S = 3600.0


def _wall_s(clock: Clock) -> float:
    return (clock.now() + wall_offset_ns()) / SECOND


@dataclass(frozen=True, slots=True)
class IceServers:
    """Which servers help to find a path."""

    known: tuple[IceServer, ...] = ()
    turn_secret: str | None = None
    """What the TURN servers of `known` that have no user share with us."""
    life_s: float = LIFE_S
    wall_s: Callable[[], float] = lambda: _wall_s(MonotonicClock())
    """Seconds since 1970, for the expiry."""

    @property
    def renewal_s(self) -> float | None:
        """After how long credentials should be replaced; None where they last."""
        return self.life_s / 2 if self.turn_secret is not None else None

    def servers(self) -> tuple[IceServer, ...]:
        """The servers for one connection that is made now."""
        return tuple(self._with_credentials(server) for server in self.known)

    def _with_credentials(self, server: IceServer) -> IceServer:
        is_turn = all(url.startswith("turn") for url in server.urls)
        if self.turn_secret is None or server.username is not None or not is_turn:
            return server
        # A name of its own for each connection: the TURN server's log and quotas can tell them apart.
        user = f"{int(self.wall_s() + self.life_s)}:{secrets.token_hex(4)}"
        return IceServer(server.urls, user, self.credential(self.turn_secret, user))

    @staticmethod
    def credential(secret: str, user: str) -> str:
        """The password that belongs to a user's name."""
        return base64.b64encode(hmac.new(secret.encode(), user.encode(), hashlib.sha1).digest()).decode()


async def address_from(server: IceServer) -> str | None:
    """The address that a STUN server sees us at, or that a TURN server relays from; None where it does not say, within
    five seconds."""
    known = RTCIceServer(urls=list(server.urls), username=server.username, credential=server.credential)
    connection = aioice.Connection(ice_controlling=False, **connection_kwargs([known]))
    try:
        await connection.gather_candidates()
        found = (c for c in connection.local_candidates if c.type in {"srflx", "relay"})
        return next((f"{candidate.host}:{candidate.port}" for candidate in found), None)
    finally:
        await connection.close()
