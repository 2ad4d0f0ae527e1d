"""A source whose checkpoint has one tensor for all experts of a layer, as if each expert had tensors of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.linear.weight_form import Shard, Stored, TensorSource
from graphdecode.models.weight_map import Part, WeightMap


class _Piece(NamedTuple):
    """Where a stack has one expert's tensor.

    Attributes:
        stack: the name of the stack, with the experts along its first dimension.
        expert: which of so many.
        experts: how many there are.
        place: of so many products of an expert whose outputs are in the stack.
        places: how many these are.
        shape: of the piece.
    """

    stack: str
    expert: int
    experts: int
    place: int
    places: int
    shape: tuple[int, ...]


class ExpertsApart:
    """A source of plain weights, with all experts of its stacks by themselves.

    Args:
        source: of plain weights, some of them in stacks.
        stacked: where the model's tensors are, as the source has them.
        apart: the same with those of each expert by themselves.
        has_turns: how stacks lie; see `ExpertNames`.
    """

    def __init__(self, source: TensorSource, stacked: WeightMap, apart: WeightMap, *, has_turns: bool) -> None:
        self._source = source
        self._has_turns = has_turns
        self._pieces: dict[str, _Piece] = {}
        self._named: dict[str, str] = {}  # what has another name in such a model alone
        for place, parts in apart.items():
            theirs = stacked[place]
            if len(theirs) < len(parts):
                self._pieces |= _pieces(theirs[0], parts)
            else:
                self._named |= {part.name: their.name for part, their in zip(parts, theirs, strict=True)}

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """All that there are, by name."""
        there = self._source.tensors
        used = {piece.stack for piece in self._pieces.values()} | set(self._named.values())
        found = {name: stored for name, stored in there.items() if name not in used}
        found |= {name: there[theirs] for name, theirs in self._named.items() if theirs in there}
        return found | {name: Stored(piece.shape, there[piece.stack].dtype) for name, piece in self._pieces.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write one tensor, or a part of it, into `out`."""
        piece = self._pieces.get(name)
        if piece is None:
            self._source.read(self._named.get(name, name), out, shard)
            return
        own = self._own(piece, out)
        out.copy_(own if shard is None else own[shard.slices(piece.shape)])

    def _own(self, piece: _Piece, out: Tensor) -> Tensor:
        """Return an expert's tensor; nothing of other experts is read."""
        expert = Shard(piece.expert, piece.experts, 0)
        if not self._has_turns:
            own = torch.empty((1, *piece.shape), dtype=out.dtype, device=out.device)
            self._source.read(piece.stack, own, Shard(piece.place, piece.places, 1, within=expert))
            return own[0]
        shape = self._source.tensors[piece.stack].shape[1:]
        all_of = torch.empty((1, *shape), dtype=out.dtype, device=out.device)
        self._source.read(piece.stack, all_of, expert)
        by_output = all_of[0].T if len(shape) > 1 else all_of[0]
        return by_output[piece.place :: piece.places]


def _pieces(stack: Part, parts: tuple[Part, ...]) -> dict[str, _Piece]:
    """Return where each of the experts' tensors is; those of one expert follow one another."""
    experts = stack.shape[0]
    places = len(parts) // experts
    return {
        part.name: _Piece(stack.name, index // places, experts, index % places, places, part.shape)
        for index, part in enumerate(parts)
    }
