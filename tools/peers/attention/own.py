"""This runtime's paged attention, as a peer among others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from graphdecode.attention import PagedDecodeAttention
from peers.attention.peer import AttentionPeer, Calls
from peers.attention.problem import PAGE_SIZE, AttentionProblem
from peers.attention.timing import median_us, prepare

_CALLS = 32


class GraphdecodeAttention(AttentionPeer):
    """Planned once, as in a step."""

    name = "graphdecode"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        attention = _planned(problem)
        return [partial(_run, attention, problem, cache) for cache in problem.caches]


def _run(attention: PagedDecodeAttention, problem: AttentionProblem, cache: tuple[Tensor, Tensor]) -> Tensor:
    attention.run(problem.out, problem.q, *cache, problem.table)
    return problem.out


def _planned(problem: AttentionProblem) -> PagedDecodeAttention:
    shape = problem.shape
    attention = PagedDecodeAttention(
        max_batch_size=problem.batch,
        num_qo_heads=shape.qo_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=PAGE_SIZE,
        max_pages_per_row=problem.pages_of_row,
        dtype=shape.dtype,
        device=problem.device,
    )
    attention.plan(*_plan_inputs(problem))
    return attention


def _plan_inputs(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    before = torch.full((problem.batch,), problem.context - 1, dtype=torch.int32, device=problem.device)
    return before, torch.tensor([problem.batch], dtype=torch.int32, device=problem.device)


def plan_us(problem: AttentionProblem) -> float:
    """Return the microseconds of the plan by itself, in a graph of many; on a GPU."""
    attention = _planned(problem)
    plan = partial(attention.plan, *_plan_inputs(problem))
    return median_us(prepare([plan] * _CALLS, problem.device))
