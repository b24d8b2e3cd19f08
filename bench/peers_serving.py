"""The same weights, the same machine, the same requests: this runtime beside what others run, on a CPU.

Every peer gets all requests at one moment.  First packet: from there to the first sound of a request.  Throughput:
seconds of sound by seconds until the last request has ended.  The sizes are those of Breeze TTS 2 with widths a quarter
and layers a half, random weights, greedy, in float32, so that the peers' sound can be compared, too.  Qwen3-TTS and CSM
get the same backbone and depth decoder, and Qwen3-TTS the same codec; that of CSM is Mimi in the same proportion.

    python bench/peers_serving.py --venv DIR [--peers ours reference ...] [--sizes 1 4 8 16] [--frames N]
                                  [--threads N] [--quick] [--seed N] [--json FILE]

DIR is a virtual environment with what the peers need and nothing else:

    python3.11 -m venv DIR
    DIR/bin/pip install torch==2.13.0 numpy safetensors 'huggingface_hub<1' 'tokenizers>=0.22,<=0.23' regex requests \\
        tqdm pyyaml filelock packaging
    DIR/bin/pip install --no-deps transformers==4.57.3 qwen-tts==0.1.1 xinference==4.1.0

With --json, peers and sizes measured by earlier calls of the same settings are kept and shown beside the new ones, so
that one long run can be made in pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from breeze_rtc.models import checkpoint, csm, published
from breeze_rtc.models.mimi import MimiConfig
from breeze_rtc.models.prompt import PromptFrontend, Voice
from breeze_rtc.models.qwen3_tts import _talker, qwen3_tts_config
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.models.weights import Weights
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.policy import Policy

PEERS = {
    "ours": "breeze",
    "reference": "breeze",
    "reference-batch": "breeze",
    "ours-qwen": "qwen",
    "qwen-tts": "qwen",
    "ours-csm": "csm",
    "csm": "csm",
}
"""Whose weights each speaks with."""
OURS = {"breeze": "ours", "qwen": "ours-qwen", "csm": "ours-csm"}
FRAME_S = 0.08
TEXTS = (
    "We asked over twenty different people, and they all said it was his.",
    "The train to the coast leaves at half past seven every morning.",
    "She sold the old piano and bought a very small boat instead.",
    "Nobody had told the baker that the oven would be repaired today.",
    "A cold wind came down from the hills and rattled the windows.",
    "He wrote the address on a piece of paper and lost it at once.",
    "The committee will meet again as soon as the figures are known.",
    "Most of the apples had fallen into the long grass by the wall.",
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 0.001953125,
    "high_freq_factor": 0.0078125,
    "original_max_position_embeddings": 16,
}
BACKBONE = {
    "vocab_size": 8,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
}
DEPTH = {
    "num_codebooks": 16,
    "vocab_size": 2051,
    "backbone_hidden_size": 512,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 33,
    "rope_theta": 500_000.0,
    "rope_scaling": LLAMA3,
}
BREEZE = {
    "model_type": "breeze",
    "architectures": ["BreezeForConditionalGeneration"],
    "vocab_size": 2051,
    "num_codebooks": 16,
    "audio_vocab_size": 2051,
    "audio_num_codebooks": 16,
    "audio_embed_size": 512,
    "hidden_size": 512,
    # The vendored code takes the shape of its caches from these; ours does not read them.
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "text_vocab_size": 1024,
    "audio_token_id": 3,
    "audio_eos_token_id": 4,
    "codebook_pad_token_id": 2050,
    "codebook_eos_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_codebooks_embeddings": True,
    "text_encoder_proj_type": "linear",
    "text_encoder_config": {
        "model_type": "t5gemma2_text",
        "vocab_size": 1024,
        "hidden_size": 288,
        "intermediate_size": 1728,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
        "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(12)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
        "eoi_token_index": 1023,
        "dropout_rate": 0.0,
        "attention_dropout": 0.0,
    },
    "backbone_model_type": "qwen3",
    "backbone_config": {"model_type": "qwen3", **BACKBONE},
    "depth_decoder_config": DEPTH,
    # A codec of an older release, which nothing uses; as small as it can be.
    "codec_config": {
        "model_type": "mimi",
        "codebook_size": 2048,
        "sampling_rate": 24_000,
        "hidden_size": 8,
        "num_filters": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 8,
        "codebook_dim": 2,
        "vector_quantization_hidden_dimension": 2,
        "upsample_groups": 8,
    },
}
CODEC = {
    "latent_dim": 256,
    "codebook_dim": 128,
    "codebook_size": 2048,
    "decoder_dim": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "num_quantizers": 16,
    "sliding_window": 72,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
}
QWEN = {
    "model_type": "qwen3_tts",
    "tokenizer_type": "qwen3_tts_tokenizer_12hz",
    "tts_model_type": "custom_voice",
    "tts_model_size": "1b7",
    "im_start_token_id": 1,
    "im_end_token_id": 2,
    "tts_pad_token_id": 3,
    "tts_bos_token_id": 4,
    "tts_eos_token_id": 5,
    "talker_config": {
        **BACKBONE,
        "vocab_size": 3072,
        "pad_token_id": None,
        "text_vocab_size": 1024,
        "text_hidden_size": 512,
        "num_code_groups": 16,
        "rope_scaling": {"interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"},
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_language_id": {"english": 2050},
        "spk_id": {"vivian": 3065},
        "spk_is_dialect": {"vivian": False},
        "code_predictor_config": {
            **{key: value for key, value in DEPTH.items() if key not in {"num_codebooks", "rope_scaling"}},
            "vocab_size": 2048,
            "num_code_groups": 16,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
            "pad_token_id": None,
        },
    },
}
CODEC_FILE = {"output_sample_rate": 24_000, "decoder_config": CODEC}
CSM = {
    **{key: value for key, value in BACKBONE.items() if key != "vocab_size"},
    "model_type": "csm",
    "architectures": ["CsmForConditionalGeneration"],
    "num_codebooks": 16,
    "vocab_size": 2051,
    "text_vocab_size": 1024,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "pad_token_id": 2,
    "audio_token_id": 2,
    "audio_eos_token_id": 3,
    "tie_codebooks_embeddings": True,
    "depth_decoder_config": DEPTH,
    "codec_config": {
        "model_type": "mimi",
        "sampling_rate": 24_000,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 512,
        "num_filters": 16,
        "upsampling_ratios": [8, 6, 5, 4],
        "kernel_size": 7,
        "residual_kernel_size": 3,
        "last_kernel_size": 3,
        "compress": 2,
        "codebook_size": 2048,
        "codebook_dim": 64,
        "num_quantizers": 16,
        "vector_quantization_hidden_dimension": 64,
        "sliding_window": 250,
        "upsample_groups": 128,
        "rope_theta": 10_000.0,
    },
}
"""The same backbone and depth decoder in CSM, whose text is a table's rows."""
GREEDY = {"temperature": 0.0, "depth_temperature": 0.0}


# ---- the checkpoint ------------------------------------------------------------------------------------------------


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A value that keeps a deep stack at ordinary sizes, by what the tensor is for."""
    if "cluster_usage" in name:
        return torch.ones(shape)
    if len(shape) == 1:
        if "eoi_embedding" in name:
            return torch.randn(shape, generator=generator)
        if "norm" in name and not name.endswith("bias"):
            # The text encoder's norms are stored less one.
            return torch.full(shape, 0.0 if name.startswith("text_encoder") else 1.0)
        return torch.full(shape, 0.1 if name.endswith(("gamma", "scale")) else 0.0)
    inputs = shape[1] if "codebooks_head" in name else int(np.prod(shape[1:]))
    value = torch.randn(shape, generator=generator) * inputs**-0.5
    # The class that ends speech is never the likeliest: every request has its full length.
    if name == "lm_head.weight":
        value[-1] = 0
    elif name == "talker.codec_head.weight":
        value[QWEN["talker_config"]["codec_eos_token_id"]] = 0
    return value


def write_breeze(folder: Path, generator: torch.Generator) -> None:
    """The checkpoint under its published names."""
    config = checkpoint.breeze_config(BREEZE, CODEC_FILE, folder)
    write(folder, BREEZE, "audio_tokenizer", checkpoint._breeze(config), generator)
    special = ["<pad>", "<eos>", "<bos>", "<|AUDIO|>", "<|audio_eos|>", "<ins_bos>", "<ins_eos>", "[S0]"]
    made = tokenizer(special)
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    made.save(str(folder / "tokenizer.json"))


def write_qwen(folder: Path, generator: torch.Generator) -> None:
    write(folder, QWEN, "speech_tokenizer", _talker(qwen3_tts_config(QWEN, CODEC_FILE, folder)), generator)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]
    tokenizer(special).save(str(folder / "tokenizer.json"))


def write_csm(folder: Path, generator: torch.Generator) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CSM))
    tokenizer([csm.BEGIN, csm.END, "<|AUDIO|>", "<|audio_eos|>"]).save(str(folder / "tokenizer.json"))
    config = csm.csm_config(CSM, folder)
    assert isinstance(config.codec, MimiConfig)
    save_file({}, folder / "model.safetensors")
    sources = [*csm._language(config, Weights(folder)), *csm._codec(config.codec)]
    sources += published.encoder_sources(csm.csm_encoder_config(CSM, folder), "codec_model.encoder", "codec_model.")
    weights = {name: random_tensor(name, shape, generator) for source in sources for name, shape in source.pieces}
    # Nobody's speech ends, and nobody speaks ids that are no codes, which transformers does not rule out.
    weights["lm_head.weight"][[0, 2048, 2049, 2050]] = 0
    weights["depth_decoder.codebooks_head.weight"][:, :, 2048:] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = SpeechModel.load(str(folder)).eval()
    with torch.no_grad():
        peak = model.codec(torch.randint(0, 2048, (1, 16, 24), generator=generator)).abs().max()
    last = f"codec_model.decoder.layers.{3 * len(config.codec.rates) + 2}.conv.weight"
    weights[last] *= 0.3 / float(peak)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write(folder: Path, config: Any, codec_name: str, sources: Iterable[Any], generator: torch.Generator) -> None:
    """A checkpoint of random weights, whose codec's sound fills a third of its range."""
    codec_folder = folder / codec_name
    codec_folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (codec_folder / "config.json").write_text(json.dumps(CODEC_FILE))
    decoder = checkpoint.published_codec(CODEC_FILE, 16, codec_folder)
    main, codec = (
        {name: random_tensor(name, shape, generator) for source in parts for name, shape in source.pieces}
        for parts in (sources, published.codec_sources(decoder))
    )
    save_file(main, folder / "model.safetensors", {"format": "pt"})
    save_file(codec, codec_folder / "model.safetensors")
    model = SpeechModel.load(str(folder)).eval()
    with torch.no_grad():
        peak = model.codec(torch.randint(0, 2048, (1, 16, 24), generator=generator)).abs().max()
    codec["decoder.decoder.6.conv.weight"] *= 0.3 / float(peak)
    save_file(codec, codec_folder / "model.safetensors")


def tokenizer(special: list[str]) -> Tokenizer:
    """Byte pairs learnt from the texts: about a word a token, as it is with a large vocabulary."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    # Qwen's prompts are cut by position, so the word before each text must be one token.
    made.train_from_iterator([*TEXTS, *["assistant\n"] * 20], trainer)
    return made


WRITE = {"breeze": write_breeze, "qwen": write_qwen, "csm": write_csm}


# ---- the peers -----------------------------------------------------------------------------------------------------

Round = dict[str, list[float]]
"""`first_s` and `last_s` of each request."""
Ask = Callable[[list[str], int, Path | None], Awaitable[Round]]


def asker_of_ours(engine: Engine) -> Ask:
    async def speak(text: str, began: float, frames: int) -> tuple[float, float, NDArray[np.int16]]:
        # Nobody interrupts, so nothing keeps speech from being made as fast as it can be.
        speech = engine.speak(seed=0, sampling=GREEDY, interactive=False, max_s=frames * FRAME_S)
        speech.push(text)
        speech.end()
        first, made = 0.0, bytearray()
        async for chunk in speech:
            made += chunk.pcm
            last = time.perf_counter() - began
            first = first or last
        assert len(made) == frames * engine.frame_samples * 2, "a request did not end at its time"
        return first, last, np.frombuffer(bytes(made), np.int16)

    async def ask(texts: list[str], frames: int, sound: Path | None) -> Round:
        began = time.perf_counter()
        spoken = await asyncio.gather(*(speak(text, began, frames) for text in texts))
        if sound is not None:
            np.save(sound, np.stack([pcm / np.float32(32_768) for _, _, pcm in spoken]))
        return {"first_s": [first for first, _, _ in spoken], "last_s": [last for _, last, _ in spoken]}

    return ask


class Peer:
    """A `peer_models.py` in the other virtual environment."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model = folder.name

    def tokens(self, text: str) -> list[int]:
        """What this peer is asked with for a text."""
        if self._model == "csm":
            turn, _ = csm.CsmPrompts(lambda: self._tokenizer, audio=2, audio_end=3).turn(csm.VOICES[0], text)
            return list(turn)
        if self._model == "qwen":
            chat = f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"
            return list(self._tokenizer.encode(chat).ids)
        frontend = PromptFrontend(self._tokenizer, Voice())
        frontend.push(text)
        return [token for segment in frontend.end() for token in segment.tokens]

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise SystemExit("the peer has ended; what it said stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    async def ask(self, texts: list[str], frames: int, sound: Path | None) -> Round:
        assert self.process.stdin is not None
        prompts = [self.tokens(text) for text in texts]
        asked = {"prompts": prompts, "frames": frames, "sound": str(sound) if sound else None}
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        return await self.answer()


async def measure(
    ask: Ask, sizes: list[int], options: argparse.Namespace, sounds: Path, *, is_serial: bool = False
) -> dict[str, list[Round]]:
    """Rounds of each size, the first of which is warm-up, shorter, and left out.  is_serial: it serves one request
    after the other, so that one is warm-up enough."""
    rounds: dict[str, list[Round]] = {}
    for size in sizes:
        texts = [TEXTS[n % len(TEXTS)] for n in range(size)]
        await ask(texts[:1] if is_serial else texts, 2, None)
        rounds[str(size)] = [
            await ask(texts, options.frames, sounds if size == max(sizes) and not number else None)
            for number in range(1 if options.quick else max(1, 4 // size))
        ]
    return rounds


async def run_peer(
    peer: str, folder: Path, options: argparse.Namespace, sounds: Path
) -> tuple[dict[str, list[Round]], dict[str, str]]:
    if peer.startswith("ours"):
        # What the machine cannot make in real time is made all the same, as the others do.
        policy = Policy(admits_by_load=False)
        async with Engine(str(folder), threads=options.threads, max_streams=16, policy=policy) as engine:
            names = ("torch", "numpy", "onnxruntime")
            return await measure(asker_of_ours(engine), options.sizes, options, sounds), {n: version(n) for n in names}
    process = await asyncio.create_subprocess_exec(
        str(options.venv / "bin" / "python"),
        str(Path(__file__).with_name("peer_models.py")),
        peer,
        str(folder),
        str(options.threads),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )
    other = Peer(process, folder)
    try:
        versions = (await other.answer())["versions"]
        return await measure(other.ask, options.sizes, options, sounds, is_serial=peer == "reference"), versions
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


# ---- figures -------------------------------------------------------------------------------------------------------


def figures(rounds: list[Round], frames: int) -> dict[str, float]:
    firsts = np.array([first for one in rounds for first in one["first_s"]]) * 1e3
    walls = [max(one["last_s"]) for one in rounds]
    sound = frames * FRAME_S
    rates = [len(one["first_s"]) * sound / wall for one, wall in zip(rounds, walls, strict=True)]
    return {
        "first_p50_ms": float(np.percentile(firsts, 50)),
        "first_p95_ms": float(np.percentile(firsts, 95)),
        "rtf": float(np.median(np.concatenate([one["last_s"] for one in rounds]))) / sound,
        "audio_s_per_s": float(np.mean(rates)),
    }


def show(document: dict[str, Any]) -> dict[str, str]:
    """Print the table of everything measured; return the ratios."""
    frames = document["arguments"]["frames"]
    found: dict[str, str] = {}
    print(
        "requests  peer              first packet p50 / p95 ms      RTF   sound s/s   first packet later x   slower x"
    )
    for size in sorted({int(n) for rounds in document["raw"].values() for n in rounds}):
        for peer, rounds in document["raw"].items():
            if str(size) not in rounds:
                continue
            ours = document["raw"].get(OURS[PEERS[peer]], {}).get(str(size))
            base = figures(ours, frames) if ours else None
            name = peer.replace("-", "_")
            row = figures(rounds[str(size)], frames)
            line = f"{size:8d}  {peer:16s}  {row['first_p50_ms']:11.0f} / {row['first_p95_ms']:<11.0f}"
            line += f"  {row['rtf']:8.2f}  {row['audio_s_per_s']:9.3f}"
            if peer.startswith("ours"):
                found[f"{name}_first_packet_p50_ms_c{size}"] = f"{row['first_p50_ms']:.0f}"
                found[f"{name}_rtf_c{size}"] = f"{row['rtf']:.2f}"
            elif base is not None:
                later = row["first_p50_ms"] / base["first_p50_ms"]
                later95 = row["first_p95_ms"] / base["first_p95_ms"]
                slower = base["audio_s_per_s"] / row["audio_s_per_s"]
                line += f"   {later:9.1f} / {later95:<9.1f}  {slower:8.2f}"
                found[f"sooner_than_{name}_c{size}"] = f"{later:.1f}"
                found[f"throughput_of_{name}_c{size}"] = f"{slower:.2f}"
            print(line)
    return found


def same_sound(folder: Path, peers: list[str]) -> dict[str, int]:
    """Of how many requests a peer's sound is ours, to a thousandth of full scale."""
    found = {}
    for peer in peers:
        ours, theirs = folder / f"{OURS[PEERS[peer]]}.npy", folder / f"{peer}.npy"
        if peer.startswith("ours") or not (ours.exists() and theirs.exists()):
            continue
        a, b = np.load(ours), np.load(theirs)
        if a.shape == b.shape:
            found[peer] = int((np.abs(a - b).max(-1) < 1e-3).sum())
    return found


def commit() -> str:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="where the peers are installed; see above")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 8, 16], help="requests at once")
    parser.add_argument("--frames", type=int, default=15, help="codec frames of 80 ms per request")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one short round at 1 and 4 requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.frames = [1, 4], 8
    if options.venv is None and not set(options.peers) <= set(OURS.values()):
        parser.error("--venv DIR is needed for the peers; without it only ours, ours-qwen and ours-csm can be measured")
    arguments = {name: getattr(options, name) for name in ("frames", "threads", "quick", "seed")}
    document: dict[str, Any] = {
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "cpus": os.cpu_count(),
        "python": sys.version,
        "versions": {},
        "commit": commit(),
        "arguments": arguments,
        "raw": {},
        "same_sound": {},
    }
    if options.json is not None and options.json.exists():
        earlier = json.loads(options.json.read_text())
        if earlier["arguments"] != arguments:
            parser.error(f"{options.json} was measured with {earlier['arguments']}; give another file")
        document |= {name: earlier[name] for name in ("raw", "versions", "same_sound")}
    with tempfile.TemporaryDirectory() as temporary:
        for peer in options.peers:
            folder, sounds = Path(temporary) / PEERS[peer], Path(temporary) / f"{peer}.npy"
            if not folder.exists():
                WRITE[PEERS[peer]](folder, torch.Generator().manual_seed(options.seed))
            rounds, versions = asyncio.run(run_peer(peer, folder, options, sounds))
            document["raw"].setdefault(peer, {}).update(rounds)
            document["versions"][peer] = versions
            if options.json is not None:
                options.json.write_text(json.dumps(document))
        found = show(document)
        same = same_sound(Path(temporary), options.peers)
    document["same_sound"].update({peer: f"{n}/{max(options.sizes)}" for peer, n in same.items()})
    if options.json is not None:
        options.json.write_text(json.dumps(document))
    for peer, count in document["same_sound"].items():
        found[f"same_sound_as_{peer.replace('-', '_')}"] = count
    print("RESULT", f"threads={options.threads}", *(f"{key}={value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
