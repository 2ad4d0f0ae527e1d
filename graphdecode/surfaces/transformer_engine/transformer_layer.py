"""`TransformerLayer`: attention and perceptron with their norms and residuals, with TransformerEngine's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .inference_params import InferenceParams
from .multihead_attention import MultiheadAttention
from .normalized_linear import LayerNormMLP
from .training_arguments import check_training_arguments


class TransformerLayer(nn.Module):
    """A decoder layer, norms first: `self_attention` and `layernorm_mlp`.

    Args:
        hidden_size: of input and output.
        ffn_hidden_size: of the perceptron's inner layer.
        num_attention_heads: query heads.
        num_gqa_groups: key/value heads; None: as many as query heads.
        layernorm_epsilon: of the norms.
        hidden_dropout: part of the surface: nothing is dropped.
        attention_dropout: likewise.
        layer_number: of the layer in the cache; None: 1.
        kv_channels: size of a head; None: hidden_size / num_attention_heads.
        self_attn_mask_type: see `DotProductAttention`.
        window_size: see `DotProductAttention`.
        params_dtype: of the parameters; None: torch's default.
        rotary_pos_interleaved: whether the pairs that are rotated are neighbours.
        zero_centered_gamma: whether the norms multiply by 1 + weight.
        bias: whether there are biases.
        activation: `gelu`, `relu`, `geglu` or `swiglu`.
        normalization: `LayerNorm` or `RMSNorm`.
        device: None means CUDA where there is one, else the CPU.
        attn_input_format: `sbhd`, `bshd` or `thd`.
        **training: arguments that only training and sharding need; see `check_training_arguments`.

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
        *,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        params_dtype: torch.dtype | None = None,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        **training: Any,
    ) -> None:
        super().__init__()
        check_training_arguments(type(self).__name__, training)
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            layernorm_epsilon=layernorm_epsilon,
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
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            activation,
            bias,
            layernorm_epsilon,
            normalization,
            zero_centered_gamma,
            like,
        )

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
