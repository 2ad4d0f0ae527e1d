"""An exponential race: the draw from a row's kept tokens.

Token i arrives after E_i / w_i, and the first one is drawn, the lowest id on ties. E_i = -log(u_i) is exponential,
w_i = exp(l_i - max l), l the logits over the temperature: so P(i) = w_i / sum(w), as for the largest l_i - log(E_i)
("Gumbel-max"). u_i is noise of (seed, position, i) (`philox`): a change of one logit changes the arrival of its token
alone, and rounding of logits by d moves a draw only if the first two arrivals are closer than a factor of exp(2 d).

Noise. 1 - u_i = (word + 1/2) 2^-32, so E_i lies in [2^-33, 22.9]; probabilities are off by less than 2^-32 times the
number of tokens, and a token exp(-26) times as likely as the most likely one is never drawn. -log(u) is taken as
-log1p(-(1 - u)), which has all bits of small E, those of winners. As it is at least 1 - u, a token can only win if
1 - u_i <= w_i t, t the earliest arrival so far: this comparison spares nearly all logarithms, and where w_i t < 2^-33
the noise itself. Neither changes a draw.

Precision. The CPU's arrivals are float64 (relative error 2^-51): from the same logits all instruction sets draw the
same tokens. The GPU's keys l_i - max l - log(E_i) are float32, with an error below 4e-6: about as many draws in a
million differ from the CPU's.
"""

import numpy as np

from ..native.optional_triton import tl, triton
from .philox import NOISE_IDS, noise_words

_LEAST_SHARE = 2.0**-33


@triton.jit
def race_keys(distances, words):
    """Return float32 keys, the largest of which wins: distances from the largest logit, <= 0, minus log(E)."""
    share = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u, of all bits where it is small
    u = ((~words).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    z = share / (2.0 - share)  # -log(1 - share) = 2 atanh(z), z < 1/7
    square = z * z
    series = 2.0 * z * (1.0 + square * (0.33333334 + square * (0.2 + square * 0.14285715)))
    return distances - tl.log(tl.where(share < 0.25, series, -tl.log(u)))


@triton.jit
def best_of(keys, ids):
    """Return the largest key, and the lowest id that has it."""
    best = tl.max(keys, axis=0)
    return best, tl.min(tl.where(keys == best, ids, 2147483647), axis=0)


def race(logits: np.ndarray, kept: np.ndarray, seed: int, position: int) -> int:
    """Return the token that is drawn.

    Args:
        logits: float32 [vocab], over the temperature; the largest is finite.
        kept: bool [vocab], what the filters left, the most likely token included.
        seed: any int64.
        position: of the token that is drawn.
    """
    leader = int(logits.argmax())
    weights = np.zeros((-(-len(logits) // NOISE_IDS), NOISE_IDS))
    distances = logits.astype(np.float64) - np.float64(logits[leader])
    np.exp(distances, out=weights.reshape(-1)[: len(logits)], where=kept)

    def shares_of(blocks: np.ndarray) -> np.ndarray:
        return (noise_words(seed, position, blocks) + 0.5) * 2.0**-32  # 1 - u

    earliest = -np.log1p(-shares_of(np.array([leader // NOISE_IDS]))[0, leader % NOISE_IDS])
    blocks = np.flatnonzero((weights * earliest >= _LEAST_SHARE).any(axis=1))
    shares, weights = shares_of(blocks), weights[blocks]
    rows, columns = np.nonzero(shares <= weights * earliest)
    first = int((-np.log1p(-shares[rows, columns]) / weights[rows, columns]).argmin())
    return int(blocks[rows[first]]) * NOISE_IDS + int(columns[first])
