"""`MultiheadAttention`, `TransformerLayer`, and their norms and linear layers, with TransformerEngine's names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphdecode.buffers import default_device
from graphdecode.cache.errors import require_choice
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.norm.rms_norm import rms_norm

from .dot_product_attention import DotProductAttention, check_training_arguments
from .inference_params import InferenceParams
from .rotary import apply_rotary_pos_emb

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
_GATES = {"swiglu": "silu", "geglu": "gelu_tanh"}
ACTIVATIONS = ("gelu", "relu", *_GATES)
_STD = 0.023  # standard deviation of initial weights


def frozen(*shape: int, value: float, like: dict[str, object]) -> nn.Parameter:
    """Return a parameter that is not trained, of one value."""
    return nn.Parameter(torch.full(shape, value, **like), requires_grad=False)  # type: ignore[call-overload]


class Initializers(NamedTuple):
    """What fills new weights in place; None: a normal distribution with a standard deviation of 0.023."""

    inner: Callable[[Tensor], object] | None  # those of queries, keys, values, and of a perceptron's first layer
    outer: Callable[[Tensor], object] | None  # those of the layers whose outputs are added to the residual stream
    tracker: Callable[[], Any] | None  # returns an object whose `fork()` is a context with another random state

    def check(self) -> None:
        """Refuse what cannot be called."""
        names = ("init_method", "output_layer_init_method", "get_rng_state_tracker")
        for name, given in zip(names, self, strict=True):
            if given is not None and not callable(given):
                raise ValueError(f"{name} must be callable or None, got {given!r}")

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
        if self.layer_norm_bias is not None:
            return F.layer_norm(x, x.shape[-1:], gain, self.layer_norm_bias, self.eps)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        rms_norm(out, rows, gain.float(), self.eps)
        return out.view(x.shape)


class LayerNormQKV(Normalized):
    """Queries, keys and values of a norm: `query_weight`, `key_weight`, `value_weight`, and their biases."""

    def __init__(self, settings: NormSettings, **sizes: int) -> None:
        super().__init__(settings)
        for name, size in sizes.items():
            weight = settings.init.weight(size, settings.hidden_size, like=settings.like)
            self.register_parameter(f"{name}_weight", weight)
        for name, size in sizes.items():
            bias = frozen(size, value=0.0, like=settings.like) if settings.bias else None
            self.register_parameter(f"{name}_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of `x` [..., hidden], [..., size] each."""
        x = self.normalize(x)
        named = ((getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")) for name in ("query", "key", "value"))
        query, key, value = (F.linear(x, weight, bias) for weight, bias in named)
        return query, key, value


class LayerNormMLP(Normalized):
    """A norm and a perceptron with one hidden layer: `fc1_weight`, `fc1_bias`, `fc2_weight`, `fc2_bias`.

    For a gated activation `fc1_weight` has twice as many rows, the gate's first.
    """

    def __init__(self, settings: NormSettings, ffn_hidden_size: int, activation: str) -> None:
        super().__init__(settings)
        require_choice("activation", activation, ACTIVATIONS)
        hidden_size, like, bias = settings.hidden_size, settings.like, settings.bias
        self.activation = activation
        rows = ffn_hidden_size * (2 if activation in _GATES else 1)
        self.fc1_weight = settings.init.weight(rows, hidden_size, like=like)
        self.fc1_bias = frozen(rows, value=0.0, like=like) if bias else None
        self.fc2_weight = settings.init.weight(hidden_size, ffn_hidden_size, like=like, is_outer=True)
        self.fc2_bias = frozen(hidden_size, value=0.0, like=like) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the perceptron's output for `x` [..., hidden]."""
        inner = F.linear(self.normalize(x), self.fc1_weight, self.fc1_bias)
        if self.activation == "relu":
            inner = F.relu(inner)
        elif self.activation == "gelu":
            inner = F.gelu(inner, approximate="tanh")
        else:
            rows = inner.reshape(-1, inner.shape[-1])
            out = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=inner.dtype, device=inner.device)
            act_mul(out, rows, _GATES[self.activation])
            inner = out.view(*inner.shape[:-1], -1)
        return F.linear(inner, self.fc2_weight, self.fc2_bias)


class MultiheadAttention(nn.Module):
    """Attention with its projections: `qkv` or, with a norm before it, `layernorm_qkv`; and `proj`.

    Parameters have TransformerEngine's names (`query_weight`, ...), and need no gradients. Arguments that
    `DotProductAttention` has too mean the same.

    Args:
        hidden_size: size of input and output.
        kv_channels: size of a head; None: hidden_size / num_attention_heads.
        init_method: fills the weights of queries, keys and values in place; None: normal, standard deviation 0.023.
        output_layer_init_method: likewise that of `proj`.
        params_dtype: None means torch's default.
        input_layernorm: whether there is a norm.
        zero_centered_gamma: whether it multiplies by 1 + weight.
        bias: whether projections have biases.
        normalization: `LayerNorm` or `RMSNorm`.
        rotary_pos_interleaved: whether rotated pairs are adjacent.
        device: None means CUDA where there is one, else the CPU.
        get_rng_state_tracker: returns an object whose `fork()` is a context; weights are filled within it.

    Raises:
        ValueError: the sizes do not divide, or an option is not known.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], object] | None = None,
        output_layer_init_method: Callable[[Tensor], object] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        num_gqa_groups: int | None = None,
        params_dtype: torch.dtype | None = None,
        input_layernorm: bool = False,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        rotary_pos_interleaved: bool = False,
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        get_rng_state_tracker: Callable[[], Any] | None = None,
        **training: Any,
    ) -> None:
        super().__init__()
        check_training_arguments(type(self).__name__, training)
        init = Initializers(init_method, output_layer_init_method, get_rng_state_tracker)
        init.check()
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_attention_heads}"
            )
        self.layer_number = 1 if layer_number is None else layer_number
        self.qkv_format = qkv_format
        self.kv_channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.rotary_pos_interleaved = rotary_pos_interleaved
        like = {"dtype": params_dtype or torch.get_default_dtype(), "device": default_device(device)}
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        inner = num_attention_heads * self.kv_channels
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.kv_channels,
            groups,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            layer_number=self.layer_number,
        )
        norm, keys = normalization if input_layernorm else None, groups * self.kv_channels
        settings = NormSettings(hidden_size, layernorm_epsilon, norm, zero_centered_gamma, bias, like, init)
        qkv = LayerNormQKV(settings, query=inner, key=keys, value=keys)
        self.qkv_name = "layernorm_qkv" if input_layernorm else "qkv"
        self.add_module(self.qkv_name, qkv)
        self.proj = nn.Linear(inner, hidden_size, bias=False, device="meta")
        self.proj.weight = init.weight(hidden_size, inner, like=like, is_outer=True)
        self.proj.register_parameter("bias", frozen(hidden_size, value=0.0, like=like) if bias else None)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
    ) -> Tensor:
        """Attend from the step's tokens; a layer that the cache does not know gets its memory here.

        Args:
            hidden_states: [s, b, hidden], [b, s, hidden] or [t, hidden], as the output.
            inference_params: the cache, after its `pre_step`.
            rotary_pos_emb: angles [s2, 1, 1, d2], or a pair for queries and keys; tokens are rotated to the positions
                from `get_seqlens_pre_step` on.
            others: see `DotProductAttention.forward`.
        """
        if inference_params is not None and self.layer_number not in inference_params.cache_manager.cache:
            inference_params.allocate_memory(self.layer_number)
        flat: tuple[Tensor, Tensor, Tensor] = getattr(self, self.qkv_name)(hidden_states)
        query, key, value = (x.unflatten(-1, (-1, self.kv_channels)) for x in flat)
        if rotary_pos_emb is not None:
            pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            starts, begins = None, cu_seqlens_q
            if inference_params is not None:
                starts, begins = inference_params.get_seqlens_pre_step(), inference_params.cu_seqlens_q
                longest, given = inference_params.max_sequence_length, min(len(angles) for angles in pair)
                if given < longest:
                    raise ValueError(f"rotary_pos_emb must have the angles of {longest} positions, got {given}")
            layout = (self.qkv_format, starts, self.rotary_pos_interleaved, False, begins)
            query, key = (
                apply_rotary_pos_emb(x, angles, *layout) for x, angles in zip((query, key), pair, strict=True)
            )
        out = self.core_attention(
            *(query, key, value, attention_mask, None, cu_seqlens_q, cu_seqlens_kv),
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            inference_params=inference_params,
        )
        return self.proj(out)


class TransformerLayer(nn.Module):
    """A decoder layer, norms first: `self_attention` and `layernorm_mlp`.

    Arguments that `MultiheadAttention` has too mean the same.

    Args:
        ffn_hidden_size: size of the perceptron's inner layer.
        hidden_dropout: ignored, as `attention_dropout`.
        init_method: fills the perceptron's first weight, too.
        output_layer_init_method: fills its second, too.
        activation: `gelu`, `relu`, `geglu` or `swiglu`.
        self_attn_mask_type: see `DotProductAttention`.
        attn_input_format: `sbhd`, `bshd` or `thd`.

    Raises:
        ValueError: the sizes do not divide, or an option is not known.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], object] | None = None,
        output_layer_init_method: Callable[[Tensor], object] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        get_rng_state_tracker: Callable[[], Any] | None = None,
        **training: Any,
    ) -> None:
        super().__init__()
        check_training_arguments(type(self).__name__, training)
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            layernorm_epsilon=layernorm_epsilon,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            num_gqa_groups=num_gqa_groups,
            params_dtype=params_dtype,
            input_layernorm=True,
            zero_centered_gamma=zero_centered_gamma,
            bias=bias,
            normalization=normalization,
            rotary_pos_interleaved=rotary_pos_interleaved,
            device=device,
            qkv_format=attn_input_format,
        )
        weight = self.self_attention.proj.weight
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        init = Initializers(init_method, output_layer_init_method, get_rng_state_tracker)
        norm = NormSettings(hidden_size, layernorm_epsilon, normalization, zero_centered_gamma, bias, like, init)
        self.layernorm_mlp = LayerNormMLP(norm, ffn_hidden_size, activation)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        *,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output for the step's tokens, in the shape of the input.

        The arguments are those of `MultiheadAttention.forward`; `self_attn_mask_type` and `window_size` None mean the
        layer's.
        """
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.layernorm_mlp(hidden_states)
