"""Choose the next token of each row from its logits, by what the row's slots ask for.

Greedy rows take the largest logit, the lowest id on ties. Other rows divide by the temperature and keep
- top-k: the k largest logits, and those equal to the k-th;
- top-p (Holtzman et al., 2020): of these, the likeliest whose mass reaches top_p, and those equal to the last;
- min-p (Nguyen et al., 2024): of these, those at least min_p times as likely as the likeliest;
and then invert the cumulative distribution of what is kept, in the order of ids, at one uniform number that is a
function of (seed, position).

A row has no choice where a logit is NaN or +inf, where all are masked (-inf), or where the temperature drives the
largest out of float32's range: it gets the code that says so (`sampling_slots`), and no token.

Probabilities are integers here (`token_filters`). Sums of integers do not depend on their order, so the token is the
same whatever the tiling, the row, the bucket or the company.
"""

import numpy as np
import torch
from torch import Tensor

from ..native.registration import Int32, Int64, Written, operator
from .logit_processing import process_row
from .philox import uniform_bits
from .sampling_slots import (
    CONSTANTS,
    DEAD_TOKEN,
    FLAG_LOGPROBS,
    FLAG_SAMPLE,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    SamplingSlots,
)
from .token_filters import sample_row


def most_likely(logits: np.ndarray) -> int:
    """Return the largest logit's id, or why there is no choice; float32 [vocab]."""
    token = int(logits.argmax())  # a NaN counts as the largest
    largest = logits[token]
    return token if np.isfinite(largest) else WITHOUT_FINITE if largest < 0 else WITHOUT_NUMBERS


@operator(is_compiled=lambda logits: logits.stride(1) == 1, constants=CONSTANTS._asdict())
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

    This is the CPU path and the oracle; on a GPU `sample_and_advance` does the same within its launch.

    Args:
        sampled: int64 [b]; dead rows get token 1, rows without a choice a code below -1.
        logits: [b, vocab], any float dtype, rows contiguous.
        positions: int32 [b], where the token stands that was fed; the new one's position is one more.
        live_rows: int32 [1]; nothing of the rows from there on is read.
        slots: what each row asks for.
        token_counts: int32 [b, vocab] of the penalties; None: no row has penalties, whatever the flags say.
        recent_tokens: int32 [b, BAD_WORD_LENGTH], see `advance`; None: no row has bad words, whatever the flags say.
    """
    live = int(live_rows.item())
    tokens = sampled.numpy()
    tokens[live:] = DEAD_TOKEN
    filters = [slot.numpy() for slot in (slots.temperature, slots.top_k, slots.top_p, slots.min_p)]
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
            tokens[row] = sample_row(line, uniform_bits(int(slots.seed[row]), position), *(x[row] for x in filters))
