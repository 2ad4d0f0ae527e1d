"""MXFP4 (Open Compute Project, Microscaling Formats, 2023), as gpt-oss has its experts: 32 values share a power of two.

`NAME_blocks` is uint8 [experts, out_features, in_features / 32, 16], two values per byte, the low nibble first, and
`NAME_scales` uint8 [experts, out_features, in_features / 32], exponents with a bias of 127. `NAME` is listed as their
transpose, [experts, in_features, out_features].
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from graphdecode.linear.quantization.format import PackedTensor, QuantizationFormat, Read
from graphdecode.linear.quantization.groups import MXFP4, Groups
from graphdecode.linear.weight_form import Stored

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # per block


class Mxfp4(QuantizationFormat):
    """gpt-oss's experts; see the module's docstring."""

    name = "mxfp4"
    weight_types = (MXFP4,)

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for name, blocks in tensors.items():
            weight_name = name.removesuffix(_BLOCKS)
            scales = tensors.get(f"{weight_name}{_SCALES}")
            if weight_name == name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
                continue
            if len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BYTES):
                experts, rows, groups = scales.shape
                stored = Stored((experts, groups * 2 * _BYTES, rows), MXFP4.name)
                tensor_names = {"blocks": name, "scales": f"{weight_name}{_SCALES}"}
                yield weight_name, PackedTensor(stored, tensor_names, _mxfp4_groups, is_stack=True)


def _mxfp4_groups(*, blocks: Tensor, scales: Tensor) -> Groups:
    exponents = scales.flatten(0, 1).view(torch.float8_e8m0fnu)
    return Groups("e2m1", 4, blocks.flatten(0, 1).flatten(1), exponents, None, 2 * _BYTES)
