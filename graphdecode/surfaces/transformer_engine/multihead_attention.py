"""`MultiheadAttention`: projections around attention over the cache, with TransformerEngine's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dot_product_attention import DotProductAttention
from .inference_params import InferenceParams
from .normalized_linear import LayerNormQKV
from .rotary import apply_rotary_pos_emb
from .training_arguments import check_training_arguments


class MultiheadAttention(nn.Module):
    """Attention with its projections: `qkv` or, with a norm before it, `layernorm_qkv`; and `proj`.

    Parameters have TransformerEngine's names (`query_weight`, ...), and need no gradients.

    Args:
        hidden_size: of input and output.
        num_attention_heads: query heads.
        kv_channels: size of a head; None: hidden_size / num_attention_heads.
        attention_dropout: part of the surface: nothing is dropped.
        layernorm_epsilon: of the norm.
        layer_number: of the layer in the cache; None: 1.
        attn_mask_type: see `DotProductAttention`.
        window_size: see `DotProductAttention`.
        num_gqa_groups: key/value heads; None: as many as query heads.
        params_dtype: of the parameters; None: torch's default.
        input_layernorm: whether there is a norm.
        zero_centered_gamma: whether it multiplies by 1 + weight.
        bias: whether projections have biases.
        normalization: `LayerNorm` or `RMSNorm`.
        rotary_pos_interleaved: whether the pairs that are rotated are neighbours.
        device: None means CUDA where there is one, else the CPU.
        qkv_format: `sbhd`, `bshd` or `thd`.
        **training: arguments that only training and sharding need; see `check_training_arguments`.

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
        *,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        num_gqa_groups: int | None = None,
        params_dtype: torch.dtype | None = None,
        input_layernorm: bool = False,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        rotary_pos_interleaved: bool = False,
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        **training: Any,
    ) -> None:
        super().__init__()
        check_training_arguments(type(self).__name__, training)
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_attention_heads}"
            )
        self.layer_number = 1 if layer_number is None else layer_number
        self.qkv_format = qkv_format
        self.kv_channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.rotary_pos_interleaved = rotary_pos_interleaved
        place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        like: dict[str, Any] = {"dtype": params_dtype or torch.get_default_dtype(), "device": place}
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
        norm = normalization if input_layernorm else None
        sizes = (inner, groups * self.kv_channels, groups * self.kv_channels)
        qkv = LayerNormQKV(hidden_size, sizes, bias, layernorm_epsilon, norm, zero_centered_gamma, like)
        self.qkv_name = "layernorm_qkv" if input_layernorm else "qkv"
        self.add_module(self.qkv_name, qkv)
        self.proj = nn.Linear(inner, hidden_size, bias=bias, **like).requires_grad_(False)

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
            hidden_states: [s, b, hidden], [b, s, hidden] or [t, hidden].
            attention_mask: must be None: lengths say what is padding.
            attn_mask_type: None: the module's.
            window_size: None: the module's.
            inference_params: the cache, after its `pre_step`.
            rotary_pos_emb: angles [s2, 1, 1, d2], or those of queries and keys; tokens are rotated to the positions
                that `get_seqlens_pre_step` says.
            cu_seqlens_q: see `DotProductAttention.forward`.
            cu_seqlens_kv: likewise.

        Returns:
            The output, in the shape of the input.

        Raises:
            ValueError: something does not fit.
        """
        if inference_params is not None and self.layer_number not in inference_params.cache_manager.cache:
            inference_params.allocate_memory(self.layer_number)
        flat: tuple[Tensor, Tensor, Tensor] = getattr(self, self.qkv_name)(hidden_states)
        query, key, value = (x.unflatten(-1, (-1, self.kv_channels)) for x in flat)
        if rotary_pos_emb is not None:
            query, key = self._rotate(query, key, rotary_pos_emb, inference_params, cu_seqlens_q)
        out = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            inference_params=inference_params,
        )
        return self.proj(out)

    def _rotate(
        self,
        query: Tensor,
        key: Tensor,
        angles: Tensor | tuple[Tensor, Tensor],
        inference_params: InferenceParams | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        of_query, of_key = angles if isinstance(angles, tuple) else (angles, angles)
        starts = None
        if inference_params is not None:
            starts, cu_seqlens = inference_params.get_seqlens_pre_step(), inference_params.cu_seqlens_q
            longest = inference_params.max_sequence_length
            if min(of_query.shape[0], of_key.shape[0]) < longest:
                raise ValueError(f"rotary_pos_emb must have the angles of {longest} positions, got {of_query.shape[0]}")
        form, pairs = self.qkv_format, self.rotary_pos_interleaved
        return (
            apply_rotary_pos_emb(query, of_query, form, starts, pairs, cu_seqlens=cu_seqlens),
            apply_rotary_pos_emb(key, of_key, form, starts, pairs, cu_seqlens=cu_seqlens),
        )
