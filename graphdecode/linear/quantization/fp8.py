"""fp8: float8 e4m3, with a scale per weight, per row, or per block of rows and columns.

DeepSeek's and Qwen's checkpoints have `NAME.weight_scale_inv` for blocks of 128 x 128, which multiplies in spite of its
name; others have `NAME.weight_scale`, per weight or per row (FBGEMM).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from graphdecode.errors import CheckpointError
from graphdecode.linear.quantization.format import FLOATS, PackedTensor, QuantizationFormat, Read, checked_block, one_of
from graphdecode.linear.quantization.groups import FP8, Groups
from graphdecode.linear.weight_form import Stored


def _float8_groups(codes: Tensor, scales: Tensor, *, block: tuple[int, int]) -> Groups:
    rows, columns = block
    return Groups("e4m3", 8, codes, scales if scales.ndim == 2 else scales.reshape(-1, 1), None, columns, rows)


class Fp8(QuantizationFormat):
    """fp8 with a scale per weight, row or block."""

    name = "fp8"
    weight_types = (FP8,)
    unused_suffixes = (".input_scale", ".activation_scale", ".input_scale_inv")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        one_of(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        one_of(settings, "expert_dtype", ("fp8",), "fp8")
        block = settings.get("weight_block_size")
        self._block = None if block is None else checked_block(block, "weight_block_size")

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for name, stored in tensors.items():
            if stored.dtype != "F8_E4M3" or not name.endswith(".weight") or len(stored.shape) != 2:
                continue
            scale = next(
                (scale_name for end in ("_scale_inv", "_scale") if (scale_name := name + end) in tensors), None
            )
            if scale is None:
                raise CheckpointError(f"{name} is F8_E4M3, and there is no {name}_scale_inv and no {name}_scale")
            unpack = partial(_float8_groups, block=self._block_of(name, stored.shape, tensors[scale]))
            yield name, PackedTensor(Stored(stored.shape, FP8.name), {"codes": name, "scales": scale}, unpack)

    def _block_of(self, name: str, shape: tuple[int, ...], scale: Stored) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        rows, columns = shape
        dims = (*scale.shape, 1, 1)[:2]
        blocks = [(rows, columns), (1, columns)]
        if self._block is not None:
            blocks.append((min(self._block[0], rows), min(self._block[1], columns)))
        for block in blocks:
            if dims == (-(-rows // block[0]), -(-columns // block[1])) and scale.dtype in (*FLOATS, "F8_E8M0"):
                return block
        expected = "one of the weight, one of each row" + (f", one of {self._block}" if self._block else "")
        raise CheckpointError(
            f"{name}: the scales are {scale.dtype} {list(scale.shape)} for a weight {list(shape)}, and should be "
            f"{expected}"
        )


class FbgemmFp8(Fp8):
    """FBGEMM's fp8: a scale per row."""

    name = "fbgemm_fp8"
