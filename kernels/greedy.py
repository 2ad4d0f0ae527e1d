"""The most likely token of each row that wants nothing else, by a compiled kernel on a CPU."""

import torch
from torch import Tensor

from .native import NativeCall, fits


def native_greedy(
    sampled: Tensor, logits: Tensor, sampling_flags: Tensor, live_rows: Tensor, allowed_flags: int
) -> NativeCall | None:
    """Return the compiled choice over fixed tensors, if there is one for them; rows with other flags are left alone.

    Args:
        sampled: int64 [b], written; of equal logits the first wins, and a NaN is the largest.
        logits: [b, vocab], rows contiguous.
        sampling_flags: int32 [b].
        live_rows: int32 [1].
        allowed_flags: that a row may have and still be greedy.
    """
    if not fits(logits) or logits.stride(1) != 1 or sampling_flags.dtype != torch.int32:
        return None
    sizes = (allowed_flags, logits.shape[1], logits.stride(0))
    return NativeCall("greedy", logits.dtype, sampled, logits, sampling_flags, live_rows, *sizes)
