"""Writes `breeze_golden.json`: what Breeze TTS 2's own code says greedily over the tiny checkpoint of
`breeze_reference`, in every mode and form of guidance.

    python tests/models/make_breeze_golden.py write FOLDER
    DIR/bin/python tests/models/make_breeze_golden.py ask FOLDER

The first, in this project's environment, writes checkpoint and prompts; the second, in the peers' (DIR of
`bench/peers_serving.py`), asks for the codes.  The code is the copy inside the xinference wheel (4.1.0, Apache-2.0,
upstream commit ca632ce6), which needs transformers 4.57.3, where the tests' classes are those of another version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
GOLDEN = HERE / "breeze_golden.json"
DEAD = ("embed_text_tokens", "codec_model")


def write(folder: Path) -> None:
    """The checkpoint, and the prompts of each row of each case: (ids, lengths of the segments of text, is text)."""
    import breeze_reference
    import test_voice_modes as modes

    reference = breeze_reference.Reference()
    reference.save(folder, shards=1)
    # The dead ones have no shape that fits.
    live = {name: tensor for name, tensor in reference.state().items() if not name.startswith(DEAD)}
    save_file(live, folder / "model.safetensors", {"format": "pt"})
    special = {"audio_token_id": 3, "audio_eos_token_id": 4, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    config = (
        breeze_reference.CONFIG
        | special
        | {
            "architectures": ["BreezeForConditionalGeneration"],
            "audio_vocab_size": breeze_reference.VOCAB,
            "audio_num_codebooks": breeze_reference.CODEBOOKS,
            "text_vocab_size": breeze_reference.TEXT["vocab_size"],
            "codebook_pad_token_id": breeze_reference.VOCAB - 1,
            "codebook_eos_token_id": 0,
            "backbone_model_type": "qwen3",
            "text_encoder_proj_type": "linear",
            "tie_codebooks_embeddings": True,
            "codec_config": {"model_type": "mimi", **breeze_reference.ENCODER},
        }
    )
    (folder / "config.json").write_text(json.dumps(config))
    codes = modes.reference_codes(reference)
    tokenizer = modes.tokenizer()

    def prompt(pieces: list[Any]) -> dict[str, Any]:
        ids: list[int] = []
        is_text: list[bool] = []
        lengths = []
        for piece in pieces:
            found = tokenizer.encode(piece).ids if isinstance(piece, str) else [3] * len(codes) + [4]
            ids += found
            is_text += [isinstance(piece, str)] * len(found)
            lengths += [len(found)] if isinstance(piece, str) else []
        return {"ids": ids, "is_text": is_text, "lengths": lengths}

    cases = [[list(case), [prompt(row) for row in modes.pieces_of(case[0], case[1])]] for case in modes.CASES]
    (folder / "cases.json").write_text(json.dumps({"codes": codes, "frames": modes.FRAMES, "cases": cases}))


def ask(folder: Path) -> None:
    sys.path.insert(0, str(HERE.parent.parent / "bench"))
    import peer_models

    asked = json.loads((folder / "cases.json").read_text())
    model = peer_models.breeze(folder)
    from breeze_tts.models.logits_process import GeneratedTokenRepetitionPenaltyLogitsProcessor

    sound = torch.tensor([asked["codes"]])
    golden = []
    for case, rows in asked["cases"]:
        _mode, scale, reference_scale = case
        names = {1: [""], 2: ["", "cfg_negative_"], 3: ["cfg_ins_", "cfg_uncond_", "cfg_ref_"]}[len(rows)]
        inputs: dict[str, Any] = {}
        for name, row in zip(names, rows, strict=True):
            ids = torch.tensor([row["ids"]])
            prompt = "prompt_ids" if name else "input_ids"
            mask = "prompt_attention_mask" if name else "attention_mask"
            inputs |= {
                f"{name}{prompt}": ids,
                f"{name}{mask}": torch.ones_like(ids),
                f"{name}text_ids_mask": torch.tensor([row["is_text"]]),
                f"{name}text_ids_len": torch.tensor(row["lengths"]),
            }
        if len(rows) == 2:
            inputs["cfg_scale"] = scale
        elif len(rows) == 3:
            inputs |= {"cfg_scale_ins": scale, "cfg_scale_ref": reference_scale}
            # The row with everything, which dual guidance prepares and does not run: any will do.
            for name in ("prompt_ids", "prompt_attention_mask", "text_ids_mask", "text_ids_len"):
                inputs[{"prompt_ids": "input_ids", "prompt_attention_mask": "attention_mask"}.get(name, name)] = inputs[
                    f"cfg_ref_{name}"
                ]
        if any(not all(row["is_text"]) for row in rows):
            inputs["input_values"] = sound
        with torch.inference_mode():
            codes = model.generate(
                **inputs,
                max_new_tokens=asked["frames"],
                do_sample=False,
                depth_decoder_do_sample=False,
                logits_processor=[GeneratedTokenRepetitionPenaltyLogitsProcessor(1.1)],
            )
        golden.append({"case": case, "codes": codes[0, -asked["frames"] :].tolist()})
    GOLDEN.write_text(json.dumps(golden))


if __name__ == "__main__":
    {"write": write, "ask": ask}[sys.argv[1]](Path(sys.argv[2]))
