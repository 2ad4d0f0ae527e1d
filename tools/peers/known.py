"""The peers by name."""

from __future__ import annotations

from peers.listing import choose
from peers.llama_cpp import LlamaCpp
from peers.nano_vllm import NanoVllm
from peers.peer import Peer
from peers.sglang import Sglang
from peers.transformers_generate import Transformers, TransformersCompiled, TransformersStatic
from peers.vllm import Vllm

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
