"""Collectives of a step, and the check that all ranks call the same ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from graphdecode.kernels.collective.group_collectives import group_all_gather, group_all_reduce
from graphdecode.kernels.collective.shared_collectives import LATE, MOST_RANKS, shared_all_gather, shared_all_reduce

Agree = Callable[[str], None]  # `Ranks.agree`


class Collectives(ABC):
    """The collectives of one rank.

    While a step is captured, the ranks compare a description of each collective before it runs, so that a mismatch is
    an error instead of a deadlock.
    """

    def __init__(self, rank: int, count: int, agree: Agree) -> None:
        self.rank, self.count, self._agree = rank, count, agree
        self.workspace: list[Tensor] = []  # written in addition to the arguments
        self._capturing: str | None = None
        self.manifests: dict[str, list[str]] = {}

    def all_reduce(self, x: Tensor, param_name: str) -> None:
        """Replace `x` [rows, columns], contiguous, by its sum over the ranks, with the same bits on each.

        `param_name` is for messages.
        """
        self._announce("all_reduce", x, param_name)
        self._reduce(x)

    def all_gather(self, out: Tensor, part: Tensor, param_name: str) -> None:
        """Write the columns of all ranks into `out` [rows, columns]; rank r has those from `columns * r // count` on.

        `part` is [rows, the rank's columns]; both are contiguous. `param_name` is for messages.
        """
        self._announce("all_gather", out, param_name)
        self._gather(out, part)

    def greatest(self, x: Tensor) -> Tensor:
        """Return the maximum over the ranks of each entry of `x` [n]; used while a model is loaded."""
        self._agree(f"compares {len(x)} numbers")  # waits without the time limit of a collective
        gathered = x.new_empty((1, self.count * len(x)))
        self._gather(gathered, x[None])
        return gathered.view(self.count, -1).amax(0)

    @contextmanager
    def captured(self, name: str) -> Iterator[None]:
        """Begin and end a capture on all ranks; raises RankError if their collectives differ."""
        self._agree(f"begins to capture {name}")
        self._capturing, self.manifests[name] = name, []
        try:
            yield
        finally:
            self._capturing = None
        self._agree(f"ends the capture of {name} with {len(self.manifests[name])} collectives")

    def _announce(self, kind: str, x: Tensor, param_name: str) -> None:
        if self._capturing is None:
            return
        line = f"{kind} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')} at {param_name}"
        manifest = self.manifests[self._capturing]
        self._agree(f"is in {self._capturing} at collective {len(manifest)}: {line}")
        manifest.append(line)

    def late(self) -> str | None:
        """Return a message if a collective has failed, else None."""
        return None

    @abstractmethod
    def give_up(self, rank: int) -> None:
        """Abort collectives that wait for a rank that has failed."""

    @abstractmethod
    def _reduce(self, x: Tensor) -> None: ...

    @abstractmethod
    def _gather(self, out: Tensor, part: Tensor) -> None: ...


class SharedCollectives(Collectives):
    """Collectives on a CPU over a segment of shared memory; see `kernels/collective/shared_collectives.py`."""

    def __init__(self, rank: int, count: int, agree: Agree, board: Tensor) -> None:
        super().__init__(rank, count, agree)
        self._board, self.workspace = board, [board]
        self._words = board.numpy()

    def _reduce(self, x: Tensor) -> None:
        shared_all_reduce(x, self._board, self.rank, self.count)

    def _gather(self, out: Tensor, part: Tensor) -> None:
        shared_all_gather(out, part, self._board, self.rank, self.count)

    def late(self) -> str | None:
        code = int(self._words[LATE])
        if not code:
            return None
        rank = (code - 1) % MOST_RANKS
        reason = "called another collective" if code > MOST_RANKS else "did not reach a collective"
        return f"rank {rank} of {self.count} {reason}"

    def give_up(self, rank: int) -> None:
        if not self._words[LATE]:
            self._words[LATE] = rank + 1


class GroupCollectives(Collectives):
    """Collectives over torch.distributed's default group: gloo on CPUs, NCCL on GPUs."""

    def give_up(self, rank: int) -> None:
        """Abort NCCL, which waits forever in a graph; gloo notices a lost rank by itself."""
        world = dist.group.WORLD
        if world is not None and dist.get_backend() == "nccl":
            world.abort()

    def _reduce(self, x: Tensor) -> None:
        group_all_reduce(x, self.count)

    def _gather(self, out: Tensor, part: Tensor) -> None:
        group_all_gather(out, part, self.count)
