"""`DotProductAttention`: attention over the cache of `inference_params`, with TransformerEngine's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphdecode.attention import AttentionOptions
from graphdecode.buffers import default_device
from graphdecode.cache.errors import (
    require_choice,
    require_fit,
    require_numbers,
    require_positive,
    require_share,
    require_tensors,
)

from .arguments import require_neutral
from .cache_managers import QKV_FORMATS
from .inference_params import OUTPUT_FORMATS, InferenceParams
from .masks import Mask, Sequences, attend, biases_of

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(nn.Module):
    """Attention of the step's tokens over the tokens of their sequences.

    With a cache, causal masks are aligned at the bottom right: a query sees its sequence up to its own position. A
    module begins in evaluation mode. Arguments that are not listed here are hints, or must be neutral; see
    `arguments.NEUTRAL`.

    Args:
        num_attention_heads: query heads.
        kv_channels: size of a head, or those of a key and a value head.
        num_gqa_groups: key/value heads; None: as many as query heads.
        attention_dropout: must be 0 in training mode.
        qkv_format: `sbhd`, `bshd` or `thd`, the default of `forward`.
        attn_mask_type: one of `masks.MASK_TYPES`, likewise.
        window_size: (tokens to the left that a query sees, tokens to the right), -1 for all, likewise.
        bottom_right_diagonal: whether windows and ALiBi of a mask that is not causal are aligned at the newest query
            and key; None: yes. Likewise.
        softcap: caps the logits; 0: no cap. Likewise.
        layer_number: number of the layer in the cache; None: 1.
        softmax_scale: multiplies the logits; None: 1 / sqrt of a key head's size.
        softmax_type: `vanilla`; `off-by-one`, with a logit of 0 that takes weight and has no value; or `learnable`,
            with one of each head, the parameter `softmax_offset`.

    Raises:
        ValueError: an option is not known, or asks for what is not offered.
    """

    softmax_offset: Tensor | None

    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None, softcap: float = 0.0,
        sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: object = None, layer_number: int | None = None, attention_type: str = "self", cp_group: object = None,
        cp_global_ranks: Sequence[int] | None = None, cp_stream: object = None, cp_comm_type: str = "p2p",
        softmax_scale: float | None = None, softmax_type: str = "vanilla", return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        require_neutral(locals())
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if self.num_gqa_groups < 1 or num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} must be a multiple of num_gqa_groups={self.num_gqa_groups}"
            )
        key_channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        require_positive(num_attention_heads=num_attention_heads, kv_channels=key_channels)
        require_numbers(softmax_scale=softmax_scale)
        self.softmax_scale = 1.0 / math.sqrt(key_channels) if softmax_scale is None else softmax_scale
        require_choice("qkv_format", qkv_format, QKV_FORMATS)
        require_choice("softmax_type", softmax_type, SOFTMAX_TYPES)
        Mask.of(attn_mask_type, window_size, bottom_right_diagonal)
        _check_softcap(softcap)
        self.qkv_format, self.attn_mask_type, self.softcap = qkv_format, attn_mask_type, softcap
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.layer_number = 1 if layer_number is None else layer_number
        require_share(attention_dropout=attention_dropout)
        self.attention_dropout = attention_dropout
        sinks = None if softmax_type == "vanilla" else torch.zeros(num_attention_heads, device=default_device(None))
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(sinks, requires_grad=False)  # type: ignore[arg-type]
        else:
            self.register_buffer("softmax_offset", sinks, persistent=False)
        self.eval()

    def forward(
        self, query_layer: Tensor | None = None, key_layer: Tensor | None = None, value_layer: Tensor | None = None,
        attention_mask: Tensor | None = None, qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None, cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None, window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None, softcap: float | None = None,
        checkpoint_core_attention: bool = False, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None, alibi_slopes: Tensor | None = None, fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None, pad_between_seqs: bool | None = None, fp8_output: bool = False,
        bf16_backward: bool = False, num_splits: int | None = 1, score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None, score_mod_tensors: object = None,
        score_mod_bprop_tensors: object = None, qkv_layer: Tensor | None = None, kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3, thd_attention_policies: object = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor:  # fmt: skip
        """Attend, after writing the new keys and values into the cache, if there is one.

        Args:
            query_layer: [s, b, h, d], [b, s, h, d] or [t, h, d].
            key_layer: the new tokens' keys, the same with the key/value heads.
            value_layer: likewise.
            attention_mask: bool [b, 1, 1, s], true for padding after each row's tokens; without a cache, for a padding
                mask without `cu_seqlens_q`. Of an arbitrary mask, true for keys that are not seen, broadcastable to
                [b, h, s, keys]; over a cache keys are `max_sequence_length`, and those that a row does not have are not
                seen anyway.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal, softcap: None: the module's.
            cu_seqlens_q: int32 [b + 1], sums of the tokens of each row; without a cache, for thd and rows with padding.
            cu_seqlens_kv: the same of the keys; None: `cu_seqlens_q`.
            cu_seqlens_q_padded: int32 [b + 1], where rows begin in thd if there is padding between them.
            cu_seqlens_kv_padded: likewise for keys; None: `cu_seqlens_q_padded`.
            core_attention_bias_type: one of `masks.BIAS_TYPES`.
            core_attention_bias: added to the logits, before they are scaled and capped or after it, as the type says;
                of the shape of an arbitrary mask.
            alibi_slopes: float32 [h] or [b, h]; None: the published ones.
            inference_params: the cache; `pre_step` has been called, and memory for this layer allocated. Lengths are
                the cache's, those given here have no effect. None: the tokens attend only to one another.
            pad_between_seqs: False: the padded sums have no effect.
            qkv_layer: queries, keys and values in one tensor, one after another in `qkv_interleave_dim`, in the place
                of the three.
            kv_layer: keys and values likewise.

        Returns:
            [s, b, h * d_v], [b, s, h * d_v] or [t, h * d_v]; zero for padding.
        """
        require_neutral(locals())
        require_eval(self, attention_dropout=self.attention_dropout)
        layout = self.qkv_format if qkv_format is None else qkv_format
        require_choice("qkv_format", layout, QKV_FORMATS)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        corner = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        mask = Mask.of(kind, self.window_size if window_size is None else window_size, corner)
        cap = self.softcap if softcap is None else softcap
        _check_softcap(cap)
        query, keys, values = _unpacked((query_layer, key_layer, value_layer), qkv_layer, kv_layer, qkv_interleave_dim)
        hidden = attention_mask if kind == "arbitrary" else None
        if kind == "arbitrary" and hidden is None:
            raise ValueError("attention_mask must be given with attn_mask_type='arbitrary', got None")
        shape = None
        if layout != "thd":
            num_keys = (
                keys.shape[layout.index("s")] if inference_params is None else inference_params.max_sequence_length
            )
            shape = (query.shape[layout.index("b")], query.shape[-2], query.shape[layout.index("s")], num_keys)
        rows = None if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        biases = biases_of(core_attention_bias_type, alibi_slopes, core_attention_bias, hidden, shape, query, rows)
        form = OUTPUT_FORMATS[layout]
        if inference_params is not None:
            if attention_mask is not None and hidden is None:
                raise ValueError("attention_mask must be None with inference_params: padding follows from the lengths")
            keys, values, cu_q, cu_kv, _, form = inference_params.step(self.layer_number, keys, values, layout)
            table = inference_params.cache_manager.page_table if inference_params.is_paged else None
            mask = mask._replace(bottom_right=mask.is_causal or mask.bottom_right)
            sequences, is_aligned = Sequences(keys, values, table, cu_q, cu_kv, cu_q), mask.bottom_right
        else:
            if pad_between_seqs is False:
                cu_seqlens_q_padded = cu_seqlens_kv_padded = None
            if "padding" in kind and attention_mask is not None and cu_seqlens_q is None:
                cu_seqlens_q = _sums_of(attention_mask)
            begins = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
            _check_uncached(keys, values, query, layout, (cu_seqlens_q, cu_seqlens_kv), begins)
            sequences = _uncached(keys, values, query, layout, (cu_seqlens_q, cu_seqlens_kv), begins)
            is_aligned = sequences.begins is sequences.cu_q and (sequences.cu_kv is sequences.cu_q or mask.bottom_right)
        sinks = None if self.softmax_offset is None else self.softmax_offset.float()
        options = AttentionOptions(self.softmax_scale, mask.left, cap, sinks)
        return attend(query, form, mask, sequences, options, biases, is_aligned).flatten(-2)


def require_eval(module: nn.Module, **dropouts: float) -> None:
    """Raise ValueError for a module in training mode that would drop values."""
    for name, dropout in dropouts.items():
        if module.training and dropout > 0.0:
            raise ValueError(f"{name} must be 0 in training mode: values are dropped in training alone, got {dropout}")


def _check_softcap(softcap: float) -> None:
    require_numbers(softcap=softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a finite number of 0 or more, got {softcap!r}")


def _unpacked(
    three: tuple[Tensor | None, Tensor | None, Tensor | None], qkv: Tensor | None, kv: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of published arguments."""
    query, key, value = three
    if qkv is not None or kv is not None:
        if dim not in (-3, -2):
            raise ValueError(f"qkv_interleave_dim must be -3 or -2, got {dim!r}")
        if (qkv is not None and kv is not None) or key is not None or value is not None:
            raise ValueError("qkv_layer, kv_layer and key_layer with value_layer exclude one another")
        name, packed, parts = ("kv_layer", kv, 2) if qkv is None else ("qkv_layer", qkv, 3)
        if packed is None or packed.shape[dim] != parts:
            raise ValueError(
                f"{name} must have {parts} in dimension {dim}, got {packed if packed is None else packed.shape}"
            )
        query, key, value = (query, *packed.unbind(dim)) if qkv is None else packed.unbind(dim)
    if query is None or key is None or value is None:
        raise ValueError(
            "query_layer, key_layer and value_layer are needed, or qkv_layer, or kv_layer with query_layer"
        )
    return query, key, value


def _sums_of(attention_mask: Tensor) -> Tensor:
    """Return the sums of the tokens of each row, given which places are padding."""
    if attention_mask.dtype != torch.bool or attention_mask.dim() != 4 or attention_mask.shape[1:3] != (1, 1):
        raise ValueError(
            "attention_mask must be bool [batch, 1, 1, tokens], "
            f"got {attention_mask.dtype} {tuple(attention_mask.shape)}"
        )
    lengths = attention_mask.logical_not().sum(-1).flatten()
    return nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _check_uncached(
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    layout: str,
    sums: tuple[Tensor | None, Tensor | None],
    padded: tuple[Tensor | None, Tensor | None],
) -> None:
    """Raise ValueError for tokens that do not fit one another, or sums that do not fit them."""
    require_tensors(query.device, key_layer=keys, value_layer=values)
    batch = "batch" if layout == "thd" else query.shape[layout.index("b")]
    sizes: dict[str, int | str] = {"b": batch, "s": "tokens", "t": "tokens", "h": "heads", "d": "channels"}
    require_fit("key_layer", keys, [sizes[each] for each in layout], query.dtype)
    require_fit("value_layer", values, [*keys.shape[:-1], "channels"], query.dtype)
    if layout == "thd":
        if sums[0] is None:
            raise ValueError("thd needs cu_seqlens_q or inference_params")
        require_tensors(query.device, cu_seqlens_q=sums[0])
        rows = sums[0].numel()
    else:
        rows = query.shape[layout.index("b")] + 1
    tokens = [each.shape[0 if layout == "thd" else layout.index("s")] for each in (query, keys)]
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    for name, cu_seqlens, most in zip(names, (*sums, *padded), tokens * 2, strict=True):
        if cu_seqlens is None:
            continue
        require_tensors(query.device, **{name: cu_seqlens})
        require_fit(name, cu_seqlens, (rows,), torch.int32)
        if cu_seqlens.is_cpu:  # a GPU is not waited for
            lengths = cu_seqlens.diff()
            if cu_seqlens.shape[0] < 2 or cu_seqlens[0] or (lengths < 0).any():
                raise ValueError(f"{name} must rise from 0, one entry more than rows, got {cu_seqlens.tolist()}")
            if cu_seqlens[-1] > most if layout == "thd" else lengths.max() > most and "padded" not in name:
                rows_of = "rows" if layout == "thd" else "each row"
                raise ValueError(f"{name} must have at most {most} tokens of {rows_of}, got {cu_seqlens.tolist()}")


def _uncached(
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    layout: str,
    sums: tuple[Tensor | None, Tensor | None],
    padded: tuple[Tensor | None, Tensor | None],
) -> Sequences:
    """Return new keys and values as a cache of their own: rows, or for packed tokens pages of one token."""
    cu_q, cu_kv = sums
    if layout == "thd":
        assert cu_q is not None
        cu_kv = cu_q if cu_kv is None else cu_kv
        begins = cu_q if padded[0] is None else padded[0]
        key_begins = padded[1] if padded[1] is not None else (cu_kv if padded[0] is None else padded[0])
        tokens = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
        table = (key_begins[:-1, None] + tokens).clamp_(max=keys.shape[0] - 1)
        return Sequences(keys.unsqueeze(1), values.unsqueeze(1), table, cu_q, cu_kv, begins)
    if layout == "sbhd":
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    width = query.shape[0 if layout == "sbhd" else 1]
    rows = torch.arange(keys.shape[0] + 1, dtype=torch.int32, device=keys.device)
    if cu_kv is None:
        cu_kv = cu_q if keys.shape[1] == width else rows * keys.shape[1]
    cu_q = rows * width if cu_q is None else cu_q
    cu_kv = cu_q if cu_kv is None else cu_kv
    return Sequences(keys, values, None, cu_q, cu_kv, cu_q)
