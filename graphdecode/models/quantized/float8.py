"""Weights in float8, e4m3, with a scale for all of a weight, for each row, or for blocks of rows and columns.

DeepSeek's and Qwen's checkpoints have `NAME.weight_scale_inv` for blocks of 128 x 128, which multiplies in spite of its
name; others have `NAME.weight_scale`, of the whole weight or of each row (FBGEMM).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graphdecode.errors import shown
from graphdecode.linear.groups import Groups
from graphdecode.linear.weight_form import Stored
from graphdecode.models.fields import UnsupportedModelError
from graphdecode.models.quantized.packed_tensor import PackedTensor, Read, is_one_of
from graphdecode.models.weight_map import CheckpointError

_SCALES = ("F32", "F16", "BF16", "F8_E8M0")


@dataclass(frozen=True)
class _Weight(PackedTensor):
    block: tuple[int, int]  # rows and columns that share a scale

    def groups(self, read: Read) -> Groups:
        """Return it as it is stored."""
        codes, scales = (read(name, ()) for name in self.tensors)
        rows, columns = self.block
        return Groups("e4m3", 8, codes, scales if scales.ndim == 2 else scales.reshape(-1, 1), None, columns, rows)


class Float8:
    """What transformers calls fine-grained fp8, and fp8 with a scale for all of a weight."""

    name: ClassVar[str] = "fp8"
    spare: ClassVar[tuple[str, ...]] = (".input_scale", ".activation_scale", ".input_scale_inv")
    of_integers = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        is_one_of(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        is_one_of(settings, "expert_dtype", ("fp8",), "fp8")
        block = settings.get("weight_block_size")
        if block is not None and (
            not isinstance(block, list)
            or len(block) != 2
            or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in block)
        ):
            raise UnsupportedModelError(f"quantization_config: weight_block_size must be two sizes, got {shown(block)}")
        self._block = None if block is None else (block[0], block[1])

    def find(self, tensors: Mapping[str, Stored], read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Yield the weights in float8."""
        for name, stored in tensors.items():
            if stored.dtype != "F8_E4M3" or not name.endswith(".weight") or len(stored.shape) != 2:
                continue
            scale = next((found for end in ("_scale_inv", "_scale") if (found := name + end) in tensors), None)
            if scale is None:
                raise CheckpointError(f"{name} is F8_E4M3, and there is no {name}_scale_inv and no {name}_scale")
            block = self._block_of(name, stored.shape, tensors[scale])
            yield name, _Weight(Stored(stored.shape, "FP8"), (name, scale), block)

    def _block_of(self, name: str, shape: tuple[int, ...], scale: Stored) -> tuple[int, int]:
        rows, columns = shape
        dims = (*scale.shape, 1, 1)[:2]
        blocks = [(rows, columns), (1, columns)]
        if self._block is not None:
            blocks.append((min(self._block[0], rows), min(self._block[1], columns)))
        for block in blocks:
            if dims == (-(-rows // block[0]), -(-columns // block[1])) and scale.dtype in _SCALES:
                return block
        expected = "one of the weight, one of each row" + (f", one of {self._block}" if self._block else "")
        raise CheckpointError(
            f"{name}: the scales are {scale.dtype} {list(scale.shape)} for a weight {list(shape)}, and should be "
            f"{expected}"
        )


class FbgemmFloat8(Float8):
    """FBGEMM's fp8: a scale for each row."""

    name: ClassVar[str] = "fbgemm_fp8"
