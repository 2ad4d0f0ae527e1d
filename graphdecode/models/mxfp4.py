"""MXFP4 in safetensors (Open Compute Project, Microscaling Formats, 2023): 32 four-bit floats share a power of two.

gpt-oss comes so: `NAME_blocks`, uint8 [experts, out_features, in_features / 32, 16], two values a byte, the lower half
first, and `NAME_scales`, uint8 [experts, out_features, in_features / 32], exponents from -127 on. What `NAME` would be
is their transpose, [experts, in_features, out_features], and as such a source lists it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphdecode.linear.weight_form import Shard, Stored

BLOCKS, SCALES = "_blocks", "_scales"
_DTYPE = "MXFP4"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of an exponent of two bits and a fraction of one
_BYTES, _BIAS = 16, 127  # of a block, of its exponent


def joined(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Return the same tensors, blocks and scales that belong together under the name of what they stand for."""
    found = dict(tensors)
    for name, blocks in tensors.items():
        plain = name.removesuffix(BLOCKS)
        scales = tensors.get(f"{plain}{SCALES}")
        if plain == name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        if len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BYTES):
            experts, rows, groups = scales.shape
            del found[name], found[f"{plain}{SCALES}"]
            found[plain] = Stored((experts, groups * 2 * _BYTES, rows), _DTYPE)
    return found


def read_joined(
    read: Callable[[str, tuple[slice, ...]], Tensor],
    name: str,
    shape: tuple[int, ...],
    out: Tensor,
    shard: Shard | None,
) -> None:
    """Write what blocks and scales stand for, or a part of it, into `out`; only the experts of the part are read.

    Args:
        read: returns a part of a tensor by its name.
        name: as `joined` has it.
        shape: of the whole.
        out: of the part's shape.
        shard: the part; None: the whole.
    """
    experts, *rest = (slice(None),) if shard is None else shard.slices(shape)
    whole = dequantised(read(f"{name}{BLOCKS}", (experts,)), read(f"{name}{SCALES}", (experts,)))
    out.copy_(whole.transpose(1, 2)[(slice(None), *rest)])


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of blocks uint8 [..., groups, 16] with scales uint8 [..., groups], fp32 [..., 32 * groups]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    # every product is exact in fp32, but for those below its smallest normal number
    return torch.ldexp(values[halves.int()], scales.int().unsqueeze(-1) - _BIAS).flatten(-2)
