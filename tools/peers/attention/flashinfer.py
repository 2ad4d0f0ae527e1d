"""FlashInfer's paged decode attention, with and without tensor cores. No committed result comes from it yet."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch

from peers.attention.peer import AttentionPeer, Calls
from peers.attention.problem import PAGE_SIZE, AttentionProblem

_WORKSPACE_BYTES = 256 << 20


class Flashinfer(AttentionPeer):
    """`BatchDecodeWithPagedKVCacheWrapper`, planned once, over the same pages."""

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
