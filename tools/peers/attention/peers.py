"""The peers of decode attention: ways to attend over the same caches, when they are there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from peers.attention.problem import PAGE_SIZE, AttentionProblem
from peers.known import choose
from peers.peer import Adapter

Calls = list[Callable[[], Tensor]]
_WORKSPACE_BYTES = 256 << 20  # of FlashInfer


class AttentionPeer(Adapter):
    """A way to compute decode attention. Nothing of it is imported before `calls`."""

    def why_not(self, device: torch.device) -> str:
        """Return why this peer cannot take part, for people; "" when it can be tried."""
        return self.why_not_on(device.type, "runs")

    @abstractmethod
    def calls(self, problem: AttentionProblem) -> Calls:
        """Return one call for each cache of the problem, which attends over it and returns the output.

        What depends on lengths alone is done here, as engines do it once for all layers of a step.

        Raises:
            Exception: whatever the peer raises when it cannot.
        """


class Sdpa(AttentionPeer):
    """torch's SDPA over keys and values that were gathered before: what an engine without pages pays."""

    name = "sdpa"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
        return [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in problem.contiguous]


class GatherSdpa(AttentionPeer):
    """The same over keys and values that are gathered from their pages in every call."""

    name = "gather+sdpa"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        return [partial(_gather_and_attend, problem, cache) for cache in problem.caches]


def _gather_and_attend(problem: AttentionProblem, cache: tuple[Tensor, Tensor]) -> Tensor:
    k, v = problem.gathered(cache)
    return scaled_dot_product_attention(problem.q.unsqueeze(2), k, v, enable_gqa=True)


class Flex(AttentionPeer):
    """torch's flex_attention over gathered keys, compiled for the shape alone; on a CPU that takes a C++ compiler."""

    name = "flex"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # a new shape at every point of a grid: past a few, they would run uncompiled
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        q = problem.q.unsqueeze(2)  # [batch, qo_heads, 1, head_dim]
        return [partial(attend, q, k, v, enable_gqa=True) for k, v in problem.contiguous]


class Flashinfer(AttentionPeer):
    """`BatchDecodeWithPagedKVCacheWrapper`, planned once, over the same pages. No committed result has it yet."""

    name = "flashinfer"
    requires: ClassVar = {"flashinfer": "flashinfer-python"}
    devices = ("cuda",)
    use_tensor_cores = False

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        import flashinfer

        shape, device = problem.shape, problem.device
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=self.use_tensor_cores
        )
        wrapper.plan(
            torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * problem.pages_of_row,
            problem.table.view(-1),
            torch.full((problem.batch,), (problem.context - 1) % PAGE_SIZE + 1, dtype=torch.int32, device=device),
            shape.qo_heads,
            shape.kv_heads,
            shape.head_dim,
            PAGE_SIZE,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )
        return [partial(wrapper.run, problem.q, cache, out=problem.out) for cache in problem.caches]


class FlashinferTensorCores(Flashinfer):
    """The same, with its kernels for tensor cores."""

    name = "flashinfer-tc"
    use_tensor_cores = True


ATTENTION_PEERS: dict[str, type[AttentionPeer]] = {
    peer.name: peer for peer in (Sdpa, GatherSdpa, Flex, Flashinfer, FlashinferTensorCores)
}


def parse_attention_peers(text: str) -> list[AttentionPeer]:
    """Return the peers of a list such as `"sdpa,flex"`, in its order, each once; `"all"` is all of them.

    Raises:
        ValueError: one is unknown; names those that there are.
    """
    return [peer() for peer in choose(text, ATTENTION_PEERS)]


def suitable_peers(device: torch.device) -> list[AttentionPeer]:
    """Return those that take part when none is named: on a CPU, the ones that need no compiler."""
    chosen = (Sdpa, Flex, Flashinfer, FlashinferTensorCores) if device.type == "cuda" else (Sdpa, GatherSdpa)
    return [peer() for peer in chosen]
