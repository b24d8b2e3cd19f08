"""The messages between page and server."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.errors import PeerError
from breeze_rtc.transport import signaling
from breeze_rtc.transport.signaling import Bye, Candidate, Flushed, Inbox, Interrupt, Offer, Ping, Report, Text

CHROMIUM = """\
v=0
o=- 88472144975227319 2 IN IP4 127.0.0.1
s=-
t=0 0
a=group:BUNDLE 0
a=extmap-allow-mixed
a=msid-semantic: WMS
m=audio 9 UDP/TLS/RTP/SAVPF 111 63 9 0 8 13 110 126
c=IN IP4 0.0.0.0
a=rtcp:9 IN IP4 0.0.0.0
a=candidate:3018940762 1 udp 2113937151 1095ed2c-9106-42fe-b6b1-f65a444fc19d.local 49744 typ host generation 0
a=candidate:2023203002 1 udp 2113942271 203.0.113.7 60291 typ host generation 0 network-cost 999
a=ice-ufrag:REAU
a=ice-pwd:6Ag36naml01Zf3/shzAlfsXA
a=ice-options:trickle
a=fingerprint:sha-256 57:8F:89:6A:CF:03:CB:8F:88:28:8D:71:55:BC:26:FC:77:48:6B:48:29:C5:A3:D3:E5:C2:E1:A6:A1:5C:D1:C7
a=setup:actpass
a=mid:0
a=extmap:1 urn:ietf:params:rtp-hdrext:ssrc-audio-level
a=extmap:4 urn:ietf:params:rtp-hdrext:sdes:mid
a=recvonly
a=rtcp-mux
a=rtcp-rsize
a=rtpmap:111 opus/48000/2
a=rtcp-fb:111 transport-cc
a=fmtp:111 minptime=10;useinbandfec=1
a=rtpmap:63 red/48000/2
a=fmtp:63 111/111
a=rtpmap:9 G722/8000
a=rtpmap:0 PCMU/8000
a=rtpmap:8 PCMA/8000
a=rtpmap:13 CN/8000
a=rtpmap:110 telephone-event/48000
a=rtpmap:126 telephone-event/8000
""".replace("\n", "\r\n")
"""An offer of Chromium 156, one of its addresses written out."""

CANDIDATE = Candidate("candidate:1 1 udp 1 1.2.3.4 5 typ host", 2)

REPORT: dict[str, Any] = {
    "type": "report",
    "seq": 3,
    "t_ms": 1_796_000_000_123.25,
    "rtp": 4_294_967_295,
    "rtp_t_ms": 1_796_000_000_111,
    "device_delay_ms": 34.5,
    "device_delay_source": "playout",
    "age_ms": 12.25,
    "jitter_buffer_ms": 41,
    "jitter_target_ms": 40,
    "concealed": 960,
    "inserted": 0,
    "removed": 0,
    "lost": 0,
    "muted": False,
    "paused": False,
    "volume": 1,
    "visible": True,
    "offset_ms": -1_795_999_000_000.5,
}


def code_of(raw: str | bytes) -> str:
    """The code with which a message is refused."""
    with pytest.raises(PeerError) as caught:
        Inbox().read(raw)
    assert caught.value.fix
    assert caught.value.fix in str(caught.value)
    return caught.value.code


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"type": "text", "text": "  hello "}, Text("hello")),
        ({"type": "ping", "id": 7, "t_ms": 12.5}, Ping(7, 12.5)),
        ({"type": "flushed", "rtp": 0, "t_ms": 1}, Flushed(0, 1.0)),
        ({"type": "interrupt"}, Interrupt()),
        ({"type": "candidate", "candidate": " candidate:1 1 udp 1 1.2.3.4 5 typ host", "id": 2}, CANDIDATE),
        ({"type": "candidate", "candidate": ""}, Candidate("")),
        ({"type": "candidate", "candidate": "candidate:1 1 udp 1 0a-1b.local 5 typ host"}, Candidate("")),
        ({"type": "bye", "later": "fields are no fault"}, Bye()),
    ],
)
def test_each_message_becomes_a_value(fields: dict[str, Any], value: object) -> None:
    """JSON in, a small value out."""
    assert Inbox().read(json.dumps(fields)) == value


def test_a_report_keeps_its_values() -> None:
    """Every field arrives, as the type it is promised as."""
    report = Inbox().read(json.dumps(REPORT))
    assert isinstance(report, Report)
    assert {"type": "report"} | {name: getattr(report, name) for name in REPORT if name != "type"} == REPORT
    assert isinstance(report.jitter_buffer_ms, float)


def test_a_report_before_the_first_packet_has_no_timestamp() -> None:
    """Null stands for not yet."""
    report = Inbox().read(json.dumps(REPORT | {"rtp": None, "rtp_t_ms": None}))
    assert isinstance(report, Report)
    assert (report.rtp, report.rtp_t_ms) == (None, None)


def test_an_unknown_device_source_is_none() -> None:
    """A word that a later page may use is no fault."""
    report = Inbox().read(json.dumps(REPORT | {"device_delay_source": "bluetooth"}))
    assert isinstance(report, Report)
    assert report.device_delay_source == "none"


def test_unknown_types_are_counted_and_skipped() -> None:
    """A newer page may say more than we understand."""
    inbox = Inbox()
    assert inbox.read('{"type": "dance"}') is None
    assert (inbox.unknown, inbox.refused) == (1, 0)
    assert inbox.read('{"type": "bye"}') == Bye()


def test_a_refused_message_does_not_end_the_conversation() -> None:
    """The fault is counted and the next message is read."""
    inbox = Inbox()
    with pytest.raises(PeerError):
        inbox.read("{")
    assert inbox.refused == 1
    assert inbox.read('{"type": "bye"}') == Bye()


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("", "not_json"),
        ("{", "not_json"),
        (b"\xff\xfe", "not_json"),
        ("[" * 30_000, "not_json"),
        ('{"type":' * 8_000, "not_json"),
        ('{"type":"ping","id":1,"t_ms":' + "9" * 5_000 + "}", "not_json"),
        ("[]", "not_an_object"),
        ("null", "not_an_object"),
        ('"bye"', "not_an_object"),
        ("{}", "no_type"),
        ('{"type": 3}', "no_type"),
        ('{"type": ["bye"]}', "no_type"),
        ('{"type":"ping","id":1,"t_ms":NaN}', "not_finite"),
        ('{"type":"ping","id":1,"t_ms":-Infinity}', "not_finite"),
        ('{"type":"ping","id":1,"t_ms":1e999}', "bad_field"),
        ('{"type":"ping","id":1,"t_ms":' + "9" * 400 + "}", "bad_field"),
        ('{"type":"ping","id":1,"t_ms":true}', "bad_field"),
        ('{"type":"ping","id":1,"t_ms":"1"}', "bad_field"),
        ('{"type":"ping","id":1.5,"t_ms":1}', "bad_field"),
        ('{"type":"ping","id":-1,"t_ms":1}', "bad_field"),
        ('{"type":"ping","id":1}', "missing_field"),
        ('{"type":"flushed","rtp":4294967296,"t_ms":1}', "bad_field"),
        ('{"type":"text","text":"   "}', "empty_text"),
        ('{"type":"text","text":7}', "bad_field"),
        ('{"type":"text","text":"\\ud800"}', "bad_field"),
        ('{"type":"text","text":"' + "a" * 8_001 + '"}', "text_too_long"),
        ('{"type":"text","text":"' + "a" * 65_536 + '"}', "message_too_large"),
        ('{"type":"text","text":"' + "\u00e4" * 33_000 + '"}', "message_too_large"),
        ('{"type":"offer","sdp":"v=0","microphone":false}', "offer_malformed"),
        ('{"type":"offer","sdp":"","microphone":false}', "offer_malformed"),
        ('{"type":"candidate"}', "missing_field"),
        ('{"type":"candidate","candidate":"","id":-1}', "bad_field"),
        ('{"type":"candidate","candidate":"' + "a" * 501 + '"}', "candidate_malformed"),
    ],
)
def test_what_breaks_the_rules_has_a_stable_code(raw: str | bytes, code: str) -> None:
    """Each fault has its code and a sentence on what to do."""
    assert code_of(raw) == code


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*REPORT, "text", "id", "sdp", "microphone"]), json_values))
def test_any_fields_are_read_or_refused(fields: dict[str, Any]) -> None:
    """Whatever stands in a report, the answer is a value or a `PeerError`."""
    for kind in signaling._READERS:
        with suppress(PeerError):
            assert Inbox().read(json.dumps(REPORT | fields | {"type": kind})) is not None


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300)))
def test_any_bytes_are_read_or_refused(raw: str | bytes) -> None:
    """Noise never raises anything but a `PeerError`."""
    with suppress(PeerError):
        Inbox().read(raw)


def test_an_offer_of_chromium_passes_without_its_mdns_names() -> None:
    """Looking up a `.local` name takes a second and never helps; real addresses stay."""
    offer = Inbox().read(json.dumps({"type": "offer", "sdp": CHROMIUM, "microphone": False}))
    assert isinstance(offer, Offer)
    assert ".local" not in offer.sdp
    assert "203.0.113.7" in offer.sdp
    dropped = set(CHROMIUM.split("\r\n")) - set(offer.sdp.split("\r\n"))
    assert len(dropped) == 1


def test_an_offer_on_another_connection_says_what_was_heard() -> None:
    """Both fields may be left out, and must be right where they are there."""
    fields = {"type": "offer", "sdp": CHROMIUM, "microphone": True}
    first, second = (Inbox().read(json.dumps(fields | more)) for more in ({}, {"id": 3, "heard_rtp": 7}))
    assert isinstance(first, Offer)
    assert isinstance(second, Offer)
    assert [(offer.id, offer.heard_rtp) for offer in (first, second)] == [(0, None), (3, 7)]
    for wrong in ({"id": "x"}, {"id": -1}, {"heard_rtp": 1 << 32}, {"heard_rtp": "now"}):
        assert code_of(json.dumps(fields | wrong)) == "bad_field"


def test_an_offer_with_bare_newlines_is_mended() -> None:
    """Some clients lose the carriage returns in JSON."""
    assert signaling.check_offer(CHROMIUM.replace("\r\n", "\n")) == signaling.check_offer(CHROMIUM)


def test_an_offer_cannot_make_us_knock_at_a_thousand_doors() -> None:
    """Candidates beyond a browser's handful are dropped."""
    line = "a=candidate:1 1 udp 2113942271 203.0.113.7 {} typ host generation 0"
    many = "\r\n".join(line.format(1_024 + k) for k in range(400))
    offer = signaling.check_offer(CHROMIUM.replace("a=mid:0", f"a=mid:0\r\n{many}"))
    assert offer.count("a=candidate:") == signaling.MAX_CANDIDATES


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("m=audio 9", "m=video 9", "offer_no_audio"),
        ("a=rtcp-mux\r\n", "a=rtcp-mux\r\nm=video 9 UDP/TLS/RTP/SAVPF 96\r\n", "offer_not_audio_only"),
        (
            "a=rtcp-mux\r\n",
            "a=rtcp-mux\r\nm=application 9 UDP/DTLS/SCTP webrtc-datachannel\r\n",
            "offer_not_audio_only",
        ),
        ("opus/48000/2", "speex/16000", "offer_no_opus"),
        ("a=recvonly", "a=sendonly", "offer_not_receiving"),
        ("a=recvonly", "a=inactive", "offer_not_receiving"),
        ("a=ice-ufrag:REAU\r\n", "", "offer_malformed"),
        ("a=ice-pwd:6Ag36naml01Zf3/shzAlfsXA\r\n", "", "offer_malformed"),
        ("a=fingerprint", "a=fingermark", "offer_malformed"),
        ("a=setup:actpass\r\n", "", "offer_malformed"),
        ("a=mid:0\r\n", "", "offer_malformed"),
        ("a=rtcp-mux\r\n", "", "offer_malformed"),
        ("s=-", "s=" + "x" * 33_000, "offer_too_large"),
    ],
)
def test_an_offer_we_cannot_answer_is_refused_with_the_reason(old: str, new: str, code: str) -> None:
    """No audio, no Opus, no way to hear us, more than audio, not whole, too long."""
    assert old in CHROMIUM
    assert code_of(json.dumps({"type": "offer", "sdp": CHROMIUM.replace(old, new), "microphone": True})) == code


def test_the_answer_asks_for_mono_wide_band_and_redundancy() -> None:
    """The format line stands right behind the codec's, once."""
    sdp = signaling.with_opus_format("m=audio\r\na=rtpmap:111 opus/48000/2\r\na=mid:0\r\n")
    wants = "minptime=20;stereo=0;useinbandfec=1;maxplaybackrate=16000;maxaveragebitrate=32000"
    assert sdp.split("\r\n")[2] == f"a=fmtp:111 {wants}"
    assert sdp.count("a=fmtp") == 1


def test_what_the_server_says_is_what_the_protocol_names() -> None:
    """Each builder gives one JSON object with its fields."""
    server = signaling.IceServer(("turn:turn.example.org",), "me", "secret")
    said = [
        signaling.hello(
            listens=False,
            listen_fix="pip install ...",
            model="nano",
            voice="v",
            ice_servers=[server],
            sample_rate=24_000,
            resume="t0ken",
            received=4,
        ),
        signaling.ice([server]),
        signaling.answer("v=0", 2),
        signaling.candidate("candidate:1", 2),
        signaling.reconnect(2),
        signaling.pong(Ping(4, 2.5), now=1_500_000),
        signaling.speech(3, "gr\u00fc\u00df"),
        signaling.heard(3, 2),
        signaling.speech_end(3, interrupted=True, chars=2),
        signaling.user("hi", final=False),
        signaling.state("thinking"),
        signaling.flush(960),
        signaling.stats(
            t_ms=1.0,
            lead_ms=None,
            slack_ms=None,
            jitter_ms=40.0,
            gaps=0,
            first_sound_ms=None,
            stop_ms=None,
            path_ms=90.0,
            source="playout",
            error_ms=15.0,
        ),
        signaling.error("offer_no_opus", "no Opus", "add it"),
    ]
    values = [json.loads(text) for text in said]
    assert [value["type"] for value in values] == (
        [
            "hello",
            "ice",
            "answer",
            "candidate",
            "reconnect",
            "pong",
            "speech",
            "heard",
            "speech_end",
            "user",
            "state",
            "flush",
            "stats",
            "error",
        ]
    )
    assert values[0]["ice_servers"] == [{"urls": ["turn:turn.example.org"], "username": "me", "credential": "secret"}]
    assert values[1]["ice_servers"] == values[0]["ice_servers"]
    assert values[2:4] == [
        {"type": "answer", "sdp": "v=0", "id": 2},
        {"type": "candidate", "candidate": "candidate:1", "id": 2},
    ]
    assert values[5] == {"type": "pong", "id": 4, "t_ms": 2.5, "server_ms": 1.5}
    assert values[6]["text"] == "gr\u00fc\u00df"
    assert values[12]["lead_ms"] is None


def test_the_server_never_says_nan() -> None:
    """The page's parser would throw the whole message away."""
    with pytest.raises(ValueError):
        signaling.pong(Ping(1, float("nan")), 0)
