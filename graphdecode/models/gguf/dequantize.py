"""From the bytes of a block type to float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graphdecode.linear.gguf_blocks import BlockType

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(stored: np.ndarray, block: BlockType) -> Tensor:
    """Return the values that bytes stand for.

    Args:
        stored: uint8 [rows, bytes of a row], whole blocks.
        block: their type.

    Returns:
        [rows, values of a row], float32 for what is stored in blocks, else of the stored type.
    """
    if block.name in _FLOATS:
        return torch.from_numpy(stored).view(_FLOATS[block.name])
    if block.name == "Q1_0":
        return torch.from_numpy(_q1_0(stored, block))
    import gguf.quants  # here, for models of other formats need none of it

    return torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[block.name]))


def _q1_0(stored: np.ndarray, block: BlockType) -> np.ndarray:
    """Return scale or -scale by each bit; the library knows the type, and cannot undo it."""
    blocks = stored.reshape(-1, block.nbytes)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") * np.float32(2) - np.float32(1)
    return (scales * signs).reshape(len(stored), -1)
