"""AWQ (Lin et al., 2023; AutoAWQ).

A module has the tensors of GPTQ's, but `qweight` [in_features, out_features / 8] and `qzeros` are packed along the
output features, the even ones of eight first.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphdecode.linear.quantization.format import PackedTensor, one_of
from graphdecode.linear.quantization.gptq import Gptq
from graphdecode.linear.quantization.groups import INT4, Groups, packed, unpacked
from graphdecode.linear.weight_form import Stored

_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each of eight outputs in an int32


class Awq(Gptq):
    """AWQ; see the module's docstring."""

    name = "awq"
    weight_types = (INT4,)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        version = settings.get("version")
        lower = {"version": version.lower() if isinstance(version, str) else version}
        one_of(lower, "version", ("gemm",), "gemm")
        one_of(settings, "zero_point", (True, False), True)
        bits = one_of({"bits": settings.get("w_bit", 4)} | dict(settings), "bits", (4,), 4)
        size = {name: settings[name] for name in ("group_size", "q_group_size") if name in settings}
        super().__init__({"bits": bits, **size})

    def _weight(self, module: str, tensors: Mapping[str, Stored]) -> PackedTensor:
        in_features, words = tensors[f"{module}.qweight"].shape
        size, tensor_names = self._checked(module, tensors, in_features, words * 8)
        return PackedTensor(Stored((words * 8, in_features), INT4.name), tensor_names, partial(_awq_groups, size))


def _awq_groups(group_size: int, *, qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None) -> Groups:
    codes = packed(_outputs_in_order(qweight).T.contiguous())
    zeros = None if qzeros is None else _outputs_in_order(qzeros).T.contiguous()
    return Groups("integer", 4, codes, scales.T.contiguous(), zeros, group_size)


def _outputs_in_order(stored: Tensor) -> Tensor:
    """Unpack int32 [rows, out_features / 8] to uint8 [rows, out_features]."""
    nibbles = unpacked(stored.contiguous().view(torch.uint8)).view(len(stored), -1, 8)
    return nibbles[..., _NIBBLE_OF_OUTPUT].flatten(1)
