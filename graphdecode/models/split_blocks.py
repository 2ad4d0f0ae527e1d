"""Blocks of a tensor-parallel model with collectives outside of products."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphdecode.attention import QKNormRope
from graphdecode.distributed import Collectives
from graphdecode.linear.weight_form import tensors_in
from graphdecode.models.blocks import Attention, Norm, Stem
from graphdecode.models.forward_context import Tokens


@dataclass(frozen=True)
class SplitStem(Stem):
    """An embedding whose rows are split over ranks; the all-reduce adds zeros, and so is exact."""

    part: Stem = field(kw_only=True)  # the rank's rows
    begin: int = field(kw_only=True)  # first row
    end: int = field(kw_only=True)  # past the last row
    collectives: Collectives = field(kw_only=True)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.part.tensors, *tensors_in(self.adapted)]

    def embed(self, residual: Tensor, tokens: Tokens) -> None:
        self.part.embed(residual, tokens._replace(ids=tokens.ids - self.begin))
        is_elsewhere = (tokens.ids < self.begin) | (tokens.ids >= self.end)
        residual.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        self.collectives.all_reduce(residual, "embedding")


@dataclass(frozen=True)
class JointlyNormedAttention(Attention):
    """Attention whose queries and keys are normed over all heads, which ranks share."""

    collectives: Collectives = field(kw_only=True)
    param_name: str = field(kw_only=True)

    def rotation(self, qkv: Tensor) -> QKNormRope:
        """Norm queries and keys in place; return only their rotation."""
        normed = list(self._normed(qkv))
        squares = torch.stack([x.float().square().sum(1) for x, _ in normed], dim=1)  # [t, 2]
        self.collectives.all_reduce(squares, self.param_name)
        for column, (x, norm) in enumerate(normed):
            # replicated heads count several times in both the sum and the number of channels
            mean = squares[:, column : column + 1] / (x.shape[1] * self.collectives.count)
            x.copy_(x.float() * torch.rsqrt(mean + norm.eps) * norm.weight)
        return QKNormRope(self.cos_sin, None, None, 0.0)

    def _normed(self, qkv: Tensor) -> Iterator[tuple[Tensor, Norm]]:
        begin = 0
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                end = begin + norm.weight.shape[0]
                yield qkv[:, begin:end], norm
                begin = end
