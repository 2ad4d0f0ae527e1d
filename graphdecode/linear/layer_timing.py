"""Times the products of a layer one after another, as they are captured: what is fastest by itself may not be there.

A product that starts early lengthens the one behind it where its programs come to lie unevenly, and shortens it where
it asks for weights in time. So of each product the fastest kernels of each kind are tried in the whole layer. Where a
product does not read the one before it, a norm stands in the place of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from graphdecode.kernels.linear.small_linear import SmallLinearConfig
from graphdecode.linear.small_linear_timing import GraphClock, LayerProduct

_COLD_BYTES = 256 << 20  # of all layers in a graph, more than any L2 cache
_COPIES = 16  # most layers
_MARGIN = 1.005  # by which another kernel must make the layer faster
_SWEEPS = 2  # over all products


class LayerRace:
    """Times a layer with any kernels of its products.

    `products`: in their order; each has won a contest of its own.
    """

    def __init__(self, products: Sequence[LayerProduct], clock: GraphClock) -> None:
        self._products, self._clock = products, clock
        nbytes = sum(product.contest.weight.nbytes for product in products)
        self._copies = min(max(math.ceil(_COLD_BYTES / nbytes), 1), _COPIES)
        self._weights = [
            [weight, *(weight.clone() for _ in range(self._copies - 1))]
            for weight in (product.contest.weight for product in products)
        ]

    def _calls(self, configs: Sequence[SmallLinearConfig | None]) -> list[Callable[[], None]]:
        calls: list[Callable[[], None]] = []
        for copy in range(self._copies):
            for place, (product, config) in enumerate(zip(self._products, configs, strict=True)):
                before = self._products[place - 1].contest  # of the first product the last one of the layer before
                if not before.preceding(self._products[place - 1].config).feeds(product.contest.weight.shape[1]):
                    calls.append(product.contest.write_norm)
                calls.append(product.contest.call_of(self._weights[place][copy], config))
        return calls

    def seconds(self, configs: Sequence[SmallLinearConfig | None]) -> float:
        """Return the time of one layer."""
        calls = self._calls(configs)
        return self._clock.seconds(calls) * len(calls) / self._copies


def fastest_layer(products: Sequence[LayerProduct], clock: GraphClock) -> tuple[list[SmallLinearConfig | None], float]:
    """Return the kernels of a layer's products that make it fastest (None: cuBLAS), and its time in seconds."""
    race, chosen = LayerRace(products, clock), [product.config for product in products]
    best_s = race.seconds(chosen)
    for _ in range(_SWEEPS):
        before = list(chosen)
        for place, product in enumerate(products):
            for config in product.kinds:
                tried = [*chosen[:place], config, *chosen[place + 1 :]]
                if tried != chosen and (seconds_taken := race.seconds(tried)) * _MARGIN < best_s:
                    chosen, best_s = tried, seconds_taken
        if chosen == before:
            break
    return chosen, best_s
