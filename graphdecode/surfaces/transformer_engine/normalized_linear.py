"""A norm and the product behind it, with TransformerEngine's parameter names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.norm.rms_norm import rms_norm

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
_GATES = {"swiglu": "silu", "geglu": "gelu_tanh"}
ACTIVATIONS = ("gelu", "relu", *_GATES)
_STD = 0.023  # of weights that are not loaded yet


def frozen(*shape: int, value: float | None = None, like: dict[str, object]) -> nn.Parameter:
    """Return a parameter that is not trained, of one value or of random ones."""
    tensor = torch.empty(*shape, **like)  # type: ignore[call-overload]
    filled = tensor.normal_(std=_STD) if value is None else tensor.fill_(value)
    return nn.Parameter(filled, requires_grad=False)


class Normalized(nn.Module):
    """A module that begins with a norm: `layer_norm_weight`, and `layer_norm_bias` for LayerNorm.

    Args:
        hidden_size: of the input.
        eps: added to the variance, or to the mean square.
        normalization: one of `NORMALIZATIONS`; None: no norm.
        zero_centered_gamma: whether the norm multiplies by 1 + weight.
        like: dtype and device of the parameters.

    Raises:
        ValueError: the normalization is not known.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        normalization: str | None,
        zero_centered_gamma: bool,
        like: dict[str, object],
    ) -> None:
        super().__init__()
        if normalization is not None and normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}")
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = self.layer_norm_bias = None
        if normalization is not None:
            self.layer_norm_weight = frozen(hidden_size, value=0.0 if zero_centered_gamma else 1.0, like=like)
        if normalization == "LayerNorm":
            self.layer_norm_bias = frozen(hidden_size, value=0.0, like=like)

    def normalize(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [..., hidden]."""
        if self.layer_norm_weight is None:
            return x
        gain = self.layer_norm_weight + 1.0 if self.zero_centered_gamma else self.layer_norm_weight
        if self.layer_norm_bias is not None:
            return F.layer_norm(x, x.shape[-1:], gain, self.layer_norm_bias, self.eps)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        rms_norm(out, rows, gain.float(), self.eps)
        return out.view(x.shape)


class LayerNormQKV(Normalized):
    """Queries, keys and values of a norm: `query_weight`, `key_weight`, `value_weight`, and their biases.

    Args:
        hidden_size: of the input.
        sizes: of queries, keys and values.
        bias: whether there are biases.
        eps: see `Normalized`.
        normalization: see `Normalized`.
        zero_centered_gamma: see `Normalized`.
        like: dtype and device of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: tuple[int, int, int],
        bias: bool,
        eps: float,
        normalization: str | None,
        zero_centered_gamma: bool,
        like: dict[str, object],
    ) -> None:
        super().__init__(hidden_size, eps, normalization, zero_centered_gamma, like)
        query, key, value = sizes
        self.query_weight = frozen(query, hidden_size, like=like)
        self.key_weight = frozen(key, hidden_size, like=like)
        self.value_weight = frozen(value, hidden_size, like=like)
        self.query_bias = frozen(query, value=0.0, like=like) if bias else None
        self.key_bias = frozen(key, value=0.0, like=like) if bias else None
        self.value_bias = frozen(value, value=0.0, like=like) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of `x` [..., hidden], [..., size] each."""
        x = self.normalize(x)
        query = F.linear(x, self.query_weight, self.query_bias)
        key = F.linear(x, self.key_weight, self.key_bias)
        return query, key, F.linear(x, self.value_weight, self.value_bias)


class LayerNormMLP(Normalized):
    """A norm and a perceptron with one hidden layer: `fc1_weight`, `fc1_bias`, `fc2_weight`, `fc2_bias`.

    Args:
        hidden_size: of the input and the output.
        ffn_hidden_size: of the layer between; `fc1_weight` has twice as many rows for a gated activation, the gate's
            first.
        activation: one of `ACTIVATIONS`.
        bias: whether there are biases.
        eps: see `Normalized`.
        normalization: see `Normalized`.
        zero_centered_gamma: see `Normalized`.
        like: dtype and device of the parameters.

    Raises:
        ValueError: the activation is not known.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str,
        bias: bool,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        like: dict[str, object],
    ) -> None:
        super().__init__(hidden_size, eps, normalization, zero_centered_gamma, like)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        rows = ffn_hidden_size * (2 if activation in _GATES else 1)
        self.fc1_weight = frozen(rows, hidden_size, like=like)
        self.fc1_bias = frozen(rows, value=0.0, like=like) if bias else None
        self.fc2_weight = frozen(hidden_size, ffn_hidden_size, like=like)
        self.fc2_bias = frozen(hidden_size, value=0.0, like=like) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the perceptron's output for `x` [..., hidden]."""
        inner = F.linear(self.normalize(x), self.fc1_weight, self.fc1_bias)
        return F.linear(self._activate(inner), self.fc2_weight, self.fc2_bias)

    def _activate(self, inner: Tensor) -> Tensor:
        if self.activation == "relu":
            return F.relu(inner)
        if self.activation == "gelu":
            return F.gelu(inner, approximate="tanh")
        rows = inner.reshape(-1, inner.shape[-1])
        out = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=inner.dtype, device=inner.device)
        act_mul(out, rows, _GATES[self.activation])
        return out.view(*inner.shape[:-1], -1)
