"""Mixers with a recurrent state: short convolutions, gated delta nets, Mamba2; and gated attention."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphdecode.cache import LayerState
from graphdecode.distributed import Collectives
from graphdecode.kernels.norm.gated_rms_norm import gated_rms_norm
from graphdecode.kernels.recurrent.causal_conv import causal_conv
from graphdecode.kernels.recurrent.gated_delta import DeltaGates, gated_delta
from graphdecode.kernels.recurrent.selective_scan import ScanWeights, selective_scan
from graphdecode.linear.weight_form import WeightForm, tensors_in
from graphdecode.models.blocks import Attention, BlockOutput, Mixer, Norm
from graphdecode.models.forward_context import ForwardContext, Hidden


def reordered(product: Tensor, order: Tensor | None, use: str, context: ForwardContext) -> Tensor:
    """Return the columns of a product in another order, contiguous; None: the product itself.

    The results are permuted because a quantized weight with interleaved heads cannot be.
    """
    if order is None:
        return product
    columns = context.buffer(len(order), product.dtype, use)
    return torch.index_select(product, 1, order, out=columns)


@dataclass(frozen=True)
class GatedAttention(Attention):
    """Attention whose result is gated per channel by `sigmoid` of a part of its QKV product (Qwen3-Next)."""

    qkv_order: Tensor  # int64 [(heads + 2 kv_heads) * head_dim], columns of the product
    gate_order: Tensor  # int64 [heads * head_dim]

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        product = context.linear(self.qkv, x)
        attended = self.attend(reordered(product, self.qkv_order, "qkv", context), context, cache)
        gate = reordered(product, self.gate_order, "gate", context)
        gated = context.buffer(attended.shape[1], use="gated")
        gated_rms_norm(gated, attended, gate, None, 0.0, attended.shape[1], False, sigmoid=True)
        return self.output_linear(self.o, gated, residual, context)

    def project(self, x: Hidden, context: ForwardContext) -> Tensor:
        return reordered(super().project(x, context), self.qkv_order, "qkv", context)


@dataclass(frozen=True)
class RecurrentMixer(Mixer):
    """A mixer with a recurrent state, between two products."""

    in_proj: WeightForm  # [projected channels, hidden]
    out_proj: WeightForm  # [hidden, channels]

    @property
    def input_linear(self) -> WeightForm:
        """The product of the input."""
        return self.in_proj

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        return self.output_linear(self.out_proj, self.read(x, context, cache), residual, context)

    @abstractmethod
    def read(self, x: Hidden, context: ForwardContext, cache: LayerState) -> Tensor:
        """Advance the layer's states by the tokens, and return the input of `out_proj`, [t, channels]."""

    def append(self, x: Hidden, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        self.read(x, context, cache)

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of products, norms and float32 tensors."""
        values = [value for value in vars(self).values() if not isinstance(value, WeightForm)]
        tensors = [tensor for value in values for tensor in tensors_in(value)]
        return super().read_bytes(rows) + sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())


@dataclass(frozen=True)
class ShortConv(RecurrentMixer):
    """`out(c * conv(b * x))`; `b`, `c`, `x` are one product (LFM2)."""

    conv: Tensor  # float32 [width, channels]
    conv_bias: Tensor | None  # float32 [channels], or None

    def read(self, x: Hidden, context: ForwardContext, cache: LayerState) -> Tensor:
        (conv_state,) = cache
        bcx = context.linear(self.in_proj, x)  # [t, 3 * channels]
        mixed = context.buffer(self.out_proj.in_features, use="mixed")
        for part, tokens in context.state_parts():
            causal_conv(mixed[part], bcx[part], conv_state, self.conv, self.conv_bias, False, tokens)
        return mixed


@dataclass(frozen=True)
class DeltaNet(RecurrentMixer):
    """Gated delta net (Yang et al., 2024): convolution, delta rule over heads, norm with a gate."""

    order: Tensor | None  # int64, columns in the order q, k, v, z, a, b; None: already in order
    conv: Tensor  # float32 [width, 2 * key channels + value channels]
    a_log: Tensor  # float32 [value heads]
    dt_bias: Tensor  # float32 [value heads]
    norm: Norm  # per value head
    strength: float = 1.0  # greatest strength of the delta rule

    def read(self, x: Hidden, context: ForwardContext, cache: LayerState) -> Tensor:
        conv_state, state = cache
        projected = reordered(context.linear(self.in_proj, x), self.order, "ordered", context)
        channels, values = self.conv.shape[1], self.out_proj.in_features
        qkv, z, ab = projected.split((channels, values, 2 * len(self.a_log)), dim=1)
        convolved = context.buffer(channels, projected.dtype, "convolved")
        read = context.buffer(values, projected.dtype, "read")
        for part, tokens in context.state_parts():
            causal_conv(convolved[part], qkv[part], conv_state, self.conv, None, True, tokens)
            gates = DeltaGates(ab[part], self.a_log, self.dt_bias)
            gated_delta(read[part], convolved[part], state, gates, tokens, self.strength)
        normed = context.buffer(values, use="normed")
        gated_rms_norm(normed, read, z, self.norm.weight, self.norm.eps, len(self.norm.weight), True)
        return normed


@dataclass(frozen=True)
class Mamba2(RecurrentMixer):
    """Mamba2 (Dao and Gu, 2024): convolution, selective scan over heads, norm with a gate."""

    conv: Tensor  # float32 [width, channels + 2 * groups * state channels]
    conv_bias: Tensor | None  # float32 [channels + 2 * groups * state channels], or None
    heads: ScanWeights  # decay, skip and bias of each head
    norm: Norm | None  # over groups of channels
    group: int  # channels of a group
    norm_first: bool  # whether the norm comes before the gate
    step_limits: tuple[float, float]  # minimum and maximum

    def read(self, x: Hidden, context: ForwardContext, cache: LayerState) -> Tensor:
        conv_state, state = cache
        projected = context.linear(self.in_proj, x)
        channels, convolved_channels = self.out_proj.in_features, self.conv.shape[1]
        gate, xbc, steps = projected.split((channels, convolved_channels, len(self.heads.skip)), dim=1)
        convolved = context.buffer(convolved_channels, projected.dtype, "convolved")
        read = context.buffer(channels, projected.dtype, "read")
        for part, tokens in context.state_parts():
            causal_conv(convolved[part], xbc[part], conv_state, self.conv, self.conv_bias, True, tokens)
            selective_scan(read[part], convolved[part], state, steps[part], self.heads, tokens, *self.step_limits)
        normed = context.buffer(channels, use="normed")
        self.finish(normed, read, gate)
        return normed

    def finish(self, normed: Tensor, read: Tensor, gate: Tensor) -> None:
        """Write `read`, the output of the scan, normed and gated into `normed`, [t, channels]."""
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        gated_rms_norm(normed, read, gate, weight, eps, self.group, self.norm_first)


@dataclass(frozen=True)
class JointlyNormedMamba2(Mamba2):
    """Mamba2 whose groups are split over ranks, and normed together."""

    collectives: Collectives = field(kw_only=True)
    param_name: str = field(kw_only=True)
    ranks_of_group: int = field(kw_only=True)  # adjacent ranks that share a group

    def finish(self, normed: Tensor, read: Tensor, gate: Tensor) -> None:
        assert self.norm is not None
        active = torch.nn.functional.silu(gate.float())
        x = read.float() if self.norm_first else read.float() * active
        squares = x.new_zeros(x.shape[0], self.collectives.count // self.ranks_of_group)
        of_group = squares[:, self.collectives.rank // self.ranks_of_group]
        of_group.copy_(x.square().sum(1))
        self.collectives.all_reduce(squares, self.param_name)
        scale = torch.rsqrt(of_group / (x.shape[1] * self.ranks_of_group) + self.norm.eps)
        x = x * scale[:, None] * self.norm.weight
        normed.copy_(x * active if self.norm_first else x)
