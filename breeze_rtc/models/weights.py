"""The files of a checkpoint: safetensors, whole or in shards, read tensor by tensor to where they are computed with.

Everything is looked up before anything is read: a file that lacks a tensor, or has one of another shape, is refused in
a moment and not after gigabytes.  Then one tensor after the other is mapped, copied to the device, and let go; what a
load needs besides the model itself is the largest tensor and `HELD_BYTES` of mapped file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from breeze_rtc.errors import CheckpointError

HELD_BYTES = 256 << 20
"""A file is mapped anew after so much was read of it: pages that were read count as this process's memory while they
are mapped."""
TELL_EVERY = 0.02
"""Share of a load that is worth telling."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The types of numbers that are read.  Weights that somebody has quantised are others."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one of our tensors comes from: pieces by name and shape, and how they are put together."""

    ours: str
    pieces: tuple[tuple[str, tuple[int, ...]], ...]
    join: Callable[[list[Tensor]], Tensor] = lambda pieces: pieces[0]


class Weights:
    """The tensors of one checkpoint: a single safetensors file, or an index and its shards."""

    def __init__(self, folder: Path, name: str = "model.safetensors") -> None:
        """name: of the single file; that of an index is longer by `.index.json`.

        Raises CheckpointError where there is neither, or where the single file or the index is broken."""
        index = folder / f"{name}.index.json"
        single = folder / name
        self._where: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._read_bytes = 0
        if index.exists():
            self._where = {tensor: folder / shard for tensor, shard in _weight_map(index).items()}
        elif single.exists():
            self._where = dict.fromkeys(self._file(single).keys(), single)
        else:
            raise CheckpointError(f"{folder} holds neither {name} nor {name}.index.json")
        self._folder = folder

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} is missing; download the checkpoint again") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is truncated or no safetensors file ({error})") from error
        return self._open[path]

    def names(self) -> list[str]:
        return list(self._where)

    def check(self, name: str, shape: tuple[int, ...]) -> int:
        """The bytes of a tensor, which is not read.

        Raises CheckpointError when it is not there, has another shape, or numbers of a type that is not read.
        """
        if name not in self._where:
            raise CheckpointError(f"tensor {name} is missing from {self._folder}; expected shape {list(shape)}")
        path = self._where[name]
        try:
            entry = self._file(path).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read from {path}: {error}") from error
        found, kind = tuple(entry.get_shape()), str(entry.get_dtype())
        if found != shape:
            raise CheckpointError(f"tensor {name} has shape {list(found)}; expected {list(shape)}")
        if kind not in _BYTES:
            raise CheckpointError(f"tensor {name} is stored as {kind}; expected one of {', '.join(_BYTES)}")
        return int(torch.Size(shape).numel()) * _BYTES[kind]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor by its name, on the CPU and mapped: copy it to keep it.  Raises CheckpointError as `check` does."""
        if self._read_bytes > HELD_BYTES:
            self._open.clear()
            self._read_bytes = 0
        self._read_bytes += self.check(name, shape)
        path = self._where[name]
        try:
            tensor: Tensor = self._file(path).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read from {path}: {error}") from error
        return tensor


def read(
    parts: Iterable[tuple[Weights, Collection[Source]]],
    device: torch.device,
    *,
    widened: Collection[str] = (),
    kept: Callable[[str, Tensor], dict[str, Tensor]] | None = None,
    told: Callable[[float], None] = lambda share: None,
) -> dict[str, Tensor]:
    """Our tensors by name, on `device`, in the type they are stored in; those of `widened` in float32.

    kept: what is kept in place of a tensor, on the device; by default the tensor.  told: how much has been read, 0 to
    1.  Raises CheckpointError; before anything is read where a tensor is not as expected or there is no room on the
    device.
    """
    parts = list(parts)
    total = sum(w.check(name, shape) for w, sources in parts for s in sources for name, shape in s.pieces)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < total and kept is None:
            raise CheckpointError(
                f"the weights take {total / 1e9:.1f} GB and {torch.cuda.get_device_name(device)} has "
                f"{free / 1e9:.1f} GB free; end what else computes there, or use --weights int8"
            )
    state: dict[str, Tensor] = {}
    done = 0
    told_of = 0.0
    told(0.0)
    for weights, sources in parts:
        for source in sources:
            mapped = [weights.tensor(name, shape) for name, shape in source.pieces]
            done += sum(piece.nbytes for piece in mapped)
            tensor = source.join([piece.to(device) for piece in mapped])
            if source.ours in widened:
                tensor = tensor.float()
            if any(tensor.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr() for piece in mapped):
                tensor = tensor.clone()
            tensor = tensor.contiguous()
            state.update({source.ours: tensor} if kept is None else kept(source.ours, tensor))
            if done / total - told_of >= TELL_EVERY:
                told_of = done / total
                told(told_of)
    told(1.0)
    return state


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; is that the folder of a checkpoint?") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content
