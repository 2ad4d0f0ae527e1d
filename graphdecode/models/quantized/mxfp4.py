"""MXFP4 in safetensors (Open Compute Project, Microscaling Formats, 2023): 32 four-bit floats share a power of two.

gpt-oss comes so: `NAME_blocks`, uint8 [experts, out_features, in_features / 32, 16], two values a byte, the lower half
first, and `NAME_scales`, uint8 [experts, out_features, in_features / 32], exponents from -127 on. What `NAME` would be
is their transpose, [experts, in_features, out_features], and as such a source lists it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphdecode.linear.groups import Groups
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.quantized.packed_tensor import PackedTensor, Read

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # of a block
_GROUP = 2 * _BYTES


@dataclass(frozen=True)
class _Experts(PackedTensor):
    def groups(self, read: Read) -> None:
        """Return nothing: it is no matrix."""

    def expert(self, read: Read, expert: int) -> Groups:
        """Return one expert's weight; nothing of others is read."""
        blocks, scales = (read(name, (slice(expert, expert + 1),))[0] for name in self.tensors)
        return _rows(blocks, scales)

    def write(self, read: Read, out: Tensor, shard: Shard | None) -> None:
        """Write its values, or those of a part; only the experts of the part are read."""
        experts, *rest = (slice(None),) if shard is None else shard.slices(self.stored.shape)
        blocks, scales = (read(name, (experts,)) for name in self.tensors)
        rows = _rows(blocks.flatten(0, 1), scales.flatten(0, 1)).dequantized()
        out.copy_(rows.view(len(blocks), -1, rows.shape[1]).transpose(1, 2)[(slice(None), *rest)])


def _rows(blocks: Tensor, scales: Tensor) -> Groups:
    """Return rows of blocks [out_features, groups, bytes] and their scales [out_features, groups] as groups."""
    return Groups("e2m1", 4, blocks.flatten(1), scales.view(torch.float8_e8m0fnu), None, _GROUP)


class Mxfp4:
    """gpt-oss's experts; see the file's docstring."""

    name: ClassVar[str] = "mxfp4"
    spare: ClassVar[tuple[str, ...]] = ()
    of_integers = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Take a `quantization_config`, which says nothing more."""

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield what blocks and scales are together; what does not fit is left as it is."""
        for name, blocks in tensors.items():
            plain = name.removesuffix(_BLOCKS)
            scales = tensors.get(f"{plain}{_SCALES}")
            if plain == name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
                continue
            if len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BYTES):
                experts, rows, groups = scales.shape
                yield plain, _Experts(Stored((experts, groups * _GROUP, rows), "MXFP4"), (name, f"{plain}{_SCALES}"))
