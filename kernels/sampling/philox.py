"""Philox4x32, the counter-based random numbers of sampling (Salmon et al., 2011, "Parallel random numbers").

A token's word of 32 bits is a function of (seed, position, id) alone: key = the 64 bits of the seed, counter =
(position, call, 0, 0). One call gives words to four ids, 16 apart, so that 16 calls serve 64 ids in their order and
vectors of up to 16 lanes need no shuffles.

There are 7 rounds, the fewest that pass all of TestU01's BigCrush (the paper's table 2); 10 are its margin, for uses
that cannot know their streams. Here a stream is one token's draw, and 3 rounds less make noise a third cheaper.
"""

from typing import Any

import numpy as np

from ..native.optional_triton import tl, triton

NOISE_IDS = 64  # ids that share some calls
ROUNDS = 7
_CALLS = NOISE_IDS // 4
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF


@triton.jit
def noise_of_ids(seed, position, ids):
    """Return the uint32 words of any int32 ids, for a seed, int64, and a position, int32."""
    zeros = (ids * 0).to(tl.uint32)
    calls = (ids // 64 * 16 + ids % 16).to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, zeros + position.to(tl.uint32), calls, zeros, zeros, n_rounds=7)
    which = ids // 16 % 4
    return tl.where(which < 2, tl.where(which == 0, first, second), tl.where(which == 2, third, fourth))


@triton.jit
def noise_of_block(seed, position, begin, IDS: tl.constexpr):
    """Return the uint32 words of the ids from `begin` on; `begin` is a multiple of IDS. Four ids share a call."""
    if IDS % 64 != 0:
        return noise_of_ids(seed, position, begin + tl.arange(0, IDS))
    calls = (begin // 4 + tl.arange(0, IDS // 4)).to(tl.uint32)
    zeros = calls * 0
    first, second, third, fourth = tl.philox(seed, zeros + position.to(tl.uint32), calls, zeros, zeros, n_rounds=7)
    words = tl.join(tl.join(first, second), tl.join(third, fourth))  # [calls, 2, 2], the last axis the pair
    return tl.reshape(tl.permute(tl.reshape(words, [IDS // 64, 16, 2, 2]), [0, 3, 2, 1]), [IDS])


def philox_words(key: int, counter: tuple[Any, Any, Any, Any], rounds: int = ROUNDS) -> tuple[Any, Any, Any, Any]:
    """Return the four 32-bit words of Philox4x32 for a 64-bit key and four counter words, ints or uint64 arrays."""
    key_0, key_1 = key & _WORD, (key >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
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


def noise_words(seed: int, position: int, blocks: np.ndarray) -> np.ndarray:
    """Return the words of ids in blocks of 64, uint64 [blocks, 64], below 2^32.

    Args:
        seed: any int64.
        position: of the token that is drawn.
        blocks: int64 [blocks], ids divided by 64.
    """
    calls = (blocks[:, None] * _CALLS + np.arange(_CALLS)).astype(np.uint64)  # [blocks, 16]
    positions, zeros = np.full_like(calls, position & _WORD), np.zeros_like(calls)
    return np.concatenate(philox_words(seed, (positions, calls, zeros, zeros)), axis=1)
