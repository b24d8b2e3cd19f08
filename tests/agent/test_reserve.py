"""What of a slow voice's sound is kept back: a voice that makes so much in a second, and a listener."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.agent.reserve import CHUNK_S, MOST_S, PACKET_S, USUAL_STALL_S, Reserve
from breeze_rtc.playback import SpeechPacket, TextMark

RATE, PACKET, FRAME = 24_000, 480, 1_920
WORD_S, WORD = 0.4, 9_600
TEXT = "One two three four five six. Seven eight nine. " * 3 + "And a last one of eight words it is."
KNOWN = 1e9  # so much sound has been made that its stalls are known


def made(reserve: Reserve, frame: int, text: str = TEXT) -> None:
    """The voice makes one frame more, a word every 0.4 s."""
    ends = [at for at in range(1, len(text) + 1) if at == len(text) or text[at] == " "]
    marks = tuple(
        TextMark((word + 1) * WORD, end)
        for word, end in enumerate(ends)
        if frame * FRAME < (word + 1) * WORD <= (frame + 1) * FRAME
    )
    packets = tuple(SpeechPacket(at, b"p") for at in range(frame * FRAME, (frame + 1) * FRAME, PACKET))
    reserve.make((frame + 1) * FRAME, packets, marks)


def played(
    pace: float,
    *,
    text: str = TEXT,
    stalls: dict[int, float] | None = None,
    stumble_s: float = 0.0,
    known_s: float = KNOWN,
) -> tuple[float, list[tuple[int, float]]]:
    """Seconds until the first sound, and the holes behind it: word after which, how long."""
    reserve = Reserve(RATE)
    reserve.know(text, is_all=True)
    frames = -(-len(text.split()) * WORD // FRAME)
    queue: list[SpeechPacket] = []
    now = dry_at = first = 0.0
    out = 0
    holes: list[tuple[int, float]] = []
    for frame in range(frames):
        now += FRAME / RATE / pace + (stalls or {}).get(frame, 0.0)
        made(reserve, frame, text)
        lead_s = max(0.0, dry_at - now)
        packets, _ = (
            reserve.take_all()
            if frame == frames - 1
            else reserve.take(lead_s, pace=pace, stumble_s=stumble_s, known_s=known_s, usual_chars=0)
        )
        for packet in packets:
            assert packet.start_samples == out, "sound is missing, or comes twice"
            if not out:
                first = now
            elif now - dry_at > PACKET_S:
                holes.append((out // WORD, now - dry_at))
            dry_at, out = max(dry_at, now) + PACKET_S, out + PACKET
        queue += packets
    assert len(queue) * PACKET == frames * FRAME
    return first, holes


def ends_sentence(word: int) -> bool:
    words = TEXT.split()
    return words[(word - 1) % len(words)].endswith(".")


@pytest.mark.parametrize("pace", [0.5, 0.7, 0.9, 1.0])
def test_a_speech_is_heard_without_a_pause(pace: float) -> None:
    """What will be missing is waited for before the first word, and two stalls, here none but a chunk's length."""
    first, holes = played(pace)
    assert holes == []
    sound_s = len(TEXT.split()) * WORD_S
    assert first < sound_s * (1 / pace - 1) + 3 * CHUNK_S / pace + 0.3


def test_a_speech_that_would_be_waited_for_too_long_pauses_between_its_sentences() -> None:
    """Two minutes of a voice at half of the pace: fifteen seconds are in hand, and the rest is waited for later."""
    first, holes = played(0.5, text=10 * (TEXT + " "))
    assert MOST_S / 0.5 <= first < MOST_S / 0.5 + 1
    assert holes
    assert all(ends_sentence(word) for word, _ in holes)


@given(
    st.floats(0.5, 1.3),
    st.dictionaries(st.integers(1, 150), st.floats(0.05, USUAL_STALL_S), max_size=1),
)
def test_a_stall_of_a_voice_that_nobody_knows_breaks_no_sentence(pace: float, stalls: dict[int, float]) -> None:
    """Whenever it comes, if it is no longer than usual."""
    _, holes = played(pace, stalls=stalls, known_s=0.0)
    assert all(ends_sentence(word) for word, _ in holes)


def test_a_stall_as_long_as_the_longest_breaks_no_sentence() -> None:
    """Of a voice that is known, one as long as has been seen is paid for before a sentence begins."""
    for frame in range(5, 80, 3):
        _, holes = played(0.9, stalls={frame: 2.5}, stumble_s=2.5)
        assert all(ends_sentence(word) for word, _ in holes)


def test_without_that_sentences_break_off() -> None:
    """The same stall, unforeseen: what the two tests above hold is not true by itself."""
    holes = [hole for frame in range(5, 80, 3) for hole in played(0.9, stalls={frame: 2.5})[1]]
    assert not all(ends_sentence(word) for word, _ in holes)


def test_a_voice_without_marks_is_waited_for_once() -> None:
    """Where its sentences are nobody knows: all that will be missing is waited for first."""
    reserve = Reserve(RATE)
    reserve.know("x" * 140, is_all=True)  # ten seconds
    for frame in range(60):
        reserve.make(
            (frame + 1) * FRAME, tuple(SpeechPacket(frame * FRAME + at, b"p") for at in range(0, FRAME, PACKET)), ()
        )
        if reserve.take(0.0, pace=0.7, stumble_s=0.0, known_s=KNOWN, usual_chars=0)[0]:
            break
    in_hand_s = reserve.made_samples / RATE
    assert in_hand_s == pytest.approx((10 - in_hand_s) * (1 / 0.7 - 1) + 3 * CHUNK_S, abs=0.2)
    assert not reserve.is_kept_back


def test_a_sentence_without_an_end_does_not_begin() -> None:
    """Text that comes bit by bit: nothing begins before it is known how long it will be."""
    reserve = Reserve(RATE)
    reserve.know("One two three")
    for frame in range(14):
        made(reserve, frame)
        assert reserve.take(0.0, pace=0.9, stumble_s=0.0, known_s=KNOWN, usual_chars=0) == ((), ())
    reserve.know("One two three. Four")
    assert len(reserve.take(0.0, pace=0.9, stumble_s=0.0, known_s=KNOWN, usual_chars=0)[0]) == 14 * 4


def test_an_answer_is_taken_to_be_as_long_as_answers_are() -> None:
    """What is known of the text is one short sentence; where answers are long, more is waited for."""
    firsts = []
    for usual_chars in (0, 300):
        reserve = Reserve(RATE)
        reserve.know("One two three. Four")
        frame = 0
        while not reserve.out_samples:
            made(reserve, frame)
            reserve.take(0.0, pace=0.9, stumble_s=0.0, known_s=KNOWN, usual_chars=usual_chars)
            frame += 1
        firsts.append(frame * FRAME / RATE)
    # 300 characters of this voice are 20 s, and it makes nine tenths of them in that time.
    assert firsts[0] + 1 < firsts[1] < 20 * (1 / 0.9 - 1) + 3 * CHUNK_S + 0.3


def test_all_there_is_can_be_had() -> None:
    """Packets and marks, whatever was kept back."""
    reserve = Reserve(RATE)
    reserve.know(TEXT)
    for frame in range(6):
        made(reserve, frame)
    assert reserve.held_samples == 6 * FRAME
    packets, marks = reserve.take_all()
    assert (len(packets), marks) == (24, (TextMark(WORD, 3),))
    assert not reserve.is_kept_back
