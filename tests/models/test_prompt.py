"""Breeze's prompts: templates, segment borders, control tokens in user text, and how far each token reads."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from breeze_rtc.errors import BadText
from breeze_rtc.models.prompt import BreezePrompts, PromptFrontend, Voice, sanitise, template, tokenise

CODES = ((1, 2), (3, 4), (5, 6))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a character, the control tokens, and the start token that every text gets."""
    specials = ["<pad>", "<eos>", "<bos>", "<|AUDIO|>", "<|audio_eos|>", "[S0]", "<ins_bos>", "<ins_eos>"]
    characters = [chr(c) for c in range(32, 127)]
    vocabulary = {token: n for n, token in enumerate(specials + characters)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = Split("", "isolated")
    made.decoder = Fuse()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return made


def strings(parts: list[object]) -> list[object]:
    return [part if isinstance(part, str) else len(part) for part in parts]  # type: ignore[arg-type]


def test_templates() -> None:
    """The four modes, and the unguided row of the two that have one."""
    assert template("hi", Voice()) == (["[S0]hi"], None)
    assert template("hi", Voice(instruction="calm")) == (["[S0]<ins_bos>calm<ins_eos>hi"], ["[S0]hi"])
    cloned = Voice(reference_text="ref", reference=CODES)
    assert template("hi", cloned) == (["[S0]ref", CODES, "[S0]hi"], None)
    edited = Voice(instruction="calm", reference_text="ref", reference=CODES)
    guided, unguided = template("hi", edited)
    assert guided == ["[S0]ref", CODES, "[S0]<ins_bos>calm<ins_eos>hi"]
    assert unguided == ["[S0]ref", CODES, "[S0]hi"]
    assert template("hi", Voice(speaker="")) == (["hi"], None)


def test_every_text_part_begins_with_the_start_token(tokenizer: Tokenizer) -> None:
    """Also in the middle of a row; reference audio is one token a frame and one for its end."""
    rows = tokenise(["[S0]ab", CODES, "[S0]c"], tokenizer)
    assert [row[0] for row in rows] == [2, 3, 2]
    assert rows[1] == [3, 3, 3, 4]
    assert [len(row) for row in rows] == [4, 4, 3]


@pytest.mark.parametrize("text", ["<bos>", "<b<bos>os>", "x<|AUDIO|>y", "<ins_eos><|audio_eos|>", "<pa<eos>d>"])
def test_user_text_cannot_hold_control_tokens(text: str, tokenizer: Tokenizer) -> None:
    """What reads as a control token is taken out, also when taking one out makes another."""
    cleaned, origin = sanitise("ab" + text + "cd")
    assert cleaned in {"abcd", "abxycd"}
    assert origin[0] == 1
    assert origin[-1] == len(text) + 4
    ids = tokenise([cleaned], tokenizer)[0]
    assert all(i > 7 for i in ids[1:])


def test_ends_count_the_users_characters(tokenizer: Tokenizer) -> None:
    """Speaker, instruction and start token read nothing; each character one; what was taken out is read along."""
    frontend = PromptFrontend(tokenizer, Voice(instruction="calm"))
    assert frontend.push("hey<eos>") == []
    frontend.push("you")
    unguided, guided = frontend.end()
    assert (unguided.row, guided.row) == (1, 0)
    assert len(guided.tokens) == len(guided.ends) == 4 + 4 + 6
    assert guided.ends == (0,) * 8 + (1, 2, 3, 9, 10, 11)


def test_reference_audio_stands_as_a_segment(tokenizer: Tokenizer) -> None:
    """A voice with a reference makes text, audio and text segments, in that order."""
    frontend = PromptFrontend(tokenizer, Voice(reference_text="ref", reference=CODES))
    frontend.push("hi")
    first, audio, last = frontend.end()
    assert audio.codes == CODES
    assert len(audio.tokens) == 4
    assert (first.codes, last.codes) == ((), ())
    assert last.ends[-1] == 2


@pytest.mark.parametrize("text", ["", "  \n"])
def test_no_text_is_no_prompt(text: str, tokenizer: Tokenizer) -> None:
    """Nothing to say makes no segment."""
    frontend = PromptFrontend(tokenizer, Voice())
    frontend.push(text)
    assert frontend.end() == []


def test_a_reference_computed_before_is_left_out(tokenizer: Tokenizer) -> None:
    """Of every row that begins with it; what is left is the rest of the row, token for token."""
    prompts = BreezePrompts(lambda: tokenizer)
    voice = Voice(instruction="calm", reference_text="ref", reference=CODES)
    for has_prefix in (False, True):
        frontend = prompts.frontend(voice, has_prefix=has_prefix)
        frontend.push("hi")
        segments = frontend.end()
        rows = [[s for s in segments if s.row == row] for row in (0, 1)]
        begin = [(s.tokens, s.codes) for s in prompts.reference(voice)]
        assert len(begin) == 2
        for row, last in zip(rows, ("<ins_bos>calm<ins_eos>hi", "hi"), strict=True):
            parts = [(s.tokens, s.codes) for s in row]
            assert parts[:-1] == ([] if has_prefix else begin)
            assert parts[-1][0] == tuple(tokenizer.encode(f"[S0]{last}").ids)
    assert prompts.reference(Voice(instruction="calm")) == []


@pytest.mark.parametrize("has_prefix", [False, True])
@pytest.mark.parametrize("instruction", ["calm", "as calm as can be, and slow"])
def test_rows_of_dual_guidance(tokenizer: Tokenizer, instruction: str, has_prefix: bool) -> None:
    """The reference alone, the instruction alone, and neither; row 0 is the longest, and reads the text."""
    voice = Voice(instruction=instruction, reference_text="ref", reference=CODES)
    frontend = PromptFrontend(tokenizer, voice, has_prefix=has_prefix, is_dual=True)
    frontend.push("hi")
    segments = frontend.end()
    assert segments[-1].row == 0
    assert segments[-1].ends[-1] == 2
    rows = [[token for s in segments if s.row == row for token in s.tokens] for row in (0, 1, 2)]
    plain, instructed = (list(tokenizer.encode(f"[S0]{t}hi").ids) for t in ("", f"<ins_bos>{instruction}<ins_eos>"))
    reference = [token for s in BreezePrompts(lambda: tokenizer).reference(voice) for token in s.tokens]
    cloned = plain if has_prefix else reference + plain
    assert rows[1] == plain
    assert rows == [*sorted((cloned, instructed), key=len, reverse=True)[:1], plain, min(cloned, instructed, key=len)]


def test_what_describes_a_voice_holds_no_control_tokens() -> None:
    """Instructions and transcripts lose them as the text does; what is nothing else is nothing."""
    voice = Voice(instruction=" <ins_eos>calm<bos> ", reference_text="r<|AUDIO|>ef", reference=CODES)
    assert (voice.instruction, voice.reference_text) == ("calm", "ref")
    assert template("hi", Voice(instruction="<ins_bos><eos>")) == (["[S0]hi"], None)
    with pytest.raises(BadText):
        Voice(reference_text="<bos>", reference=CODES)


def test_reference_needs_both_halves() -> None:
    """Audio without words, or words without audio, is refused."""
    with pytest.raises(BadText):
        Voice(reference=CODES)
    with pytest.raises(BadText):
        Voice(reference_text="ref")


def test_a_tokenizer_that_joins_parts_is_noticed() -> None:
    """If the row encodes to other lengths than its parts, no border is guessed."""

    class Joining:
        def encode(self, sequence: str, *, add_special_tokens: bool = True) -> object:
            return type("Encoding", (), {"ids": list(range(len(sequence.replace("ab", "_"))))})

        def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
            return "ba"

    with pytest.raises(BadText, match="joins"):
        tokenise(["x", "y"], Joining())  # type: ignore[arg-type]
