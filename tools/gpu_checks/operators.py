"""Attention in levels, and sampling of the surfaces: each captured in a graph, with the bytes that it must read.

python -m gpu_checks.operators DEVICE        known figures are not measured again
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import gpu_checks.absent  # noqa: F401 (first)
from gpu_checks.figures import Figures
from graphdecode.cascade import MultiLevelCascadeAttentionWrapper
from graphdecode.sampling import (
    chain_speculative_sampling,
    softmax,
    top_k_renorm_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
)

CALLS, REPEATS = 10, 5


class Sizes(NamedTuple):
    """Sizes on a GPU, or of a rehearsal."""

    rows: int
    shared_tokens: int
    own_tokens: int
    heads: int
    kv_heads: int
    vocab_size: int


OF_GPU, OF_CPU = Sizes(64, 8192, 512, 32, 8, 128256), Sizes(2, 32, 16, 2, 1, 64)
_PAGE, _HEAD_DIM = 16, 128


class Case(NamedTuple):
    """An operation to time, and the bytes that it must read."""

    call: Callable[[], object]
    nbytes: int


def call_us(call: Callable[[], object], device: str) -> float:
    """Return the time of a call, on a GPU of one in a captured graph."""
    call()
    if device == "cpu":
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def _lists(rows: int, pages: int, first: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lists of a level: where each row's pages begin, the pages, and tokens in each last page."""
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=device) * pages
    indices = torch.arange(first, first + rows * pages, dtype=torch.int32, device=device)
    return indptr, indices, torch.full((rows,), _PAGE, dtype=torch.int32, device=device)


def cascade(device: str, sizes: Sizes) -> Case:
    """Attention of rows over a prefix that all share, and over keys of their own."""
    shared_pages, own_pages = sizes.shared_tokens // _PAGE, sizes.own_tokens // _PAGE
    levels = [_lists(1, shared_pages, 0, device), _lists(sizes.rows, own_pages, shared_pages, device)]
    pages = shared_pages + sizes.rows * own_pages
    keys, values = (torch.randn(pages, _PAGE, sizes.kv_heads, _HEAD_DIM, device=device).bfloat16() for _ in range(2))
    q = torch.randn(sizes.rows, sizes.heads, _HEAD_DIM, device=device).bfloat16()
    of_rows = torch.arange(sizes.rows + 1, dtype=torch.int32, device=device)
    wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(128 << 20, dtype=torch.uint8, device=device))
    indptr, indices, last_lengths = map(list, zip(*levels, strict=True))
    wrapper.plan(
        [of_rows[:: sizes.rows].contiguous(), of_rows], indptr, indices, last_lengths, sizes.heads, sizes.kv_heads,
        _HEAD_DIM, _PAGE, q_data_type=torch.bfloat16,
    )  # fmt: skip
    return Case(lambda: wrapper.run(q, (keys, values)), keys.nbytes + values.nbytes)


def sampling(device: str, sizes: Sizes) -> dict[str, Case]:
    """Filters and draws over a batch's probabilities."""
    logits = torch.randn(sizes.rows, sizes.vocab_size, device=device) * 3
    probs = softmax(logits)
    drafts = torch.randint(0, sizes.vocab_size, (sizes.rows, 3), dtype=torch.int32, device=device)
    of_drafts, of_target = (probs[:, None].expand(-1, count, -1).contiguous() for count in (3, 4))
    calls: dict[str, Callable[[], object]] = {
        "softmax": lambda: softmax(logits),
        "top_k_renorm_probs": lambda: top_k_renorm_probs(probs, 50),
        "top_p_renorm_probs": lambda: top_p_renorm_probs(probs, 0.9),
        "top_k_top_p_sampling_from_probs": lambda: top_k_top_p_sampling_from_probs(probs, 50, 0.9, seed=1, offset=1),
    }
    cases = {name: Case(call, probs.nbytes) for name, call in calls.items()}
    verified = Case(
        lambda: chain_speculative_sampling(of_drafts, drafts, of_target, seed=1, offset=1),
        of_drafts.nbytes + of_target.nbytes,
    )
    return cases | {"chain_speculative_sampling": verified}


def main() -> None:
    """Measure all operations."""
    device, figures = sys.argv[1], Figures()
    sizes = OF_GPU if device == "cuda" else OF_CPU
    cases = {"cascade": cascade(device, sizes)} | sampling(device, sizes)
    for name, case in cases.items():
        key = f"operator {name}, {sizes.rows} rows"
        if key not in figures:
            taken_us = call_us(case.call, device)
            figures.add(key, us=taken_us, nbytes=case.nbytes, gb_per_s=case.nbytes / taken_us / 1e3)


if __name__ == "__main__":
    main()
