"""One peer connection of a call: it answers one offer, finds a path, watches that path, and ends.

aiortc has no ICE restart and notices a lost peer after half a minute.  So a call may have several of these, one after
another, and each says within two seconds that nobody is at the other end any more: whatever arrives (sound, RTCP,
STUN, a listener's report of fresh sound) is a sign of life; after a while without one the peer is asked by STUN, which
it must answer (RFC 7675), several times.

All that is used of the private parts of aiortc 1.16 and aioice 0.13 for connections is in this module:

`RTCIceGatherer._connection`
    aioice's connection, and of that:
`.stun_server`, `.turn_server` and what goes with it, `._local_candidates`, `._protocols`
    gathering in two steps, so that a server that does not answer holds nothing up.
`._remote_candidates`, `._pair_remote_candidate`, `.sort_check_list`, `._check_list_done`
    a local candidate that comes late.
`._nominated`, `.build_request`, `.remote_password`
    the pair of addresses in use, and a question to the other end of it.
`.data_received`, `.request_received`
    signs of life.
`._query_consent_task`
    why it ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import aioice.ice
from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.rtcconfiguration import RTCIceTransportPolicy
from aiortc.rtcrtpsender import RTCRtpSender
from aiortc.rtcrtptransceiver import RTCRtpTransceiver
from aiortc.sdp import candidate_from_sdp

from breeze_rtc.clock import MS, Clock
from breeze_rtc.errors import PeerError
from breeze_rtc.transport import signaling
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playhead import ReceiverReport
from breeze_rtc.transport.playout import Playout, Slot
from breeze_rtc.transport.sender import SlotSender
from breeze_rtc.transport.uplink import Uplink, UplinkReceiver

logger = logging.getLogger(__name__)

GATHER_S = 0.3
"""How long the answer waits for STUN and TURN servers.  What they say later is told later."""
RELAY_S = 5.0
"""The same where there is no path but through the TURN server."""
DOUBT_NS = 700 * MS
"""So long without a sign of life, and the peer is asked."""
QUESTIONS = 4
"""So many unanswered, asked at every look (a quarter of a second apart), and it is lost: 1.7 s after the last sign.
A path that loses 30 % each way leaves four of them unanswered once in fifteen times, but is hardly silent before."""


class Peer:
    """Released by `close()`, which may be called twice.  The callbacks come on the loop, none after `close()` began."""

    def __init__(
        self,
        playout: Playout,
        uplink: Uplink,
        *,
        pacer: Pacer,
        clock: Clock,
        origin_rtp: int | None,
        ice_servers: Sequence[signaling.IceServer],
        relay_only: bool,
        on_slot: Callable[[Slot], None],
        on_receiver_report: Callable[[ReceiverReport], None],
        on_connected: Callable[[], None],
        on_candidate: Callable[[str, int], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`origin_rtp` is that of the peer before.  `on_candidate(line, offer)` tells of an address found after the
        answer to that offer; `on_end(reason)` comes once, when this peer is of no more use."""
        self.connected = asyncio.Event()
        """Set once media can flow."""
        self._clock = clock
        self._uplink = uplink
        self._on_connected = on_connected
        self._on_candidate = on_candidate
        self._on_end = on_end
        self.has_ended = False
        """Whether it is of no more use."""
        self._closing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Whether something came since the last look, and when that was; questions asked since.
        self._has_come = False
        self._life_ns = 0
        self._microphone_packets = 0
        self._asked = 0
        self._has_answered = False
        self.offer_id = 0
        """Of the offer it answers."""
        # Never without a list of servers: aiortc would ask a public STUN server, and wait for it.
        self.connection = RTCPeerConnection(
            RTCConfiguration(
                iceServers=[_ice_server(server) for server in ice_servers],
                iceTransportPolicy=RTCIceTransportPolicy.RELAY if relay_only else RTCIceTransportPolicy.ALL,
            )
        )
        self.connection.on("connectionstatechange", self._on_state)
        self.transceiver: RTCRtpTransceiver = self.connection.addTransceiver("audio", direction="sendrecv")
        self.sender = SlotSender(
            self.transceiver.sender,
            playout,
            pacer,
            clock=clock,
            on_slot=on_slot,
            on_receiver_report=on_receiver_report,
            # Nothing can start a sender again: a peer that stays silent is over.
            on_end=lambda: self._end(self._why()),
            origin_rtp=origin_rtp,
        )
        UplinkReceiver.install(self.transceiver, uplink)
        capabilities = RTCRtpSender.getCapabilities("audio").codecs
        self.transceiver.setCodecPreferences([codec for codec in capabilities if codec.mimeType == "audio/opus"])
        self._ice = cast(Any, self.transceiver.receiver.transport.transport.iceGatherer._connection)
        self._ice.data_received = self._noticing(self._ice.data_received)
        self._ice.request_received = self._noticing(self._ice.request_received)

    # --- its life

    async def answer(self, offer: signaling.Offer) -> str:
        """The SDP to send back.  Raises `PeerError` for an offer that cannot be answered; `close` it then."""
        self.offer_id = offer.id
        try:
            await self.connection.setRemoteDescription(RTCSessionDescription(sdp=offer.sdp, type="offer"))
            await self._gather()
            await self.connection.setLocalDescription(await self.connection.createAnswer())
        except PeerError:
            raise
        except Exception as error:
            # aiortc reads SDP with assertions and plain lookups, so any exception may mean a malformed offer.
            if self._closing is not None:
                raise PeerError("call_closed", "the call ended before it was answered", "Call again.") from error
            raise PeerError(
                "offer_malformed", f"the offer could not be read: {error}", "Send localDescription.sdp as it is."
            ) from error
        self._has_answered = True
        sdp = signaling.with_opus_format(self.connection.localDescription.sdp)
        return sdp.replace("a=end-of-candidates\r\n", "") if self._tasks else sdp

    async def add_candidate(self, candidate: signaling.Candidate) -> None:
        """One more address of the peer.  What cannot be used is ignored, as ICE does."""
        ice = self.transceiver.receiver.transport.transport
        is_enough = len(ice.getRemoteCandidates()) >= signaling.MAX_CANDIDATES
        if self._closing is not None or candidate.id != self.offer_id or not candidate.line or is_enough:
            return
        try:
            parsed = candidate_from_sdp(candidate.line.removeprefix("candidate:"))
        except (ValueError, AssertionError, IndexError) as error:
            raise PeerError(
                "candidate_malformed", "a candidate cannot be read", "Send it as the browser says it."
            ) from error
        await ice.addRemoteCandidate(parsed)

    async def close(self) -> None:
        """Release everything; returns when that is done."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.sender.stop()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self.connection.close()
        except Exception:
            logger.exception("a peer connection did not close cleanly")

    def _on_state(self) -> None:
        state = self.connection.connectionState
        if state == "connected":
            self._life_ns = self._clock.now()
            self.connected.set()
            if self._closing is None:
                self._on_connected()
        elif state == "failed":
            self._end("connection lost" if self.connected.is_set() else "connection failed")
        elif state == "closed":
            self._end(self._why())

    def _end(self, reason: str) -> None:
        if not self.has_ended and self._closing is None:
            self.has_ended = True
            self._on_end(reason)

    def _why(self) -> str:
        """aiortc ends in one way for three reasons; the layers below know which it was."""
        dtls = self.transceiver.sender.transport
        if self.connected.is_set() and self._ice._query_consent_task is None:
            return "connection lost"  # aioice drops its consent checks (RFC 7675) when they stay unanswered.
        return "peer left" if dtls.state in {"closed", "failed"} else "sending failed"

    @property
    def addresses(self) -> list[str]:
        """Where the peer was told to find us."""
        return [f"{c.host}:{c.port} ({c.type})" for c in self._ice.local_candidates]

    # --- is anybody there?

    @property
    def life_ns(self) -> int:
        """When the peer last gave a sign of life, as far as the last look saw."""
        return self._life_ns

    def notice(self) -> None:
        """A sign of life."""
        self._has_come = True

    def is_lost(self, now: int) -> bool:
        """Whether the peer has been silent for too long.  To be called four times a second; asks it when in doubt.

        Questions are counted, not time: after this process has stood still, answers wait to be read.
        """
        packets = self._uplink.buffer.tally.used
        if self._has_come or packets != self._microphone_packets:
            self._has_come, self._microphone_packets = False, packets
            self._life_ns, self._asked = now, 0
        if now - self._life_ns < DOUBT_NS:
            return False
        if self._asked >= QUESTIONS:
            self._spawn(self._ask())
            return True
        self._asked += 1
        self._spawn(self._ask())
        return False

    async def _ask(self) -> None:
        pair = self._ice._nominated.get(1)
        if pair is None:
            return
        request = self._ice.build_request(pair, nominate=False)
        try:
            # Said once more after half a second, and listened for for another: a way there and back may take that long.
            await pair.protocol.request(
                request, pair.remote_addr, integrity_key=self._ice.remote_password.encode(), retransmissions=1
            )
        except aioice.stun.TransactionError:
            return
        self._has_come = True

    def _noticing(self, receive: Callable[..., None]) -> Callable[..., None]:
        def received(*arguments: Any) -> None:
            self._has_come = True
            receive(*arguments)

        return received

    # --- addresses

    async def _gather(self) -> None:
        """Find our addresses: those of this machine at once, those that a STUN or TURN server knows as they come.

        On a machine that has none but the loopback, take that: aioice leaves it out, rightly so where there is anything
        else.
        """
        ice = self._ice
        stun, turn = ice.stun_server, ice.turn_server
        relay_only = ice._transport_policy is aioice.TransportPolicy.RELAY
        ice.stun_server = ice.turn_server = None
        await self.transceiver.receiver.transport.transport.iceGatherer.gather()
        if not ice._local_candidates and not relay_only:
            ice._local_candidates += await ice.get_component_candidates(component=1, addresses=["127.0.0.1", "::1"])
        asking = [self._spawn(self._relay(turn))] if turn is not None else []
        if stun is not None and not relay_only:
            asking += [
                self._spawn(self._reflect(protocol, stun))
                for protocol in ice._protocols
                if ":" not in protocol.local_candidate.host
            ]
        if asking:
            await asyncio.wait(asking, timeout=RELAY_S if relay_only else GATHER_S)
        if not ice._local_candidates:
            raise PeerError("no_relay", "the server's TURN server gives it no address", "Its operator must look at it.")

    async def _reflect(self, protocol: aioice.ice.StunProtocol, server: tuple[str, int]) -> None:
        try:
            candidate, _ = await aioice.ice.server_reflexive_candidate(protocol, server)
        except (OSError, aioice.stun.TransactionError) as error:
            logger.warning("the STUN server %s:%d does not answer: %s", *server, error)
            return
        self._tell(candidate)

    async def _relay(self, server: tuple[str, int]) -> None:
        ice = self._ice
        try:
            candidate, protocol = await aioice.ice.relayed_candidate(
                component=1,
                hide_related_address=True,
                protocol_factory=lambda: aioice.ice.StunProtocol(ice),
                turn_server=server,
                turn_username=ice.turn_username,
                turn_password=ice.turn_password,
                turn_ssl=ice.turn_ssl,
                turn_transport=ice.turn_transport,
            )
        except (OSError, aioice.stun.TransactionError) as error:
            logger.warning("the TURN server %s:%d does not help: %s", *server, error)
            return
        if ice._closing or ice._check_list_done:
            await protocol.close()  # A path was found without it.
            return
        ice._protocols.append(protocol)
        self._tell(candidate)
        for remote in ice._remote_candidates:
            ice._pair_remote_candidate(remote)
        ice.sort_check_list()

    def _tell(self, candidate: aioice.Candidate) -> None:
        self._ice._local_candidates.append(candidate)
        if self._has_answered and self._closing is None:
            self._on_candidate(f"candidate:{candidate.to_sdp()}", self.offer_id)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of a peer connection failed", exc_info=error)


def _ice_server(server: signaling.IceServer) -> RTCIceServer:
    return RTCIceServer(urls=list(server.urls), username=server.username, credential=cast(str, server.credential))
