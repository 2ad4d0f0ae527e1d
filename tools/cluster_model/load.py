"""Requests as the internet sends them: a day with its night, bursts, and a few beginnings that most prompts have."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from cluster_model.simulation import Request

Rate = Callable[[float], float]  # requests a second, at a time


def arrivals(rate: Rate, peak: float, seconds: float, draw: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate changes (thinning; Lewis and Shedler, 1979).

    Args:
        rate: never above `peak`.
        peak: in requests a second.
        seconds: that it lasts.
        draw: of chance.
    """
    now = draw.expovariate(peak)
    while now < seconds:
        if draw.random() * peak <= rate(now):
            yield now
        now += draw.expovariate(peak)


def day(mean: float, seconds: float, bursts: list[tuple[float, float, float]]) -> Rate:
    """Return the rate of a day that is quietest at its beginning, with bursts on top.

    Args:
        mean: requests a second without the bursts; the night has a third of the noon's.
        seconds: of the day.
        bursts: begin, end and the factor of each.
    """

    def rate(now: float) -> float:
        factor = max((more for begin, end, more in bursts if begin <= now < end), default=1.0)
        return mean * factor * (1 - 0.5 * math.cos(2 * math.pi * now / seconds))

    return rate


def requests(times: Iterator[float], *, prefixes: int, sizes: tuple[int, int, int], seed: int) -> Iterator[Request]:
    """Yield a request for each time; the popularity of beginnings is Zipf's, lengths of answers are exponential.

    Args:
        times: of arrival.
        prefixes: beginnings that there are.
        sizes: tokens of a beginning, of the prompt behind it, and of an answer in the mean.
        seed: of chance.
    """
    draw = random.Random(seed)
    sums = list(accumulate(1 / rank for rank in range(1, prefixes + 1)))
    prefix_tokens, prompt_tokens, answer_tokens = sizes
    for time in times:
        prefix = bisect_left(sums, draw.random() * sums[-1])
        length = max(1, round(draw.expovariate(1 / answer_tokens)))
        yield Request(time, prefix, prefix_tokens, prompt_tokens, length)
