"""What is written and what is said: markup goes, places stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.agent import numbers
from breeze_rtc.agent.text import SpokenText


def spoken(text: str, *, pieces: list[str] | None = None) -> tuple[str, SpokenText]:
    filter_ = SpokenText()
    return "".join([*(filter_.push(piece) for piece in pieces or [text]), filter_.end()]), filter_


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Plain words, said as they are.", "Plain words, said as they are."),
        ("This is **very** _important_ and ~~wrong~~ `code`.", "This is very important and wrong code."),
        ("# Title\n\n- one\n- *two*.\n1. three\nDone.", " Title.\n\n one.\n two.\n1. three.\nDone."),
        ("See [the guide](https://example.org/a?b=c) now.", "See the guide now."),
        ("![a boat](boat.png) on a sea", "a boat on a sea"),
        ("Go to https://www.example.com/a/b?c=d#e, or (http://foo.io/x).", "Go to example.com, or (foo.io)."),
        ("Well done 👍🏽 👩‍👩‍👧 ⭐️!", "Well done   !"),
        ("Run:\n```python\nprint('x') # **not** said\n```\nThat is all.", "Run:\n\n\n\nThat is all."),
        ("| a | b |\n|---|---|\n| 1 | 2 |", " a  b \n\n 1  2 "),
        ("2 * 3 and 3*4, snake_case, it's 5 > 4, a-b - c", "2 * 3 and 3*4, snake_case, it's 5 > 4, a-b - c"),
        ('$100.50 on 2024-05-01 at 3:30 pm, Dr. No, "quoted"', '$100.50 on 2024-05-01 at 3:30 pm, Dr. No, "quoted"'),
        ("今天**天气**很好。我们去公园吧!", "今天天气很好。我们去公园吧!"),
        ("می‌خواهم नमस्ते क्‍ष", "می‌خواهم नमस्ते क्‍ष"),
    ],
)
def test_markup_is_not_said(written: str, said: str) -> None:
    """Markdown, emoji and links become what a person would read out; the rest is left alone, joiners of scripts too."""
    assert spoken(written)[0] == said


SIGNS = [*"ab 1.*_`#[]()|->~!\n\u4f60\u3002\u200d", "\U0001f600", "https://a.b/c ", "**", "```"]
MARKUP = st.lists(st.sampled_from(SIGNS), max_size=60).map("".join)
WORDS = ["**bold**", "word,", "_it_", "# Title\n", "- item\n", "[a b](http://x.y/z)", "\u4f60\u597d\u3002", "\n"]


@given(st.one_of(MARKUP, st.text(max_size=60)), st.data())
def test_a_stream_is_said_as_the_whole(written: str, data: st.DataObject) -> None:
    """However the text is cut into pieces, the places in it never go back and end at its end."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    said, filter_ = spoken(written, pieces=pieces)
    places = [filter_.written_chars(k) for k in range(len(said) + 1)]
    assert places == sorted(places)
    assert not said or places[-1] == len(written)
    assert len(said) <= len(written) + written.count("\n")


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_letter_by_letter_is_the_same(words: list[str]) -> None:
    """A model's tokens may end anywhere."""
    written = " ".join(words)
    assert spoken(written, pieces=list(written))[0] == spoken(written)[0]


def test_places_in_what_is_said_are_places_in_what_was_written() -> None:
    """The end of a spoken word is the end of the written one, its markup included."""
    written = "See **the** [guide](https://example.org/a/b) for more."
    said, filter_ = spoken(written)
    assert said == "See the guide for more."
    ends = [filter_.written_chars(said.index(word) + len(word)) for word in ("See", "the", "guide", "for", "more.")]
    assert [written[:end] for end in ends] == [
        "See",
        "See **the**",
        "See **the** [guide](https://example.org/a/b)",
        "See **the** [guide](https://example.org/a/b) for",
        written,
    ]


def test_text_is_held_back_for_one_word_at_most() -> None:
    """What is complete goes on at once, in Chinese each character, so that nothing waits for a sentence."""
    filter_ = SpokenText()
    assert filter_.push("The first words of a long sent") == "The first words of a long "
    assert filter_.push("ence that goes on") == "sentence that goes "
    chinese = SpokenText()
    assert "".join(chinese.push(char) for char in "今天天气很好") == "今天天气很好"


def test_numbers_can_be_read_for_a_voice_that_cannot() -> None:
    """Words with digits go to the function, others and addresses do not."""
    seen: list[str] = []

    def read(word: str, language: str) -> str:
        assert language == "en"
        seen.append(word)
        return "seven" + word.lstrip("7")

    filter_ = SpokenText(read=read)
    assert filter_.push("There are 7, see http://a7.com/7 and x. ") == "There are seven, see a7.com and x. "
    assert seen == ["7,"]
    assert filter_.written_chars(len("There are seven,")) == len("There are 7,")


@pytest.mark.skipif(not numbers.is_installed(), reason="pip install 'breeze_rtc[numbers]'")
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("It costs $5, or £3 today.", "It costs five dollars, or three pounds today."),
        ("On 2024-03-04 at 15:30.", "On the fourth of march twenty twenty four at fifteen thirty."),
        ("The 21st of 1,200 (about 3.5%)!", "The twenty first of twelve hundred (about three point five percent)!"),
        ("Call 555-0100, version 1.14.0 of the 1990s.", "Call 555-0100, version 1.14.0 of the 1990s."),
        ("价格是12.5元。", "价格是十二点五元。"),
        ("2024年", "二零二四年"),
    ],
)
def test_numbers_become_words_of_the_language_around_them(written: str, said: str) -> None:
    """By a library's grammars, each where it stands; what these read wrongly is left to the voice.  What was heard is
    counted in the text as it was written."""
    filter_ = SpokenText(read=numbers.read)
    assert filter_.push(written) + filter_.end() == said
    assert filter_.written_chars(len(said)) == len(written)
    places = [filter_.written_chars(at) for at in range(len(said) + 1)]
    assert places == sorted(places)


@pytest.mark.skipif(not numbers.is_installed(), reason="pip install 'breeze_rtc[numbers]'")
def test_a_word_that_no_grammar_knows_is_left_as_it_is() -> None:
    """Some end in an assertion of the library."""
    assert numbers.read("#1", "en") in ("#1", "number one", "#one")
    assert numbers.read("१२", "en")
