"""Sample the next token of each row from its logits, by the row's sampling parameters.

Greedy rows take the largest logit, the lowest id on ties. Other rows divide by the temperature and keep - top-k: the k
largest logits, and those equal to the k-th; - top-p (Holtzman et al., 2020): of these, the most likely whose mass
reaches top_p, and those equal to the last; - min-p (Nguyen et al., 2024): of these, those at least min_p times as
likely as the most likely; and then draw from the kept tokens by their probabilities, in a `race` whose noise is a
function of (seed, position, id).

A row has no choice if a logit is NaN or +inf, if all are masked (-inf), or if the temperature drives the largest out of
float32's range: it gets an error code (`sampling_slots`) instead of a token.

Thresholds are found from integers (`token_filters`), whose sums do not depend on their order, and the race has no sums:
the token does not depend on tiling, row, bucket or other rows. Logits that are rounded otherwise draw another token
only where two tokens arrive nearly together, or stand at a threshold.
"""

import numpy as np
import torch
from torch import Tensor

from ..native.registration import Int32, Int64, Written, operator
from .logit_processing import process_row
from .philox import NOISE_IDS, ROUNDS
from .race import race
from .sampling_slots import (
    CONSTANTS,
    DEAD_TOKEN,
    FLAG_LOGPROBS,
    FLAG_SAMPLE,
    TOO_COLD,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    SamplingSlots,
)
from .token_filters import kept_tokens


def most_likely(logits: np.ndarray) -> int:
    """Return the id of the largest logit, float32 [vocab], or the code of no choice."""
    token = int(logits.argmax())  # a NaN counts as the largest
    largest = logits[token]
    return token if np.isfinite(largest) else WITHOUT_FINITE if largest < 0 else WITHOUT_NUMBERS


def drawn(line: np.ndarray, row: int, position: int, slots: SamplingSlots) -> int:
    """Return a token drawn from a row's processed logits, float32 [vocab], which are overwritten, or TOO_COLD."""
    temperature, top_k, top_p, min_p, seed = (
        slot[row].item() for slot in (slots.temperature, slots.top_k, slots.top_p, slots.min_p, slots.seed)
    )
    with np.errstate(over="ignore"):
        line /= np.float32(temperature)
        if not np.isfinite(line.max()):
            return TOO_COLD
        return race(line, kept_tokens(line, int(top_k), top_p, min_p), int(seed), position)


_CONSTANTS = CONSTANTS._asdict() | {"NOISE_IDS": NOISE_IDS, "PHILOX_ROUNDS": ROUNDS}


@operator(is_compiled=lambda logits: logits.stride(1) == 1, constants=_CONSTANTS)
def sample(
    sampled: Written[Int64],
    logits: Tensor,
    positions: Int32,
    live_rows: Int32,
    slots: SamplingSlots,
    token_counts: Int32 | None = None,
    recent_tokens: Int32 | None = None,
) -> None:
    """Write the next token of each live row into `sampled`.

    This is the CPU path and the reference; on a GPU, `sample_and_advance` includes it.

    Args:
        sampled: int64 [b]; dead rows get token 1, rows without a choice a code below -1.
        logits: [b, vocab], any float dtype, rows contiguous.
        positions: int32 [b], position of the token that was fed; the new token's is one more.
        live_rows: int32 [1]; rows from there on are not read.
        slots: the rows' sampling parameters.
        token_counts: int32 [b, vocab], for penalties; None: no row has penalties.
        recent_tokens: int32 [b, BAD_WORD_LENGTH], see `advance`; None: no row has bad words.
    """
    live = int(live_rows.item())
    tokens = sampled.numpy()
    tokens[live:] = DEAD_TOKEN
    for row, flags in enumerate(slots.sampling_flags.numpy()[:live].tolist()):
        line = logits[row].float().numpy()  # numpy's argmax is several times faster than torch's
        if not flags & ~FLAG_LOGPROBS:
            tokens[row] = most_likely(line)
            continue
        if logits.dtype == torch.float32:
            line = line.copy()
        position = int(positions[row]) + 1
        process_row(line, row, flags, position, slots, token_counts, recent_tokens)
        tokens[row] = most_likely(line)
        if flags & FLAG_SAMPLE and tokens[row] >= 0:
            tokens[row] = drawn(line, row, position, slots)
