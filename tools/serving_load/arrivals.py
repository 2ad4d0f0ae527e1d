"""The load of a serving run: when requests arrive, and how long their prompts and answers are."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphdecode.errors import ArgumentError, cause

_LARGEST_SIGMA = 10  # e^10 is 22026 times the median


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens.

    Attributes:
        low: the shortest.
        high: the longest.
        median: of a log-normal distribution, cut off at `low` and `high`; None: evenly spread over them.
        sigma: of the logarithm.
    """

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Read `64`, `8-64` (evenly spread) or `lognormal:MEDIAN:SIGMA:LONGEST`.

        Args:
            option: its name, for the message.
            text: what was given.

        Raises:
            ValueError: it is none of these, or a number that no length can have.
        """
        try:
            if text.startswith("lognormal:"):
                median, sigma, high = text.split(":")[1:]
                lengths = cls(1, int(high), float(median), float(sigma))
            else:
                low, _, rest = text.partition("-")
                lengths = cls(int(low), int(rest or low))
        except ValueError:
            raise ArgumentError(
                f"{option} must be N, LOW-HIGH or lognormal:MEDIAN:SIGMA:LONGEST, got {text!r}"
            ) from None
        median_fits = lengths.median is None or 1 <= lengths.median <= lengths.high
        if not (1 <= lengths.low <= lengths.high and median_fits and 0 <= lengths.sigma <= _LARGEST_SIGMA):
            raise ArgumentError(
                f"{option} must be lengths >= 1 in ascending order, and sigma in 0..{_LARGEST_SIGMA}, got {text!r}"
            )
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        drawn = rng.lognormvariate(math.log(self.median), self.sigma)
        return min(max(round(min(drawn, self.high)), self.low), self.high)


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes, in seconds from the start, and how long its prompt and its answer are, in tokens."""

    at: float
    prompt_tokens: int
    answer_tokens: int


def poisson_arrivals(
    rate: float, count: int, prompt_tokens: Lengths, answer_tokens: Lengths, seed: int = 0, burst: int = 1
) -> list[Arrival]:
    """Return bursts of requests that arrive independently of one another; rates differ in nothing but the pace.

    Args:
        rate: requests per second, > 0.
        count: requests.
        prompt_tokens: of each prompt.
        answer_tokens: of each answer.
        seed: of the draws.
        burst: requests that arrive together.

    Raises:
        ValueError: a number that no load can have.
    """
    if not 0 < rate < math.inf or count < 1 or burst < 1:
        raise ArgumentError(
            f"rate must be > 0, the number of requests and a burst >= 1, got {rate}, {count} and {burst}"
        )
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for index in range(count):
        if index % burst == 0:
            now += burst * rng.expovariate(1.0)
        arrivals.append(Arrival(now / rate, prompt_tokens.draw(rng), answer_tokens.draw(rng)))
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """Read arrivals from a JSONL file: objects with `at` (seconds), `prompt_tokens` and `answer_tokens`, a line each.

    Raises:
        ValueError: the file cannot be read, holds no arrival, or a line holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is no trace of arrivals: {cause(error)}") from error
    arrivals = [_arrival(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise ArgumentError(f"{path} is no trace of arrivals: it is empty")
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _arrival(where: str, line: str) -> Arrival:
    try:
        record = json.loads(line)
        at, prompt_tokens, answer_tokens = (record[key] for key in ("at", "prompt_tokens", "answer_tokens"))
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{where} is no arrival: {error!r}") from error
    if type(at) not in (int, float) or not 0 <= at < math.inf:
        raise ArgumentError(f"{where}: at must be seconds >= 0, got {at!r}")
    for name, tokens in (("prompt_tokens", prompt_tokens), ("answer_tokens", answer_tokens)):
        if type(tokens) is not int or tokens < 1:
            raise ArgumentError(f"{where}: {name} must be an integer >= 1, got {tokens!r}")
    return Arrival(float(at), prompt_tokens, answer_tokens)


def offered_rate(arrivals: Sequence[Arrival]) -> float | None:
    """Return the mean rate at which requests follow the first one, in requests per second; None where none does."""
    seconds = arrivals[-1].at - arrivals[0].at
    return (len(arrivals) - 1) / seconds if seconds > 0 else None


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the same requests, closer together or further apart, so that their mean rate is another.

    Raises:
        ValueError: they have no rate, or the wanted one is impossible.
    """
    offered = offered_rate(arrivals)
    if offered is None:
        raise ArgumentError("a trace whose requests all arrive at one time has no rate that could be changed")
    if not 0 < rate < math.inf:
        raise ArgumentError(f"rate must be > 0, got {rate}")
    first = arrivals[0].at
    return [replace(arrival, at=(arrival.at - first) * offered / rate) for arrival in arrivals]
