"""Which tiles suit the products of the fused depth decoder on this card?

    python bench/depth_tiles.py                                         on a CUDA machine, the published sizes
    TRITON_INTERPRET=1 python bench/depth_tiles.py --device cpu         small ones, interpreted: a check of the code

Each product (q, k and v; output; gate and twin; down; head) runs in a CUDA graph over the weights of twelve layers,
which no cache holds, at 1, 16 and 32 rows and with every tile of a list; printed are the time of one, the share of the
bandwidth of a plain copy that it reads its weights with, and the tile now in `breeze_rtc/models/kernels.py`.

    python bench/depth_tiles.py [--device cuda] [--weights int8|fp8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu import bandwidth
from origin import origin
from torch import Tensor

from breeze_rtc.clock import SECOND, MonotonicClock
from breeze_rtc.models import kernels
from breeze_rtc.models.kernels import Tile
from breeze_rtc.models.presets import breeze_tts_2, tiny
from breeze_rtc.models.quantised import quantise
from breeze_rtc.runtime.graphs import CudaRecorder
from breeze_rtc.runtime.process import no_cuda

ROWS = (1, 16, 32)
LAYERS = 12
REPLAYS = 20


def tiles(product: str) -> Iterator[Tile]:
    """The current one first."""
    now = {"gate": kernels.GATED, "down": kernels.LONG, "head": kernels.HEAD}.get(product, kernels.PLAIN)
    yield now
    for outputs in (16, 32, 64):
        for inputs in (64, 128, 256):
            for splits in (1, 2, 4, 8) if product in {"down", "out"} else (1,):
                for warps, stages in ((4, 3), (4, 5), (8, 4)):
                    tile = Tile(outputs, inputs, splits, warps, stages)
                    if tile != now:
                        yield tile


def products(device: torch.device, kind: str) -> dict[str, tuple[list[dict[str, Any]], int]]:
    """The weights of each layer's product, as `kernels.linear` takes them, and the product's inputs."""
    config = (breeze_tts_2() if device.type == "cuda" else tiny()).depth
    block = config.block
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wide = block.heads * block.head_dim
    shapes = {
        "qkv": (wide + 2 * block.kv_heads * block.head_dim, block.hidden),
        "out": (block.hidden, wide),
        "gate": (2 * block.ffn, block.hidden),
        "down": (block.hidden, block.ffn),
    }
    found: dict[str, tuple[list[dict[str, Any]], int]] = {}
    for name, shape in shapes.items():
        layers = []
        for _ in range(LAYERS):
            weight = torch.randn(shape, device=device, dtype=dtype)
            layer: dict[str, Any] = {"weight": weight}
            if kind:
                layer["weight"], layer["scale"] = quantise(weight, kind)
            if name in {"qkv", "gate"}:
                layer["gain"] = torch.ones(shape[1], device=device, dtype=dtype)
            layer["is_gated"] = name == "gate"
            layers.append(layer)
        found[name] = (layers, shape[1])
    heads = torch.randn(LAYERS, block.hidden, config.vocab, device=device)
    gain = torch.ones(block.hidden, device=device, dtype=dtype)
    found["head"] = ([{"weight": head, "gain": gain, "is_transposed": True} for head in heads], block.hidden)
    return found


def time_ns(work: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> float:
    """Of one product, in a graph of all layers' on a card; the least of some."""
    is_cuda = x.device.type == "cuda"
    replay = CudaRecorder().record(work, (x,)) if is_cuda else lambda: work(x)
    clock = MonotonicClock()
    times = []
    for _ in range(REPLAYS if is_cuda else 1):
        began_ns = clock.now()
        replay()[0].sum().item()
        times.append(clock.now() - began_ns)
    return min(times) / LAYERS


def sweep(device: torch.device, kind: str, rate: float) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for name, (layers, inputs) in products(device, kind).items():
        size = layers[0]["weight"].nbytes
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            timed = []
            for index, tile in enumerate(tiles(name)):

                def work(x: Tensor, tile: Tile = tile, layers: list[dict[str, Any]] = layers) -> tuple[Tensor, ...]:
                    return (torch.stack([kernels.linear(x, tile=tile, **layer) for layer in layers]),)

                try:
                    timed.append((time_ns(work, x), index, tile))
                except Exception as error:  # a tile that the card has no room for
                    print(f"   {name} {tile}: {type(error).__name__}", file=sys.stderr)
                if device.type == "cpu" and index == 1:
                    break
            now = next((ns for ns, index, _ in timed if not index), float("nan"))
            best_ns, _, best = min(timed, key=lambda one: one[0])
            found.append({"product": name, "rows": rows, "now_ns": now, "best_ns": best_ns, "best": repr(best)})
            print(
                f"{name:4} {rows:2} rows: now {now / 1e3:7.2f} us ({100 * size * SECOND / now / rate:3.0f} % of what a "
                f"copy moves), best {best_ns / 1e3:7.2f} us with {best}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--weights", default="", help="int8 or fp8")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"no CUDA device: {no_cuda()}.")
    with torch.inference_mode():
        rate = bandwidth(device)
        found = sweep(device, options.weights, rate)
    if options.json:
        document = origin("torch", "triton") | {"bandwidth": rate, "products": found}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    worst = max(found, key=lambda one: one["now_ns"] / one["best_ns"])
    print(
        f"RESULT device={device.type} worst={worst['product']}_{worst['rows']} "
        f"times_best={worst['now_ns'] / worst['best_ns']:.2f}"
    )


if __name__ == "__main__":
    main()
