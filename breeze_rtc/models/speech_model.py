"""The five parts of one model, and what differs between models beyond their sizes.

Two ways of feeding text are known.  *prefix*: the encoded text is the backbone's prompt (Breeze TTS 2).  *per_frame*:
each frame brings one item of text beside the previous frame's codes, and a pointer walks over the text (nano; Qwen3-TTS
adds one text token a frame in the same manner).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from breeze_rtc.errors import BadRequest, UnknownVoice
from breeze_rtc.models.backbone import Backbone
from breeze_rtc.models.codec import CodecDecoder
from breeze_rtc.models.depth import DepthDecoder
from breeze_rtc.models.mimi import MimiConfig, MimiDecoder
from breeze_rtc.models.pointer import TextPointer
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.prompt_table import PromptTable
from breeze_rtc.models.reference_encoder import ReferenceEncoder
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.text_encoder import TextEncoder, TextEncoderConfig

if TYPE_CHECKING:
    from breeze_rtc.models.prompt import Voice


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A piece of a stream's text that is encoded by itself."""

    tokens: tuple[int, ...]
    """Ids for the text encoder; where `codes` is set, one id per frame and, for models that have one, the id that ends
    the audio."""
    ends: tuple[int, ...]
    """ends[i]: how many characters of the stream's whole text have been spoken once token i has been passed."""
    row: int = 0
    """Backbone row whose prompt it belongs to; 1 is the unguided row of classifier-free guidance."""
    codes: tuple[tuple[int, ...], ...] = ()
    """Frames of reference audio that stand here instead of text."""
    vector: tuple[float, ...] = ()
    """Added to what the backbone reads of its tokens: a speaker whom no token names."""


class TextFrontend(Protocol):
    """Written text in, segments out; one per stream.

    The last `ends` of a stream is the length of its text.  Each segment but the last has at least three tokens: the
    pointer looks two ahead, and what it sees must not depend on when the next segment comes.
    """

    def push(self, text: str) -> list[TextSegment]:
        """More text; return the segments that are complete now."""

    def end(self) -> list[TextSegment]:
        """No more text; return what is left."""


class Tokenizer(Protocol):
    """What we use of `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Prompts(Protocol):
    """How a model's prompts tell it a voice, by words or by a recording."""

    is_guided: bool
    """They have an unguided form, for guidance to lead away from."""
    goes_on: bool
    """Speech goes on where the recording ends, so the codec must have heard it."""

    def frontend(self, voice: Voice, *, has_prefix: bool = False, is_dual: bool = False) -> TextFrontend:
        """The text front end of a stream in this voice.  Raises BadRequest for a voice it has no prompt for.

        has_prefix: the positions that `reference` stands for are computed already, wherever a row begins with them.
        is_dual: with the rows of dual guidance, see `prompt`.
        """

    def reference(self, voice: Voice) -> list[TextSegment]:
        """What a row in this voice, or with its recording, begins with, whatever is said."""


class SpeechModel(nn.Module):
    """Text encoder, backbone, depth decoder, codec decoder and, where text is fed per frame, the pointer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        frontend: Callable[[str], TextFrontend],
        prompts: Prompts | None = None,
        encoder: Callable[[], ReferenceEncoder] | None = None,
        voices: tuple[str, ...] = ("default",),
        sampling: Sampling | None = None,
        licence_note: str = "",
        graphs: Mapping[str, bytes] | None = None,
    ) -> None:
        """frontend: makes the text front end of a stream in a voice of its own.  voices: their names, the default
        first.  prompts: how other voices are told; None: it knows no others.  encoder: loads what makes codec frames
        of a recording; a voice needs it once, so the model does not keep it.  graphs: the steps
        as ONNX graphs, where a checkpoint has them (see `step_graphs`)."""
        super().__init__()
        self.config = config
        self.text = TextEncoder(config.text) if isinstance(config.text, TextEncoderConfig) else PromptTable(config.text)
        self.backbone = Backbone(config.backbone)
        self.depth = DepthDecoder(config.depth)
        self.codec = MimiDecoder(config.codec) if isinstance(config.codec, MimiConfig) else CodecDecoder(config.codec)
        assert (config.pointer is not None) == (config.feed == "per_frame")
        self.pointer = None if config.pointer is None else TextPointer(config.pointer)
        self.voices = voices
        self.sampling = sampling or Sampling()
        self.licence_note = licence_note
        """Not empty: what the user must know about these weights before using them; said once, when they are loaded."""
        self.graphs = graphs or {}
        self._frontend = frontend
        self.prompts = prompts
        self._encoder = encoder

    @property
    def sample_rate(self) -> int:
        return self.config.codec.sample_rate

    @property
    def frame_samples(self) -> int:
        return self.config.codec.frame_samples

    def frontend(self, voice: str | None = None) -> TextFrontend:
        """A new stream's text front end.  Raises UnknownVoice."""
        voice = voice or self.voices[0]
        if voice not in self.voices:
            raise UnknownVoice(voice, self.voices)
        return self._frontend(voice)

    @property
    def clones(self) -> bool:
        """It can make a voice of a recording."""
        return self.prompts is not None and self._encoder is not None

    def reference_encoder(self) -> ReferenceEncoder:
        """Loads it, where the model's codec is.  Raises BadRequest when the model has none, and CheckpointError."""
        if self._encoder is None:
            raise BadRequest(f"the {self.config.name} model cannot clone a voice")
        return self._encoder().to(self.depth.table.weight.device)

    @classmethod
    def load(
        cls,
        name_or_path: str = "nano",
        *,
        device: torch.device | str = "cpu",
        weights: str = "",
        told: Callable[[float], None] = lambda share: None,
    ) -> SpeechModel:
        """A ready model by the name of a preset, the folder of a checkpoint or its Hugging Face id.  Raises
        CheckpointError.

        `nano` comes with the package; `breeze-tts-2` is looked for in the Hugging Face cache, `org/name` is downloaded
        where it is not there; `tiny`, `tiny-pointer`, `mid` and `breeze-tts-2-random` are made on the spot, speak noise
        and need no file.
        device: large weights are read straight to it; others are moved there by the executor.  weights: "int8" or
        "fp8" keeps the large layers in half the memory, see `quantised`.  told: how much of a large checkpoint has been
        read, 0 to 1.
        """
        # Reading weights knows this class, so this class meets it late.
        from breeze_rtc.models.checkpoint import load

        return load(name_or_path, device=device, weights=weights, told=told)

    @property
    def silent(self) -> tuple[int, int, int]:
        """First and last of the ids that are never spoken, and one between them that may be; -1 for none."""
        first, last = self.config.reserved or (0, -1)
        return first, last, -1 if self.config.end_class is None else self.config.end_class

    def silence_reserved(self, logits: Tensor) -> Tensor:
        """Set the logits of reserved ids, (..., V) float32, to -inf in place; the class that ends speech is none."""
        if self.config.reserved is not None:
            first, last = self.config.reserved
            end = self.config.end_class
            if end is not None and first <= end <= last:
                logits[..., first:end] = float("-inf")
                first = end + 1
            logits[..., first : last + 1] = float("-inf")
        return logits

    def embed_audio(self, segment: TextSegment) -> Tensor:
        """A segment of reference audio -> (tokens, hidden): its frames' embeddings, then, if it has a token more than
        frames, that of the all-zero frame."""
        device = self.depth.table.weight.device
        ends = [(0,) * self.config.depth.codebooks] * (len(segment.tokens) - len(segment.codes))
        return self.depth.embed_frame(torch.tensor([*segment.codes, *ends], device=device))


class ByteFrontend:
    """Text as UTF-8 bytes, cut after punctuation or at 32 characters: the front end of models that speak noise.

    whole: keep everything until the end, in one segment, as prefix models need it.  bytes_per_token: so many bytes are
    one token (the first of them), so that a text is about as many tokens as a tokenizer makes of it.
    """

    def __init__(self, *, whole: bool, bytes_per_token: int = 1) -> None:
        self._whole = whole
        self._bytes_per_token = bytes_per_token
        self._text = ""
        self._chars = 0

    def push(self, text: str) -> list[TextSegment]:
        self._text += text
        segments = []
        while not self._whole:
            cut = next((i + 1 for i, char in enumerate(self._text[:32]) if char in ".,!?;:" and i >= 2), 32)
            if len(self._text) < cut:
                break
            segments.append(self._segment(cut))
        return segments

    def end(self) -> list[TextSegment]:
        return [self._segment(len(self._text))] if self._text else []

    def _segment(self, chars: int) -> TextSegment:
        piece, self._text = self._text[:chars], self._text[chars:]
        tokens: list[int] = []
        ends: list[int] = []
        for char in piece:
            self._chars += 1
            encoded = char.encode(errors="replace")
            tokens += encoded
            # A character has been spoken when its last byte has.
            ends += [self._chars - 1] * (len(encoded) - 1) + [self._chars]
        # The last of what ends together says where that is; the end of the text is said by the last token.
        last = self._bytes_per_token
        return TextSegment(
            tuple(tokens[::last]), tuple(ends[min(i + last, len(ends)) - 1] for i in range(0, len(ends), last))
        )


class ByteTokenizer:
    """UTF-8 bytes as tokens, and control characters for Breeze's special ones: for models that speak noise."""

    _SPECIAL = ("<pad>", "<eos>", "<bos>", "<|AUDIO|>", "<|audio_eos|>", "[S0]", "<ins_bos>", "<ins_eos>")

    @dataclass(frozen=True, slots=True)
    class Encoding:
        ids: list[int]

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding:
        for token, name in enumerate(self._SPECIAL):
            sequence = sequence.replace(name, chr(token))
        return self.Encoding([2] * add_special_tokens + list(sequence.encode(errors="replace")))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = bytes(ids).decode(errors="ignore")
        for token, name in enumerate(self._SPECIAL):
            text = text.replace(chr(token), "" if skip_special_tokens else name)
        return text
