"""What the test carrier plays: sound, and marks in it, on the clock of its line."""

from __future__ import annotations

from pjsip_player import FRAME_BYTES, Player


def test_the_player_pads_nothing_and_tells_marks_when_they_are_passed() -> None:
    """An odd last piece comes out as short as it is; a mark comes once the clock asks for what is after it."""
    player = Player()
    player.mark("at once")
    player.put(bytes(FRAME_BYTES + 100))
    player.mark("end")
    assert player.next() == (bytes(FRAME_BYTES), ["at once"])
    assert player.next() == (bytes(100), [])
    assert player.next() == (b"", ["end"])
    assert player.waiting_bytes == 0


def test_a_clear_of_the_player_gives_its_marks_back_and_what_follows_is_whole() -> None:
    player = Player()
    player.put(bytes(10 * FRAME_BYTES))
    player.mark("never")
    player.next()
    assert player.clear() == ["never"]
    assert player.next() == (b"", [])
    player.put(b"\1" * FRAME_BYTES)
    player.mark("heard")
    assert player.next() == (b"\1" * FRAME_BYTES, [])
    assert player.next() == (b"", ["heard"])
    assert player.clear() == []
