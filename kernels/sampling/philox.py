"""Philox4x32-10, the counter-based random numbers of sampling (Salmon et al., 2011, "Parallel random numbers").

A draw is a function of (seed, position) alone: key = the 64 bits of the seed, counter = (position, 0, 0, 0).
The first output word gives 24 bits; as a fraction of 2^24 they are the uniform number in [0, 1).
"""

from ..native.optional_triton import tl, triton

UNIFORM_BITS = 24
_ROUNDS = 10
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF


@triton.jit
def uniform_bits_of(seed, position):
    """Return the 24 uniform bits of (seed int64, position int32), as int64; scalars or blocks."""
    zero = (position * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, position.to(tl.uint32), zero, zero, zero)
    return (word >> 8).to(tl.int64)


def philox_words(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of Philox4x32-10 for a 64-bit key and four 32-bit counter words."""
    key_0, key_1 = key & _WORD, (key >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ key_0,
            product_1 & _WORD,
            (product_0 >> 32) ^ c3 ^ key_1,
            product_0 & _WORD,
        )
        key_0 = (key_0 + _WEYL_0) & _WORD
        key_1 = (key_1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform_bits(seed: int, position: int) -> int:
    """Return the 24 uniform bits of a draw at `position` under `seed` (any int64)."""
    return philox_words(seed, (position & _WORD, 0, 0, 0))[0] >> (32 - UNIFORM_BITS)
