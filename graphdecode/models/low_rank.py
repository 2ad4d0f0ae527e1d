"""The low-rank matrices that an adapter (Hu et al., 2021) adds to products, as files have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.linear.experts import ExpertNames
from graphdecode.models.weight_map import Part


class AdapterError(ArgumentError):
    """An adapter that the model cannot have; the message names the file and what is wrong, and nothing was changed."""


class LowRank(NamedTuple):
    """The low-rank term of an adapter in one product, `scale * B @ A`, or to those of all experts."""

    down: Tensor  # A, [experts * rank, in_features], one expert's rows after another's
    up: Tensor  # B, [out_features, rank * experts], the columns of a rank side by side, one of each expert
    scale: float
    is_embedding: bool = False  # PEFT says that it is of an embedding: the transposed weight
    experts: int = 1  # 1: of one product

    @property
    def rank(self) -> int:
        """Rows of A, of each expert."""
        return self.down.shape[0] // self.experts if self.down.dim() else 0

    def transposed(self) -> LowRank:
        """Return the adapter of the transposed weights of experts."""
        down = self.up.view(len(self.up), -1, self.experts).permute(2, 1, 0)
        up = self.down.view(self.experts, -1, self.down.shape[1]).permute(2, 1, 0)
        return self._replace(down=down.flatten(0, 1), up=up.flatten(1, 2))

    def parts_of_experts(self, sizes: list[int], *, interleaved: bool) -> Iterator[tuple[tuple[int, int], LowRank]]:
        """Yield (expert, part) and the adapter of each, given the parts' output features.

        `interleaved`: outputs alternate between two parts.
        """
        down = self.down.view(self.experts, self.rank, -1)
        up = self.up.view(-1, self.rank, self.experts)
        up = torch.cat((up[::2], up[1::2])) if interleaved else up
        for at, of_part in enumerate(up.split(sizes)):
            for expert in range(self.experts):
                yield (expert, at), LowRank(down[expert], of_part[..., expert], self.scale)


class Stack(NamedTuple):
    """A weight of all experts in one tensor, [experts, outputs, inputs] or transposed."""

    parts: tuple[Part, ...]  # of one expert
    names: ExpertNames

    def oriented(self, adapter: LowRank, version: Any) -> LowRank | None:
        """Return an adapter of the weights as [outputs, inputs]; None if that is ambiguous.

        In PEFT 0.17, which names no version, and 0.18, A has the stack's second dimension; in 0.21 the inputs.
        """
        experts, outputs, inputs = self.names.experts, sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]
        adapter = adapter._replace(experts=experts)
        if adapter.down.dim() != 2 or adapter.up.dim() != 2:
            return adapter  # `_check` refuses it
        if (*adapter.down.shape[1:], *adapter.up.shape[:1]) != (outputs, inputs):
            return adapter
        if outputs == inputs:
            is_old = version is None or str(version).startswith(("0.17.", "0.18."))
            if str(version).startswith(("0.19.", "0.20.")):
                return None
            if self.names.layout.transposed or not is_old:
                return adapter
        is_whole = adapter.down.shape[0] % experts == adapter.up.shape[-1] % experts == 0
        return adapter.transposed() if is_whole else adapter
