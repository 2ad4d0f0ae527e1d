"""The peers of decode attention by name."""

from __future__ import annotations

import torch

from peers.attention.flashinfer import Flashinfer, FlashinferTensorCores
from peers.attention.flex import Flex
from peers.attention.peer import AttentionPeer
from peers.attention.sdpa import GatherSdpa, Sdpa
from peers.listing import choose

ATTENTION_PEERS: dict[str, type[AttentionPeer]] = {
    peer.name: peer for peer in (Sdpa, GatherSdpa, Flex, Flashinfer, FlashinferTensorCores)
}


def parse_attention_peers(text: str) -> list[AttentionPeer]:
    """Return the peers of a list such as `"sdpa,flex"`, in its order, each once; `"all"` is all of them.

    Raises:
        ValueError: one is unknown; names those that there are.
    """
    return [peer() for peer in choose(text, ATTENTION_PEERS)]


def suitable_peers(device: torch.device) -> list[AttentionPeer]:
    """Return those that take part when none is named: on a CPU, the ones that need no compiler."""
    chosen = (Sdpa, Flex, Flashinfer, FlashinferTensorCores) if device.type == "cuda" else (Sdpa, GatherSdpa)
    return [peer() for peer in chosen]
