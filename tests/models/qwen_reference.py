"""A tiny Qwen3-TTS checkpoint under the published names, and the qwen-tts package that computes the same: the oracle.

The package makes the prompts and holds the stages.  Its decoding loop is transformers 4's `generate`, which this
transformers no longer runs, so the loop is written out here, without a cache; `bench/peers_serving.py` runs the
package's own in an environment of its own.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from breeze_reference import (
    CODEBOOKS,
    CODES,
    _randomise,
    codec_module,
    fill_codebooks,
    random_codec,
    random_encoder,
    save_codec,
    transformers,
)
from safetensors.torch import save_file
from torch import Tensor

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]
BYTES = 256
MERGES = [("assistant"[:n], "assistant"[n]) for n in range(1, 9)] + [("o", "n"), ("Ġ", "on"), ("t", "w")]
"""The published prompts are cut by position, so "assistant" must be one token."""
FIRST_SPECIAL = BYTES + len(MERGES)
TAGS = {
    "codec_pad_id": CODES + 100,
    "codec_bos_id": CODES + 101,
    "codec_eos_token_id": CODES + 102,
    "codec_think_id": CODES + 106,
    "codec_nothink_id": CODES + 107,
    "codec_think_bos_id": CODES + 108,
    "codec_think_eos_id": CODES + 109,
    "codec_language_id": {"chinese": CODES + 7, "english": CODES + 2, "beijing_dialect": CODES + 26},
    "spk_id": {"vivian": CODES + 900, "dylan": CODES + 901},
    "spk_is_dialect": {"vivian": False, "dylan": "beijing_dialect"},
}


SPEAKER = {
    "enc_dim": 32,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_res2net_scale": 4,
    "enc_attention_channels": 6,
    "enc_se_channels": 5,
    "sample_rate": 24_000,
}


def config(kind: str, inner: int) -> dict[str, Any]:
    """config.json of a checkpoint whose code predictor has width `inner`, beside a talker of 32."""
    predictor = {
        "vocab_size": CODES,
        "hidden_size": inner,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "num_code_groups": CODEBOOKS,
        "max_position_embeddings": 64,
    }
    talker = {
        **TAGS,
        "vocab_size": CODES + 1_024,
        "text_vocab_size": FIRST_SPECIAL + len(SPECIAL),
        "text_hidden_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default", "type": "default"},
        "num_code_groups": CODEBOOKS,
        "max_position_embeddings": 512,
        "code_predictor_config": predictor,
    }
    return {
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_type": kind,
        "tts_model_size": "0b6" if inner == 32 else "1b7",
        "im_start_token_id": FIRST_SPECIAL + 1,
        "im_end_token_id": FIRST_SPECIAL + 2,
        "tts_pad_token_id": FIRST_SPECIAL + 3,
        "tts_bos_token_id": FIRST_SPECIAL + 4,
        "tts_eos_token_id": FIRST_SPECIAL + 5,
        "talker_config": talker if kind == "custom_voice" else {**talker, "spk_id": {}, "spk_is_dialect": {}},
        **({"speaker_encoder_config": SPEAKER} if kind == "base" else {}),
    }


def _mel(sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float) -> Any:
    """What the package takes from librosa."""
    made = transformers().audio_utils.mel_filter_bank(
        n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm="slaney", mel_scale="slaney"
    )
    return made.T.astype("float32")


@cache
def package() -> Any:
    """The model file of qwen-tts, written for transformers 4, made to run with 5; see `codec_module`."""
    codec_module()
    from transformers import masking_utils

    folder = Path(sys.modules["qwen_tts"].__path__[0])
    for name in ("qwen_tts.core.models", "qwen_tts.inference", "librosa", "librosa.filters"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    sys.modules["librosa.filters"].mel = _mel  # type: ignore[attr-defined]
    stand_in = types.ModuleType("qwen_tts.inference.qwen3_tts_tokenizer")
    stand_in.Qwen3TTSTokenizer = None  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    try:
        module = importlib.import_module("qwen_tts.core.models.modeling_qwen3_tts")
    finally:
        # Others may look whether it is there.
        del sys.modules["librosa"], sys.modules["librosa.filters"]

    def mask(*, config: Any, input_embeds: Tensor, attention_mask: Any = None, **_: Any) -> Any:
        positions = torch.arange(input_embeds.shape[1])[None]
        return masking_utils.create_causal_mask(config, input_embeds, attention_mask, None, position_ids=positions)

    module.create_causal_mask = mask  # type: ignore[attr-defined]
    return module


class QwenReference:
    """The package's model with random weights."""

    def __init__(self, kind: str = "custom_voice", inner: int = 24, seed: int = 11) -> None:
        transformers()
        module = package()
        self.config = config(kind, inner)
        generator = torch.Generator().manual_seed(seed)
        # Biases begin as the library draws them; of these draws every mode says something else.
        torch.manual_seed(seed + 2)
        settings = {key: value for key, value in self.config.items() if key != "model_type"}
        settings["talker_config"] = {**settings["talker_config"], "pad_token_id": None}
        settings["talker_config"]["code_predictor_config"] = {
            **settings["talker_config"]["code_predictor_config"],
            "pad_token_id": None,
        }
        made = module.Qwen3TTSConfig(**settings, attn_implementation="eager")
        self.model = module.Qwen3TTSForConditionalGeneration(made).eval()
        self.talker = self.model.talker
        _randomise(self.talker, generator)
        with torch.no_grad():
            for part in self.talker.modules():
                if isinstance(part, torch.nn.Embedding):
                    # So large that what is said depends on what was read, not on the biases.
                    part.weight.mul_(6)
        if kind == "base":
            with torch.no_grad():
                for parameter in self.model.speaker_encoder.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3 * noise)
        self.encoder = random_encoder(seed)
        self.codec = random_codec(generator)
        fill_codebooks(self.codec, generator)

    def save(self, folder: Path) -> Path:
        """Write the checkpoint's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        asked = {"do_sample": True, "temperature": 0.8, "subtalker_temperature": 0.7, "top_k": 40, "top_p": 1.0}
        (folder / "generation_config.json").write_text(json.dumps({**asked, "repetition_penalty": 1.05}))
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        save_file(state, folder / "model.safetensors")
        save_codec(self.codec, folder / "speech_tokenizer", self.encoder)
        save_tokenizer(folder)
        return folder

    # ---- the package's generation ------------------------------------------------------------------------------------

    @torch.no_grad()
    def clone(self, sound: Tensor, *, has_words: bool) -> dict[str, Any]:
        """What the package's `create_voice_clone_prompt` makes of a recording (samples,); without words it is the
        speaker's vector alone."""
        codes = self.encoder.encode(sound[None, None]).audio_codes[0, :CODEBOOKS].T
        return {
            "ref_code": [codes if has_words else None],
            "ref_spk_embedding": [self.model.extract_speaker_embedding(sound.numpy(), 24_000)],
            "x_vector_only_mode": [not has_words],
            "icl_mode": [has_words],
        }

    @torch.no_grad()
    def prompt(self, **prompt: Any) -> dict[str, Any]:
        """What the package gives its talker.  prompt: the arguments of its own `generate`."""
        asked: dict[str, Any] = {}

        def take(**given: Any) -> None:
            asked.update(given)
            raise _PromptMade

        self.talker.generate, kept = take, self.talker.generate
        try:
            self.model.generate(non_streaming_mode=True, **prompt)
        except _PromptMade:
            pass
        finally:
            self.talker.generate = kept
        assert asked["min_new_tokens"] == 2
        return asked

    @torch.no_grad()
    def generate(self, frames: int, **prompt: Any) -> list[list[int]]:
        """Greedy codes, at most `frames`.  prompt: see `prompt`."""
        asked = self.prompt(**prompt)
        talker, predictor = self.talker, self.talker.code_predictor
        context = asked["inputs_embeds"]
        # Everything is read before speech begins: what is left for each frame is "no text".
        assert torch.equal(asked["trailing_text_hidden"][0, 0], asked["tts_pad_embed"][0, 0])
        made: list[list[int]] = []
        while len(made) < frames:
            hidden = talker.model(inputs_embeds=context, use_cache=False).last_hidden_state[:, -1:]
            logits = talker.codec_head(hidden)[0, -1]
            for code in {frame[0] for frame in made}:
                logits[code] = logits[code] / 1.1 if logits[code] > 0 else logits[code] * 1.1
            if len(made) < asked["min_new_tokens"]:
                logits[asked["eos_token_id"]] = float("-inf")
            logits[asked["suppress_tokens"]] = float("-inf")
            codes = [int(logits.argmax())]
            if codes[0] == asked["eos_token_id"]:
                break
            vectors = [talker.get_input_embeddings()(torch.tensor([codes]))]
            while len(codes) < CODEBOOKS:
                read = predictor.small_to_mtp_projection(torch.cat((hidden, *vectors), 1))
                last = predictor.model(inputs_embeds=read, use_cache=False).last_hidden_state[:, -1]
                codes.append(int(predictor.lm_head[len(codes) - 1](last).argmax()))
                vectors.append(predictor.get_input_embeddings()[len(codes) - 2](torch.tensor([codes[-1:]])))
            made.append(codes)
            context = torch.cat((context, torch.cat(vectors, 1).sum(1, keepdim=True) + asked["tts_pad_embed"]), 1)
        return made


class _PromptMade(Exception):
    pass


def save_tokenizer(folder: Path) -> None:
    """Vocabulary and merges as the published folders have them: bytes, few merges, and the special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in MERGES) + "\n")
    added = {
        str(FIRST_SPECIAL + n): {
            "content": content,
            "special": content != "<tts_pad>",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for n, content in enumerate(SPECIAL)
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>"})
    )
