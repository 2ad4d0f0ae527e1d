"""Slots for rows that ask for nothing, for a little of everything, or are hostile; and what filters leave of a row."""

import numpy as np
import torch
from torch import Tensor

from graphdecode.engine.steps.step import RowSampling, token_mask
from graphdecode.kernels.model.advance import AdvanceState
from graphdecode.kernels.sampling.follow_automata import ACCEPTS, COMPLETES
from graphdecode.kernels.sampling.sample_and_advance import BLOCK, sample_and_advance_triton
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    MASK_BITS,
    PROMPT_BIT,
    LogprobOutputs,
    SamplingCapacity,
    SamplingSlots,
    masked_only,
    sampling_slots,
)

CAPACITY = SamplingCapacity(max_logprobs=20, max_stop_token_ids=5, max_logit_biases=64, max_bad_words=6)


def neutral_slots(rows: int, vocab: int = 64) -> SamplingSlots:
    """Every row is plain greedy."""
    specs = sampling_slots(CAPACITY, vocab)
    return SamplingSlots(*(torch.full((rows, *spec.sizes), spec.neutral, dtype=spec.dtype) for spec in specs))


def set_row(
    slots: SamplingSlots,
    row: int,
    *,
    biases: dict[int, float] | None = None,
    stops: tuple[int, ...] = (),
    min_position: int = 0,
    allowed: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
    **values: float,
) -> None:
    """Fill one row's slots, flags included, as an engine does."""
    biases = biases or {}
    for place, (token, value) in enumerate(biases.items()):
        slots.bias_ids[row, place] = token
        slots.bias_values[row, place] = value
    for place, token in enumerate(stops):
        slots.stop_ids[row, place] = token
    slots.min_position[row] = min_position
    if allowed is not None:
        slots.token_mask[row] = torch.from_numpy(token_mask(allowed, 32 * slots.token_mask.shape[1]))
    for place, word in enumerate(bad_words or []):
        slots.bad_words[row, place, BAD_WORD_LENGTH - len(word) :] = torch.tensor(word)
    for name, value in values.items():
        getattr(slots, name)[row] = value
    given = RowSampling(
        **values,  # type: ignore[arg-type]
        bias_ids=tuple(biases),
        stop_ids=stops,
        min_position=min_position,
        token_mask=None if allowed is None else slots.token_mask[row].numpy(),
        bad_words=tuple(map(tuple, bad_words or [])),
    )
    slots.sampling_flags[row] = given.sampling_flags


def random_rows(rows: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, SamplingSlots, Tensor, Tensor]:
    """Logits, positions, slots, counts and recent tokens of rows with random wishes; some rows are plain greedy."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=draw).item()

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw).item())

    slots = neutral_slots(rows, vocab)
    positions = torch.randint(0, 100, (rows,), dtype=torch.int32, generator=draw)
    recent = torch.randint(0, 3, (rows, BAD_WORD_LENGTH), dtype=torch.int32, generator=draw)
    for row in range(rows):
        wish = integer(0, 16)
        if wish == 0:
            continue
        set_row(
            slots,
            row,
            temperature=number(0.3, 2.0) if wish > 1 else 0.0,
            top_k=integer(0, vocab + 3) if wish & 2 else 0,
            top_p=number(0.05, 1.0) if wish & 1 else 1.0,
            min_p=number(0.0, 0.3) if wish & 4 else 0.0,
            seed=integer(-(2**62), 2**62),
            repetition_penalty=number(0.7, 1.6) if wish & 1 else 1.0,
            presence_penalty=number(-1.0, 1.0) if wish & 2 else 0.0,
            frequency_penalty=number(-0.5, 0.5) if wish & 4 else 0.0,
            biases={integer(0, vocab // 2): number(-4, 4), vocab - 1: number(-4, 4)} if wish & 2 else None,
            stops=(0, vocab - 2, masked_only(1)),
            min_position=50,
            num_logprobs=5 if wish & 4 else -1,
            allowed=sorted({integer(0, vocab) for _ in range(vocab)}) if wish > 8 else None,
            # of what was generated last, one token more; and others that do not match
            bad_words=[[*past(recent[row], int(positions[row]) + 1, length), integer(0, vocab)] for length in range(4)]
            + [[2, 2, 2, 2, 2, integer(0, vocab)]]
            if wish & 8
            else None,
        )
    logits = torch.randn(rows, vocab, generator=draw) * 3
    counts = torch.randint(-4, 4, (rows, vocab), dtype=torch.int32, generator=draw).clamp_(min=0)
    counts |= PROMPT_BIT * (torch.rand(rows, vocab, generator=draw) < 0.3).int()
    return logits, positions, slots, counts, recent


def random_automata(
    rng: np.random.Generator, automata: int, vocab: int, lines: int, classes: int
) -> tuple[Tensor, ...]:
    """Tables of automata; half of their states accept, some of these let nothing follow."""

    def int32(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int32))

    ends = rng.choice([0, ACCEPTS, ACCEPTS | COMPLETES], lines, p=[0.5, 0.3, 0.2])
    return (
        int32(rng.integers(0, classes, (automata, vocab))),
        int32(rng.integers(-1, lines, (lines, classes))),
        int32(rng.integers(-(2**31), 2**31, (lines, -(-vocab // MASK_BITS)))),
        int32(ends),
    )


def past(recent: Tensor, position: int, length: int) -> list[int]:
    """Return what stands at the `length` places before a position."""
    return [int(recent[place % BAD_WORD_LENGTH]) for place in range(position - length, position)]


def make_hostile(slots: SamplingSlots, first_dead: int) -> None:
    """Fill the rows from `first_dead` on with what no kernel may obey."""
    for slot in slots:
        if slot.is_floating_point():
            slot[first_dead:] = torch.nan
        else:
            slot[first_dead:] = torch.iinfo(slot.dtype).max
    slots.top_k[first_dead:] = torch.iinfo(torch.int32).min


def logprob_outputs(rows: int) -> LogprobOutputs:
    """Outputs filled with a value that no log-probability has."""
    return LogprobOutputs(
        torch.full((rows,), 7.0),
        torch.full((rows,), -7, dtype=torch.int32),
        torch.full((rows, CAPACITY.max_logprobs), 7.0),
        torch.full((rows, CAPACITY.max_logprobs), -7, dtype=torch.int32),
    )


def ended_step(
    logits: Tensor,
    positions: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    token_counts: Tensor | None,
    recent_tokens: Tensor | None,
    block: int = BLOCK,
    capacity: int = 16384,
) -> Tensor:
    """The tokens that the end of a step samples on a GPU, int64 [b]; the rest of the step's end is not looked at."""
    rows, where = logits.shape[0], logits.device

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=where)

    counted, remembered = (None if book is None else book.clone() for book in (token_counts, recent_tokens))
    fed, step = zeros(rows, dtype=torch.int64), zeros(1, dtype=torch.int64)
    ring = zeros(1, rows, dtype=torch.int64)
    state = AdvanceState(fed, positions.clone(), zeros(rows), step, zeros(1), ring, counted, recent_tokens=remembered)
    sampled = torch.full((rows,), -7, dtype=torch.int64, device=where)
    outputs = LogprobOutputs(*(tensor.to(where) for tensor in logprob_outputs(rows)))
    sample_and_advance_triton(state, sampled, outputs, logits, live_rows, slots, None, block, capacity)
    return sampled


def kept_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """What the filters leave of one row, float64, by sorting; the definitions as they are written."""
    wide = logits.double() / temperature
    keep = torch.ones_like(wide, dtype=torch.bool)
    if 0 < top_k < len(wide):
        keep &= wide >= wide.sort(descending=True).values[top_k - 1]
    p = torch.where(keep, wide, -torch.inf).softmax(-1)
    if top_p < 1:
        best = p.sort(descending=True).values
        enough = int((best.cumsum(0) < top_p - 1e-12).sum())
        keep &= p >= best[min(enough, len(best) - 1)]
    keep &= p >= min_p * p.max()
    p = torch.where(keep, p, 0.0)
    return p / p.sum()
