"""Weight maps: names in a model -> tensors of a source; and the check of a source's tensors."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from graphdecode.errors import CheckpointError
from graphdecode.linear.quantization.registry import weight_type
from graphdecode.linear.weight_form import FLOAT_DTYPES, Stored

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # in older checkpoints; derived from the configuration


class Run(NamedTuple):
    """Adjacent rows or columns of a tensor that are split evenly over shards."""

    size: int  # rows or columns
    heads: int = 0  # key or value heads; if fewer than shards, several shards have the same one. 0: not heads


class Part(NamedTuple):
    """A tensor of a source, as a family expects it."""

    name: str  # in the source
    shape: tuple[int, ...]  # in the source
    split: int | None = None  # the axis that is split; None: each shard has all of it
    runs: tuple[Run, ...] = ()  # runs along that axis, split separately; empty: one run
    is_added: bool = False  # added to a sum over shards: the first shard has it, the others zeros


WeightMap = dict[str, tuple[Part, ...]]  # name in the model -> tensors, concatenated by rows


def product(
    param_name: str,
    names: Mapping[str, int | tuple[Run, ...]],
    in_features: int,
    *,
    split: int | None,
    bias: bool = False,
) -> WeightMap:
    """Return the weight map of a linear layer: `param_name`, and `param_name.bias` if it has one.

    Args:
        names: its modules in the source -> rows of each, or their runs.
        split: the axis that is split: 0: rows, 1: columns, None: each shard has all.
    """
    weights: list[Part] = []
    biases: list[Part] = []
    for name, rows in names.items():
        runs = () if isinstance(rows, int) else rows
        size = rows if isinstance(rows, int) else sum(run.size for run in rows)
        weights.append(Part(f"{name}.weight", (size, in_features), split, runs))
        biases.append(Part(f"{name}.bias", (size,), 0 if split == 0 else None, runs, is_added=split == 1))
    return {param_name: tuple(weights)} | ({f"{param_name}.bias": tuple(biases)} if bias else {})


def parts(weight_map: WeightMap) -> list[Part]:
    """Return every tensor of a map."""
    return [part for of_name in weight_map.values() for part in of_name]


def num_values(weight_map: WeightMap) -> int:
    """Return the number of values of all tensors; one that has several names in the model counts once."""
    return sum(map(math.prod, {part.name: part.shape for part in parts(weight_map)}.values()))


def check(name: str, tensors: Mapping[str, Stored], weight_map: WeightMap, unused: frozenset[str]) -> None:
    """Raise `CheckpointError` for tensors that are missing, unexpected, misshapen or of an unsupported type."""
    expected = {part.name: part.shape for part in parts(weight_map)}
    present = {name: tensors[name] for name in expected if name in tensors}
    types = {stored.dtype for stored in present.values()}
    unknown = {dtype for dtype in types - FLOAT_DTYPES.keys() if weight_type(dtype) is None}
    faults = {
        "missing": _by_layers((name, "") for name in expected if name not in present),
        "unexpected": _by_layers(
            (name, "")
            for name in tensors
            if name not in expected and name not in unused and not name.endswith(_IGNORED_SUFFIXES)
        ),
        "misshapen": _by_layers(
            (name, f"is {list(tensor.shape)} and should be {list(expected[name])}")
            for name, tensor in present.items()
            if tensor.shape != expected[name]
        ),
        "of an unsupported type": _by_layers(
            (name, f"is {tensor.dtype} and should be one of {', '.join(FLOAT_DTYPES)}")
            for name, tensor in present.items()
            if tensor.dtype in unknown
        ),
    }
    named = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in faults.items() if names)
    if named:
        raise CheckpointError(f"{name} does not fit its configuration; {named}")


def _by_layers(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line per (name, fault); layers with the same fault share one: `model.layers.{0-3,7}`."""
    layers: dict[tuple[str, str, str], list[int]] = {}
    for name, wrong in faults:
        parts = re.fullmatch(r"(model\.layers\.)(\d+)(\..+)", name)
        before, layer, after = parts.groups() if parts else (name, None, "")
        layers.setdefault((before, after, wrong), []).extend([] if layer is None else [int(layer)])
    return [f"{before}{_ranges(numbers)}{after} {wrong}".rstrip() for (before, after, wrong), numbers in layers.items()]


def _ranges(numbers: list[int]) -> str:
    """Return `3` for one number, `{0-3,7}` for several, "" for none."""
    text = ",".join(f"{first}-{last}" if first < last else str(first) for first, last in runs_of(numbers))
    return f"{{{text}}}" if len(numbers) > 1 else text


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        is_next = runs and number == runs[-1][1] + 1
        runs.append((runs.pop()[0], number) if is_next else (number, number))
    return runs
