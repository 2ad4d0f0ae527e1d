"""A checkpoint's weights as safetensors, those in groups in compressed-tensors' form, and what config.json says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphdecode.linear.groups import Groups
from graphdecode.linear.weight_form import TensorSource
from graphdecode.models.quantised.on_load import QuantisedGroups, plain_weight

_SHARD_BYTES = 1 << 30  # of a file, and what is held in memory while one is made
_METADATA = {"format": "pt"}  # without which transformers does not read a file
_INDEX = "model.safetensors.index.json"


def quantization_config(source: QuantisedGroups) -> dict[str, Any]:
    """Return what a config.json says of a source's weights: all linear layers but the output layer's and routers."""
    scheme, is_float = source.scheme, source.scheme.code == "e4m3"
    routers = [part.name for place, found in source.weight_map.items() if place.endswith(".router") for part in found]
    weights = {
        "num_bits": scheme.bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(name.removesuffix(".weight") for name in routers)],
        "kv_cache_scheme": None,
    }


def write_weights(source: TensorSource, folder: Path, names: Iterable[str]) -> None:
    """Write a source's tensors into a folder, in several files and with an index where they are large.

    Args:
        source: of the tensors.
        folder: that is there.
        names: of the tensors, in the order in which they are read; whoever counts them knows how far it is.
    """
    held: dict[str, Tensor] = {}
    written: dict[str, int] = {}  # tensor -> its file
    total = count = 0
    for name in names:
        for part, tensor in _stored(source, name):
            held[part] = tensor.contiguous()
            total += tensor.nbytes
            written[part] = count
        if sum(tensor.nbytes for tensor in held.values()) >= _SHARD_BYTES:
            _save(held, folder / f"{count}")
            count += 1
    if held:
        _save(held, folder / f"{count}")
        count += 1
    _name_files(folder, count, written, total)


def _save(held: dict[str, Tensor], path: Path) -> None:
    save_file(held, path, metadata=_METADATA)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors leaves files that nobody else may read
    held.clear()


def _name_files(folder: Path, count: int, written: dict[str, int], total: int) -> None:
    if count == 1:
        (folder / "0").rename(folder / "model.safetensors")
        return
    files = [f"model-{place + 1:05}-of-{count:05}.safetensors" for place in range(count)]
    for place, file in enumerate(files):
        (folder / f"{place}").rename(folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[place] for name, place in written.items()}}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _stored(source: TensorSource, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file that stand for one tensor of the model."""
    groups = source.read_few_bits(name) if isinstance(source, QuantisedGroups) else None
    if not isinstance(groups, Groups):
        yield name, plain_weight(source, name)
        return
    module = name.removesuffix(".weight")
    yield f"{module}.weight_scale", groups.scales
    if groups.code == "e4m3":
        yield name, groups.codes
    else:
        yield f"{module}.weight_packed", _words(groups)
        yield f"{module}.weight_shape", torch.tensor(groups.shape)


def _words(groups: Groups) -> Tensor:
    """Return integers as int32, the first in the lowest bits; rows are filled up to whole ones."""
    missing = -groups.codes.shape[1] % 4
    return torch.nn.functional.pad(groups.codes, (0, missing)).view(torch.int32)
