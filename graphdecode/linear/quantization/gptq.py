"""GPTQ (Frantar et al., 2022; AutoGPTQ, GPTQModel).

A module has `qweight` [in_features * bits / 32, out_features] and `qzeros` [groups, out_features * bits / 32], integers
packed into int32, zero points minus one in the first version; `scales`, float16 [groups, out_features]; and perhaps
`g_idx`, the group of each input feature.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.errors import CheckpointError, UnsupportedModelError
from graphdecode.linear.quantization.format import (
    FLOATS,
    PackedTensor,
    QuantizationFormat,
    Read,
    checked_group_size,
    one_of,
    require,
)
from graphdecode.linear.quantization.groups import INT4, INT8, Groups, sorted_by_group, unpacked
from graphdecode.linear.quantization.quantized_weight import WeightType
from graphdecode.linear.weight_form import Stored


class Gptq(QuantizationFormat):
    """GPTQ; see the module's docstring."""

    name = "gptq"
    weight_types: ClassVar[tuple[WeightType, ...]] = (INT4, INT8)
    is_integer = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = one_of(settings, "bits", (4, 8), 4)
        self._group_size = checked_group_size(settings.get("group_size", settings.get("q_group_size", 128)))
        one_of(settings, "desc_act", (True, False), False)
        if settings.get("dynamic"):
            raise UnsupportedModelError("quantization_config: dynamic is not supported: all layers must be alike")
        # version 1 stores zero points minus 1
        self._zero_offset = 1 if one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq" else 0

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for name, stored in tensors.items():
            module = name.removesuffix(".qweight")
            if module == name:
                continue
            if stored.dtype != "I32" or len(stored.shape) != 2:
                raise CheckpointError(f"{name} is {stored.dtype} {list(stored.shape)} and should be a matrix of I32")
            yield f"{module}.weight", self._weight(module, tensors)

    def _weight(self, module: str, tensors: Mapping[str, Stored]) -> PackedTensor:
        words, out_features = tensors[f"{module}.qweight"].shape
        in_features = words * 32 // self._bits
        size, tensor_names = self._checked(module, tensors, in_features, out_features)
        if "qzeros" not in tensor_names:
            raise CheckpointError(f"{module}.qzeros is missing")
        if f"{module}.g_idx" in tensors:
            tensor_names["g_idx"] = f"{module}.g_idx"
            require(tensors, tensor_names["g_idx"], (in_features,), ("I32", "I64"))
        unpack = partial(_gptq_groups, module, self._bits, size, self._zero_offset)
        return PackedTensor(Stored((out_features, in_features), f"INT{self._bits}"), tensor_names, unpack)

    def _checked(
        self, module: str, tensors: Mapping[str, Stored], in_features: int, out_features: int
    ) -> tuple[int, dict[str, str]]:
        """Return the group size, and the names of a module's tensors."""
        tensor_names = {
            part: name for part in ("qweight", "qzeros", "scales") if (name := f"{module}.{part}") in tensors
        }
        scales = tensors.get(f"{module}.scales")
        groups = scales.shape[0] if scales is not None and scales.shape else 0
        require(tensors, f"{module}.scales", (groups, out_features), FLOATS)
        size = in_features if self._group_size == -1 else min(self._group_size, in_features)
        if -(-in_features // size) != groups:
            raise CheckpointError(
                f"{module} has {groups} groups of {in_features} columns, and should have groups of {self._group_size}"
            )
        if "qzeros" in tensor_names:
            require(tensors, tensor_names["qzeros"], (groups, out_features * self._bits // 32), ("I32",))
        return size, tensor_names


def _gptq_groups(
    module: str,
    bits: int,
    group_size: int,
    zero_offset: int,
    *,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
) -> Groups:
    zeros = qzeros.contiguous().view(torch.uint8)
    zeros = unpacked(zeros) if bits == 4 else zeros
    zeros = ((zeros + zero_offset) & (2**bits - 1)).T.contiguous()
    codes = qweight.T.contiguous().view(torch.uint8)
    groups = Groups("integer", bits, codes, scales.T.contiguous(), zeros, group_size)
    return sorted_by_group(groups, g_idx, module)
