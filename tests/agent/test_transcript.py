"""Words heard, cut at the playhead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.agent.transcript import Transcript, word_floor
from breeze_rtc.playback import TextMark

RATE = 24_000
TEXTS = [
    'Dr. No said: "$100, please..."  Or else?',
    "你好，世界。今天天气很好。",
    "สวัสดีครับ ยินดีต้อนรับ",
    "مرحبا بالعالم",
    "Family: 👨‍👩‍👧‍👦 and a wave 👋🏽!",
    "cafe\u0301 ole\u0301",
    "one\x00two three",
]


def transcript(text: str, marks: list[tuple[int, int]], delivered: int, *, complete: bool) -> Transcript:
    made = Transcript(RATE)
    made.push(text)
    made.deliver(delivered, tuple(TextMark(samples, chars) for samples, chars in marks))
    if complete:
        made.complete()
    return made


@given(
    st.one_of(st.sampled_from(TEXTS), st.text()),
    st.lists(st.tuples(st.integers(-100, 500_000), st.integers(-5, 500))),
    st.lists(st.integers(-10, 600_000)),
    st.integers(0, 500_000),
    st.booleans(),
)
def test_heard_and_unheard_are_the_whole_text(
    text: str, marks: list[tuple[int, int]], positions: list[int], delivered: int, complete: bool
) -> None:
    """Whatever marks and positions come, nothing is lost, doubled, or unheard again."""
    made = transcript(text, marks, delivered, complete=complete)
    before = 0
    for position in positions:
        made.hear(position)
        assert made.heard_text + made.unheard_text == text
        assert made.heard_chars >= before
        before = made.heard_chars
        assert made.heard_samples <= delivered


@pytest.mark.parametrize("text", TEXTS)
def test_all_is_heard_at_the_end_and_nothing_before_the_start(text: str) -> None:
    """At the last sample the heard text is the text; before the first it is empty."""
    made = transcript(text, [], 48_000, complete=True)
    assert made.heard_text == ""
    made.hear(48_000)
    assert made.heard_text == text


def test_marks_decide_the_cut() -> None:
    """A word counts once its last sample has been heard."""
    made = transcript("One two three.", [(10_000, 3), (20_000, 7), (30_000, 14)], 30_000, complete=True)
    made.hear(19_999)
    assert made.heard_text == "One"
    made.hear(20_000)
    assert made.heard_text == "One two"


def test_marks_inside_a_word_do_not_split_it() -> None:
    """Marks of word pieces leave whole words."""
    made = transcript("unbelievable news", [(5_000, 2), (10_000, 7), (15_000, 12), (22_000, 17)], 22_000, complete=True)
    made.hear(12_000)
    assert made.heard_text == ""
    made.hear(15_000)
    assert made.heard_text == "unbelievable"


def test_without_marks_the_cut_is_in_proportion() -> None:
    """A voice without alignment gives neither all of a cut turn nor nothing of it."""
    text = "a b c d e f g h i j"
    made = transcript(text, [], 100_000, complete=True)
    made.hear(50_000)
    assert made.heard_text == "a b c d e"


def test_without_marks_and_end_the_cut_follows_a_usual_rate() -> None:
    """While the voice is still at it and gives no marks, three seconds are about forty characters, and never all."""
    text = "word " * 40
    made = transcript(text, [], 10 * RATE, complete=False)
    made.hear(3 * RATE)
    assert 30 <= made.heard_chars <= 45
    short = transcript("hello there", [], 10 * RATE, complete=False)
    short.hear(10 * RATE)
    assert short.heard_text == "hello"


@pytest.mark.parametrize("text", [TEXTS[1], TEXTS[2]])
def test_scripts_without_spaces_are_cut_between_characters(text: str) -> None:
    """Half of a Chinese or Thai sentence is about half of it, and a prefix."""
    made = transcript(text, [], 100_000, complete=True)
    made.hear(50_000)
    assert len(text) // 3 <= len(made.heard_text) <= len(text) // 2 + 1
    assert text.startswith(made.heard_text)


@pytest.mark.parametrize(("text", "limit"), [("cafe\u0301 noir", 4), ("👨‍👩‍👧‍👦 family", 3)])
def test_a_combined_character_is_never_split(text: str, limit: int) -> None:
    """An accent or a joined emoji stays with what it belongs to."""
    assert word_floor(text, limit) == 0


def test_unheard_seconds_count_sound_and_text() -> None:
    """What is unheard is the sound not heard yet, and the text that has no sound yet, at a usual rate."""
    made = Transcript(RATE)
    made.push("x" * 28)
    assert made.unheard_s == pytest.approx(2.0)
    made.deliver(2 * RATE, (TextMark(2 * RATE, 28),))
    assert made.unheard_s == pytest.approx(2.0)
    made.hear(RATE)
    assert made.unheard_s == pytest.approx(1.0)
    made.hear(2 * RATE)
    assert made.unheard_s == 0.0
