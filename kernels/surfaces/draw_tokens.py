"""Draws from rows of probabilities or of logits that are ready: a `race` of the tokens, see `sampling`."""

import torch

from ..native.optional_triton import tl, triton
from ..native.registration import AnyElement, Int32, Int64, Written, operator
from ..sampling.philox import noise_of_ids
from ..sampling.race import best_of, race_keys
from ..sampling.sample import sample
from ..sampling.sampling_slots import FLAG_SAMPLE, SamplingCapacity, SamplingSlots, sampling_slots
from .filter_probs import largest_value

_BLOCK = 2048  # ids at once
_ONE_OF_EACH = SamplingCapacity(1, 1, 1, 1)


# One program draws one token: it reads its row twice, the second time from L2.
@triton.jit
def _draw_kernel(
    sampled, valid, values, indices, seeds, positions, rows, vocab, stride, IS_LOGITS: tl.constexpr, BLOCK: tl.constexpr
):
    draw = tl.program_id(0)
    seed = tl.load(seeds + draw)
    position = tl.load(positions + draw)
    row = tl.load(indices + draw).to(tl.int64)
    in_range = (row >= 0) & (row < rows)
    line = values + tl.where(in_range, row, 0) * stride
    largest, is_strange = largest_value(line, vocab, BLOCK)
    least = -float("inf")
    if not IS_LOGITS:
        least = 0.0
    is_valid = in_range & (is_strange == 0) & (largest > least)
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], 2147483647, tl.int32)
    if is_valid:
        for block in range(tl.cdiv(vocab, BLOCK)):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            part = tl.load(line + columns, mask=columns < vocab, other=least).to(tl.float32)
            may_win = part > least
            if IS_LOGITS:
                distances = tl.where(may_win, part - largest, -float("inf"))
            else:
                distances = tl.where(may_win, tl.log(tl.where(may_win, part, 1.0)), -float("inf"))
            keys = race_keys(distances, noise_of_ids(seed, position, columns))
            key, first = best_of(tl.where(may_win, keys, -float("inf")), columns)
            token = tl.where(key > best, first, token)
            best = tl.maximum(key, best)
    is_valid &= token < vocab
    tl.store(sampled + draw, tl.where(is_valid, token, 0).to(sampled.dtype.element_ty))
    tl.store(valid + draw, is_valid)


def draw_tokens_triton(sampled, valid, values, indices, seeds, positions, is_logits) -> None:
    """Launch the kernel; see `draw_tokens`."""
    rows, vocab = values.shape
    _draw_kernel[(sampled.shape[0],)](
        sampled, valid, values, indices, seeds, positions, rows, vocab, values.stride(0), IS_LOGITS=is_logits,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip


@operator(triton_version=draw_tokens_triton)
def draw_tokens(
    sampled: Written[AnyElement],
    valid: Written[AnyElement],
    values: AnyElement,
    indices: AnyElement,
    seeds: Int64,
    positions: Int32,
    is_logits: bool,
) -> None:
    """Write a token drawn from each of the named rows.

    Args:
        sampled: int32 or int64 [b]; 0 where no token can be drawn.
        valid: bool [b], whether one can: the row exists, has neither NaN nor inf, and a token with a chance.
        values: [rows, vocab], rows contiguous: probabilities, of any sum, or logits.
        indices: int32 or int64 [b], the row of each draw.
        seeds: int64 [b], the noise is a function of these, of
        positions: int32 [b], >= 0, and of the token.
        is_logits: whether they are logits.
    """
    rows, vocab = values.shape
    in_range = (indices >= 0) & (indices < rows)
    logits = values[torch.where(in_range, indices, 0).long()].float()
    if not is_logits:
        logits = logits.clamp(min=0.0).log()
    logits.masked_fill_(~in_range[:, None], -torch.inf)
    count, device = indices.shape[0], values.device
    slots = {
        spec.name: torch.full((count, *spec.sizes), spec.neutral, dtype=spec.dtype, device=device)
        for spec in sampling_slots(_ONE_OF_EACH, vocab)
    }
    slots |= {"seed": seeds, "sampling_flags": torch.full_like(positions, FLAG_SAMPLE)}
    slots["temperature"] = torch.ones_like(slots["top_p"])
    drawn = torch.empty(count, dtype=torch.int64, device=device)
    sample(drawn, logits, positions - 1, positions.new_full((1,), count), SamplingSlots(**slots))
    valid.copy_(drawn >= 0)
    sampled.copy_(drawn.clamp_(min=0))
