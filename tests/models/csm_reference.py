"""A tiny Sesame CSM checkpoint as transformers writes it, and its own classes that compute the same: the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from breeze_reference import LLAMA3, _randomise, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

CODEBOOKS, VOCAB, CODES = 5, 19, 16
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>"]
TEXTS = ["One, two: naïve on 東京 — it's 3 on the way.", "another thing, said at one and the same time"]
RATES = [4, 3, 2]
FRAME = 48
"""Samples of a codec frame."""
MIMI = {
    "model_type": "mimi",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "num_filters": 4,
    "upsampling_ratios": RATES,
    "codebook_dim": 8,
    "codebook_size": CODES,
    "num_quantizers": CODEBOOKS,
    "vector_quantization_hidden_dimension": 8,
    "sliding_window": 10,
    "layer_scale_initial_scale": 0.3,
    "upsample_groups": 16,
}
DEPTH = {
    "num_codebooks": CODEBOOKS,
    "vocab_size": VOCAB,
    "backbone_hidden_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": LLAMA3,
}
BACKBONE = {
    "num_codebooks": CODEBOOKS,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        **LLAMA3,
        "low_freq_factor": 0.125,
        "high_freq_factor": 0.5,
        "original_max_position_embeddings": 64,
    },
    "codebook_pad_token_id": VOCAB - 1,
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "<|begin_of_text|>[{{ message['role'] }}]{{ part['text'] }}<|end_of_text|>"
    "{% else %}<|AUDIO|><|audio_eos|>{% endif %}{% endfor %}{% endfor %}"
)
"""What the published template makes of a conversation."""


def tokenizer() -> Any:
    """Byte pairs of a Llama 3 kind, few of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


class CsmReference:
    """The class of transformers with random weights, and its processor."""

    def __init__(self, seed: int = 5) -> None:
        library = transformers()
        generator = torch.Generator().manual_seed(seed)
        # What biases begin with is not overwritten but added to.
        torch.manual_seed(seed)
        self.tokenizer = tokenizer()
        begin, end, audio, audio_end = map(self.tokenizer.token_to_id, SPECIAL)
        config = library.CsmConfig(
            **BACKBONE,
            text_vocab_size=self.tokenizer.get_vocab_size(),
            bos_token_id=begin,
            pad_token_id=end,
            audio_token_id=audio,
            audio_eos_token_id=audio_end,
            depth_decoder_config=DEPTH,
            codec_config=MIMI,
            attn_implementation="eager",
        )
        self.model = library.CsmForConditionalGeneration(config).eval()
        _randomise(self.model, generator)
        self.codec = self.model.codec_model
        with torch.no_grad():
            # Ids that are no codes have a logit of zero, never the largest: transformers does not rule them out.
            self.model.lm_head.weight[CODES:] = 0
            self.model.depth_decoder.codebooks_head.weight[:, :, CODES:] = 0
            self._fill_codebooks(generator)
        self.model.generation_config.update(do_sample=True, temperature=0.8, top_k=40)
        self.model.depth_decoder.generation_config.update(do_sample=True, temperature=0.7)
        extractor = library.EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000)
        fast = library.PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, pad_token=SPECIAL[1])
        self.processor = library.CsmProcessor(extractor, fast, TEMPLATE)

    def _fill_codebooks(self, generator: torch.Generator) -> None:
        """Where the vectors of sound lie: elsewhere one entry would be the nearest to all of them.  Its own sound is
        quiet enough that no sample is clipped."""
        codec = self.codec
        latents = codec.encoder(torch.randn(1, 1, 9_600, generator=generator) * 0.3).latents
        for kind in ("semantic", "acoustic"):
            quantizer = getattr(codec.quantizer, f"{kind}_residual_vector_quantizer")
            found = quantizer.input_proj(latents)[0].T
            for n, layer in enumerate(quantizer.layers):
                book = layer.codebook
                book.cluster_usage.uniform_(0.5, 3.0, generator=generator)
                noise = torch.randn(book.embed_sum.shape, generator=generator) * found.std(0) * 0.7**n
                book.embed_sum.copy_((noise + (0 if n else found.mean(0))) * book.cluster_usage[:, None])
        last = codec.decoder.decoder_seanet.layers[-1]
        loudest = (
            codec.decode(torch.randint(0, CODES, (2, CODEBOOKS, 30), generator=generator)).audio_values.abs().max()
        )
        for parameter in last.parameters():
            parameter.mul_(0.4 / loudest)

    def save(self, folder: Path) -> Path:
        """Write the checkpoint's folder as the published one is: the weights have a name of their own, and what
        transformers would look for by default is another file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        (folder / "model.safetensors").rename(folder / "transformers-00001-of-00001.safetensors")
        weights = load_file(folder / "transformers-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(weights, "transformers-00001-of-00001.safetensors")}
        (folder / "transformers.safetensors.index.json").write_text(json.dumps(index))
        config = json.loads((folder / "config.json").read_text())
        config["transformers_weights"] = "transformers.safetensors.index.json"
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"backbone.layers.0.attn.q_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
        self.tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    # ---- the library's generation ------------------------------------------------------------------------------------

    def inputs(self, text: str, speaker: str = "0", spoken: tuple[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What the processor makes of a turn, behind a turn of speaker 0 that has been spoken (words, sound)."""
        conversation: list[dict[str, Any]] = []
        if spoken is not None:
            words, sound = spoken
            said = [{"type": "text", "text": words}, {"type": "audio", "path": sound.numpy()}]
            conversation.append({"role": "0", "content": said})
        conversation.append({"role": speaker, "content": [{"type": "text", "text": text}]})
        rows = [1]
        kernels, strides = [7], [1]
        for rate in reversed(RATES):
            kernels += [3, 1, 2 * rate]
            strides += [1, 1, rate]
        ladder = {"kernel_sizes": [*kernels, 3, 4], "strides": [*strides, 1, 2], "use_causal_conv": True}
        ladder["dilations"] = rows * len(ladder["kernel_sizes"])
        prompt = self.processor.apply_chat_template(conversation, tokenize=False)
        audio = None if spoken is None else [np.asarray(spoken[1])]
        found = self.processor(text=prompt, audio=audio, audio_kwargs={"encoded_length_kwargs": ladder})
        return dict(found)

    @torch.no_grad()
    def generate(self, frames: int, **inputs: Tensor) -> list[list[int]]:
        """Greedy codes, at most `frames`, without the frame of zeros."""
        found = self.model.generate(**inputs, max_new_tokens=frames, do_sample=False, depth_decoder_do_sample=False)
        codes: list[list[int]] = found[0].tolist()
        if not any(codes[-1][:-1]):
            codes.pop()
        return codes
