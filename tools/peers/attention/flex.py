"""torch's flex_attention, compiled, over keys and values that were gathered before."""

from __future__ import annotations

from functools import partial

import torch

from peers.attention.peer import AttentionPeer, Calls
from peers.attention.problem import AttentionProblem


class Flex(AttentionPeer):
    """Compiled for the shape at hand alone; on a CPU that takes a C++ compiler."""

    name = "flex"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # a new shape at every point of a grid: past a few, they would run uncompiled
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
        return [partial(attend, q, k, v, enable_gqa=True) for k, v in problem.contiguous]
