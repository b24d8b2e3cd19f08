"""Passwords: the examples of the RFCs."""

from __future__ import annotations

from breeze_rtc.sip import digest


def test_the_example_of_rfc_7616() -> None:
    """Section 3.9.1, both algorithms: the first challenge that can be met is."""
    more = 'realm="http-auth@example.org", qop="auth, auth-int", nonce="7ypf/xlj9XXwfDPEoM4URrv/xwf94BcCAzFZH4GiTo0v"'
    opaque = ', opaque="FQhe/qaU925kfnzjCev0ciny7QMkPqMAFRtzCUYo5tdS"'
    asked = {"method": "GET", "uri": "/dir/index.html", "user": "Mufasa", "password": "Circle of Life"}
    cnonce = "f2/wE4q74E6zIJEtWaHKaf5wv/H5QzzpXusqGemxURZJ"
    sha = digest.answer((f"Digest {more}, algorithm=SHA-256{opaque}",), **asked, cnonce=cnonce)
    md5 = digest.answer(
        (f"Digest {more}, algorithm=SHA-512-256", f"Digest {more}, algorithm=MD5{opaque}"), **asked, cnonce=cnonce
    )
    assert sha is not None
    assert md5 is not None
    assert 'response="753927fa0e85d155564e2e272a28d1802ca10daf4496794697cf8db5856cb6c1"' in sha
    assert 'response="8ca523f5e9506fed4657c9700eebdbec"' in md5
    assert 'opaque="FQhe/qaU925kfnzjCev0ciny7QMkPqMAFRtzCUYo5tdS"' in md5


def test_a_challenge_without_qop_is_met_the_old_way() -> None:
    """RFC 2069, as small registrars still do; the response was computed with md5sum."""
    said = digest.answer(
        ('Digest realm="telephones", nonce="abc"',),
        **{"method": "REGISTER", "uri": "sip:example.org", "user": "agent", "password": "secret", "cnonce": "x"},
    )
    assert said is not None
    assert 'response="60f82f7ff8220fda445b90639eb59c02"' in said
    assert "cnonce" not in said


def test_a_challenge_that_cannot_be_met_is_not() -> None:
    asked = {"method": "REGISTER", "uri": "sip:a", "user": "a", "password": "b", "cnonce": "x"}
    for challenge in (
        "Basic realm=x",
        "Digest realm=x",
        'Digest nonce="x", qop="auth-int"',
        'Digest nonce="x", algorithm=X',
    ):
        assert digest.answer((challenge,), **asked) is None
    assert digest.is_stale(('Digest nonce="x", stale=TRUE',))
    assert not digest.is_stale(('Digest nonce="x", stale=false',))
