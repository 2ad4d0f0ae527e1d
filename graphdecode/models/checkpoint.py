"""A checkpoint's tensors: checked as a whole before any is read, then read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_MOST_NAMED = 8
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # older checkpoints keep what follows from the configuration


class CheckpointError(ValueError):
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
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as reader:
                    for name in reader.keys():  # noqa: SIM118 (not a mapping)
                        self._file_of[name] = file
                        self._shapes[name] = tuple(reader.get_slice(name).get_shape())
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
            CheckpointError: names all that are missing, unexpected or misshapen.
        """
        missing = [name for name in expected if name not in self._shapes]
        unexpected = [
            name
            for name in self._shapes
            if name not in expected and name not in optional and not name.endswith(_IGNORED_SUFFIXES)
        ]
        misshapen = [
            f"{name} is {list(self._shapes[name])} and should be {list(shape)}"
            for name, shape in expected.items()
            if name in self._shapes and self._shapes[name] != shape
        ]
        faults = [
            f"{kind}: {_some(names)}"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
            if names
        ]
        if faults:
            raise CheckpointError(f"{self._folder} does not fit its config.json; " + "; ".join(faults))

    def read(self, *names: str) -> Tensor:
        """Return one tensor, or several fused along their first dimension."""
        shapes = [self._shapes[name] for name in names]
        if len(names) == 1:
            return self._read(names[0])
        fused = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            fused[start : start + shape[0]].copy_(self._read(name))
            start += shape[0]
        return fused

    def _read(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt", device=str(self._device)) as reader:
            return reader.get_tensor(name).to(self._dtype)


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
        raise CheckpointError(f"{folder} lacks the shards {_some(absent)}")
    yield from names


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
