"""The next token of each row, by a compiled kernel on a CPU; see `sample`."""

import torch
from torch import Tensor

from ..native.library import LANES, NativeCall, fits
from .logit_processing import COUNT_MASK
from .sampling_slots import DEAD_TOKEN, FLAG_BIAS, FLAG_PENALTIES, FLAG_SAMPLE, FLAG_STOP_MASK


def native_sample(
    sampled: Tensor,
    logits: Tensor,
    positions: Tensor,
    live_rows: Tensor,
    sampling_flags: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    stop_ids: Tensor,
    min_position: Tensor,
    token_counts: Tensor | None,
) -> NativeCall | None:
    """Return the compiled choice over these tensors, if there is one for them; see `sample` for what they are."""
    if not fits(logits) or logits.stride(1) != 1:
        return None
    rows, vocab = logits.shape
    lanes = max(min(rows, torch.get_num_threads()), 1)
    memory = torch.empty(lanes, 3, -(-vocab // LANES) * LANES)
    rows_of = (positions, live_rows, sampling_flags, temperature, top_k, top_p, min_p, seed)
    processing = (repetition_penalty, presence_penalty, frequency_penalty, bias_ids, bias_values, stop_ids)
    counts_stride = 0 if token_counts is None else token_counts.stride(0)
    sizes = (rows, vocab, logits.stride(0), counts_stride, bias_ids.shape[1], stop_ids.shape[1], lanes)
    numbers = (DEAD_TOKEN, COUNT_MASK, FLAG_SAMPLE, FLAG_PENALTIES, FLAG_BIAS, FLAG_STOP_MASK)
    tensors = (sampled, logits, *rows_of, *processing, min_position, token_counts, memory)
    return NativeCall("sample", logits.dtype, *tensors, *sizes, *numbers)
