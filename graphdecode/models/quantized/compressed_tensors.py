"""compressed-tensors: what llm-compressor writes, read, and written for weights in groups, as safetensors.

Of a module NAME there are `NAME.weight_scale`, and either `NAME.weight`, int8 or float8, or `NAME.weight_packed` with
`NAME.weight_shape`: int32, low bits first, with integers that are moved into what is not negative. Zero points, where
there are some, are packed likewise along the rows, or int8. Which modules are quantized, the tensors say: those of the
ignore list have a plain weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphdecode.errors import shown
from graphdecode.linear.groups import Code, Groups, unpacked
from graphdecode.linear.weight_form import Stored, TensorSource
from graphdecode.models.fields import UnsupportedModelError
from graphdecode.models.quantized.on_load import QuantizedGroups, plain_weight
from graphdecode.models.quantized.packed_tensor import PackedTensor, Read, is_one_of, reordered, require
from graphdecode.models.weight_map import CheckpointError

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "dense")
_FLOATS = ("F32", "F16", "BF16")
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


class _Scheme(NamedTuple):
    """How a group of modules is quantized."""

    code: Code
    bits: int
    group_size: int  # -1: a row, or all of the weight
    rows_of_scale: int = 1
    is_symmetric: bool = True  # there need be no zero points


@dataclass(frozen=True)
class _Weight(PackedTensor):
    module: str
    scheme: _Scheme

    @property
    def has_zeros(self) -> bool:
        """Whether there are zero points that say something: those of floats are 0."""
        return self.scheme.code == "integer" and f"{self.module}.weight_zero_point" in self.tensors

    def groups(self, read: Read) -> Groups:
        """Return it as it is stored."""
        rows, columns = self.stored.shape
        here = {name.removeprefix(f"{self.module}."): read(name, ()) for name in self.tensors}
        scales = here["weight_scale"]
        if self.scheme.code == "e2m1":
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        is_one = len(scales) == 1 < rows and self.scheme.rows_of_scale == 1
        groups = Groups(
            code=self.scheme.code,
            bits=self.scheme.bits,
            codes=_codes(here, self.scheme, columns),
            scales=scales,
            zeros=_zeros(here["weight_zero_point"], self.scheme.bits, rows) if self.has_zeros else None,
            group_size=self.scheme.group_size,
            rows_of_scale=rows if is_one else self.scheme.rows_of_scale,
        )
        return groups if "weight_g_idx" not in here else reordered(groups, here["weight_g_idx"], self.module)


def _codes(here: Mapping[str, Tensor], scheme: _Scheme, columns: int) -> Tensor:
    if "weight" in here:
        weight = here["weight"]
        return weight if scheme.code == "e4m3" else weight.view(torch.uint8) ^ 128
    return here["weight_packed"].view(torch.uint8)[:, : columns * scheme.bits // 8]


def _zeros(stored: Tensor, bits: int, rows: int) -> Tensor:
    """Return zero points as codes, uint8 [rows, groups]."""
    if stored.dtype == torch.int8:
        return stored.reshape(len(stored), -1).view(torch.uint8) ^ 128 if bits == 8 else (stored + 8).view(torch.uint8)
    by_group = stored.T.contiguous().view(torch.uint8)
    return (by_group if bits == 8 else unpacked(by_group))[:, :rows].T.contiguous()


class CompressedTensors:
    """compressed-tensors; see the file's docstring."""

    name: ClassVar[str] = "compressed-tensors"
    spare: ClassVar[tuple[str, ...]] = (".input_scale", ".input_zero_point", ".output_zero_point")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._format = is_one_of(settings, "format", (*_FORMATS, "mixed-precision"), "dense")
        for other in ("sparsity_config", "transform_config"):
            held = settings.get(other)
            if held and not (isinstance(held, dict) and held.get("format") == "dense"):
                raise UnsupportedModelError(f"quantization_config: {other} is not supported")
        ignored = settings.get("ignore")  # which they are, the tensors say
        if ignored is not None and not (isinstance(ignored, list) and all(isinstance(name, str) for name in ignored)):
            raise UnsupportedModelError(f"quantization_config: ignore must be a list of names, got {shown(ignored)}")
        _check_cache(settings.get("kv_cache_scheme"))
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise UnsupportedModelError(f"quantization_config: config_groups must be an object, got {shown(groups)}")
        self._schemes = {_scheme_of(group, self._format) for group in groups.values() if group.get("weights")}
        self.of_integers = any(scheme.code == "integer" for scheme in self._schemes)

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield the weights of modules that have a scale."""
        for scale in tensors:
            module = scale.removesuffix(".weight_scale")
            if module == scale:
                continue
            there = tuple(name for part in _PARTS if (name := f"{module}.{part}") in tensors)
            yield f"{module}.weight", self._weight(module, tensors, there, read)

    def _weight(self, module: str, tensors: Mapping[str, Stored], there: tuple[str, ...], read: Read) -> PackedTensor:
        is_packed = f"{module}.weight_packed" in tensors
        codes = tensors.get(f"{module}.weight_packed" if is_packed else f"{module}.weight")
        if codes is None or len(codes.shape) != 2:
            raise CheckpointError(f"{module} has a weight_scale and no matrix of weights that it could belong to")
        rows, columns = codes.shape
        if f"{module}.weight_shape" in tensors:
            require(tensors, f"{module}.weight_shape", (2,), ("I64", "I32"))
            rows, columns = (int(size) for size in read(f"{module}.weight_shape", ()))
        elif is_packed and codes.dtype == "U8":
            columns *= 2
        kind = self._kind(module, codes, (rows, columns))
        found = [scheme for scheme in self._schemes if (scheme.code, scheme.bits) == kind]
        if f"{module}.weight_zero_point" not in tensors:
            found = [scheme for scheme in found if scheme.is_symmetric]
            if not found:
                raise CheckpointError(f"{module}.weight_zero_point is missing: the configuration has symmetric false")
        scheme = _fitting(module, found, (rows, columns), tensors[f"{module}.weight_scale"])
        _check_zeros(module, tensors, (rows, columns), scheme)
        name = {"integer": f"INT{scheme.bits}", "e4m3": "FP8", "e2m1": "MXFP4"}[scheme.code]
        return _Weight(Stored((rows, columns), name), there, module, scheme)

    def _kind(self, module: str, codes: Stored, shape: tuple[int, int]) -> tuple[str, int]:
        """Return what codes are, and their bits."""
        rows, columns = shape
        if codes.dtype in ("I8", "F8_E4M3"):
            kind = ("integer" if codes.dtype == "I8" else "e4m3", 8)
        elif codes.dtype == "U8":
            kind = ("e2m1", 4)
        else:
            bits = {-(-columns * bits // 32): bits for bits in (4, 8)}.get(codes.shape[1], 0)
            kind = ("integer", bits)
        known = {(scheme.code, scheme.bits) for scheme in self._schemes}
        if kind not in known or codes.shape[0] != rows or columns * kind[1] % 8:
            raise CheckpointError(
                f"{module}: {codes.dtype} {list(codes.shape)} is no weight {list(shape)} that the configuration names"
            )
        return kind


def _scheme_of(group: Mapping[str, Any], overall: str) -> _Scheme:
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise UnsupportedModelError(f"quantization_config: weights must be an object, got {shown(weights)}")
    is_one_of(group, "format", _FORMATS, overall if overall in _FORMATS else "dense")
    kind = is_one_of(weights, "type", ("int", "float"), "int")
    bits = is_one_of(weights, "num_bits", (4, 8), 8)
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = is_one_of(weights, "strategy", ("tensor", "channel", "group", "block"), implied)
    size = size if strategy == "group" else -1
    if kind == "float" and bits == 4 and (strategy, size) != ("group", 32):
        raise UnsupportedModelError(
            "quantization_config: floats of 4 bits are supported in groups of 32 alone (mxfp4-pack-quantized)"
        )
    code: Code = "integer" if kind == "int" else "e2m1" if bits == 4 else "e4m3"
    is_symmetric = is_one_of(weights, "symmetric", (True, False), True) or kind == "float"
    if strategy == "block":
        block = weights.get("block_structure")
        if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
            raise UnsupportedModelError(f"quantization_config: block_structure must be two sizes, got {shown(block)}")
        return _Scheme(code, bits, block[1], block[0], is_symmetric)
    if not isinstance(size, int) or not (size == -1 or _is_size(size)):
        raise UnsupportedModelError(f"quantization_config: group_size must be an integer >= 1, got {shown(size)}")
    return _Scheme(code, bits, size, is_symmetric=is_symmetric)


def _check_cache(scheme: Any) -> None:
    """Refuse scales of a cache of another kind than an fp8 one, with a number for each layer or each of its heads."""
    if scheme is None:
        return
    if not isinstance(scheme, dict):
        raise UnsupportedModelError(f"quantization_config: kv_cache_scheme must be an object, got {shown(scheme)}")
    known = {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "attn_head"), "symmetric": (True,)}
    for name, values in known.items():
        is_one_of(scheme, name, values, values[0], of="kv_cache_scheme")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _fitting(module: str, schemes: list[_Scheme], shape: tuple[int, int], scale: Stored) -> _Scheme:
    """Return the scheme whose scales a module has, its group size that of the weight.

    Raises:
        CheckpointError: none of those that the configuration names.
    """
    rows, columns = shape
    dims = (*scale.shape, 1, 1)[:2]
    for scheme in schemes:
        size = columns if scheme.group_size == -1 else min(scheme.group_size, columns)
        blocks = -(-rows // scheme.rows_of_scale)
        is_whole = scheme.group_size == -1 and dims in ((1, 1), (rows, 1))
        dtypes = ("U8",) if scheme.code == "e2m1" else _FLOATS
        if (is_whole or dims == (blocks, -(-columns // size))) and scale.dtype in dtypes:
            return scheme._replace(group_size=size)
    raise CheckpointError(
        f"{module}.weight_scale is {scale.dtype} {list(scale.shape)}, which the configuration has for no weight "
        f"{list(shape)}"
    )


def _check_zeros(module: str, tensors: Mapping[str, Stored], shape: tuple[int, int], scheme: _Scheme) -> None:
    name = f"{module}.weight_zero_point"
    zeros = tensors.get(name)
    if zeros is None or scheme.code != "integer":
        return
    rows, groups = shape[0], -(-shape[1] // scheme.group_size)
    if zeros.dtype == "I32":
        require(tensors, name, (-(-rows * scheme.bits // 32), groups), ("I32",))
    else:
        require(tensors, name, (rows, groups), ("I8",))


_SHARD_BYTES = 1 << 30  # of a file, and what is held in memory while one is made
_METADATA = {"format": "pt"}  # without which transformers does not read a file
_INDEX = "model.safetensors.index.json"


def quantization_config(source: QuantizedGroups) -> dict[str, Any]:
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
    groups = source.read_quantized(name) if isinstance(source, QuantizedGroups) else None
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
