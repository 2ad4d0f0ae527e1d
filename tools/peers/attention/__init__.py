"""Other decode attention on the same keys and values, in the same run: outputs first, then times."""

from peers.attention.contest import AttentionResult, compare_attention, plan_us
from peers.attention.peers import ATTENTION_PEERS, AttentionPeer, parse_attention_peers, suitable_peers
from peers.attention.problem import PAGE_SIZE, SHAPES, AttentionProblem, AttentionShape

__all__ = [
    "ATTENTION_PEERS",
    "PAGE_SIZE",
    "SHAPES",
    "AttentionPeer",
    "AttentionProblem",
    "AttentionResult",
    "AttentionShape",
    "compare_attention",
    "parse_attention_peers",
    "plan_us",
    "suitable_peers",
]
