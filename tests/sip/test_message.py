"""SIP messages: what is read and written, and that nothing else than a `PeerError` comes of what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.errors import PeerError
from breeze_rtc.sip.message import Inbox, Request, Response, address, host_of, parse, split, uri_of

# After the "short tortuous INVITE" of RFC 4475 section 3.1.1.1: folding, compact names, quotes, spaces.
TORTUOUS = (
    b"INVITE sip:vivekg@chair-dnrc.example.com;unknownparam SIP/2.0\r\n"
    b"TO :\r\n sip:vivekg@chair-dnrc.example.com ;   tag    = 1918181833n\r\n"
    b'from   : "J Rosenberg \\\\\\"" <sip:jdrosen@example.com>\r\n  ;\r\n  tag = 98asjd8\r\n'
    b"MaX-fOrWaRdS: 0068\r\n"
    b"Call-ID: wsinv.ndaksdj@192.0.2.1\r\n"
    b"Content-Length   : 5\r\n"
    b"cseq: 0009\r\n  INVITE\r\n"
    b"Via  : SIP  /   2.0\r\n /UDP\r\n    192.0.2.2;branch=390skdjuw\r\n"
    b"s :\r\n"
    b"NewFangledHeader:   newfangled value\r\n continued newfangled value\r\n"
    b"v:  SIP  / 2.0  / TCP     spindle.example.com   ;\r\n  branch  =   z9hG4bK9ikj8  ,"
    b" SIP  /    2.0   / UDP  192.168.255.111   ; branch=\r\n z9hG4bK30239\r\n"
    b'm:"Quoted string \\"\\"" <sip:jdrosen@example.com> ; newparam =\r\n      newvalue ;\r\n  other ; q = 0.33\r\n'
    b"\r\nv=0\r\nrest"
)


def test_a_tortuous_message_is_understood() -> None:
    message = parse(TORTUOUS)
    assert isinstance(message, Request)
    assert (message.method, message.cseq, message.body) == ("INVITE", (9, "INVITE"), b"v=0\r\n")
    assert address(message.get("to")) == ("sip:vivekg@chair-dnrc.example.com", {"tag": "1918181833n"})
    assert address(message.get("from")) == ("sip:jdrosen@example.com", {"tag": "98asjd8"})
    assert len(message.all("via")) == 3
    assert address(message.get("contact"))[0] == "sip:jdrosen@example.com"


def test_what_is_written_is_read_again() -> None:
    headers = (
        *(("via", "SIP/2.0/UDP a;branch=z9hG4bKx"), ("from", "<sip:a@b>;tag=1"), ("to", "<sip:c@d>")),
        *(
            ("call-id", "x"),
            ("cseq", "1 INVITE"),
            ("contact", "<sip:a@b>"),
            ("www-authenticate", 'Digest realm="a, b"'),
        ),
    )
    request = Request(headers, b"body", "INVITE", "sip:c@d")
    assert parse(bytes(request)) == request
    response = Response(headers, b"", 180, "It Rings")
    assert parse(bytes(response)) == response
    assert b"\r\nCall-ID: x\r\nCSeq: 1 INVITE\r\n" in bytes(request)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", TORTUOUS[:-8], TORTUOUS.replace(b"cseq", b"x")),
        TORTUOUS.replace(b"INVITE sip", b"INVITE\xff sip"),
        TORTUOUS.replace(b"  INVITE", b""),
        TORTUOUS.replace(b": 5", b": -5"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError) as refused:
        parse(data)
    assert refused.value.code == "sip_malformed"


@given(st.integers(0, len(TORTUOUS)), st.integers(0, len(TORTUOUS)), st.binary(max_size=8))
def test_a_broken_message_is_read_or_refused(start: int, end: int, noise: bytes) -> None:
    try:
        message = parse(TORTUOUS[:start] + noise + TORTUOUS[end:])
    except PeerError:
        return
    assert all(message.get(name) for name in ("via", "from", "to", "call-id", "cseq"))
    assert all(isinstance(address(value)[0], str) for value in message.all("contact"))


@given(st.lists(st.integers(1, 200), max_size=20))
def test_a_connection_may_cut_messages_anywhere(sizes: list[int]) -> None:
    """Keep-alives between them too."""
    whole = b"\r\n\r\n".join((TORTUOUS[:-4], b"", TORTUOUS[:-4]))
    inbox, messages, at = Inbox(), [], 0
    for size in (*sizes, len(whole)):
        messages += inbox.feed(whole[at : at + size])
        at += size
    assert messages == [TORTUOUS[:-4]] * 2


def test_a_connection_that_sends_no_end_is_refused() -> None:
    with pytest.raises(PeerError):
        Inbox().feed(b"x" * 70_000)
    with pytest.raises(PeerError):
        Inbox().feed(b"INVITE sip:a SIP/2.0\r\nContent-Length: 99999999\r\n\r\n")


def test_addresses_in_all_their_forms() -> None:
    assert split('"a, b" <sip:x;a,b@y>, <sip:c>') == ['"a, b" <sip:x;a,b@y>', "<sip:c>"]
    assert address("sip:a@b;tag=1") == ("sip:a@b", {"tag": "1"})
    assert address("<sip:a@b;lr>;tag=1")[0] == "sip:a@b;lr"
    assert uri_of("sip:a@[2001:db8::1]:5080;transport=TCP") == ("a", "2001:db8::1", 5080, {"transport": "TCP"})
    assert uri_of("sips:b.example.org") == ("", "b.example.org", None, {})
    assert host_of("[::1]:70000") == ("::1", None)
    for wrong in ("tel:+49", "mailto:a@b", "sip:", "sip:a@"):
        with pytest.raises(PeerError):
            uri_of(wrong)
