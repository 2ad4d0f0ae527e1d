"""A checkpoint's tensors: checked as a whole before any is read, then read one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphdecode.errors import GraphdecodeError

_FLOATS = ("F64", "F32", "F16", "BF16")  # what safetensors calls the types that are weights as they stand
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # older checkpoints keep what follows from the configuration


class CheckpointError(GraphdecodeError, ValueError):
    """A checkpoint that is not the model that its configuration describes; the message names every tensor."""


class Checkpoint:
    """The safetensors of a folder, single or sharded; never a pickle.

    Args:
        folder: the checkpoint.
        device: tensors are read straight to it.
        dtype: tensors are converted to it, one at a time.

    Raises:
        CheckpointError: there are no safetensors, or a shard is missing or damaged.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._folder = folder
        self._files = [folder / name for name in _shard_names(folder)]
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as reader:
                    for name in reader.keys():  # noqa: SIM118 (not a mapping)
                        self._file_of[name] = file
                        part = reader.get_slice(name)
                        self._shapes[name] = tuple(part.get_shape())
                        self._types[name] = part.get_dtype()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in self._files)

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: set[str]) -> None:
        """Compare the tensors with those that a model has.

        Args:
            expected: name -> shape.
            optional: names that may be there and are not used.

        Raises:
            CheckpointError: names all that are missing, unexpected, misshapen or not of a float type.
        """
        missing = [name for name in expected if name not in self._shapes]
        unexpected = [
            name
            for name in self._shapes
            if name not in expected and name not in optional and not name.endswith(_IGNORED_SUFFIXES)
        ]
        misshapen, quantised = [], []
        for name, shape in expected.items():
            if name not in self._shapes:
                continue
            if self._shapes[name] != shape:
                misshapen.append((name, f"is {list(self._shapes[name])} and should be {list(shape)}"))
            if self._types[name] not in _FLOATS:
                quantised.append((name, f"is {self._types[name]} and should be one of {', '.join(_FLOATS)}"))
        faults = {
            "missing": _by_layers((name, "") for name in missing),
            "unexpected": _by_layers((name, "") for name in unexpected),
            "misshapen": _by_layers(misshapen),
            "of an unsupported type": _by_layers(quantised),
        }
        named = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in faults.items() if names)
        if named:
            raise CheckpointError(f"{self._folder} does not fit its config.json; {named}")

    def read(self, *names: str) -> Tensor:
        """Return one tensor, or several fused along their first dimension, in memory of their own.

        What safetensors gives on a CPU is a view of the mapped file: kept, it would change with the file.
        """
        shapes = [self._shapes[name] for name in names]
        tensor = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device
        )
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            with safe_open(self._file_of[name], framework="pt", device=str(self._device)) as reader:
                tensor[start : start + shape[0]].copy_(reader.get_tensor(name))
            start += shape[0]
        return tensor


def _shard_names(folder: Path) -> Iterator[str]:
    if (folder / "model.safetensors").exists():
        yield "model.safetensors"
        return
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f"; {pickles[0]} is a pickle, which is never read: convert it" if pickles else ""
        raise CheckpointError(f"{folder} holds no model.safetensors and no model.safetensors.index.json{hint}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}") from error
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks the shards {', '.join(absent)}")
    yield from names


def _by_layers(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Return each (name, what is wrong) as a line; layers with the same fault share one: `model.layers.{0-3,7}`."""
    layers: dict[tuple[str, str, str], list[int]] = {}
    for name, wrong in faults:
        parts = re.fullmatch(r"(model\.layers\.)(\d+)(\..+)", name)
        before, layer, after = parts.groups() if parts else (name, None, "")
        layers.setdefault((before, after, wrong), []).extend([] if layer is None else [int(layer)])
    return [f"{before}{_ranges(found)}{after} {wrong}".rstrip() for (before, after, wrong), found in layers.items()]


def _ranges(numbers: list[int]) -> str:
    """Return `3` for one number, `{0-3,7}` for several, nothing for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)
    return f"{{{text}}}" if len(numbers) > 1 else text
