"""GPTQ (Frantar et al., 2022; AutoGPTQ, GPTQModel) and AWQ (Lin et al., 2023; AutoAWQ).

In both a module has `qweight`, `qzeros` and `scales` (float16 [groups, out_features]), integers packed into int32. GPTQ
packs along the input features, [in_features * bits / 32, out_features], and zero points along the output features,
minus one in its first version; `g_idx` is the group of each input feature. AWQ packs both along the output features,
[in_features, out_features / 8], the even ones of eight first.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphdecode.linear.groups import Groups, packed, unpacked
from graphdecode.linear.weight_form import Stored
from graphdecode.models.fields import UnsupportedModelError, flag
from graphdecode.models.quantized import method
from graphdecode.models.quantized.method import PackedTensor, Read, one_of, require
from graphdecode.models.weight_map import CheckpointError

_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each of eight outputs in an int32 of AWQ


class Gptq(method.Method):
    """GPTQ; see the module's docstring."""

    name = "gptq"
    of_integers = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = one_of(settings, "bits", (4, 8), 4)
        self._group_size = method.checked_group_size(settings.get("group_size", settings.get("q_group_size", 128)))
        flag(settings, "desc_act", False)
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
        size, there = self._checked(module, tensors, in_features, out_features)
        if "qzeros" not in there:
            raise CheckpointError(f"{module}.qzeros is missing")
        if f"{module}.g_idx" in tensors:
            there["g_idx"] = f"{module}.g_idx"
            require(tensors, there["g_idx"], (in_features,), ("I32", "I64"))
        unpack = partial(_gptq_groups, module, self._bits, size, self._zero_offset)
        return PackedTensor(Stored((out_features, in_features), f"INT{self._bits}"), there, unpack)

    def _checked(
        self, module: str, tensors: Mapping[str, Stored], in_features: int, out_features: int
    ) -> tuple[int, dict[str, str]]:
        """Return the group size, and the names of a module's tensors."""
        there = {part: name for part in ("qweight", "qzeros", "scales") if (name := f"{module}.{part}") in tensors}
        scales = tensors.get(f"{module}.scales")
        groups = scales.shape[0] if scales is not None and scales.shape else 0
        require(tensors, f"{module}.scales", (groups, out_features), method.FLOATS)
        size = in_features if self._group_size == -1 else min(self._group_size, in_features)
        if -(-in_features // size) != groups:
            raise CheckpointError(
                f"{module} has {groups} groups of {in_features} columns, and should have groups of {self._group_size}"
            )
        if "qzeros" in there:
            require(tensors, there["qzeros"], (groups, out_features * self._bits // 32), ("I32",))
        return size, there


class Awq(Gptq):
    """AWQ; see the module's docstring."""

    name = "awq"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        version = settings.get("version")
        lower = {"version": version.lower() if isinstance(version, str) else version}
        one_of(lower, "version", ("gemm",), "gemm")
        flag(settings, "zero_point", True)
        bits = one_of({"bits": settings.get("w_bit", 4)} | dict(settings), "bits", (4,), 4)
        size = {name: settings[name] for name in ("group_size", "q_group_size") if name in settings}
        super().__init__({"bits": bits, **size})

    def _weight(self, module: str, tensors: Mapping[str, Stored]) -> PackedTensor:
        in_features, words = tensors[f"{module}.qweight"].shape
        size, there = self._checked(module, tensors, in_features, words * 8)
        return PackedTensor(Stored((words * 8, in_features), "INT4"), there, partial(_awq_groups, size))


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
    return method.sorted_by_group(
        Groups("integer", bits, codes, scales.T.contiguous(), zeros, group_size), g_idx, module
    )


def _awq_groups(group_size: int, *, qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None) -> Groups:
    codes = packed(_outputs_in_order(qweight).T.contiguous())
    zeros = None if qzeros is None else _outputs_in_order(qzeros).T.contiguous()
    return Groups("integer", 4, codes, scales.T.contiguous(), zeros, group_size)


def _outputs_in_order(stored: Tensor) -> Tensor:
    """Unpack int32 [rows, out_features / 8] to uint8 [rows, out_features]."""
    places = unpacked(stored.contiguous().view(torch.uint8)).view(len(stored), -1, 8)
    return places[..., _PLACE_OF_OUTPUT].flatten(1)
