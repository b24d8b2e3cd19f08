"""The voices a stream may have, ready to speak: the model's own, described ones, and cloned ones from a folder.

What a cloned voice costs is paid once.  Its recording becomes codec frames, its words and frames become what the
backbone reads, and that becomes keys and values, which are the same for whatever the voice says.  All of it is kept
beside the recording; the keys and values of the voices used last are in pages that their streams share, so that a
stream of such a voice has only its own text to encode and to prefill, as a plain one has.  What the prompts of one of
the model's own voices begin with is kept in memory in the same way.

What was kept is used as long as recording, transcript, weights and tokenizer are those it was made of.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from breeze_rtc.errors import BadRequest, BadSampling, BadText, BreezeError, UnknownVoice
from breeze_rtc.media.recording_file import read_recording
from breeze_rtc.models.codec import Heard
from breeze_rtc.models.prompt import Voice
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime import voice_folder
from breeze_rtc.runtime.driver import Speaker
from breeze_rtc.runtime.executor import Executor, merged
from breeze_rtc.runtime.messages import AddVoice, Open, VoiceAdded

if TYPE_CHECKING:
    from breeze_rtc.runtime.kv_cache import Prefix

log = logging.getLogger(__name__)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_OF_SOUND = ("codes", "speaker", "heard")
"""What a recording becomes: codec frames, the vector of a speaker encoder, the codec's state behind the frames."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A cloned voice in memory."""

    voice: Voice
    prefix: Prefix | None
    """Its positions in the executor; None where there is no room for them: each stream computes its own."""
    heard: Heard | None
    """What the codec has of the recording, for models whose sound goes on from there."""
    signature: tuple[int, ...]
    """Of the files it was read from."""


class VoiceStore:
    """Used by the engine's one thread, but for the encoding of new recordings, which has a thread of its own."""

    def __init__(self, model: SpeechModel, executor: Executor, folder: Path | None = None) -> None:
        """folder: of the cloned voices; None: there are none."""
        self._model = model
        self._executor = executor
        self._folder = folder
        # What streams in the model's own voices begin with, as `warm` found room for it.
        self._begins: dict[str, Prefix] = {}
        # Those in memory, the one used last at the end.
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._weights = ""
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="breeze-voices")
        self._adding: list[tuple[int, str, Future[None]]] = []

    def names(self) -> tuple[str, ...]:
        """The model's own voices, the default first, then the cloned ones."""
        cloned = voice_folder.names(self._folder) if self._folder is not None and self._model.clones else ()
        return self._model.voices + tuple(name for name in cloned if name not in self._model.voices)

    def close(self) -> None:
        self._encoding.shutdown(wait=False, cancel_futures=True)

    # ---- streams -----------------------------------------------------------------------------------------------------

    def rows(self, message: Open) -> int:
        """Backbone rows that a stream takes.

        Raises BadSampling for guidance that its voice has no prompt for, and BadRequest for a model that has no prompts
        of this kind; whether there is such a voice is not looked at.
        """
        sampling = merged(self._model.sampling, message.sampling)
        prompts = self._model.prompts
        if sampling.rows > 1 and prompts is not None and not prompts.is_guided:
            raise BadSampling("cfg_scale", sampling.cfg_scale, "1: this model has no unguided form")
        if sampling.reference_scale and (message.voice in self._model.voices or not message.instruction):
            raise BadSampling(
                "reference_scale", sampling.reference_scale, "0: it weighs a cloned voice against instructions"
            )
        if sampling.cfg_scale != 1 and not message.instruction:
            raise BadSampling("cfg_scale", sampling.cfg_scale, "1 for a stream without instructions")
        return sampling.rows

    def speaker(self, message: Open) -> Speaker:
        """What a stream needs of its voice.  Raises UnknownVoice, BadRequest, BadText."""
        prompts = self._model.prompts
        is_own = message.voice in self._model.voices
        if is_own and not (message.instruction or message.language):
            begin = self._begins.get(message.voice)
            if begin is None or prompts is None:
                return Speaker(self._model.frontend(message.voice))
            return Speaker(prompts.frontend(Voice(name=message.voice), has_prefix=True), (begin,) * self.rows(message))
        if prompts is None:
            if not is_own:
                raise UnknownVoice(message.voice, self.names())
            raise refused(f"the {self._model.config.name} model", message)
        if is_own:
            voice = Voice(message.instruction, name=message.voice, language=message.language)
            return Speaker(prompts.frontend(voice))
        held = self._get(message.voice)
        rows = self.rows(message)
        # What is kept leaves the language to the model.
        prefix = None if message.language else held.prefix
        # Every row begins with the reference, but in dual guidance it has a row of its own.
        prefixes = (None, None, prefix) if rows == 3 else (prefix,) * rows
        voice = replace(held.voice, instruction=message.instruction, language=message.language)
        frontend = prompts.frontend(voice, has_prefix=prefix is not None, is_dual=rows == 3)
        return Speaker(frontend, prefixes, held.heard)

    def warm(self) -> None:
        """Compute what the model's own voices begin with, and read the cloned ones, as many as there is room for: their
        first stream need not."""
        for name in self._model.voices:
            vectors = self._executor.encode(begins(self._model, name))
            begin = self._executor.add_prefix(torch.cat(vectors)) if vectors else None
            if begin is not None:
                self._begins[name] = begin
        if self._folder is None or not self._model.clones:
            return
        for name in voice_folder.names(self._folder):
            try:
                held = self._get(name, evicts=False)
            except BreezeError as error:
                log.warning("the voice %s: %s", name, error)
            else:
                if held.prefix is None:
                    # The next stream in this voice makes room for it.
                    self._drop(name)
                    return

    def _get(self, name: str, *, evicts: bool = True) -> _Held:
        """A cloned voice, as its files are now.  evicts: others may leave memory for it."""
        signature = voice_folder.signature(self._folder, name) if self._folder is not None else ()
        held = self._held.get(name)
        if held is not None and held.signature == signature:
            self._held.move_to_end(name)
            return held
        self._drop(name)
        if self._folder is None or not self._model.clones or not voice_folder.has(self._folder, name):
            raise UnknownVoice(name, self.names())
        held = self._held[name] = self._read(self._folder, name, signature, evicts=evicts)
        return held

    def _drop(self, name: str) -> int:
        """Forget a voice in memory; how many positions that gives back once no stream uses them."""
        held = self._held.pop(name, None)
        if held is None or held.prefix is None:
            return 0
        self._executor.drop_prefix(held.prefix)
        return held.prefix.positions

    # ---- what is computed of a voice ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def _read(self, folder: Path, name: str, signature: tuple[int, ...], *, evicts: bool) -> _Held:
        transcript, recording = voice_folder.read(folder, name)
        inputs = self._inputs(transcript, recording)
        kept = _kept(folder / name / voice_folder.PROMPT, inputs)
        made = {part: kept[part] for part in _OF_SOUND if part in kept} or self._encoded(transcript, recording)
        codes, speaker, heard = map(made.get, _OF_SOUND)
        voice = Voice(
            reference_text=transcript,
            reference=() if codes is None else tuple(map(tuple, codes.tolist())),
            vector=() if speaker is None else tuple(speaker.tolist()),
        )
        vectors = kept.get("vectors")
        if vectors is None:
            vectors = self._vectors(voice)
        prefix = None
        if len(vectors):
            prefix = self._placed(vectors.to(self._executor.device), kept.get("keys_values"), evicts=evicts)
        made["vectors"] = vectors.cpu().contiguous()
        if prefix is not None:
            made["keys_values"] = self._executor.prefix_kv(prefix).cpu().contiguous()
        elif "keys_values" in kept:
            made["keys_values"] = kept["keys_values"]
        if made.keys() != kept.keys():
            try:
                voice_folder.write_prompt(folder, name, bytes_of(made, {"inputs": inputs}))
            except BreezeError as error:
                log.warning("%s; it is computed again next time", error)
        past = None if heard is None else Heard(heard.to(self._executor.device), len(voice.reference))
        return _Held(voice, prefix, past, signature)

    def _placed(self, vectors: Tensor, keys_values: Tensor | None, *, evicts: bool) -> Prefix | None:
        """The voice's positions in the executor's pages, in place of those used least recently where it must be."""
        executor = self._executor
        if keys_values is not None:
            keys_values = keys_values.to(executor.device)
        prefix = executor.add_prefix(vectors, keys_values)
        freed = 0
        # More than that is no help: what is still lacking is held by streams that speak.
        while prefix is None and evicts and self._held and freed < len(vectors) + executor.page_tokens:
            freed += self._drop(next(iter(self._held)))
            prefix = executor.add_prefix(vectors, keys_values)
        return prefix

    @torch.inference_mode()
    def _encoded(self, transcript: str, recording: bytes) -> dict[str, Tensor]:
        """Those `_OF_SOUND` that the model reads.  Without a transcript that is the speaker alone.

        Raises BadRecording, BadText, BadRequest, CheckpointError.  For any thread.
        """
        model = self._model
        encoder = model.reference_encoder()
        if not transcript and encoder.speaker is None:
            raise BadText("a voice needs the words that are said in its recording: give the transcript")
        samples = torch.from_numpy(read_recording(recording, encoder.config.sample_rate)).to(encoder.codebooks.device)
        made = {}
        if transcript:
            codes = encoder(samples[None])[0]
            made["codes"] = codes.to("cpu", torch.int16)
            if model.prompts is not None and model.prompts.goes_on:
                made["heard"] = model.codec.hear(codes).flat.cpu()
        if encoder.speaker is not None:
            made["speaker"] = encoder.speaker.vector(samples).cpu()
        return made

    def _vectors(self, voice: Voice) -> Tensor:
        """What the backbone reads of a voice, (positions, hidden)."""
        assert self._model.prompts is not None
        nothing = self._model.depth.table.weight.new_zeros(0, self._model.config.backbone.block.hidden)
        return torch.cat([nothing, *self._executor.encode(self._model.prompts.reference(voice))])

    def _inputs(self, transcript: str, recording: bytes) -> str:
        """Another one after any change of what the kept tensors were made of."""
        if not self._weights:
            self._weights = _weights(self._model)
        assert self._model.prompts is not None
        # A frame of silence stands for the audio: of the prompt, only the tokens are of interest here.
        audio = ((0,) * self._model.config.depth.codebooks,) if transcript else ()
        segments = self._model.prompts.reference(Voice(reference_text=transcript, reference=audio, vector=(0.0,)))
        tokens = repr([segment.tokens for segment in segments])
        digest = hashlib.sha256()
        for part in (str(voice_folder.FORMAT), self._weights, transcript, tokens):
            digest.update(hashlib.sha256(part.encode()).digest())
        digest.update(hashlib.sha256(recording).digest())
        return digest.hexdigest()

    # ---- new voices --------------------------------------------------------------------------------------------------

    @property
    def is_adding(self) -> bool:
        """A recording is being encoded; `added` will say what came of it."""
        return bool(self._adding)

    def add(self, message: AddVoice) -> None:
        """Begin to make a voice of a recording."""
        self._adding.append((message.request, message.name, self._encoding.submit(self._make, message)))

    def added(self) -> list[VoiceAdded]:
        """What has become of the recordings that are encoded by now; those that are good can be spoken with."""
        done = [entry for entry in self._adding if entry[2].done()]
        self._adding = [entry for entry in self._adding if not entry[2].done()]
        return [VoiceAdded(request, *_outcome(future, partial(self._get, name))) for request, name, future in done]

    def _make(self, message: AddVoice) -> None:
        transcript = message.transcript.strip()
        voice_folder.check(message.name, transcript, self._model.voices)
        folder = self._folder
        assert folder is not None, "whoever asks has looked"
        made = self._encoded(transcript, message.recording)
        prompt = bytes_of(made, {"inputs": self._inputs(transcript, message.recording)})
        voice_folder.write(folder, message.name, transcript, message.recording, prompt)


def begins(model: SpeechModel, voice: str) -> list[TextSegment]:
    """What the prompts of one of the model's own voices begin with, as long as nothing else is asked for."""
    return [] if model.prompts is None else model.prompts.reference(Voice(name=voice))


def refused(whose: str, message: Open) -> BadRequest:
    """Why a stream cannot be told what no prompt says."""
    if message.instruction:
        return BadRequest(f"{whose} follows no instructions: leave them out")
    return BadRequest(f"{whose} is not told a language: leave it out")


def _outcome(future: Future[None], then: Callable[[], object]) -> tuple[str, str]:
    """Class and sentence of the error that it ended with; empty for none."""
    try:
        future.result()
        then()
    except Exception as error:
        if not isinstance(error, BreezeError):
            log.exception("a voice could not be made")
        return type(error).__name__, str(error)
    return "", ""


def _kept(path: Path, inputs: str) -> Mapping[str, Tensor]:
    """What was computed of just these inputs before; nothing of it where a file is missing, damaged or of others."""
    try:
        data = path.read_bytes()
        # The metadata stand in the header, which `load` does not show: it is JSON behind its length of eight bytes.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return tensors_of(data) if header["__metadata__"]["inputs"] == inputs else {}
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read and is made again: %s", path, error)
        return {}


def _weights(model: SpeechModel) -> str:
    """A name for the weights that a voice's tensors are made with: another one as soon as one number differs."""
    digest = hashlib.sha256()
    for part in (model.text, model.backbone, model.depth.table, model.codec, model.reference_encoder()):
        for name, tensor in part.state_dict().items():
            bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
            total = int(bits.sum(dtype=torch.int64))
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}\n".encode())
    return digest.hexdigest()
