"""Collectives inside a step, and the check that all ranks call the same ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from graphdecode.kernels.collective.group_collectives import group_all_gather, group_all_reduce
from graphdecode.kernels.collective.shared_collectives import LATE, MOST_RANKS, shared_all_gather, shared_all_reduce

Agree = Callable[[str], None]  # returns when all ranks have said the same, and raises otherwise


class Collectives(ABC):
    """The collectives of one rank.

    While a step is captured each of them is announced before it runs, and all ranks compare what they announce: a
    mismatch is an error that names it, before any rank waits for what will not come.
    """

    def __init__(self, rank: int, count: int, agree: Agree) -> None:
        self.rank, self.count, self._agree = rank, count, agree
        self.workspace: list[Tensor] = []  # what they write beside what they are given
        self._capturing: str | None = None
        self._order = 0
        self.manifests: dict[str, list[str]] = {}

    def all_reduce(self, x: Tensor, place: str) -> None:
        """Replace `x` [rows, columns], contiguous, by its sum over the ranks, with the same bits on each.

        `place` is where in the model, for messages.
        """
        self._announce("all_reduce", x, place)
        self._reduce(x)

    def all_gather(self, out: Tensor, part: Tensor, place: str) -> None:
        """Write the columns of all ranks into `out` [rows, columns]; rank r has those from `columns * r // count` on.

        `part` is [rows, the rank's columns]; both are contiguous. `place` is where in the model, for messages.
        """
        self._announce("all_gather", out, place)
        self._gather(out, part)

    def greatest(self, x: Tensor) -> Tensor:
        """Return the greatest of all ranks' numbers, [n], while a model is loaded; it may take any time."""
        self._agree(f"is to compare {len(x)} numbers")  # who is early waits here, where there is no limit
        found = x.new_empty((1, self.count * len(x)))
        self._gather(found, x[None])
        return found.view(self.count, -1).amax(0)

    @contextmanager
    def captured(self, what: str) -> Iterator[None]:
        """Make all ranks begin a capture together, agree on its collectives, and end together.

        Raises:
            RankError: they do not agree; the message names the ranks, what is captured, and the place.
        """
        self._agree(f"begins to capture {what}")
        self._capturing, self._order, self.manifests[what] = what, 0, []
        try:
            yield
        finally:
            self._capturing = None
        self._agree(f"ends the capture of {what} with {self._order} collectives")

    def _announce(self, kind: str, x: Tensor, place: str) -> None:
        if self._capturing is None:
            return
        line = f"{kind} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')} at {place}"
        self.manifests[self._capturing].append(line)
        self._agree(f"is in {self._capturing} at collective {self._order}: {line}")
        self._order += 1

    def late(self) -> str | None:
        """Return what went wrong in a collective since the last look, naming the rank; None if nothing did."""
        return None

    @abstractmethod
    def give_up(self, rank: int) -> None:
        """End all waiting: a rank is gone."""

    @abstractmethod
    def _reduce(self, x: Tensor) -> None: ...

    @abstractmethod
    def _gather(self, out: Tensor, part: Tensor) -> None: ...


class SharedCollectives(Collectives):
    """Collectives in a shared-memory segment, `board`, on a CPU; see `kernels/collective/shared_collectives.py`."""

    def __init__(self, rank: int, count: int, agree: Agree, board: Tensor) -> None:
        super().__init__(rank, count, agree)
        self._board, self.workspace = board, [board]
        self._words = board.numpy()

    def _reduce(self, x: Tensor) -> None:
        shared_all_reduce(x, self._board, self.rank, self.count)

    def _gather(self, out: Tensor, part: Tensor) -> None:
        shared_all_gather(out, part, self._board, self.rank, self.count)

    def late(self) -> str | None:
        """See `Collectives.late`."""
        found = int(self._words[LATE])
        if not found:
            return None
        rank = (found - 1) % MOST_RANKS
        why = "came for another one" if found > MOST_RANKS else "did not come"
        return f"rank {rank} of {self.count} {why} to a collective"

    def give_up(self, rank: int) -> None:
        """See `Collectives.give_up`."""
        if not self._words[LATE]:
            self._words[LATE] = rank + 1


class GroupCollectives(Collectives):
    """Over torch.distributed's default group: gloo on CPUs, NCCL on GPUs."""

    def give_up(self, rank: int) -> None:
        """End all waiting: gloo notices by itself, NCCL in a graph would wait for ever for a rank."""
        world = dist.group.WORLD
        if world is not None and dist.get_backend() == "nccl":
            world.abort()

    def _reduce(self, x: Tensor) -> None:
        group_all_reduce(x, self.count)

    def _gather(self, out: Tensor, part: Tensor) -> None:
        group_all_gather(out, part, self.count)
