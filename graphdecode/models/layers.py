"""The orders in which the blocks of a decoder layer and the residual stream meet."""

from __future__ import annotations

from dataclasses import dataclass

from graphdecode.cache import LayerCache
from graphdecode.models.blocks import Attention, FeedForward, Layer, Norm, ResidualStream


@dataclass(frozen=True)
class PreNormLayer(Layer):
    """Attention and an MLP, each behind a norm: `x + scale * attention(norm(x))`, then `x + scale * mlp(norm(x))`."""

    input_norm: Norm
    attention: Attention
    post_norm: Norm
    mlp: FeedForward
    residual_scale: float = 1.0

    def run(self, stream: ResidualStream, cache: LayerCache) -> None:
        """Run the layer."""
        stream.norm(self.input_norm)
        self.attention.run(stream, cache)
        stream.change(scale=self.residual_scale)
        stream.norm(self.post_norm)
        self.mlp.run(stream)
        stream.change(scale=self.residual_scale)


@dataclass(frozen=True)
class SandwichLayer(Layer):
    """Attention and an MLP, each with a norm behind it and perhaps one before: `x + after(attention(before(x)))`."""

    before_attention: Norm | None
    attention: Attention
    after_attention: Norm
    before_mlp: Norm | None
    mlp: FeedForward
    after_mlp: Norm

    def run(self, stream: ResidualStream, cache: LayerCache) -> None:
        """Run the layer."""
        stream.norm(self.before_attention)
        self.attention.run(stream, cache)
        stream.change(self.after_attention)
        stream.norm(self.before_mlp)
        self.mlp.run(stream)
        stream.change(self.after_mlp)
