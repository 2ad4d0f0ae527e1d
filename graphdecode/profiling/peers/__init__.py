"""Other engines on the same checkpoint, in the same run: outputs first, then times."""

from graphdecode.profiling.peers.contest import compare_engines
from graphdecode.profiling.peers.known import PEERS, parse_peers
from graphdecode.profiling.peers.own import Graphdecode
from graphdecode.profiling.peers.peer import Peer, Workload
from graphdecode.profiling.peers.table import contest_notes, contest_table

__all__ = [
    "PEERS",
    "Graphdecode",
    "Peer",
    "Workload",
    "compare_engines",
    "contest_notes",
    "contest_table",
    "parse_peers",
]
