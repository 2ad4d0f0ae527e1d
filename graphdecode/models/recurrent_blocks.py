"""Mixers whose layers keep a state of fixed size: short convolutions, gated delta nets, Mamba2; and gated attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.cache import LayerState
from graphdecode.kernels.norm.gated_rms_norm import gated_rms_norm
from graphdecode.kernels.recurrent.causal_conv import causal_conv
from graphdecode.kernels.recurrent.gated_delta import DeltaGates, gated_delta
from graphdecode.kernels.recurrent.selective_scan import ScanWeights, selective_scan
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.blocks import Attention, Mixer, ResidualStream


def reordered(stream: ResidualStream, product: Tensor, order: Tensor | None, use: str) -> Tensor:
    """Return the columns of a product in another order, contiguous; None: the product itself.

    Rows of a weight that interleaves heads cannot be moved where it is quantized, so its results are.
    """
    if order is None:
        return product
    columns = stream.room(len(order), product.dtype, use)
    return torch.index_select(product, 1, order, out=columns)


@dataclass(frozen=True)
class GatedAttention(Attention):
    """Attention whose result is gated per channel by `sigmoid` of a part of its first product (Qwen3-Next)."""

    qkv_order: Tensor  # int64 [(heads + 2 kv_heads) * head_dim], columns of the product
    gate_order: Tensor  # int64 [heads * head_dim]

    def project(self, stream: ResidualStream) -> Tensor:
        """Return queries, keys and values of the tokens."""
        return reordered(stream, super().project(stream), self.qkv_order, "qkv")

    def finish(self, stream: ResidualStream, attended: Tensor) -> None:
        """Give the output product of what the tokens attended to, gated."""
        gate = reordered(stream, stream.room_of(self.qkv), self.gate_order, "gate")
        gated = stream.room(attended.shape[1], use="gated")
        gated_rms_norm(gated, attended, gate, None, 0.0, attended.shape[1], False, sigmoid=True)
        stream.give(self.o, gated)


@dataclass(frozen=True)
class ShortConv(Mixer):
    """`out(c * conv(b * x))`, where `b`, `c`, `x` are one product (LFM2)."""

    in_proj: WeightForm  # [3 * channels, hidden]
    conv: Tensor  # float32 [width, channels]
    conv_bias: Tensor | None  # float32 [channels], or None
    out_proj: WeightForm  # [hidden, channels]

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Advance the layer's states by the tokens, and give what they read."""
        (conv_state,) = cache
        bcx = stream.room_of(self.in_proj)
        stream.feed(self.in_proj, bcx)
        mixed = stream.room(self.out_proj.in_features, use="mixed")
        for part, tokens in stream.state_parts():
            causal_conv(mixed[part], bcx[part], conv_state, self.conv, self.conv_bias, False, tokens)
        stream.give(self.out_proj, mixed)


@dataclass(frozen=True)
class DeltaNet(Mixer):
    """Gated delta net (Yang et al., 2024): convolution, delta rule over heads, norm with a gate."""

    qkvz: WeightForm  # [2 * key channels + 2 * value channels, hidden]
    ab: WeightForm  # [2 * value heads, hidden]
    qkvz_order: Tensor | None  # int64, columns in the order q, k, v, z; None: they have it
    ab_order: Tensor | None  # int64, columns in the order a, b; None: they have it
    conv: Tensor  # float32 [width, 2 * key channels + value channels]
    a_log: Tensor  # float32 [value heads]
    dt_bias: Tensor  # float32 [value heads]
    gain: Tensor  # float32 [channels of a value head]
    eps: float  # of the norm
    out_proj: WeightForm  # [hidden, value channels]

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Advance the layer's states by the tokens, and give what they read."""
        conv_state, state = cache
        qkvz, ab = stream.room_of(self.qkvz, "qkvz"), stream.room_of(self.ab, "ab")
        stream.feed(self.qkvz, qkvz)
        stream.feed(self.ab, ab)
        qkvz = reordered(stream, qkvz, self.qkvz_order, "ordered qkvz")
        ab = reordered(stream, ab, self.ab_order, "ordered ab")
        channels = self.conv.shape[1]
        convolved = stream.room(channels, qkvz.dtype, "convolved")
        read = stream.room(self.out_proj.in_features, qkvz.dtype, "read")
        for part, tokens in stream.state_parts():
            causal_conv(convolved[part], qkvz[part, :channels], conv_state, self.conv, None, True, tokens)
            gated_delta(read[part], convolved[part], state, DeltaGates(ab[part], self.a_log, self.dt_bias), tokens)
        normed = stream.room(self.out_proj.in_features, use="normed")
        gated_rms_norm(normed, read, qkvz[:, channels:], self.gain, self.eps, len(self.gain), True)
        stream.give(self.out_proj, normed)


@dataclass(frozen=True)
class Mamba2(Mixer):
    """Mamba2 (Dao and Gu, 2024): convolution, selective scan over heads, norm with a gate."""

    in_proj: WeightForm  # [channels + convolved channels + heads, hidden]: gate, x B C, steps
    conv: Tensor  # float32 [width, channels + 2 * groups * state channels]
    conv_bias: Tensor | None  # float32 [channels + 2 * groups * state channels], or None
    heads: ScanWeights  # decay, skip and bias of each head
    gain: Tensor | None  # float32 [channels]; None: there is no norm
    eps: float  # of the norm
    group: int  # channels that are normed together
    norm_first: bool  # whether the norm stands before the gate
    step_limits: tuple[float, float]  # least and greatest step
    out_proj: WeightForm  # [hidden, channels]

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        """Advance the layer's states by the tokens, and give what they read."""
        conv_state, state = cache
        projected = stream.room_of(self.in_proj)
        stream.feed(self.in_proj, projected)
        channels, convolved_channels = self.out_proj.in_features, self.conv.shape[1]
        gate, xbc, steps = projected.split((channels, convolved_channels, len(self.heads.skip)), dim=1)
        convolved = stream.room(convolved_channels, projected.dtype, "convolved")
        read = stream.room(channels, projected.dtype, "read")
        for part, tokens in stream.state_parts():
            causal_conv(convolved[part], xbc[part], conv_state, self.conv, self.conv_bias, True, tokens)
            selective_scan(read[part], convolved[part], state, steps[part], self.heads, tokens, *self.step_limits)
        normed = stream.room(channels, use="normed")
        gated_rms_norm(normed, read, gate, self.gain, self.eps, self.group, self.norm_first)
        stream.give(self.out_proj, normed)
