"""`DotProductAttention`: attention over the cache of `inference_params`, with TransformerEngine's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphdecode.attention import cached_attention
from graphdecode.cache.errors import require_choice

from .cache_managers import QKV_FORMATS
from .inference_params import OUTPUT_FORMATS, InferenceParams

MASK_TYPES = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
_WITHOUT_EFFECT = {  # of the forward pass: dropout, warming up, the layout of fused weights, messages
    "get_rng_state_tracker",
    "seq_length",
    "micro_batch_size",
    "qkv_weight_interleaved",
    "name",
}
_ONLY = {  # the only supported values
    "tp_size": 1,
    "tp_group": None,
    "cp_group": None,
    "attention_type": "self",
    "layer_type": "encoder",
    "drop_path_rate": 0.0,
    "sequence_parallel": False,
    "set_parallel_mode": False,
    "fuse_qkv_params": False,
    "return_bias": False,
    "return_layernorm_output": False,
    "apply_residual_connection_post_layernorm": False,
    "output_layernorm": False,
    "parallel_attention_mlp": False,
    "fuse_wgrad_accumulation": False,
    "softmax_type": "vanilla",
    "qk_norm_type": None,
    "return_max_logit": False,
    "ub_tp_comm_overlap": False,
}


def check_training_arguments(module: str, given: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown argument, ValueError for a value that is not supported."""
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY:
            raise TypeError(f"{module} got an unexpected keyword argument {name!r}")
        if value != _ONLY[name]:
            raise ValueError(f"{name} must be {_ONLY[name]!r}, {module} does nothing else here, got {value!r}")


class DotProductAttention(nn.Module):
    """Causal attention of the step's tokens over all tokens of their sequences, up to their own positions.

    With a cache the masks `causal` and `padding_causal` are both aligned at the bottom right.

    Args:
        num_attention_heads: query heads.
        kv_channels: size of a head, or those of a key and a value head.
        num_gqa_groups: key/value heads; None: as many as query heads.
        attention_dropout: ignored.
        qkv_format: `sbhd`, `bshd` or `thd`, the default of `forward`.
        attn_mask_type: one of `MASK_TYPES`, likewise.
        window_size: (tokens to the left that a query sees or -1, 0 or -1), likewise.
        layer_number: number of the layer in the cache; None: 1.
        softmax_scale: multiplies the logits; None: 1 / sqrt of a key head's size.
        **training: arguments that only training and sharding need; see `check_training_arguments`.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        layer_number: int | None = None,
        softmax_scale: float | None = None,
        **training: Any,
    ) -> None:
        super().__init__()
        check_training_arguments(type(self).__name__, training)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if self.num_gqa_groups < 1 or num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} must be a multiple of num_gqa_groups={self.num_gqa_groups}"
            )
        key_channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(key_channels) if softmax_scale is None else softmax_scale
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size = window_size
        self.layer_number = 1 if layer_number is None else layer_number
        _check_options(qkv_format, attn_mask_type, window_size)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        inference_params: InferenceParams | None = None,
    ) -> Tensor:
        """Attend, after writing the new keys and values into the cache, if there is one.

        Args:
            query_layer: [s, b, h, d], [b, s, h, d] or [t, h, d].
            key_layer: the new tokens' keys, the same with the key/value heads.
            value_layer: likewise.
            attention_mask: must be None: padding follows from the lengths.
            qkv_format, attn_mask_type, window_size: None: the module's.
            cu_seqlens_q: int32 [b + 1], sums of the tokens of each row; without a cache, for thd and rows with padding.
            cu_seqlens_kv: must be None or `cu_seqlens_q`: keys and queries are of the same tokens.
            inference_params: the cache; `pre_step` has been called, and memory for this layer allocated. None: the
                tokens attend only to one another.

        Returns:
            [s, b, h * d_v], [b, s, h * d_v] or [t, h * d_v]; zero for padding.
        """
        layout = self.qkv_format if qkv_format is None else qkv_format
        window = self.window_size if window_size is None else window_size
        _check_options(layout, self.attn_mask_type if attn_mask_type is None else attn_mask_type, window)
        if attention_mask is not None:
            raise ValueError("attention_mask must be None: padding follows from the lengths")
        table = None
        if inference_params is not None:
            keys, values, cu_q, cu_kv, _, out_format = inference_params.step(
                self.layer_number, key_layer, value_layer, layout
            )
            table = inference_params.cache_manager.page_table if inference_params.is_paged else None
        else:
            if cu_seqlens_kv is not None and cu_seqlens_kv is not cu_seqlens_q:
                raise ValueError("cu_seqlens_kv must be None or cu_seqlens_q without inference_params")
            keys, values, cu_q, table = _uncached(key_layer, value_layer, layout, cu_seqlens_q)
            cu_kv, out_format = cu_q, OUTPUT_FORMATS[layout]
        out = cached_attention(
            query_layer,
            keys,
            values,
            cu_q,
            cu_kv,
            qkv_format=out_format,
            page_table=table,
            sm_scale=self.softmax_scale,
            window_left=-1 if window is None else window[0],
        )
        return out.flatten(-2)


def _check_options(qkv_format: str, attn_mask_type: str, window_size: tuple[int, int] | None) -> None:
    require_choice("qkv_format", qkv_format, QKV_FORMATS)
    require_choice("attn_mask_type", attn_mask_type, MASK_TYPES)
    if window_size is not None and (window_size[0] < -1 or window_size[1] not in (-1, 0)):
        raise ValueError(f"window_size must be (-1 or more, 0 or -1) for a causal mask, got {window_size!r}")


def _uncached(
    key_layer: Tensor, value_layer: Tensor, layout: str, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return new keys and values as a cache of their own: rows, or for packed tokens pages of one token."""
    if layout == "thd":
        if cu_seqlens is None:
            raise ValueError("thd needs cu_seqlens_q or inference_params")
        tokens = torch.arange(key_layer.shape[0], dtype=torch.int32, device=key_layer.device)
        table = (cu_seqlens[:-1, None] + tokens).clamp_(max=key_layer.shape[0] - 1)
        return key_layer.unsqueeze(1), value_layer.unsqueeze(1), cu_seqlens, table
    if layout == "sbhd":
        key_layer, value_layer = key_layer.transpose(0, 1), value_layer.transpose(0, 1)
    if cu_seqlens is None:
        batch, width = key_layer.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=key_layer.device) * width
    return key_layer, value_layer, cu_seqlens, None
