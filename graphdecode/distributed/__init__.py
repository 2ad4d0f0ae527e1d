"""Tensor parallelism: the ranks of one model, their messages, heartbeats and collectives."""

from graphdecode.distributed.collectives import Collectives, GroupCollectives, SharedCollectives
from graphdecode.distributed.ranks import Follower, Leader, RankError, Ranks, RefusedError

__all__ = [
    "Collectives",
    "Follower",
    "GroupCollectives",
    "Leader",
    "RankError",
    "Ranks",
    "RefusedError",
    "SharedCollectives",
]
