"""Which path reads the weight of a linear layer fastest: measured, once for each shape."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], None]  # writes the product of its second argument into its first
_REPETITIONS = 7
_MARGIN = 1.15  # by so much another path must be faster than the one before it: a busy machine may not turn the choice
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

    def choose(
        self,
        weight: Tensor,
        bias: Tensor | None,
        batch_sizes: tuple[int, ...],
        paths: Mapping[str, Callable[[], Product]],
    ) -> str:
        """Return the path that takes the least time: the geometric mean over the batch sizes.

        Args:
            weight: the plain weight, on the CPU.
            bias: [out_features] or None.
            batch_sizes: how many rows a decode step may have.
            paths: name of each path -> what makes its product, the one that is to be preferred first.
        """
        key = (tuple(weight.shape), weight.dtype, torch.get_num_threads(), batch_sizes, bias is not None)
        if key not in self.choices:
            best, best_s = "", float("inf")
            for path, make in paths.items():
                seconds = self._typical_seconds(make(), weight, batch_sizes)
                if seconds * (_MARGIN if best else 1.0) < best_s:
                    best, best_s = path, seconds
            self.choices[key] = best
        return self.choices[key]

    def _typical_seconds(self, product: Product, weight: Tensor, batch_sizes: tuple[int, ...]) -> float:
        typical = 1.0
        for rows in batch_sizes:
            x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
            out = torch.empty(rows, weight.shape[0], dtype=weight.dtype)
            typical *= self._best_seconds(product, out, x) ** (1 / len(batch_sizes))
        return typical

    def _best_seconds(self, product: Product, out: Tensor, x: Tensor) -> float:
        product(out, x)
        best = float("inf")
        for _ in range(_REPETITIONS):
            if self._eviction is not None:
                self._eviction.add_(1)
            start = time.perf_counter()
            product(out, x)
            best = min(best, time.perf_counter() - start)
        return best
