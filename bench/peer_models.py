"""One implementation that others wrote, asked to speak: a measured side of `peers_serving.py`.

    python bench/peer_models.py KIND FOLDER THREADS

KIND: `reference`, Breeze TTS 2's own streaming runtime, one request at a time as its server does; `reference-batch`,
its `generate` over all requests at once, which is what its batch endpoint calls; `qwen-tts`, that package's `generate`;
`csm`, the same of transformers' CSM, whose codec then decodes one request after the other, as there.  FOLDER holds the
checkpoint.

Lines of JSON: `{"prompts": [...], "frames": N, "sound": FILE}` is answered by the seconds from the line to each
request's first and last sound, `{"first_s": [...], "last_s": [...]}`, and the sound goes into FILE, if one is named, as
a .npy of (requests, samples).  It imports nothing of breeze_rtc, for its virtual environment has other versions of
everything.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

Sound = Iterator[tuple[int, np.ndarray]]
"""Pieces of sound as they are made, each with the number of its request."""
Speak = Callable[[list[Any], int], Sound]
PACKAGES = ("torch", "transformers", "qwen-tts", "xinference")


def package(name: str, path: Path | None = None, **names: object) -> Any:
    """Stands for a package whose own `__init__` would import what is not needed here and not installed."""
    module = types.ModuleType(name)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(names)
    sys.modules[name] = module
    return module


def installed(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not in this virtual environment; peers_serving.py says how to make it")
    return Path(spec.submodule_search_locations[0])


def without_audio_libraries() -> None:
    """The model files of qwen-tts without its audio libraries, of which the models use no function."""
    root = installed("qwen_tts")
    # It looks for these libraries, and must not find what stands for them.
    importlib.import_module("transformers.utils")
    for name in ("librosa", "librosa.filters", "soundfile"):
        package(name, mel=None)
    for name in ("qwen_tts", "qwen_tts.core", "qwen_tts.core.models", "qwen_tts.core.tokenizer_12hz"):
        package(name, root.joinpath(*name.split(".")[1:]))
    package("qwen_tts.inference", root / "inference")
    package("qwen_tts.inference.qwen3_tts_tokenizer", Qwen3TTSTokenizer=types.SimpleNamespace)


def codec_of(folder: Path) -> Any:
    """The codec's decoder, as the attribute of what stands for the codec model."""
    without_audio_libraries()
    from qwen_tts.core.tokenizer_12hz import configuration_qwen3_tts_tokenizer_v2 as configs
    from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as models

    config = json.loads((folder / "config.json").read_text())["decoder_config"]
    config = configs.Qwen3TTSTokenizerV2DecoderConfig(**config, attn_implementation="eager")
    decoder = models.Qwen3TTSTokenizerV2Decoder(config).eval()
    state = {name.removeprefix("decoder."): t for name, t in load_file(folder / "model.safetensors").items()}
    missing, unexpected = decoder.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("input_proj" in name for name in missing), missing
    holder = torch.nn.Module()
    holder.decoder = decoder
    return holder


def breeze(folder: Path) -> Any:
    """The vendored Breeze TTS 2 model over a checkpoint, in the type the checkpoint has."""
    path = installed("xinference") / "thirdparty"
    sys.path.insert(0, str(path))
    from breeze_tts.models.breeze import BreezeForConditionalGeneration

    weights = load_file(folder / "model.safetensors")
    dtype = weights["lm_head.weight"].dtype
    model = BreezeForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    # It makes its text encoder in bfloat16, whatever it is asked for, and so rounds what is worked out there: the scale
    # of the embeddings.
    prefix = "text_encoder."
    model.text_encoder = type(model.text_encoder)._from_config(
        model.config.text_encoder_config, dtype=dtype, attn_implementation="eager"
    )
    model.text_encoder.load_state_dict(
        {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
    )
    return model.eval()


def prompt(tokens: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([tokens])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "text_ids_mask": torch.ones_like(ids, dtype=torch.bool),
        "text_ids_len": torch.tensor([len(tokens)]),
    }


def reference(folder: Path) -> Speak:
    """The streaming runtime.  It asks for a CUDA device and, with its graphs off, uses nothing of one."""
    codec = types.SimpleNamespace(model=codec_of(folder / "audio_tokenizer"))
    model = breeze(folder)
    from breeze_tts.models import fast_streaming

    runtimes: dict[int, Any] = {}

    def runtime(frames: int) -> Any:
        if frames not in runtimes:
            kept = fast_streaming._get_device
            fast_streaming._get_device = lambda _model: types.SimpleNamespace(type="cuda")
            config = fast_streaming.FastStreamingConfig(
                # Its attention runs over every slot of the cache, used or not; the default has 1,024.
                max_seq_len=160,
                max_new_tokens=frames,
                do_sample=False,
            )
            made = fast_streaming.FastBreezeStreamingRuntime(model, codec, config)
            fast_streaming._get_device = kept
            made.device = torch.device("cpu")
            runtimes[frames] = made
        return runtimes[frames]

    def speak(prompts: list[Any], frames: int) -> Sound:
        for number, tokens in enumerate(prompts):
            for chunk in runtime(frames).iter_audio_chunks(prompt(tokens)):
                yield number, chunk.audio

    return speak


def reference_batch(folder: Path) -> Speak:
    codec = codec_of(folder / "audio_tokenizer")
    model = breeze(folder)

    def speak(prompts: list[Any], frames: int) -> Sound:
        length = max(map(len, prompts))
        padded = [
            {
                name: torch.nn.functional.pad(value, (length - len(tokens), 0))
                for name, value in prompt(tokens).items()
                if name != "text_ids_len"
            }
            for tokens in prompts
        ]
        inputs = {name: torch.cat([row[name] for row in padded]) for name in padded[0]}
        inputs["text_ids_len"] = torch.tensor([len(tokens) for tokens in prompts])
        with torch.inference_mode():
            codes = model.generate(
                **inputs,
                max_new_tokens=frames,
                do_sample=False,
                depth_decoder_do_sample=False,
            )
            for number, row in enumerate(codes):
                yield number, codec.decoder(row[None, -frames:].transpose(1, 2))[0, 0].numpy()

    return speak


def qwen(folder: Path) -> Speak:
    """The whole text is read before speech begins, as the package does for named voices, and sound is made at the
    end."""
    codec = codec_of(folder / "speech_tokenizer")
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration

    settings = json.loads((folder / "config.json").read_text())
    settings.pop("model_type")
    model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**settings, attn_implementation="eager")).eval()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(weights)
    speaker = next(iter(settings["talker_config"]["spk_id"]))

    def speak(prompts: list[Any], frames: int) -> Sound:
        with torch.inference_mode():
            made, _ = model.generate(
                input_ids=[torch.tensor([tokens]) for tokens in prompts],
                languages=["Auto"] * len(prompts),
                speakers=[speaker] * len(prompts),
                non_streaming_mode=True,
                # The frame of the last token is never made.
                max_new_tokens=frames + 1,
                do_sample=False,
                subtalker_dosample=False,
                repetition_penalty=1.05,
            )
            for number, codes in enumerate(made):
                assert len(codes) == frames, codes.shape
                yield number, codec.decoder(codes[None].transpose(1, 2))[0, 0].numpy()

    return speak


def csm(folder: Path) -> Speak:
    """Sound is made at the end."""
    from transformers import CsmForConditionalGeneration

    model = CsmForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()

    def speak(prompts: list[Any], frames: int) -> Sound:
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(tokens)) + tokens for tokens in prompts])
        mask = torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in prompts])
        with torch.inference_mode():
            codes = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=frames,
                min_new_tokens=frames,
                do_sample=False,
                depth_decoder_do_sample=False,
            )
            assert codes.shape[1] == frames, codes.shape
            for number, row in enumerate(codes):
                yield number, model.codec_model.decode(row.T[None]).audio_values[0, 0].numpy()

    return speak


KINDS = {"reference": reference, "reference-batch": reference_batch, "qwen-tts": qwen, "csm": csm}


def main() -> None:
    kind, folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    # Whatever the libraries print is not for whoever reads the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    found = {name: version(name) for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))}
    speak = KINDS[kind](Path(folder))

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({"versions": found})
    for line in sys.stdin:
        asked = json.loads(line)
        count = len(asked["prompts"])
        first: list[float | None] = [None] * count
        last = [0.0] * count
        pieces: list[list[np.ndarray]] = [[] for _ in range(count)]
        began = time.perf_counter()
        for number, sound in speak(asked["prompts"], asked["frames"]):
            last[number] = time.perf_counter() - began
            first[number] = last[number] if first[number] is None else first[number]
            pieces[number].append(sound)
        if asked.get("sound"):
            np.save(asked["sound"], np.stack([np.concatenate(row) for row in pieces]))
        answer({"first_s": first, "last_s": last})


if __name__ == "__main__":
    main()
