"""The peers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from graphdecode.errors import ArgumentError
from peers.gpu_engines import NanoVllm, Sglang, Vllm
from peers.llama_cpp import LlamaCpp
from peers.peer import Peer
from peers.transformers_generate import Transformers, TransformersCompiled, TransformersStatic

Kind = TypeVar("Kind")
PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Transformers,
        TransformersStatic,
        TransformersCompiled,
        LlamaCpp,
        Vllm,
        Sglang,
        NanoVllm,
    )
}


def parse_peers(text: str) -> list[Peer]:
    """Return the peers of a list such as `"transformers,llama-cpp"`, in its order, each once; `"all"` is all of them.

    Raises:
        ValueError: one is unknown; names those that there are.
    """
    return [peer() for peer in choose(text, PEERS)]


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
        raise ArgumentError(f"unknown peers: {', '.join(unknown)}; there are {', '.join(known)}, or all")
    return [known[name] for name in dict.fromkeys(names)]
