"""Slots for rows that ask for nothing, for a little of everything, or are hostile; and what filters leave of a row."""

import torch
from torch import Tensor

from graphdecode.kernels.sampling.sampling_slots import (
    MAX_LOGPROBS,
    PROMPT_BIT,
    SAMPLING_SLOTS,
    LogprobOutputs,
    SamplingSlots,
    sampling_flags,
)


def neutral_slots(rows: int) -> SamplingSlots:
    """Every row is plain greedy."""
    shapes = ((rows, spec.width) if spec.width else (rows,) for spec in SAMPLING_SLOTS)
    return SamplingSlots(
        *(torch.full(shape, spec.neutral, dtype=spec.dtype) for shape, spec in zip(shapes, SAMPLING_SLOTS, strict=True))
    )


def set_row(
    slots: SamplingSlots,
    row: int,
    *,
    biases: dict[int, float] | None = None,
    stops: tuple[int, ...] = (),
    min_position: int = 0,
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
    for name, value in values.items():
        getattr(slots, name)[row] = value
    asked = {
        name: value
        for name, value in values.items()
        if name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "num_logprobs")
    }
    slots.sampling_flags[row] = sampling_flags(
        **asked,  # type: ignore[arg-type]
        num_biases=len(biases),
        masks_stops=bool(stops) and min_position > 0,
    )


def random_rows(rows: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, SamplingSlots, Tensor]:
    """Logits, positions, slots and counts of rows with random wishes; some rows are plain greedy."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=draw).item()

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw).item())

    slots = neutral_slots(rows)
    for row in range(rows):
        wish = integer(0, 8)
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
            stops=(0, vocab - 2),
            min_position=50,
            num_logprobs=5 if wish & 4 else -1,
        )
    logits = torch.randn(rows, vocab, generator=draw) * 3
    positions = torch.randint(0, 100, (rows,), dtype=torch.int32, generator=draw)
    counts = torch.randint(-4, 4, (rows, vocab), dtype=torch.int32, generator=draw).clamp_(min=0)
    counts |= PROMPT_BIT * (torch.rand(rows, vocab, generator=draw) < 0.3).int()
    return logits, positions, slots, counts


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
        torch.full((rows, MAX_LOGPROBS), 7.0),
        torch.full((rows, MAX_LOGPROBS), -7, dtype=torch.int32),
    )


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
