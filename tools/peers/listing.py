"""Lists of peers as a person writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Kind = TypeVar("Kind")


def choose(text: str, known: Mapping[str, Kind]) -> list[Kind]:
    """Return what a comma-separated list names, in its order, each once; `"all"` is everything that is known.

    Raises:
        ValueError: a name is unknown; the message has those that there are.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        names = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown peers: {', '.join(unknown)}; there are {', '.join(known)}, or all")
    return [known[name] for name in dict.fromkeys(names)]
