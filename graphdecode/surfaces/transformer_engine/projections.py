"""Norms, projections and perceptrons of a layer, with TransformerEngine's names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphdecode.cache.errors import require_choice
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.norm.rms_norm import rms_norm

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")
_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
_GATES = {"reglu": "relu", "sreglu": "srelu", "qgeglu": "qgelu"}  # gated activation -> that of its gate
_FUSED = {"swiglu": "silu", "geglu": "gelu_tanh"}  # those that have a kernel
ACTIVATIONS = (*_UNGATED, *_GATES, *_FUSED, "glu", "clamped_swiglu")
_CLAMP = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}  # of clamped_swiglu
_STD = 0.023  # standard deviation of initial weights


def frozen(*shape: int, value: float, like: dict[str, object]) -> nn.Parameter:
    """Return a parameter that is not trained, of one value."""
    return nn.Parameter(torch.full(shape, value, **like), requires_grad=False)  # type: ignore[call-overload]


class Initializers(NamedTuple):
    """Functions that fill new weights in place; None: a normal distribution with a standard deviation of 0.023."""

    inner: Callable[[Tensor], object] | None  # those of queries, keys, values, and of a perceptron's first layer
    outer: Callable[[Tensor], object] | None  # those of the layers whose outputs are added to the residual stream
    tracker: Callable[[], Any] | None  # returns an object whose `fork()` is a context with another random state

    def check(self) -> None:
        """Raise ValueError for an argument that is not callable."""
        names = ("init_method", "output_layer_init_method", "get_rng_state_tracker")
        for name, function in zip(names, self, strict=True):
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be callable or None, got {function!r}")

    def weight(self, *shape: int, like: dict[str, object], is_outer: bool = False) -> nn.Parameter:
        """Return a new weight that is not trained."""
        weight = nn.Parameter(torch.empty(*shape, **like), requires_grad=False)  # type: ignore[call-overload]
        fill = self.outer if is_outer else self.inner
        with torch.no_grad(), nullcontext() if self.tracker is None else self.tracker().fork():
            if fill is None:
                weight.normal_(std=_STD)
            else:
                fill(weight)
        return weight


class NormSettings(NamedTuple):
    """Settings of a norm, and of the linear layers after it."""

    hidden_size: int
    eps: float  # added to the variance, or to the mean square
    normalization: str | None  # one of `NORMALIZATIONS`; None: no norm
    zero_centered_gamma: bool  # whether the norm multiplies by 1 + weight
    bias: bool  # whether the linear layers have biases
    like: dict[str, object]  # dtype and device of the parameters
    init: Initializers  # of the linear layers' weights


class Normalized(nn.Module):
    """A module that begins with a norm: `layer_norm_weight`, and `layer_norm_bias` for LayerNorm."""

    def __init__(self, settings: NormSettings) -> None:
        super().__init__()
        hidden_size, self.eps, normalization, self.zero_centered_gamma, _, like, _ = settings
        self.layer_norm_weight = self.layer_norm_bias = None
        if normalization is not None:
            require_choice("normalization", normalization, NORMALIZATIONS)
            self.layer_norm_weight = frozen(hidden_size, value=0.0 if self.zero_centered_gamma else 1.0, like=like)
        if normalization == "LayerNorm":
            self.layer_norm_bias = frozen(hidden_size, value=0.0, like=like)

    def normalize(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [..., hidden]."""
        if self.layer_norm_weight is None:
            return x
        gain = self.layer_norm_weight + 1.0 if self.zero_centered_gamma else self.layer_norm_weight
        return _normed(x, gain, self.layer_norm_bias, self.eps)


def _normed(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the LayerNorm of `x` with a bias, else its RMSNorm."""
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], gain, bias, eps)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    rms_norm(out, rows, gain.float(), eps)
    return out.view(x.shape)


class StandaloneNorm(nn.Module):
    """A norm, one of `QK_NORMS`: `weight`, and `bias` for LayerNorm."""

    def __init__(
        self, name: str, kind: str, size: int, eps: float, like: dict[str, object], *, zero_centered: bool = False
    ) -> None:
        super().__init__()
        require_choice(name, kind, QK_NORMS)
        self.eps, self.zero_centered = eps, zero_centered
        one = 0.0 if zero_centered else 1.0
        self.weight = None if kind == "L2Normalization" else frozen(size, value=one, like=like)
        self.bias = frozen(size, value=0.0, like=like) if kind == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [..., size]."""
        if self.weight is not None:
            return _normed(x, self.weight + 1.0 if self.zero_centered else self.weight, self.bias, self.eps)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class QKVLayout(NamedTuple):
    """Heads of queries, keys and values, and how their weights are stored."""

    query: int
    key: int
    dim: int  # channels of each
    is_fused: bool  # whether there is one weight
    is_interleaved: bool  # whether that has the heads of each group together: its queries, a key and a value

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of rows of each weight by name."""
        return {"query": self.query * self.dim, "key": self.key * self.dim, "value": self.key * self.dim}


class LayerNormQKV(Normalized):
    """Queries, keys and values of a norm: `query_weight`, `key_weight`, `value_weight`, and biases; or one `weight`."""

    def __init__(self, settings: NormSettings, heads: QKVLayout) -> None:
        super().__init__(settings)
        self.heads, sizes = heads, heads.sizes
        self.sizes = {"": sum(sizes.values())} if heads.is_fused else {f"{name}_": n for name, n in sizes.items()}
        for name, size in self.sizes.items():
            weight = settings.init.weight(size, settings.hidden_size, like=settings.like)
            self.register_parameter(f"{name}weight", weight)
        for name, size in self.sizes.items():
            bias = frozen(size, value=0.0, like=settings.like) if settings.bias else None
            self.register_parameter(f"{name}bias", bias)

    def forward(self, x: Tensor, normed: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return queries, keys and values of `x` [..., hidden], [..., heads, dim] each; see `LayerNormMLP.forward`."""
        x, heads = self.normalize(x) if normed is None else normed, self.heads
        flat = [F.linear(x, getattr(self, f"{name}weight"), getattr(self, f"{name}bias")) for name in self.sizes]
        if not heads.is_fused:
            return tuple(part.unflatten(-1, (-1, heads.dim)) for part in flat)
        if not heads.is_interleaved:
            return tuple(part.unflatten(-1, (-1, heads.dim)) for part in flat[0].split([*heads.sizes.values()], -1))
        groups = flat[0].unflatten(-1, (heads.key, -1, heads.dim))  # [..., groups, heads of one, dim]
        return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]


class LayerNormMLP(Normalized):
    """A norm and a perceptron with one hidden layer: `fc1_weight`, `fc1_bias`, `fc2_weight`, `fc2_bias`.

    For a gated activation `fc1_weight` has twice as many rows, the gate's first.
    """

    def __init__(
        self, settings: NormSettings, ffn_hidden_size: int, activation: str, params: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(settings)
        require_choice("activation", activation, ACTIVATIONS)
        unknown = {} if not params else params.keys() - (_CLAMP.keys() if activation == "clamped_swiglu" else ())
        if unknown:
            raise ValueError(
                f"activation_params of {activation} must be of {list(_CLAMP)}, for clamped_swiglu alone, got {params!r}"
            )
        self.clamp = _CLAMP | dict(params or {})
        hidden_size, like, bias = settings.hidden_size, settings.like, settings.bias
        self.activation = activation
        rows = ffn_hidden_size * (1 if activation in _UNGATED else 2)
        self.fc1_weight = settings.init.weight(rows, hidden_size, like=like)
        self.fc1_bias = frozen(rows, value=0.0, like=like) if bias else None
        self.fc2_weight = settings.init.weight(hidden_size, ffn_hidden_size, like=like, is_outer=True)
        self.fc2_bias = frozen(hidden_size, value=0.0, like=like) if bias else None

    def forward(self, x: Tensor, normed: Tensor | None = None) -> Tensor:
        """Return the perceptron's output for `x` [..., hidden]; `normed` is its norm, if it is known."""
        inner = F.linear(self.normalize(x) if normed is None else normed, self.fc1_weight, self.fc1_bias)
        return F.linear(self._activated(inner), self.fc2_weight, self.fc2_bias)

    def _activated(self, inner: Tensor) -> Tensor:
        if self.activation in _UNGATED:
            return _UNGATED[self.activation](inner)
        if self.activation in _FUSED:
            rows = inner.reshape(-1, inner.shape[-1])
            out = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=inner.dtype, device=inner.device)
            act_mul(out, rows, _FUSED[self.activation])
            return out.view(*inner.shape[:-1], -1)
        gate, up = inner.chunk(2, -1)
        if self.activation == "glu":
            return torch.sigmoid(gate) * up
        if self.activation == "clamped_swiglu":
            limit, alpha, offset = self.clamp["limit"], self.clamp["alpha"], self.clamp["glu_linear_offset"]
            gate = gate.clamp(max=limit)
            return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + offset)
        return _UNGATED[_GATES[self.activation]](gate) * up
