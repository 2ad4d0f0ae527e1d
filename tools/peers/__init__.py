"""Other engines on the same checkpoint, in the same run: outputs first, then times."""

from peers.contest import PEERS, compare_engines, parse_peers
from peers.peer import Graphdecode, Peer, Workload, random_prompts
from peers.table import contest_notes, contest_table

__all__ = [
    "PEERS",
    "Graphdecode",
    "Peer",
    "Workload",
    "compare_engines",
    "contest_notes",
    "contest_table",
    "parse_peers",
    "random_prompts",
]
