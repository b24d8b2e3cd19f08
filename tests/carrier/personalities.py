"""What carriers say over their WebSockets, written from their documentation and from nothing of ours, from their side:
G.711 is Python's own here.

Each takes what a server sends apart into `Sound` (16 bits at 8 kHz), `Mark`, `Clear` and `HangUp`, and writes what the
carrier would say.
"""

from __future__ import annotations

import base64
import json
import warnings
from dataclasses import dataclass
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import audioop


@dataclass(frozen=True)
class Sound:
    pcm: bytes


@dataclass(frozen=True)
class Mark:
    name: str


class Clear:
    pass


class HangUp:
    pass


@dataclass(frozen=True)
class Keys:
    keys: str


Said = Sound | Mark | Clear | HangUp | Keys
Message = str | bytes


def written(pcm: bytes, law: str) -> bytes:
    return {"PCMU": audioop.lin2ulaw, "PCMA": audioop.lin2alaw}[law](pcm, 2)


def read(payload: bytes, law: str) -> bytes:
    return {"PCMU": audioop.ulaw2lin, "PCMA": audioop.alaw2lin}[law](payload, 2)


def _base64(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


class Twilio:
    """https://www.twilio.com/docs/voice/media-streams/websocket-messages"""

    path = "twilio"

    def __init__(self) -> None:
        self.sequence = 0
        self.chunk = 0
        self.parameters: dict[str, str] = {}
        """What TwiML's `<Parameter>`s say."""

    def hello(self) -> list[Message]:
        start = {
            "accountSid": "AC00",
            "streamSid": "MZ00",
            "callSid": "CA00",
            "tracks": ["inbound"],
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
            "customParameters": self.parameters,
        }
        connected = json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"})
        return [connected, self._numbered("start", start=start)]

    def voice(self, pcm: bytes) -> list[Message]:
        self.chunk += 1
        media = {"track": "inbound", "chunk": str(self.chunk), "timestamp": str(20 * self.chunk)}
        return [self._numbered("media", media={**media, "payload": _base64(written(pcm, "PCMU"))})]

    def digit(self, digit: str) -> Message:
        return self._numbered("dtmf", dtmf={"track": "inbound_track", "digit": digit})

    def reached(self, name: str) -> Message:
        return self._numbered("mark", mark={"name": name})

    def cleared(self, names: list[str]) -> list[Message]:
        """All marks come back, played or not."""
        return [self.reached(name) for name in names]

    def bye(self) -> list[Message]:
        return [self._numbered("stop", stop={"accountSid": "AC00", "callSid": "CA00"})]

    def read(self, raw: str | bytes) -> Said:
        message = json.loads(raw)
        assert message["streamSid"] == "MZ00"
        match message["event"]:
            case "media":
                return Sound(read(base64.b64decode(message["media"]["payload"], validate=True), "PCMU"))
            case "mark":
                return Mark(message["mark"]["name"])
            case "clear":
                return Clear()
        raise ValueError(f"Twilio knows no {message['event']!r}")

    def _numbered(self, event: str, **fields: Any) -> str:
        self.sequence += 1
        return json.dumps({"event": event, "sequenceNumber": str(self.sequence), **fields, "streamSid": "MZ00"})


class Telnyx:
    """https://developers.telnyx.com/docs/voice/programmable-voice/media-streaming: A-law from a European line,
    mu-law to it, and every tenth piece comes after the next."""

    path = "telnyx"

    def __init__(self) -> None:
        self.chunk = 0
        self.caller, self.called = "+4930123456", "+4930654321"
        self._held: list[Message] = []

    def hello(self) -> list[Message]:
        start = {
            "user_id": "U0",
            "call_control_id": "v3:call",
            "call_session_id": "S0",
            "from": self.caller,
            "to": self.called,
            "client_state": "aGVsbG8=",
            "media_format": {"encoding": "PCMA", "sample_rate": 8000, "channels": 1},
        }
        connected = json.dumps({"event": "connected", "version": "1.0.0"})
        return [connected, json.dumps({"event": "start", "sequence_number": "1", "stream_id": "T0", "start": start})]

    def voice(self, pcm: bytes) -> list[Message]:
        self.chunk += 1
        media = {"track": "inbound", "chunk": str(self.chunk), "timestamp": str(20 * self.chunk)}
        media["payload"] = _base64(written(pcm, "PCMA"))
        message = json.dumps({"event": "media", "sequence_number": str(self.chunk + 1), "media": media})
        if self.chunk % 10 == 0:
            self._held = [message]
            return []
        held, self._held = self._held, []
        return [message, *held]

    def digit(self, digit: str) -> Message:
        return json.dumps({"event": "dtmf", "occurred_at": "2026-01-01T00:00:00Z", "dtmf": {"digit": digit}})

    def reached(self, name: str) -> Message:
        return json.dumps({"event": "mark", "stream_id": "T0", "mark": {"name": name}})

    def cleared(self, names: list[str]) -> list[Message]:
        return [self.reached(name) for name in names]

    def bye(self) -> list[Message]:
        return [json.dumps({"event": "stop", "stream_id": "T0", "stop": {"call_control_id": "v3:call"}})]

    def read(self, raw: str | bytes) -> Said:
        message = json.loads(raw)
        match message["event"]:
            case "media":
                payload = base64.b64decode(message["media"]["payload"], validate=True)
                if not 160 <= len(payload) <= 240_000:
                    raise ValueError(f"Telnyx takes 20 ms to 30 s at a time, not {len(payload)} bytes")
                return Sound(read(payload, "PCMU"))
            case "mark":
                return Mark(message["mark"]["name"])
            case "clear":
                return Clear()
        raise ValueError(f"Telnyx knows no {message['event']!r}")


class Plivo:
    """https://www.plivo.com/docs/voice/concepts/audio-streaming: a clear is confirmed, its checkpoints are not."""

    path = "plivo"

    def __init__(self) -> None:
        self.chunk = 0

    def hello(self) -> list[Message]:
        start = {
            "callId": "c0",
            "streamId": "s0",
            "accountId": "MA0",
            "tracks": ["inbound"],
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000},
        }
        return [json.dumps({"sequenceNumber": 0, "event": "start", "start": start, "extra_headers": "{}"})]

    def voice(self, pcm: bytes) -> list[Message]:
        self.chunk += 1
        media = {"track": "inbound", "timestamp": str(20 * self.chunk), "chunk": self.chunk}
        media["payload"] = _base64(written(pcm, "PCMU"))
        fields = {"sequenceNumber": self.chunk, "streamId": "s0", "media": media, "extra_headers": "{}"}
        return [json.dumps({"event": "media", **fields})]

    def digit(self, digit: str) -> Message:
        dtmf = {"track": "inbound", "digit": digit, "timestamp": str(20 * self.chunk)}
        return json.dumps({"event": "dtmf", "streamId": "s0", "sequenceNumber": self.chunk, "dtmf": dtmf})

    def reached(self, name: str) -> Message:
        return json.dumps({"event": "playedStream", "sequenceNumber": self.chunk, "streamId": "s0", "name": name})

    def cleared(self, names: list[str]) -> list[Message]:
        return [json.dumps({"event": "clearedAudio", "sequenceNumber": self.chunk, "streamId": "s0"})]

    def bye(self) -> list[Message]:
        return []

    def read(self, raw: str | bytes) -> Said:
        message = json.loads(raw)
        match message["event"]:
            case "playAudio":
                media = message["media"]
                assert (media["contentType"], int(media["sampleRate"])) == ("audio/x-mulaw", 8000)
                return Sound(read(base64.b64decode(media["payload"], validate=True), "PCMU"))
            case "checkpoint":
                assert message["streamId"] == "s0"
                return Mark(message["name"])
            case "clearAudio":
                assert message["streamId"] == "s0"
                return Clear()
            case "sendDTMF":
                return Keys(message["dtmf"])
        raise ValueError(f"Plivo knows no {message['event']!r}")


class Vonage:
    """https://developer.vonage.com/en/voice/voice-api/guides/websockets"""

    path = "vonage"

    def hello(self) -> list[Message]:
        return [json.dumps({"event": "websocket:connected", "content-type": "audio/l16;rate=8000", "uuid": "u0"})]

    def voice(self, pcm: bytes) -> list[Message]:
        return [pcm]

    def digit(self, digit: str) -> Message:
        return json.dumps({"event": "websocket:dtmf", "digit": digit, "duration": 260})

    def reached(self, name: str) -> Message:
        return json.dumps({"event": "websocket:notify", "payload": {"mark": name}})

    def cleared(self, names: list[str]) -> list[Message]:
        return [json.dumps({"event": "websocket:cleared"})]

    def bye(self) -> list[Message]:
        return []

    def read(self, raw: str | bytes) -> Said:
        if isinstance(raw, bytes):
            return Sound(raw)
        message = json.loads(raw)
        match message["action"]:
            case "notify":
                return Mark(message["payload"]["mark"])
            case "clear":
                return Clear()
        raise ValueError(f"Vonage knows no {message['action']!r}")


class Asterisk:
    """https://docs.asterisk.org/Configuration/Channel-Drivers/WebSocket/, in words, as before 20.18; in mu-law."""

    path = "asterisk"

    def hello(self) -> list[Message]:
        names = "connection_id:7 channel:WebSocket/breeze/0x1 channel_id:1.1"
        return [f"MEDIA_START {names} format:ulaw optimal_frame_size:160 ptime:20"]

    def voice(self, pcm: bytes) -> list[Message]:
        return [written(pcm, "PCMU")]

    def digit(self, digit: str) -> Message:
        return f"DTMF_END digit:{digit}"

    def reached(self, name: str) -> Message:
        return f"MEDIA_MARK_PROCESSED correlation_id:{name}"

    def cleared(self, names: list[str]) -> list[Message]:
        return []

    def bye(self) -> list[Message]:
        return []

    def read(self, raw: str | bytes) -> Said:
        if isinstance(raw, bytes):
            return Sound(read(raw, "PCMU"))
        command, _, rest = raw.partition(" ")
        match command:
            case "MARK_MEDIA":
                return Mark(rest)
            case "FLUSH_MEDIA":
                return Clear()
            case "HANGUP":
                return HangUp()
        raise ValueError(f"Asterisk knows no {command!r}")


PERSONALITIES = {kind.path: kind for kind in (Twilio, Telnyx, Plivo, Vonage, Asterisk)}
