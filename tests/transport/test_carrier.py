"""The dialects, by messages as the carriers' documentation shows them."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.errors import PeerError
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.transport.carrier import (
    CARRIERS,
    Asterisk,
    Audio,
    Carrier,
    Chunks,
    Complaint,
    Digit,
    Flow,
    Played,
    Plivo,
    Started,
    Stopped,
    Telnyx,
    Twilio,
    Vonage,
)

MULAW = LineCodec("PCMU")
SOUND = bytes(range(160))
SOUND_64 = base64.b64encode(SOUND).decode()

TWILIO_START = {
    "event": "start",
    "sequenceNumber": "1",
    "start": {
        "accountSid": "AC1",
        "streamSid": "MZ1",
        "callSid": "CA1",
        "tracks": ["inbound"],
        "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
        "customParameters": {"FirstName": "Jane"},
    },
    "streamSid": "MZ1",
}
TELNYX_START = {
    "event": "start",
    "sequence_number": "1",
    "start": {
        "call_control_id": "v3:1",
        "from": "+13122010094",
        "to": "+13122123456",
        "media_format": {"encoding": "PCMA", "sample_rate": 8000, "channels": 1},
    },
    "stream_id": "32DE0DEA",
}
PLIVO_START = {
    "sequenceNumber": 0,
    "event": "start",
    "start": {
        "callId": "c1",
        "streamId": "s1",
        "accountId": "a1",
        "tracks": ["inbound"],
        "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000},
    },
    "extra_headers": "{}",
}
VONAGE_START = {"event": "websocket:connected", "content-type": "audio/l16;rate=16000", "uuid": "u1"}
ASTERISK_START = {
    "event": "MEDIA_START",
    "connection_id": "media_connection1",
    "channel": "WebSocket/1",
    "channel_id": "ast-1",
    "format": "ulaw",
    "optimal_frame_size": 160,
    "ptime": 20,
    "channel_variables": {"CALLERID": "100"},
}
STARTS = {
    "twilio": TWILIO_START,
    "telnyx": TELNYX_START,
    "plivo": PLIVO_START,
    "vonage": VONAGE_START,
    "asterisk": ASTERISK_START,
}


def read(carrier: Carrier, message: Any) -> tuple[Any, ...]:
    return carrier.read(message if isinstance(message, bytes | str) else json.dumps(message))


def started(name: str) -> Carrier:
    carrier = CARRIERS[name]()
    read(carrier, STARTS[name])
    return carrier


@pytest.mark.parametrize(
    ("name", "call", "hears", "speaks", "parameter"),
    [
        ("twilio", "CA1", MULAW, MULAW, ("FirstName", "Jane")),
        ("telnyx", "v3:1", LineCodec("PCMA"), MULAW, ("from", "+13122010094")),
        ("plivo", "c1", MULAW, MULAW, ("accountId", "a1")),
        ("vonage", "u1", LineCodec("L16", 16_000), LineCodec("L16", 16_000), ("uuid", "u1")),
        ("asterisk", "ast-1", MULAW, MULAW, ("CALLERID", "100")),
    ],
)
def test_a_start_names_the_call_and_how_each_side_writes_sound(
    name: str, call: str, hears: LineCodec, speaks: LineCodec, parameter: tuple[str, str]
) -> None:
    (event,) = read(CARRIERS[name](), STARTS[name])
    assert isinstance(event, Started)
    assert (event.call, event.hears, event.speaks) == (call, hears, speaks)
    assert event.parameters[parameter[0]] == parameter[1]


@pytest.mark.parametrize(
    ("name", "message", "event"),
    [
        ("twilio", {"event": "media", "streamSid": "MZ1", "media": {"payload": SOUND_64}}, Audio(SOUND)),
        ("twilio", {"event": "mark", "streamSid": "MZ1", "mark": {"name": "0:7"}}, Played("0:7")),
        ("twilio", {"event": "dtmf", "streamSid": "MZ1", "dtmf": {"track": "inbound_track", "digit": "1"}}, Digit("1")),
        ("twilio", {"event": "stop", "streamSid": "MZ1", "stop": {}}, Stopped()),
        ("telnyx", {"event": "media", "media": {"chunk": "2", "payload": SOUND_64}}, Audio(SOUND)),
        ("telnyx", {"event": "mark", "mark": {"name": "1:1"}}, Played("1:1")),
        ("telnyx", {"event": "dtmf", "dtmf": {"digit": "#"}}, Digit("#")),
        ("telnyx", {"event": "error", "payload": {"code": 100002, "detail": "no"}}, Complaint("100002", "no")),
        ("plivo", {"event": "media", "streamId": "s1", "media": {"chunk": 1, "payload": SOUND_64}}, Audio(SOUND)),
        ("plivo", {"event": "playedStream", "streamId": "s1", "name": "0:1"}, Played("0:1")),
        ("plivo", {"event": "dtmf", "streamId": "s1", "dtmf": {"digit": "9"}}, Digit("9")),
        ("vonage", SOUND, Audio(SOUND)),
        ("vonage", {"event": "websocket:notify", "payload": {"mark": "0:1"}}, Played("0:1")),
        ("vonage", {"event": "websocket:dtmf", "digit": "5", "duration": 260}, Digit("5")),
        ("asterisk", SOUND, Audio(SOUND)),
        ("asterisk", {"event": "MEDIA_MARK_PROCESSED", "correlation_id": "0:2"}, Played("0:2")),
        ("asterisk", {"event": "MEDIA_XOFF"}, Flow(has_room=False)),
        ("asterisk", {"event": "MEDIA_XON"}, Flow(has_room=True)),
        ("asterisk", {"event": "DTMF_END", "digit": "*"}, Digit("*")),
    ],
)
def test_what_a_carrier_says(name: str, message: Any, event: object) -> None:
    assert read(started(name), message) == (event,)


def test_what_is_said_to_twilio() -> None:
    carrier = started("twilio")
    assert json.loads(carrier.audio(SOUND)) == {"event": "media", "streamSid": "MZ1", "media": {"payload": SOUND_64}}
    assert json.loads(carrier.mark("0:1")) == {"event": "mark", "streamSid": "MZ1", "mark": {"name": "0:1"}}
    assert [json.loads(out) for out in carrier.clear()] == [{"event": "clear", "streamSid": "MZ1"}]


def test_what_is_said_to_telnyx_and_plivo() -> None:
    telnyx, plivo = started("telnyx"), started("plivo")
    assert json.loads(telnyx.audio(SOUND)) == {"event": "media", "media": {"payload": SOUND_64}}
    assert [json.loads(out) for out in telnyx.clear()] == [{"event": "clear"}]
    media = {"contentType": "audio/x-mulaw", "sampleRate": 8000, "payload": SOUND_64}
    assert json.loads(plivo.audio(SOUND)) == {"event": "playAudio", "media": media}
    assert json.loads(str(plivo.keys("1#"))) == {"event": "sendDTMF", "dtmf": "1#"}
    assert telnyx.keys("1#") is None
    assert json.loads(plivo.mark("0:1")) == {"event": "checkpoint", "streamId": "s1", "name": "0:1"}
    assert [json.loads(out) for out in plivo.clear()] == [{"event": "clearAudio", "streamId": "s1"}]


def test_what_is_said_to_vonage_and_asterisk() -> None:
    vonage, asterisk = started("vonage"), started("asterisk")
    assert vonage.audio(SOUND) == SOUND == asterisk.audio(SOUND)
    assert json.loads(vonage.mark("0:1")) == {"action": "notify", "payload": {"mark": "0:1"}}
    assert json.loads(asterisk.mark("0:1")) == {"command": "MARK_MEDIA", "correlation_id": "0:1"}
    assert [json.loads(out) for out in asterisk.clear()] == [{"command": "FLUSH_MEDIA"}]
    assert asterisk.hang_up() == '{"command":"HANGUP"}'


def test_an_asterisk_from_before_json_is_answered_in_words() -> None:
    carrier = Asterisk()
    (event,) = read(carrier, "MEDIA_START connection_id:m1 channel:WebSocket/1 channel_id:a1 format:slin16 ptime:20")
    assert (event.call, event.hears) == ("a1", LineCodec("L16", 16_000))
    assert carrier.mark("0:1") == "MARK_MEDIA 0:1"
    assert carrier.clear() == ("FLUSH_MEDIA",)
    assert read(carrier, "MEDIA_MARK_PROCESSED correlation_id:0:1") == (Played("0:1"),)
    assert read(carrier, "MEDIA_MARK_PROCESSED 0:2") == (Played("0:2"),)


def test_sound_that_comes_before_asterisks_start_is_kept() -> None:
    """Reproduction 22 (asterisk#1304, #2006, #1712)."""
    carrier = Asterisk()
    assert read(carrier, SOUND) == ()
    first, second = read(carrier, ASTERISK_START)
    assert isinstance(first, Started)
    assert second == Audio(SOUND)


@pytest.mark.parametrize("name", STARTS)
def test_a_second_start_changes_nothing(name: str) -> None:
    """Trap: two starts."""
    carrier = started(name)
    assert read(carrier, STARTS[name]) == ()
    assert carrier.unknown == 1


@pytest.mark.parametrize("name", ["twilio", "telnyx", "plivo"])
def test_a_call_that_stops_before_it_starts_says_nothing(name: str) -> None:
    """Trap: a stop before the start."""
    carrier = CARRIERS[name]()
    assert read(carrier, {"event": "stop"}) == ()
    assert carrier.unknown == 1


@pytest.mark.parametrize("name", ["twilio", "plivo"])
def test_what_belongs_to_another_stream_is_skipped(name: str) -> None:
    carrier = started(name)
    mark = {"event": "mark", "streamSid": "MZ2", "streamId": "s2", "mark": {"name": "x"}, "name": "x"}
    assert read(carrier, mark) == ()
    assert carrier.unknown == 1


@pytest.mark.parametrize("name", STARTS)
def test_new_events_are_counted_and_skipped(name: str) -> None:
    carrier = started(name)
    assert read(carrier, {"event": "weather", "sky": "blue"}) == ()
    assert carrier.unknown == 1


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "not_json"),
        ("[" * 100_000, "message_too_large"),
        ("[" * 60_000, "not_json"),
        ("7", "not_an_object"),
        ({"event": "media", "streamSid": "MZ1"}, "field_missing"),
        ({"event": "media", "streamSid": "MZ1", "media": {"payload": "@@"}}, "payload_malformed"),
        ({"event": "media", "streamSid": "MZ1", "media": {"payload": 7}}, "field_missing"),
        ({"event": "mark", "streamSid": "MZ1", "mark": {"name": ""}}, "field_missing"),
        ({"event": "dtmf", "streamSid": "MZ1", "dtmf": {"digit": "12"}}, "digit_unknown"),
    ],
)
def test_bad_messages_are_refused_by_name(message: Any, code: str) -> None:
    with pytest.raises(PeerError) as refused:
        read(started("twilio"), message)
    assert refused.value.code == code


@pytest.mark.parametrize("encoding", ["AMR-WB", "audio/ogg", None, 7, "G722"])
def test_an_unknown_codec_is_named_with_what_to_do(encoding: object) -> None:
    """Reproduction 28 (dograh#256): what the start says is what the line is; what nobody reads here is a clear
    error."""
    start = json.loads(json.dumps(TELNYX_START))
    start["start"]["media_format"]["encoding"] = encoding
    with pytest.raises(PeerError, match="PCMU or PCMA") as refused:
        read(Telnyx(), start)
    assert refused.value.code == "codec_unknown"


@pytest.mark.parametrize(("encoding", "rate"), [("PCMU", 16_000), ("L16", 11_025), ("L16", "fast"), ("L16", -1)])
def test_a_rate_that_cannot_be_is_refused(encoding: str, rate: object) -> None:
    start = json.loads(json.dumps(TELNYX_START))
    start["start"]["media_format"] |= {"encoding": encoding, "sample_rate": rate}
    with pytest.raises(PeerError):
        read(Telnyx(), start)


def test_telnyx_writes_plain_samples_in_network_order_and_plivo_does_not() -> None:
    telnyx = json.loads(json.dumps(TELNYX_START))
    telnyx["start"]["media_format"] = {"encoding": "L16", "sample_rate": 16_000}
    plivo = json.loads(json.dumps(PLIVO_START))
    plivo["start"]["mediaFormat"] = {"encoding": "audio/x-l16", "sampleRate": "16000"}
    assert read(Telnyx(), telnyx)[0].hears == LineCodec("L16", 16_000, is_big_endian=True)
    assert read(Plivo(), plivo)[0].hears == LineCodec("L16", 16_000)


def test_pieces_out_of_order_come_out_in_order_and_a_lost_one_is_told() -> None:
    """Trap: media out of order."""
    order = Chunks()
    assert order.push(1, b"1") == [b"1"]
    assert order.push(3, b"3") == []
    assert order.push(2, b"2") == [b"2", b"3"]
    assert order.push(2, b"2") == []
    for number in (5, 6, 7, 8):
        assert order.push(number, b"x") == []
    assert order.push(9, b"x") == [None, *[b"x"] * 5]
    # The count was begun again.
    assert order.push(500, b"new") == [b"new"]
    assert order.push(501, b"x") == [b"x"]


@given(st.permutations(range(1, 30)), st.integers(0, 3))
def test_pieces_that_wander_by_less_than_the_window_all_arrive_in_order(numbers: list[int], reach: int) -> None:
    """Each is moved by at most `reach` places."""
    wandering = sorted(range(1, 30), key=lambda number: number + reach * (numbers[number - 1] / 30))
    order = Chunks()
    out: list[bytes | None] = []
    for number in [0, *wandering]:
        out += order.push(number, bytes([number]))
    assert out == [bytes([number]) for number in range(30)]


@pytest.mark.parametrize("name", STARTS)
@given(
    st.one_of(
        st.text(max_size=80),
        st.binary(max_size=80),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["event", "media", "start", "mark", "name", "digit"]), inner)
            ),
            max_leaves=12,
        ).map(json.dumps),
        st.fixed_dictionaries(
            {"event": st.sampled_from(["media", "mark", "dtmf", "start", "playedStream", "error", "MEDIA_START"])},
            optional={
                key: st.dictionaries(st.text(max_size=6), st.integers() | st.none()) for key in ("media", "mark")
            },
        ).map(json.dumps),
    )
)
def test_nothing_a_stranger_sends_does_more_than_be_refused(name: str, raw: str | bytes) -> None:
    for carrier in (CARRIERS[name](), started(name)):
        with contextlib.suppress(PeerError):
            assert isinstance(carrier.read(raw), tuple)


def test_every_dialect_is_a_class_of_its_own() -> None:
    assert [type(make()) for make in CARRIERS.values()] == [Twilio, Telnyx, Plivo, Vonage, Asterisk]
