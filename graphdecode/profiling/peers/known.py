"""The peers by name."""

from __future__ import annotations

from graphdecode.profiling.peers.listing import choose
from graphdecode.profiling.peers.llama_cpp import LlamaCpp
from graphdecode.profiling.peers.nano_vllm import NanoVllm
from graphdecode.profiling.peers.peer import Peer
from graphdecode.profiling.peers.sglang import Sglang
from graphdecode.profiling.peers.transformers_generate import Transformers, TransformersCompiled, TransformersStatic
from graphdecode.profiling.peers.vllm import Vllm

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
