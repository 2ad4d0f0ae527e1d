"""The types in which a GGUF file keeps weights: how many values a block has, and how many bytes."""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """One type of GGUF, by the name that ggml has for it.

    Attributes:
        name: such as "Q4_K".
        values: of a block; 1 for a type that is no block.
        nbytes: of a block.
    """

    name: str
    values: int
    nbytes: int

    def size(self, values: int) -> int:
        """Return the bytes of so many values, a multiple of a block's."""
        return values // self.values * self.nbytes


# by the number that a file has for it; what is not here is no weight (I8, ...), or never stored (Q8_1, Q8_K)
BLOCK_TYPES = {
    number: BlockType(*described)
    for number, described in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}
BLOCK_TYPE_NAMES = frozenset(block.name for block in BLOCK_TYPES.values())
