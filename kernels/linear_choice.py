"""Which path reads the weight of a linear layer fastest: measured, once for each shape."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .linear import linear
from .packed_linear import packed_linear

_REPETITIONS = 7
_PLAIN_MARGIN = 1.15  # the plain product must be so much faster to be chosen: it is the one that load slows down
_EVICTION_BYTES = 64 * 2**20  # more than a last-level cache slice holds


class LinearTuner:
    """Times the paths of a linear layer on this machine, once per shape, dtype, thread count and batch sizes.

    Args:
        model_bytes: the weights that one step reads in all. Beyond the size of a cache, each timed run
            finds the weight evicted, as it will be in the model.
    """

    def __init__(self, model_bytes: int = 0) -> None:
        self.choices: dict[tuple[object, ...], str] = {}
        """The path chosen for each (shape, dtype, threads, batch sizes, has bias), for reports."""
        cold = model_bytes > _EVICTION_BYTES // 2
        self._eviction = torch.zeros(_EVICTION_BYTES // 4) if cold else None

    def choose(self, weight: Tensor, packed: Tensor, bias: Tensor | None, batch_sizes: tuple[int, ...]) -> str:
        """Return "plain" or "packed", whichever takes less time: the geometric mean over the batch sizes.

        Args:
            weight: the plain weight, on the CPU.
            packed: the same weight packed.
            bias: [out_features] or None.
            batch_sizes: how many rows a decode step may have.
        """
        key = (tuple(weight.shape), weight.dtype, torch.get_num_threads(), batch_sizes, bias is not None)
        if key not in self.choices:
            ratio = 1.0
            for rows in batch_sizes:
                x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
                out = torch.empty(rows, weight.shape[0], dtype=weight.dtype)
                plain_s = self._best_seconds(linear, out, x, weight, bias)
                packed_s = self._best_seconds(packed_linear, out, x, packed, bias)
                ratio *= packed_s / plain_s
            self.choices[key] = "packed" if ratio < _PLAIN_MARGIN ** len(batch_sizes) else "plain"
        return self.choices[key]

    def _best_seconds(self, product: Callable[..., None], *arguments: Tensor | None) -> float:
        product(*arguments)
        best = float("inf")
        for _ in range(_REPETITIONS):
            if self._eviction is not None:
                self._eviction.add_(1)
            start = time.perf_counter()
            product(*arguments)
            best = min(best, time.perf_counter() - start)
        return best
