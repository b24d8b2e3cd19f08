"""Settings of the SIP door, by which telephones and PBXs call with no carrier between: see `sip_call`."""

from __future__ import annotations

from dataclasses import dataclass, field

RTP_PORTS = (10_000, 20_000)
"""Where sound comes in, by UDP: the range that PBXs use."""


@dataclass(frozen=True, slots=True)
class Sip:
    """Settings of the SIP door.

    listen: a local HOST:PORT, for SIP over UDP and TCP.  account: one to register, sip:NAME@HOST; calls to it come
    here, and calls of ours go out by it.  public_host: our address as others see it, where a router changes it.
    rtp_ports: the first and the last port for sound.  allow: networks that may call, such as a PBX's or a provider's;
    empty: everybody who reaches the port.
    """

    listen: str
    account: str | None = None
    password: str = field(default="", repr=False)
    public_host: str | None = None
    rtp_ports: tuple[int, int] = RTP_PORTS
    allow: tuple[str, ...] = ()

    def instructions(self) -> str:
        """How to call."""
        registered = f"; what {self.account} is called by comes here too" if self.account else ""
        return f"call sip:agent@{self.listen} from any telephone{registered}"
