"""Rows whose logits and wishes are as odd as they may be, for comparing versions of the sampler."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sampling_rows import random_rows
from torch import Tensor

from graphdecode.kernels.sampling.sampling_slots import FLAG_SAMPLE, SamplingSlots

TEMPERATURES = (1e-5, 0.1, 0.7, 1.0, 1.0, 1.3, 4.0, 1e30)
SHARES = (0.0, 1e-7, 0.3, 0.7, 0.9, 0.95, 0.999, 0.9999999, 1.0, 1.0)
MINIMA = (0.0, 0.0, 0.0, 0.05, 0.5, 1.0)


def logits_of_a_kind(vocab: int, chosen: random.Random, draw: torch.Generator) -> Tensor:
    """One row, float32 [vocab]."""
    logits = torch.randn(vocab, generator=draw)
    kind = chosen.randrange(12)
    if kind == 0:  # flat
        return logits * chosen.choice([0.0, 1e-6, 0.01, 0.3])
    if kind == 1:  # sharp
        return logits.abs().pow(3) * 4
    if kind == 2:  # many ties
        return (logits * 2).round()
    if kind == 3:  # of two values
        return torch.where(logits > chosen.uniform(-2, 2), 5.0, chosen.choice([4.999, 1.0, -30.0]))
    if kind == 4:  # far from 0
        return logits * 3 + chosen.choice([-1e4, 3e7, -80.0, 1e30])
    if kind == 5:  # large
        return logits * chosen.choice([50.0, 1e4, 1e37])
    if kind == 6:  # mostly masked
        return torch.where(torch.rand(vocab, generator=draw) < 0.9, -torch.inf, logits)
    if kind == 7:  # nothing to choose from, or a number that is none
        place = chosen.randrange(vocab)
        logits[place] = chosen.choice([torch.nan, torch.inf, -torch.inf])
        return logits if chosen.random() < 0.8 else torch.full((vocab,), -torch.inf)
    if kind == 8:  # zeros of both signs
        return torch.where(logits > 0, 0.0, -0.0)
    return logits * chosen.uniform(0.5, 8)


def hostile_rows(rows: int, seed: int) -> tuple[Tensor, Tensor, SamplingSlots, Tensor, Tensor, tuple[int, int]]:
    """Return logits, positions, slots, counts, recent tokens; and a block's ids and a list's candidates."""
    chosen, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab = chosen.choice([45, 64, 100, 150, 256])
    logits, positions, slots, counts, recent = random_rows(rows, vocab, seed)
    for row in range(rows):
        logits[row] = logits_of_a_kind(vocab, chosen, draw)
        if int(slots.sampling_flags[row]) & FLAG_SAMPLE:
            slots.temperature[row] = chosen.choice(TEMPERATURES)
            slots.top_p[row] = chosen.choice(SHARES)
            slots.min_p[row] = chosen.choice(MINIMA)
            slots.top_k[row] = chosen.choice([0, 0, -1, 1, 2, 5, 20, vocab - 1, vocab, vocab + 1])
    dtype = chosen.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    return logits.to(dtype), positions, slots, counts, recent, (chosen.choice([32, 64]), chosen.choice([1, 16, 512]))


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Let a kernel's functions be interpreted without making Triton's language ready anew for each call."""
    import triton.language as tl
    from triton.runtime import interpreter

    made_ready = interpreter._patch_lang

    def once(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        languages = [module for module in modules if module in (tl, tl.core)]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return made_ready(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = made_ready
