"""Keys in RTP (RFC 4733)."""

from __future__ import annotations

from breeze_rtc.media.telephone_event import Keypad, Told, read, written


def test_a_key_is_told_while_it_is_held_and_three_times_at_its_end() -> None:
    keypad = Keypad(160)
    keypad.press("5#")
    slots = [keypad.next() for _ in range(24)]
    first, second = slots[:11], slots[11:22]
    durations = [160, 320, 480, 640, 800, 800, 800, 800]
    expected = [(slot == 0, Told("5", slot >= 5, duration)) for slot, duration in enumerate(durations)]
    assert first == [*expected, None, None, None]
    assert [told and told[1].key for told in second] == ["#"] * 8 + [None] * 3
    assert slots[22:] == [None, None]
    assert not keypad.is_busy


def test_a_payload_is_written_as_the_rfc_has_it() -> None:
    assert written(Told("#", True, 800)) == bytes((11, 0x80 | 10, 0x03, 0x20))
    assert read(bytes((11, 0x8A, 0x03, 0x20))) == Told("#", True, 800)
    assert read(bytes((0, 0, 0, 160))) == Told("0", False, 160)


def test_what_is_no_key_is_none() -> None:
    assert read(bytes((32, 0, 0, 160))) is None  # A fax's tone.
    assert read(b"\0\0") is None
