"""Session descriptions: offers of real telephones, and what is answered."""

from __future__ import annotations

import pytest

from breeze_rtc.errors import PeerError
from breeze_rtc.sip import sdp

BARESIP = b"""v=0\r
o=- 1664130716 1206214416 IN IP4 127.0.0.1\r
s=-\r
c=IN IP4 127.0.0.1\r
t=0 0\r
a=tool:baresip 1.0.0\r
m=audio 21450 RTP/AVP 8 0 101\r
a=rtpmap:8 PCMA/8000\r
a=rtpmap:0 PCMU/8000\r
a=rtpmap:101 telephone-event/8000\r
a=fmtp:101 0-15\r
a=rtcp:21451\r
a=sendrecv\r
a=label:1\r
a=rtcp-rsize\r
a=ssrc:3019216541 cname:sip:caller@127.0.0.1\r
a=ptime:20\r
m=video 0 RTP/AVP 96\r
"""
SIPP = b"v=0\no=user1 53655765 2353687637 IN IP4 192.0.2.1\ns=-\nc=IN IP4 192.0.2.1\nt=0 0\nm=audio 6000 RTP/AVP 0\n"


def test_an_offer_of_a_telephone_is_understood() -> None:
    said = sdp.read(BARESIP)
    assert (said.host, said.port, said.rtcp_port, said.codecs, said.keys) == ("127.0.0.1", 21450, 21451, (8, 0), 101)
    assert said.hears
    assert sdp.read(SIPP).codecs == (0,)
    assert sdp.read(SIPP).rtcp_port == 6001
    assert sdp.read(SIPP).keys is None


def test_an_answer_takes_the_first_codec_and_no_other_media() -> None:
    lines = sdp.answer(sdp.read(BARESIP), "192.0.2.7", 10_000, session=5, version=2).decode().split("\r\n")
    assert lines[1] == "o=- 5 2 IN IP4 192.0.2.7"
    assert "m=audio 10000 RTP/AVP 8 101" in lines
    assert "a=rtpmap:8 PCMA/8000" in lines
    assert "m=video 0 RTP/AVP 96" in lines
    assert lines.index("m=audio 10000 RTP/AVP 8 101") < lines.index("m=video 0 RTP/AVP 96")
    assert "m=audio 10000 RTP/AVP 0" in sdp.answer(sdp.read(SIPP), "192.0.2.7", 10_000, session=5).decode()


def test_an_offer_of_ours_is_one_that_we_understand() -> None:
    said = sdp.read(sdp.offer("2001:db8::7", 10_002, session=5))
    assert (said.host, said.port, said.codecs, said.keys) == ("2001:db8::7", 10_002, (0, 8), 101)


@pytest.mark.parametrize(
    ("theirs", "ours", "hears"),
    [
        ("sendrecv", "sendrecv", True),
        ("sendonly", "recvonly", False),
        ("recvonly", "sendonly", True),
        ("inactive", "inactive", False),
    ],
)
def test_a_hold_is_answered_as_one(theirs: str, ours: str, hears: bool) -> None:
    said = sdp.read(BARESIP.replace(b"a=sendrecv", b"a=" + theirs.encode()))
    assert said.hears == hears
    assert f"a={ours}\r\n" in sdp.answer(said, "192.0.2.7", 10_000, session=5).decode()


def test_an_address_of_zeros_is_the_old_way_to_hold() -> None:
    assert not sdp.read(SIPP.replace(b"c=IN IP4 192.0.2.1", b"c=IN IP4 0.0.0.0")).hears


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xff", b"v=0", SIPP.replace(b"RTP/AVP 0", b"RTP/AVP 9"), SIPP.replace(b"RTP/AVP", b"RTP/SAVP")),
        *(SIPP.replace(b"audio 6000", b"audio 0"), SIPP.replace(b"c=IN IP4 192.0.2.1", b"c=IN IP4 phone.example.org")),
        *(SIPP.replace(b"6000", b"x"), SIPP.replace(b"AVP 0", b"AVP 96") + b"a=rtpmap:96 opus/48000/2\n"),
    ],
)
def test_what_cannot_be_spoken_is_refused(body: bytes) -> None:
    with pytest.raises(PeerError):
        sdp.read(body)
