"""The nano voice's front end: reading, cutting, offsets."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.pronunciation import (
    LETTERS,
    PUNCTUATION,
    SPACE,
    VOCABULARY,
    Lexicon,
    Pronunciation,
    _items,
    letter_tokens,
    phoneme_tokens,
    tokenize,
)
from breeze_rtc.models.speech_model import TextSegment

FOLDER = Path(__file__).parents[2] / "breeze_rtc/voices/nano"


@pytest.fixture(scope="module")
def pronunciation() -> Pronunciation:
    return Pronunciation.load(FOLDER)


def read_aloud(text: str, lexicon: Lexicon) -> str:
    """The words and pauses a text is read as; a letter that is spelled keeps its full stop."""
    return " ".join(item.word or item.mark for item in _items(text, lexicon))


def segments_of(pronunciation: Pronunciation, pieces: list[str]) -> list[TextSegment]:
    frontend = pronunciation.frontend()
    segments: list[TextSegment] = []
    for piece in pieces:
        segments += frontend.push(piece)
    return segments + frontend.end()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("$5.30", "five dollars and thirty cents"),
        ("$1", "one dollar"),
        ("£0.02", "two pence"),
        ("$2.5 million", "two point five million dollars"),
        ("3:45 pm", "three forty five p. m."),
        ("12:00", "twelve o'clock"),
        ("9:05", "nine oh five"),
        ("7 a.m.", "seven a. m. ."),
        ("1999", "nineteen ninety nine"),
        ("2005", "two thousand five"),
        ("1,234", "one thousand two hundred thirty four"),
        ("-5°C", "minus five degrees celsius"),
        ("50%", "fifty percent"),
        ("21st", "twenty first"),
        ("1/2", "one half"),
        ("10 kg", "ten kilograms"),
        ("1 ft", "one foot"),
        ("3-5", "three to five"),
        ("3.14", "three point one four"),
        ("007", "zero zero seven"),
        ("(212) 555-0199", "two one two five five five zero one nine nine"),
        ("2024-03-05", "march fifth twenty twenty four"),
        ("Dr. No", "doctor No"),
        ("e.g. the U.S.", "for example the u. s. ."),
        ("the FBI and NASA", "the f. b. i. and NASA"),
        ("me@foo.org", "me at foo dot org"),
        ("https://www.example.com/a", "example dot com slash a"),
        ("rock & roll", "rock and roll"),
        ("well - yes", "well , yes"),
        ("so...", "so …"),
        ("café", "cafe"),
        ("JavaScript", "Java Script"),
        ("don’t", "don't"),
        ("ok \U0001f642 \x00 日本 שלום", "ok"),
    ],
)
def test_written_forms_are_read_as_people_read_them(pronunciation: Pronunciation, written: str, said: str) -> None:
    """Numbers, money, times, abbreviations and addresses become the words an English speaker says."""
    assert read_aloud(written, pronunciation.lexicon) == said


def test_neighbours_change_small_words(pronunciation: Pronunciation) -> None:
    """Articles and "to" take the form that fits the sound after them."""
    say = pronunciation.lexicon.say
    assert say(["the", "apple"])[0] == "ði"
    assert say(["the", "pear"])[0] == "ðə"
    assert say(["to", "eat"])[0] == "tʊ"
    assert say(["to", "buy"])[0] == "tə"
    assert say(["used", "to"])[0] == "jˈust"


@pytest.mark.parametrize(
    ("word", "phonemes"),
    [
        ("cats", "kˈæts"),
        ("libraries", "lˈIbɹˌɛɹiz"),
        ("dog's", "dˈɔɡz"),
        ("googled", "ɡˈuɡᵊld"),
        ("emailing", "ˈimˌAlɪŋ"),
    ],
)
def test_regular_endings_need_no_entry(pronunciation: Pronunciation, word: str, phonemes: str) -> None:
    """Plurals, possessives, -ed and -ing follow from the stem."""
    found = pronunciation.lexicon.look_up(word)
    assert found is not None
    assert found[0] == phonemes


def test_unknown_words_are_read_by_their_letters(pronunciation: Pronunciation) -> None:
    """A word without an entry becomes letter tokens, one a letter."""
    assert pronunciation.lexicon.look_up("Zyxquorb") is None
    (segment,) = tokenize("Zyxquorb", pronunciation.lexicon, closed=False)
    assert list(segment.tokens) == [*letter_tokens("zyxquorb"), SPACE]


def test_tokens_are_distinct_and_in_range() -> None:
    """Letters, marks and sounds with their stresses share no id, and all are under VOCABULARY."""
    stressed = [token for token, _ in phoneme_tokens("ˈAˌAAæˈæT")]
    ids = [*LETTERS.values(), SPACE, *PUNCTUATION.values(), *stressed]
    assert len(set(ids)) == len(ids)
    assert max(ids) < VOCABULARY


@pytest.mark.parametrize(
    "text",
    [
        "Ask Dr. Smith about it.",
        "It costs 3. That is cheap.",
        "Pi is 3.14 or so.",
        "J. K. Rowling wrote it.",
        "Use e.g. this one.",
    ],
)
def test_a_full_stop_inside_is_no_end(pronunciation: Pronunciation, text: str) -> None:
    """Titles, numbers and initials do not cut the text."""
    assert len(segments_of(pronunciation, [text])) == 1


def test_sentences_come_as_soon_as_the_next_word_begins(pronunciation: Pronunciation) -> None:
    """A sentence is handed out with the first letter after it, closing quotes and smiles included."""
    frontend = pronunciation.frontend()
    assert frontend.push('"Hello there!" \U0001f642 ') == []
    (segment,) = frontend.push("H")
    assert segment.ends[-1] == len('"Hello there!" \U0001f642 ')
    assert segment.tokens[-1] == PUNCTUATION["!"]


def test_the_first_clause_is_not_kept_waiting(pronunciation: Pronunciation) -> None:
    """At the start of a stream a clause is enough, later it takes a sentence."""
    pieces = segments_of(pronunciation, ["Well, yes, of course, we can do that today. Then, as you like, tomorrow."])
    assert [piece.ends[-1] for piece in pieces] == [20 + 2, 44, 72] or len(pieces) == 3


@settings(deadline=None, max_examples=150)
@given(text=st.text(max_size=400) | st.text(alphabet="ab. ,3$:!\n\U0001f642Dr-'", max_size=400), data=st.data())
def test_offsets_account_for_every_character(pronunciation: Pronunciation, text: str, data: st.DataObject) -> None:
    """However the text is pushed, the segments are the same; `ends` only grow and reach the text's end."""
    whole = segments_of(pronunciation, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert segments_of(pronunciation, pieces) == whole
    ends = [end for segment in whole for end in segment.ends]
    assert ends == sorted(ends)
    assert all(len(segment.tokens) == len(segment.ends) <= 200 for segment in whole)
    assert all(0 < token < VOCABULARY for segment in whole for token in segment.tokens)
    if whole:
        assert ends[-1] == len(text)
        for heard in ends:
            assert text[:heard] + text[heard:] == text


@pytest.mark.parametrize(
    "text",
    [
        "a" * 100_000,
        "1" * 100_000,
        "word " * 20_000,
        "." * 100_000,
        "$" * 100_000,
        "\U0001f642" * 100_000,
        "a.b" * 33_000,
    ],
)
def test_long_texts_take_bounded_time(pronunciation: Pronunciation, text: str) -> None:
    """100 000 characters of anything are cut into short segments in seconds, with no square in it."""
    started = time.process_time()
    segments = segments_of(pronunciation, [text[start : start + 50] for start in range(0, len(text), 50)])
    assert time.process_time() - started < 10
    assert all(len(segment.tokens) <= 200 for segment in segments)


def test_a_missing_lexicon_is_a_checkpoint_error(tmp_path: Path) -> None:
    """The folder is named."""
    with pytest.raises(CheckpointError, match="lexicon"):
        Pronunciation.load(tmp_path)
