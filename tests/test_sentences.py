"""Where growing text may be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.sentences import FIRST_CHARS, MAX_CHARS, piece_end, sentence_ends


def pieces(text: str, step: int = 1) -> list[str]:
    """The pieces of a text that comes `step` characters at a time."""
    found: list[str] = []
    start = 0
    for known in [*range(step, len(text), step), len(text)]:
        while True:
            end = piece_end(text[:known], start, is_first=not found, is_all=known == len(text))
            if end == start:
                break
            found.append(text[start:end])
            start = end
    return found


TITLES = "Dr. No paid $3.50 on Jan. 5. Mr. Bond, e.g. James, did not."
CLAUSES = "A first sentence that is long, with a clause, and an end. So."
WEATHER = "今天天气很好，我们去公园散步吧。那里有很多花！你说呢？"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two is more! Three? Yes.", ["One.", " Two is more!", " Three?", " Yes."]),
        (TITLES, ["Dr. No paid $3.50 on Jan. 5. Mr. Bond,", " e.g. James, did not."]),
        ('He said "Stop!" and left. "Why?" she asked.', ['He said "Stop!" and left.', ' "Why?" she asked.']),
        (CLAUSES, ["A first sentence that is long,", " with a clause, and an end.", " So."]),
        (WEATHER, ["今天天气很好，我们去公园散步吧。", "那里有很多花！", "你说呢？"]),
        ("No stop at all", ["No stop at all"]),
        ("  \n ", []),
    ],
)
def test_pieces_end_where_sentences_do(text: str, expected: list[str]) -> None:
    """Abbreviations, numbers and quotes do not end one; the first piece may be a clause."""
    assert pieces(text) == expected


def test_the_first_piece_leaves_before_the_first_sentence_ends() -> None:
    """In English after a clause, in Chinese too."""
    english = "Well, if you really want to know, it is a long story that began"
    assert piece_end(english, 0, is_first=True, is_all=False) == english.index("know,") + 5
    chinese = "如果你真的想知道的话，那是一个很长的故事，从很久以前开始"
    assert piece_end(chinese, 0, is_first=True, is_all=False) == chinese.index("，") + 1


def test_what_has_come_meanwhile_is_one_piece() -> None:
    """Two sentences sound better together than apart."""
    text = "Begin. The second one. The third one! And a"
    assert text[6 : piece_end(text, 6, is_first=False, is_all=False)] == " The second one. The third one!"


@given(st.text(alphabet='ab .,!?\n。，你"', max_size=200), st.integers(1, 9))
def test_the_pieces_are_the_text(text: str, step: int) -> None:
    """Nothing is lost or doubled, and no piece is blank, whatever the text and however it comes."""
    found = pieces(text, step)
    assert text.startswith("".join(found))
    assert not text[len("".join(found)) :].strip()
    assert all(piece.strip() for piece in found)


def test_text_without_an_end_is_cut_at_a_blank() -> None:
    """A model is not kept waiting for a stop that never comes."""
    text = "word " * 200
    assert all(len(piece) <= MAX_CHARS and piece.strip().endswith("word") for piece in pieces(text, 7))
    assert FIRST_CHARS < MAX_CHARS


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two is not over.", ["One."]),
        ("Dr. No paid 3.50! He did. ", ["Dr. No paid 3.50!", " He did."]),
        ('"Stop!" he said. Then', ['"Stop!" he said.']),
        ("今天天气很好。我们去公园!", ["今天天气很好。"]),
        ("no stop at all", []),
    ],
)
def test_sentences_that_are_over_are_found(text: str, sentences: list[str]) -> None:
    """The last one is not over before something follows it."""
    ends = sentence_ends(text, 0)
    assert [text[one:other] for one, other in zip([0, *ends], ends, strict=False)] == sentences
