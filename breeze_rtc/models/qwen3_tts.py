"""Qwen3-TTS (12 Hz, 0.6B and 1.7B): the published checkpoints as our stages, and their prompts.

Its talker is our backbone, its code predictor our depth decoder, its codec that of Breeze TTS 2.  In place of a text
encoder it has a table (`prompt_table`); to each frame that it reads back the vector of "no text" is added.

A prompt is one row, its whole text first (what the published package calls non-streaming and takes for named and
designed voices):

| positions                                             | text beside them      | tag            |
| ----------------------------------------------------- | --------------------- | -------------- |
| `<|im_start|>user`, newline, the instruction, its end | themselves            | none           |
| `<|im_start|>assistant`, newline                      | themselves            | none           |
| language                                              | no text               | three or four  |
| speaker                                               | no text               | one, if named  |
| the text begins                                       | beginning             | no sound       |
| the text, its end                                     | themselves            | no sound       |
| speech begins                                         | no text               | beginning      |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from breeze_rtc.errors import BadText, CheckpointError
from breeze_rtc.models.backbone import BackboneConfig
from breeze_rtc.models.checkpoint import (
    WIDENED,
    _block,
    _blocks,
    _breeze_codec,
    _concat,
    _get,
    _linear,
    _rope,
    published_codec,
)
from breeze_rtc.models.depth import DepthConfig
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.prompt import sanitise
from breeze_rtc.models.prompt_table import PromptTableConfig
from breeze_rtc.models.quantised import narrow, narrowed
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextFrontend, TextSegment
from breeze_rtc.models.weights import Source, Weights, read, read_json

NO_SOUND = 1_024
"""The last ids of codebook 0 are tags, and are never spoken but for the one that ends speech."""
MIN_FRAMES = 2
"""The published package lets no speech end sooner."""
MAX_POSITIONS = 32_768

# How a text is cut before its byte pairs are joined: the published tokenizer's own pattern.
_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# ---- prompts -------------------------------------------------------------------------------------------------------


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

    def before_text(self, speaker: str) -> list[int]:
        """Language and speaker ("": none is named), and that text begins.  The language is left to the model, but where
        the speaker has one."""
        language = self.dialects.get(speaker)
        if language is None:
            tags = [self.no_think, self.think_bos, self.think_eos]
        else:
            tags = [self.think, self.think_bos, self.languages[language], self.think_eos]
        if speaker:
            tags.append(self.speakers[speaker])
        return [*(self.beside(self.text_pad, tag) for tag in tags), self.beside(self.text_bos, self.pad)]


class QwenFrontend:
    """The text front end: it waits for the whole text, then makes the prompt."""

    def __init__(self, tokenizer: Tokenizer, ids: Ids, *, speaker: str = "", instruction: str = "") -> None:
        """speaker: one of the checkpoint's own.  instruction: who speaks, and how, in words."""
        self._tokenizer = tokenizer
        self._ids = ids
        self._speaker = speaker
        self._instruction = instruction
        self._text = ""

    def push(self, text: str) -> list[TextSegment]:
        self._text += text
        return []

    def end(self) -> list[TextSegment]:
        """The prompt's segments.  Raises BadText when the tokenizer does not leave the text apart from what surrounds
        it."""
        text, origin = sanitise(self._text, _added(self._tokenizer))
        # Line breaks at its beginning would become one token with the line break before it.
        stripped = text.lstrip()
        origin = origin[len(text) - len(stripped) :]
        if not stripped:
            return []
        ids = self._ids
        tokens: list[int] = []
        if instruction := sanitise(self._instruction, _added(self._tokenizer))[0]:
            tokens += self._encode(f"<|im_start|>user\n{instruction}<|im_end|>\n").ids
        words, ends = self._words(stripped, origin)
        tokens += self._encode("<|im_start|>assistant\n").ids
        tokens += ids.before_text(self._speaker)
        marks = [0] * len(tokens)
        tokens += [ids.beside(word, ids.pad) for word in (*words, ids.text_eos)]
        tokens.append(ids.beside(ids.text_pad, ids.bos))
        marks += [*ends, len(self._text), len(self._text)]
        return [TextSegment(tuple(tokens), tuple(marks))]

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _words(self, text: str, origin: list[int]) -> tuple[list[int], list[int]]:
        """Tokens of a text where it stands in a prompt, and how many characters of the user's have been read with
        each."""
        before = "<|im_start|>assistant\n"
        opening, closing = self._encode(before).ids, self._encode("<|im_end|>\n").ids
        whole = self._encode(f"{before}{text}<|im_end|>\n")
        start, stop = len(opening), len(whole.ids) - len(closing)
        if whole.ids[:start] != opening or whole.ids[stop:] != closing or start == stop:
            raise BadText("the tokenizer joins this text with its surroundings; change its first or last character")
        # Characters may be joined to those before them (normal form C), whose place is then theirs.
        ends = [origin[end - len(before) - 1] for _, end in whole.offsets[start:stop]]
        return whole.ids[start:stop], ends


@cache
def _added(tokenizer: Tokenizer) -> re.Pattern[str]:
    """What user text must not contain: the strings that are tokens of their own."""
    added = tokenizer.get_added_tokens_decoder().values()
    return re.compile("|".join(re.escape(token.content) for token in added))


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
    added = _get(read_json(path), "added_tokens_decoder", path)
    for number, token in sorted(added.items(), key=lambda item: int(item[0])):
        made.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), normalized=False)])
        if made.token_to_id(token["content"]) != int(number):
            raise CheckpointError(f"{path}: {token['content']} would not be token {number}; download it again")
    return made


# ---- the checkpoint ------------------------------------------------------------------------------------------------


def load_qwen3_tts(
    folder: Path,
    config: dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    weights: str = "",
    told: Callable[[float], None] = lambda share: None,
) -> SpeechModel:
    """A published checkpoint, read straight to `device`.  Raises CheckpointError.

    Weights keep the type they are stored in, but for the heads, which are widened once because logits are computed in
    float32.  The speaker encoder of the Base checkpoints is not read.
    """
    codec_folder = folder / "speech_tokenizer"
    ids = _ids(config, folder)
    ours = qwen3_tts_config(config, read_json(codec_folder / "config.json"), folder)
    tokenizer = cache(lambda: read_tokenizer(folder))

    def frontend(voice: str) -> TextFrontend:
        return QwenFrontend(tokenizer(), ids, speaker=voice if voice in ids.speakers else "")

    with torch.device("meta"):
        model = SpeechModel(
            ours,
            frontend=frontend,
            voices=tuple(ids.speakers) or ("default",),
            sampling=_sampling(folder / "generation_config.json"),
        )
    if weights == "int8":
        narrow(model)
    parts = [(Weights(folder), list(_talker(ours))), (Weights(codec_folder), list(_breeze_codec(ours.codec)))]
    state = read(parts, torch.device(device), widened=WIDENED, kept=narrowed if weights == "int8" else None, told=told)
    state["depth.beside"] = torch.zeros_like(state["backbone.norm.weight"])
    model.load_state_dict(state, assign=True)
    assert model.depth.beside is not None
    with torch.no_grad():
        pad = torch.tensor([ids.text_pad], device=device)
        model.depth.beside.copy_(model.text(pad, torch.ones_like(pad))[0])
    return model


def qwen3_tts_config(config: dict[str, Any], codec: dict[str, Any], folder: Path) -> ModelConfig:
    """Our config from the published ones.  Raises CheckpointError for a missing key, and for the 25 Hz models, whose
    codec is another."""
    path = folder / "config.json"
    kind = config.get("tokenizer_type", "qwen3_tts_tokenizer_12hz")
    if kind != "qwen3_tts_tokenizer_12hz":
        raise CheckpointError(f"{path} names the codec {kind!r}; only 'qwen3_tts_tokenizer_12hz' is known")
    talker = _get(config, "talker_config", path)
    predictor = _get(talker, "code_predictor_config", path)
    for part in (talker, predictor):
        if part.get("attention_bias") or part.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{path}: biases in attention and activations other than silu are not known")
    classes = _get(talker, "vocab_size", path)
    hidden, inner = _get(talker, "hidden_size", path), _get(predictor, "hidden_size", path)
    codebooks = _get(talker, "num_code_groups", path)
    return ModelConfig(
        name="qwen3-tts",
        feed="prefix",
        text=_table(talker, path),
        backbone=BackboneConfig(
            block=_block(talker, path, qk_norm=True),
            layers=_get(talker, "num_hidden_layers", path),
            # Its three axes of positions are always equal: plain rotary positions.
            rope=_rope(talker, path),
            classes=classes,
        ),
        depth=DepthConfig(
            codebooks=codebooks,
            vocab=_get(predictor, "vocab_size", path),
            embedding=hidden,
            block=_block(predictor, path, qk_norm=True),
            layers=_get(predictor, "num_hidden_layers", path),
            rope=_rope(predictor, path),
            first_vocab=classes,
            projection="none" if hidden == inner else "biased",
            has_beside=True,
        ),
        codec=published_codec(codec, codebooks, folder / "speech_tokenizer"),
        end_class=_get(talker, "codec_eos_token_id", path),
        reserved=(classes - NO_SOUND, classes - 1),
        min_frames=MIN_FRAMES,
        max_positions=talker.get("max_position_embeddings", MAX_POSITIONS),
    )


def _table(talker: dict[str, Any], path: Path) -> PromptTableConfig:
    return PromptTableConfig(
        vocab=_get(talker, "text_vocab_size", path),
        hidden=_get(talker, "text_hidden_size", path),
        output=_get(talker, "hidden_size", path),
        tags=NO_SOUND,
    )


def _ids(config: dict[str, Any], folder: Path) -> Ids:
    path = folder / "config.json"
    talker = _get(config, "talker_config", path)
    speakers = {name.lower(): number for name, number in (talker.get("spk_id") or {}).items()}
    dialects = {name.lower(): dialect for name, dialect in (talker.get("spk_is_dialect") or {}).items() if dialect}
    return Ids(
        table=_table(talker, path),
        first_tag=_get(talker, "vocab_size", path) - NO_SOUND,
        text_pad=_get(config, "tts_pad_token_id", path),
        text_bos=_get(config, "tts_bos_token_id", path),
        text_eos=_get(config, "tts_eos_token_id", path),
        pad=_get(talker, "codec_pad_id", path),
        bos=_get(talker, "codec_bos_id", path),
        think=_get(talker, "codec_think_id", path),
        no_think=_get(talker, "codec_nothink_id", path),
        think_bos=_get(talker, "codec_think_bos_id", path),
        think_eos=_get(talker, "codec_think_eos_id", path),
        speakers=speakers,
        languages=talker.get("codec_language_id") or {},
        dialects=dialects,
    )


def _sampling(path: Path) -> Sampling:
    """What the checkpoint asks for; the published package's own values where it says nothing."""
    asked = read_json(path) if path.exists() else {}
    draws, depth_draws = asked.get("do_sample", True), asked.get("subtalker_dosample", True)
    return Sampling(
        temperature=float(asked.get("temperature", 0.9)) if draws else 0.0,
        depth_temperature=float(asked.get("subtalker_temperature", 0.9)) if depth_draws else 0.0,
        top_k=int(asked.get("top_k", 50)),
        top_p=float(asked.get("top_p", 1.0)),
        repetition_penalty=float(asked.get("repetition_penalty", 1.05)),
    )


def _talker(config: ModelConfig) -> Iterator[Source]:
    """Everything but the codec."""
    text, backbone, depth = config.text, config.backbone, config.depth
    assert isinstance(text, PromptTableConfig)
    hidden, inner, first = backbone.block.hidden, depth.block.hidden, backbone.classes
    yield Source("text.embedding.weight", (("talker.model.text_embedding.weight", (text.vocab, text.hidden)),))
    yield from _linear("text.up", "talker.text_projection.linear_fc1", text.hidden, text.hidden)
    yield from _linear("text.down", "talker.text_projection.linear_fc2", text.hidden, hidden)
    first_table = ("talker.model.codec_embedding.weight", (first, hidden))

    def tags(pieces: list[Tensor]) -> Tensor:
        return torch.cat((pieces[0].new_zeros(1, hidden), pieces[0][first - text.tags :]))

    yield Source("text.tags.weight", (first_table,), tags)
    yield from _blocks("backbone", "talker.model", backbone.block, backbone.layers)
    yield Source("backbone.output.weight", (("talker.codec_head.weight", (first, hidden)),))
    predictor = "talker.code_predictor"
    others = tuple(
        (f"{predictor}.model.codec_embedding.{n}.weight", (depth.vocab, hidden)) for n in range(depth.codebooks - 1)
    )
    yield Source("depth.table.weight", (first_table, *others), _concat)
    if depth.projection != "none":
        yield from _linear("depth.projection", f"{predictor}.small_to_mtp_projection", hidden, inner)
    yield from _blocks("depth", f"{predictor}.model", depth.block, depth.layers)
    heads = tuple((f"{predictor}.lm_head.{n}.weight", (depth.vocab, inner)) for n in range(depth.codebooks - 1))
    yield Source("depth.heads", heads, lambda pieces: torch.stack([piece.t() for piece in pieces]))
