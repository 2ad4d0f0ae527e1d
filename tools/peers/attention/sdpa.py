"""torch's scaled_dot_product_attention, which reads contiguous keys: with and without the time of gathering them."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from peers.attention.peer import AttentionPeer, Calls
from peers.attention.problem import AttentionProblem


class Sdpa(AttentionPeer):
    """Over keys and values that were gathered before: what an engine without pages pays."""

    name = "sdpa"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
        return [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in problem.contiguous]


class GatherSdpa(AttentionPeer):
    """Over keys and values that are gathered from their pages in every call."""

    name = "gather+sdpa"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        return [partial(_gather_and_attend, problem, cache) for cache in problem.caches]


def _gather_and_attend(problem: AttentionProblem, cache: tuple[Tensor, Tensor]) -> Tensor:
    k, v = problem.gathered(cache)
    return scaled_dot_product_attention(problem.q.unsqueeze(2), k, v, enable_gqa=True)
