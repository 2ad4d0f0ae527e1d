"""Mixers with a recurrent state: short convolutions, gated delta nets, Mamba2; and gated attention."""

from __future__ import annotations

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
from graphdecode.models.blocks import Attention, Mixer, Norm, ResidualStream


def reordered(stream: ResidualStream, product: Tensor, order: Tensor | None, use: str) -> Tensor:
    """Return the columns of a product in another order, contiguous; None: the product itself.

    The results are permuted because a quantized weight with interleaved heads cannot be.
    """
    if order is None:
        return product
    columns = stream.buffer(len(order), product.dtype, use)
    return torch.index_select(product, 1, order, out=columns)


@dataclass(frozen=True)
class GatedAttention(Attention):
    """Attention whose result is gated per channel by `sigmoid` of a part of its QKV product (Qwen3-Next)."""

    qkv_order: Tensor  # int64 [(heads + 2 kv_heads) * head_dim], columns of the product
    gate_order: Tensor  # int64 [heads * head_dim]

    def project(self, stream: ResidualStream) -> Tensor:
        return reordered(stream, super().project(stream), self.qkv_order, "qkv")

    def finish(self, stream: ResidualStream, attended: Tensor) -> None:
        """Gate the attention's result, and set the output product."""
        gate = reordered(stream, stream.buffer_for(self.qkv), self.gate_order, "gate")
        gated = stream.buffer(attended.shape[1], use="gated")
        gated_rms_norm(gated, attended, gate, None, 0.0, attended.shape[1], False, sigmoid=True)
        stream.set_output(self.o, gated)


class RecurrentMixer(Mixer):
    """A mixer with a recurrent state."""

    def read_bytes(self, rows: int | None = None) -> int:
        """Return the bytes of products, norms and float32 tensors."""
        own = [value for value in vars(self).values() if not isinstance(value, WeightForm)]
        tensors = [tensor for value in own for tensor in tensors_in(value)]
        return super().read_bytes(rows) + sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())


@dataclass(frozen=True)
class ShortConv(RecurrentMixer):
    """`out(c * conv(b * x))`; `b`, `c`, `x` are one product (LFM2)."""

    in_proj: WeightForm  # [3 * channels, hidden]
    conv: Tensor  # float32 [width, channels]
    conv_bias: Tensor | None  # float32 [channels], or None
    out_proj: WeightForm  # [hidden, channels]

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        (conv_state,) = cache
        bcx = stream.buffer_for(self.in_proj)
        stream.project(self.in_proj, bcx)
        mixed = stream.buffer(self.out_proj.in_features, use="mixed")
        for part, tokens in stream.state_parts():
            causal_conv(mixed[part], bcx[part], conv_state, self.conv, self.conv_bias, False, tokens)
        stream.set_output(self.out_proj, mixed)


@dataclass(frozen=True)
class DeltaNet(RecurrentMixer):
    """Gated delta net (Yang et al., 2024): convolution, delta rule over heads, norm with a gate."""

    in_proj: WeightForm  # [2 * key channels + 2 * value channels + 2 * value heads, hidden]
    order: Tensor | None  # int64, columns in the order q, k, v, z, a, b; None: already in order
    conv: Tensor  # float32 [width, 2 * key channels + value channels]
    a_log: Tensor  # float32 [value heads]
    dt_bias: Tensor  # float32 [value heads]
    norm: Norm  # per value head
    out_proj: WeightForm  # [hidden, value channels]
    strength: float = 1.0  # greatest strength of the delta rule

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        conv_state, state = cache
        projected = stream.buffer_for(self.in_proj)
        stream.project(self.in_proj, projected)
        projected = reordered(stream, projected, self.order, "ordered")
        channels, values = self.conv.shape[1], self.out_proj.in_features
        qkv, z, ab = projected.split((channels, values, 2 * len(self.a_log)), dim=1)
        convolved = stream.buffer(channels, projected.dtype, "convolved")
        read = stream.buffer(values, projected.dtype, "read")
        for part, tokens in stream.state_parts():
            causal_conv(convolved[part], qkv[part], conv_state, self.conv, None, True, tokens)
            gates = DeltaGates(ab[part], self.a_log, self.dt_bias)
            gated_delta(read[part], convolved[part], state, gates, tokens, self.strength)
        normed = stream.buffer(values, use="normed")
        gated_rms_norm(normed, read, z, self.norm.weight, self.norm.eps, len(self.norm.weight), True)
        stream.set_output(self.out_proj, normed)


@dataclass(frozen=True)
class Mamba2(RecurrentMixer):
    """Mamba2 (Dao and Gu, 2024): convolution, selective scan over heads, norm with a gate."""

    in_proj: WeightForm  # [channels + convolved channels + heads, hidden]: gate, x B C, steps
    conv: Tensor  # float32 [width, channels + 2 * groups * state channels]
    conv_bias: Tensor | None  # float32 [channels + 2 * groups * state channels], or None
    heads: ScanWeights  # decay, skip and bias of each head
    norm: Norm | None  # over groups of channels
    group: int  # channels of a group
    norm_first: bool  # whether the norm comes before the gate
    step_limits: tuple[float, float]  # minimum and maximum
    out_proj: WeightForm  # [hidden, channels]

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        stream.set_output(self.out_proj, self.read(stream, cache))

    def read(self, stream: ResidualStream, cache: LayerState) -> Tensor:
        """Advance the layer's states by the tokens, and return the input of `out_proj`, [t, channels]."""
        conv_state, state = cache
        projected = stream.buffer_for(self.in_proj)
        stream.project(self.in_proj, projected)
        channels, convolved_channels = self.out_proj.in_features, self.conv.shape[1]
        gate, xbc, steps = projected.split((channels, convolved_channels, len(self.heads.skip)), dim=1)
        convolved = stream.buffer(convolved_channels, projected.dtype, "convolved")
        read = stream.buffer(channels, projected.dtype, "read")
        for part, tokens in stream.state_parts():
            causal_conv(convolved[part], xbc[part], conv_state, self.conv, self.conv_bias, True, tokens)
            selective_scan(read[part], convolved[part], state, steps[part], self.heads, tokens, *self.step_limits)
        normed = stream.buffer(channels, use="normed")
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
    place: str = field(kw_only=True)  # name in the model
    ranks_of_group: int = field(kw_only=True)  # adjacent ranks that share a group

    def finish(self, normed: Tensor, read: Tensor, gate: Tensor) -> None:
        assert self.norm is not None
        active = torch.nn.functional.silu(gate.float())
        x = read.float() if self.norm_first else read.float() * active
        squares = x.new_zeros(x.shape[0], self.collectives.count // self.ranks_of_group)
        own = squares[:, self.collectives.rank // self.ranks_of_group]
        own.copy_(x.square().sum(1))
        self.collectives.all_reduce(squares, self.place)
        scale = torch.rsqrt(own / (x.shape[1] * self.ranks_of_group) + self.norm.eps)
        x = x * scale[:, None] * self.norm.weight
        normed.copy_(x * active if self.norm_first else x)
