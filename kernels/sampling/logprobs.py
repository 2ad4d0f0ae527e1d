"""Log-probabilities of the sampled token, with its rank, and of the most likely ones, from unprocessed logits.

`logprob = logit - log(sum(exp(logits)))` in fp32, before temperature, penalties or any filter.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Int64, Written, operator
from .sampling_slots import CONSTANTS, FLAG_LOGPROBS, LogprobOutputs

_BLOCK = 4096


class _Meta(NamedTuple):
    """Constants of the kernels; see `SamplerMeta`."""

    TOPS: int
    BLOCK: int
    BLOCKS: int
    BLOCKS_PADDED: int


@triton.jit
def store_block_sums(block_max, block_sum, index, values):
    """Write a block's maximum, and the sum of exponentials relative to it; 0 for a block of -inf."""
    largest = tl.max(values, axis=0)
    tl.store(block_max + index, largest)
    tl.store(block_sum + index, tl.sum(tl.exp(values - tl.maximum(largest, -3.0e38)), axis=0))


@triton.jit
def row_logprobs(outputs, block_max, block_sum, line, row, token, num_top, vocab, META: tl.constexpr):
    """Write the results of `token_logprobs` for one row with logits at `line`, after `store_block_sums`.

    It reads the logits once for the rank, and then takes the `num_top` most likely tokens one by one, each from the
    block with the largest remaining logit.
    """
    blocks = tl.arange(0, META.BLOCKS_PADDED)
    maxima = tl.load(block_max + row * META.BLOCKS + blocks, mask=blocks < META.BLOCKS, other=float("-inf"))
    sums = tl.load(block_sum + row * META.BLOCKS + blocks, mask=blocks < META.BLOCKS, other=0.0)
    largest = tl.max(maxima, axis=0)
    total = largest + tl.log(tl.sum(tl.where(maxima > float("-inf"), tl.exp(maxima - largest) * sums, 0.0), axis=0))
    is_token = (token >= 0) & (token < vocab)
    logit = tl.load(line + token, mask=is_token, other=float("-inf")).to(tl.float32)
    BLOCK: tl.constexpr = META.BLOCK
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for block in tl.range(0, META.BLOCKS, num_stages=3):
        columns = block * META.BLOCK + tl.arange(0, META.BLOCK)
        values = tl.load(line + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        earlier = (values > logit) | ((values == logit) & (columns < token))
        before += (earlier & (columns < vocab)).to(tl.int32)
    tl.store(outputs.sampled_logprob + row, tl.where(is_token, logit - total, float("-inf")))
    tl.store(outputs.sampled_rank + row, tl.where(is_token, tl.sum(before, axis=0) + 1, 0))
    last_value = float("inf")
    last_id = -1
    for index in range(tl.minimum(num_top, META.TOPS)):
        chosen = tl.argmax(maxima, axis=0)
        columns = chosen * META.BLOCK + tl.arange(0, META.BLOCK)
        values = tl.load(line + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        # logits after the last token taken: smaller, or equal with a higher id
        after = (values < last_value) | ((values == last_value) & (columns > last_id))
        values = tl.where(after, values, float("-inf"))
        last_value = tl.max(values, axis=0)
        last_id = tl.min(tl.where(values == last_value, columns, 2147483647), axis=0)
        tl.store(outputs.top_logprobs + row * META.TOPS + index, last_value - total)
        tl.store(outputs.top_ids + row * META.TOPS + index, tl.where(last_value > float("-inf"), last_id, -1))
        remaining = tl.where((values == last_value) & (columns <= last_id), float("-inf"), values)
        maxima = tl.where(blocks == chosen, tl.max(remaining, axis=0), maxima)


# One program reads one block of one row, if log-probabilities are requested.
@triton.jit
def _block_sums_kernel(
    block_max, block_sum, logits, live_rows, sampling_flags, vocab, logits_stride, META: tl.constexpr, K: tl.constexpr
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    if row < tl.load(live_rows):  # noqa: SIM102 - a dead row's flags are not read
        if (tl.load(sampling_flags + row) & K.FLAG_LOGPROBS) != 0:
            columns = block * META.BLOCK + tl.arange(0, META.BLOCK)
            line = logits + row.to(tl.int64) * logits_stride
            values = tl.load(line + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
            store_block_sums(block_max, block_sum, row * tl.num_programs(1) + block, values)


# One program per row with log-probabilities.
@triton.jit
def _row_logprobs_kernel(
    outputs,
    block_max,
    block_sum,
    logits,
    sampled,
    live_rows,
    sampling_flags,
    num_logprobs,
    vocab,
    logits_stride,
    META: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0)
    if row < tl.load(live_rows):  # noqa: SIM102 - a dead row's flags are not read
        if (tl.load(sampling_flags + row) & K.FLAG_LOGPROBS) != 0:
            line = logits + row.to(tl.int64) * logits_stride
            token, num_top = tl.load(sampled + row), tl.load(num_logprobs + row)
            row_logprobs(outputs, block_max, block_sum, line, row, token, num_top, vocab, META)


def token_logprobs_triton(outputs, logits, sampled, live_rows, sampling_flags, num_logprobs, block=_BLOCK) -> None:
    """Launch the kernels, `block` ids of the vocabulary per program; see `token_logprobs`."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, block)
    block_max = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    block_sum = torch.empty_like(block_max)
    meta = _Meta(outputs.top_ids.shape[1], block, blocks, triton.next_power_of_2(blocks))
    row_inputs = (live_rows, sampling_flags)
    sizes = (vocab, logits.stride(0))
    _block_sums_kernel[(rows, blocks)](block_max, block_sum, logits, *row_inputs, *sizes, meta, CONSTANTS, num_warps=8)
    _row_logprobs_kernel[(rows,)](
        outputs, block_max, block_sum, logits, sampled, *row_inputs, num_logprobs, *sizes, meta, CONSTANTS, num_warps=8,
        **({"maxnreg": 96} if torch.version.hip is None else {}),  # or Triton 3.6 spills
    )  # fmt: skip


@operator(
    triton_version=token_logprobs_triton,
    is_compiled=lambda logits: logits.stride(1) == 1,
    constants=CONSTANTS._asdict(),
)
def token_logprobs(
    outputs: Written[LogprobOutputs],
    logits: Tensor,
    sampled: Int64,
    live_rows: Int32,
    sampling_flags: Int32,
    num_logprobs: Int32,
) -> None:
    """Write log-probabilities for the live rows with FLAG_LOGPROBS; other rows' outputs are unchanged.

    Args:
        outputs: the sampled token's log-probability and rank, from 1, and the `num_logprobs` most likely tokens, ties
            by the lower id; if fewer tokens are possible, the rest of these is -inf and -1. Further entries are
            unchanged.
        logits: [b, vocab], any float dtype, rows contiguous; unprocessed.
        sampled: int64 [b]; if it is not a token, the result is -inf and rank 0, and the rest of the row undefined.
        live_rows: int32 [1].
        sampling_flags: int32 [b].
        num_logprobs: int32 [b], requested top tokens.
    """
    num_top = num_logprobs.numpy().clip(0, outputs.top_ids.shape[1]).tolist()
    for row, flags in enumerate(sampling_flags.numpy()[: int(live_rows.item())].tolist()):
        if not flags & FLAG_LOGPROBS:
            continue
        token = int(sampled[row])
        if not 0 <= token < logits.shape[1]:
            outputs.sampled_logprob[row], outputs.sampled_rank[row] = -torch.inf, 0
            continue
        line = logits[row].float()
        wide = line.numpy()
        largest = wide.max()
        total = largest + np.log(np.exp(wide - largest).sum())
        outputs.sampled_logprob[row] = float(wide[token] - total)
        before = np.count_nonzero(wide > wide[token]) + np.count_nonzero(wide[:token] == wide[token])
        outputs.sampled_rank[row] = 1 + int(before)
        count = min(num_top[row], len(wide))
        if num_top[row] == 0:
            continue
        candidates = np.flatnonzero(wide >= torch.topk(line, count).values[-1].item())
        ids = candidates[np.lexsort((candidates, -wide[candidates]))][:count]
        outputs.top_logprobs[row, : num_top[row]] = -torch.inf
        outputs.top_logprobs[row, :count] = torch.from_numpy(wide[ids] - total)
        outputs.top_ids[row, : num_top[row]] = -1
        outputs.top_ids[row, :count] = torch.from_numpy(np.where(wide[ids] == -np.inf, -1, ids))
