"""Sets of option combinations in which every pair of choices occurs."""

from __future__ import annotations

import itertools
import random
from typing import Any


def pairwise(choices: dict[str, tuple[Any, ...]], seed: int = 0, candidates: int = 60) -> list[dict[str, Any]]:
    """Return combinations such that any two choices of any two options occur together in at least one.

    Greedy: the next combination is the one of a few random ones that covers the most pairs which are still missing.
    """
    draw = random.Random(seed)
    names = list(choices)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(choices[names[a]]))
        for j in range(len(choices[names[b]]))
    }

    def covered(picks: list[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return missing & set(itertools.combinations(enumerate(picks), 2))

    combinations = []
    while missing:
        (first, second) = draw.choice(sorted(missing))
        trials = []
        for _ in range(candidates):
            picks = [draw.randrange(len(choices[name])) for name in names]
            picks[first[0]], picks[second[0]] = first[1], second[1]
            trials.append(picks)
        best = max(trials, key=lambda picks: len(covered(picks)))
        missing -= covered(best)
        combinations.append({name: choices[name][pick] for name, pick in zip(names, best, strict=True)})
    return combinations


def with_chunks(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases, and every other one with a window again, with chunks of that length in its place."""
    windowed = [case for case in cases if case["window_left"] > 0]
    return [*cases, *(case | {"is_chunked": True} for case in windowed[::2])]
