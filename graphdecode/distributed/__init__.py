"""Ranks that compute one model together: how they find, tell and watch one another, and what they compute."""

from graphdecode.distributed.collectives import Collectives, GroupCollectives, SharedCollectives
from graphdecode.distributed.errors import RankError
from graphdecode.distributed.ranks import Follower, Leader, Ranks

__all__ = ["Collectives", "Follower", "GroupCollectives", "Leader", "RankError", "Ranks", "SharedCollectives"]
