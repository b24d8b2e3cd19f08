"""Write the trained parts as the package's voice: half-precision weights, their config and the step graphs.

    python examples/nano_voice/export.py --work nano_work --out breeze_rtc/voices/nano

What was not trained is the package's: with nano_work/codec.pt alone, its language model stays.  The codec's encoder,
which nothing that speaks needs, is written beside this file, so that others can train on from the package.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_codec import ENCODER, VOICE, CodecTraining, filter_of_the_bands

from breeze_rtc.models import presets, step_graphs
from breeze_rtc.models.checkpoint import write_graphs
from breeze_rtc.models.pronunciation import VOCABULARY

LEXICON = VOICE / "lexicon.txt.gz"
SAMPLING = {"temperature": 0.0, "depth_temperature": 0.0, "top_k": 0, "repetition_penalty": 1.0}


def codec_tensors(codec: CodecTraining) -> dict[str, Tensor]:
    """The decoder's tensors; the features' scale and mean and their filter go into its last layer."""
    state = {name: tensor.clone() for name, tensor in codec.decoder.state_dict().items()}
    factors, added = filter_of_the_bands()
    state["to_features.weight"] = factors @ (state["to_features.weight"] * codec.scale[:, None])
    state["to_features.bias"] = factors @ (state["to_features.bias"] * codec.scale + codec.mean) + added
    return {f"codec.{name}": tensor for name, tensor in state.items()}


def write_voice(out: Path, tensors: dict[str, Tensor]) -> None:
    """A folder that the engine loads."""
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "model.safetensors"
    save_file({name: tensor.half().contiguous() for name, tensor in sorted(tensors.items())}, weights)
    weights.chmod(0o644)
    config = {
        "model_type": "breeze_rtc",
        "preset": "nano",
        "vocab": VOCABULARY,
        "voices": ["nano"],
        "sampling": SAMPLING,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not (out / LEXICON.name).exists():
        shutil.copy(LEXICON, out)
    write_graphs(out, step_graphs.export(presets.nano(vocab=VOCABULARY)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    codec = CodecTraining.start(arguments.work)
    language = arguments.work / "lm.pt"
    tensors = torch.load(language)["averaged"] if language.exists() else load_file(VOICE / "model.safetensors")
    tensors |= codec_tensors(codec)
    write_voice(arguments.out, tensors)
    encoder = {name: tensor for name, tensor in codec.state_dict().items() if not name.startswith("decoder.")}
    save_file({name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in encoder.items()}, ENCODER)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{arguments.out}: {count:,} numbers, {size / 1e6:.2f} MB in all")


if __name__ == "__main__":
    main()
