"""Qwen3-TTS's prompts: a voice that has a name, one that is described, or one that is cloned, then the whole text.

| positions                                             | text beside them      | tag            |
| ----------------------------------------------------- | --------------------- | -------------- |
| `<|im_start|>user`, newline, the instruction, its end | themselves            | none           |
| `<|im_start|>assistant`, newline                      | themselves            | none           |
| language                                              | no text               | three or four  |
| speaker                                               | no text               | one, or of a clone its vector |
| the text begins                                       | beginning             | no sound       |
| a clone's transcript                                  | themselves            | no sound       |
| the text, its end                                     | themselves            | no sound       |
| speech begins                                         | no text               | beginning      |
| a clone's recording                                   | no text               | its codes      |

What is not there is left out: a clone without a transcript has its vector alone.  The published package calls this
layout, which has the whole text before any sound, non-streaming.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from breeze_rtc.errors import BadRequest, BadText, CheckpointError
from breeze_rtc.models.prompt import Voice, added_tokens, sanitise
from breeze_rtc.models.prompt_table import PromptTableConfig
from breeze_rtc.models.published import required
from breeze_rtc.models.speech_model import TextSegment
from breeze_rtc.models.weights import read_json

OPENING, CLOSING = "<|im_start|>assistant\n", "<|im_end|>\n"
# How a text is cut before its byte pairs are joined: the published tokenizer's own pattern.
_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Ids:
    """What a checkpoint's config calls the pieces of its prompts."""

    table: PromptTableConfig
    first_tag: int
    """Codebook 0's id of tag 0."""
    text_pad: int
    text_bos: int
    text_eos: int
    pad: int
    bos: int
    think: int
    no_think: int
    think_bos: int
    think_eos: int
    speakers: dict[str, int]
    languages: dict[str, int]
    dialects: dict[str, str]
    """The language of those speakers who speak a dialect."""

    def beside(self, text: int, codec_id: int) -> int:
        """The token of a position that has both."""
        return self.table.token(text, codec_id - self.first_tag)


class QwenPrompts:
    """See `Prompts`.  Of the voice, `name` may be one of the checkpoint's speakers."""

    is_guided = False
    goes_on = True

    def __init__(self, tokenizer: Callable[[], Tokenizer], ids: Ids, *, refuses: str = "") -> None:
        """tokenizer: reads it when the first prompt is made.  refuses: what this kind of checkpoint is called that
        follows no instructions; empty for one that does."""
        self._tokenizer = tokenizer
        self._ids = ids
        self._refuses = refuses

    def frontend(self, voice: Voice, *, has_prefix: bool = False, is_dual: bool = False) -> QwenFrontend:
        assert not is_dual, "nothing guides"
        if voice.instruction and self._refuses:
            raise BadRequest(f"{self._refuses} follows no instructions: leave them out")
        # Dialects are those of speakers, and not asked for by themselves.
        known = [name for name in self._ids.languages if "dialect" not in name]
        if voice.language and voice.language not in known:
            raise BadRequest(f"the language {voice.language!r:.40} is not known; one of {', '.join(sorted(known))}")
        return QwenFrontend(self, voice, has_prefix=has_prefix)

    def reference(self, voice: Voice) -> list[TextSegment]:
        return self.before(voice)

    def before(self, voice: Voice) -> list[TextSegment]:
        """All that stands before the text."""
        ids = self._ids
        tokens = []
        if instruction := self.sanitised(voice.instruction)[0]:
            tokens += self.encode(f"<|im_start|>user\n{instruction}{CLOSING}").ids
        tokens += self.encode(OPENING).ids
        language = voice.language
        if language in {"", "chinese"}:
            language = ids.dialects.get(voice.name, language)
        if language:
            tags = [ids.think, ids.think_bos, ids.languages[language], ids.think_eos]
        else:
            tags = [ids.no_think, ids.think_bos, ids.think_eos]
        if voice.name in ids.speakers:
            tags.append(ids.speakers[voice.name])
        tokens += [ids.beside(ids.text_pad, tag) for tag in tags]
        begins = [ids.beside(ids.text_bos, ids.pad)]
        if transcript := self.sanitised(voice.reference_text)[0]:
            begins += [ids.beside(word, ids.pad) for word in self.words(transcript)[0]]
        if not voice.vector:
            return [_segment(tokens + begins)]
        return [_segment(tokens), replace(_segment([ids.text_pad]), vector=voice.vector), _segment(begins)]

    def after(self, words: list[int], ends: list[int]) -> TextSegment:
        """The text, and that speech begins.  ends: see `TextSegment`."""
        ids = self._ids
        tokens = [*(ids.beside(word, ids.pad) for word in (*words, ids.text_eos)), ids.beside(ids.text_pad, ids.bos)]
        return TextSegment(tuple(tokens), (*ends, ends[-1], ends[-1]))

    # ---- the tokenizer -----------------------------------------------------------------------------------------------

    def encode(self, text: str) -> Any:
        return self._tokenizer().encode(text, add_special_tokens=False)

    def sanitised(self, text: str) -> tuple[str, list[int]]:
        return sanitise(text, added_tokens(self._tokenizer()))

    def words(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a text where it stands in a prompt, and how many of its characters have been read with each.

        Raises BadText when the tokenizer does not leave it apart from what surrounds it.
        """
        opening, closing = self.encode(OPENING).ids, self.encode(CLOSING).ids
        whole = self.encode(f"{OPENING}{text}{CLOSING}")
        start, stop = len(opening), len(whole.ids) - len(closing)
        if whole.ids[:start] != opening or whole.ids[stop:] != closing or start == stop:
            raise BadText("the tokenizer joins this text with its surroundings; change its first or last character")
        return whole.ids[start:stop], [end - len(OPENING) for _, end in whole.offsets[start:stop]]


class QwenFrontend:
    """The text front end: it waits for the whole text, then makes the prompt."""

    def __init__(self, prompts: QwenPrompts, voice: Voice, *, has_prefix: bool = False) -> None:
        self._prompts = prompts
        self._voice = voice
        self._has_prefix = has_prefix
        self._text = ""

    def push(self, text: str) -> list[TextSegment]:
        self._text += text
        return []

    def end(self) -> list[TextSegment]:
        """The prompt's segments.  Raises BadText."""
        text, origin = self._prompts.sanitised(self._text)
        # Line breaks at its beginning would become one token with the line break before it.
        stripped = text.lstrip()
        if not stripped:
            return []
        words, ends = self._prompts.words(stripped)
        # Characters may be joined to those before them (normal form C), whose place is then theirs.
        ends = [origin[len(text) - len(stripped) + end - 1] for end in ends[:-1]] + [len(self._text)]
        segment = self._prompts.after(words, ends)
        before = [] if self._has_prefix else self._prompts.before(self._voice)
        if before:
            last = before.pop()
            segment = TextSegment(last.tokens + segment.tokens, last.ends + segment.ends)
        recording = self._voice.reference
        if not recording:
            return [*before, segment]
        return [*before, segment, replace(_segment([0] * len(recording)), codes=recording)]


def _segment(tokens: list[int]) -> TextSegment:
    """Tokens that take no share of the text."""
    return TextSegment(tuple(tokens), (0,) * len(tokens))


def read_tokenizer(folder: Path) -> Tokenizer:
    """From `tokenizer.json`, or from the vocabulary and merges that the published folders have.

    Raises CheckpointError.
    """
    ready = folder / "tokenizer.json"
    try:
        if ready.exists():
            return Tokenizer.from_file(str(ready))
        made = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library's errors are plain Exceptions
        raise CheckpointError(f"the tokenizer in {folder} is missing or broken ({error})") from error
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_CUTS), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    made.decoder = decoders.ByteLevel()
    path = folder / "tokenizer_config.json"
    added = required(read_json(path), "added_tokens_decoder", path)
    for number, token in sorted(added.items(), key=lambda item: int(item[0])):
        made.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), normalized=False)])
        if made.token_to_id(token["content"]) != int(number):
            raise CheckpointError(f"{path}: {token['content']} would not be token {number}; download it again")
    return made
