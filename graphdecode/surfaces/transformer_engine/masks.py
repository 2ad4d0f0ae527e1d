"""Masks and biases of attention, and attention under those that the kernels of a causal step do not support."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.attention.cached import attend_from_rows, cached_attention
from graphdecode.cache.errors import require_choice, require_tensors
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.attention_torch import alibi_slopes

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class Mask(NamedTuple):
    """The keys that a query at position `i` sees; keys count from 0, and `i` does from the diagonal's corner."""

    is_causal: bool  # no key after i
    bottom_right: bool  # whether the newest query has the newest key's position, or the first the first's
    left: int  # keys from i - left on; -1: all
    right: int  # and up to i + right; -1: all

    @classmethod
    def of(cls, kind: str, window: tuple[int, int] | None, bottom_right: bool | None) -> Mask:
        """Return the mask of published arguments; a window that does not fit the type is cut, as published."""
        kind = kind.replace(",", "_")
        kind = "padding_causal" if kind == "causal_padding" else kind
        require_choice("attn_mask_type", kind, MASK_TYPES)
        is_causal = "causal" in kind
        left, right = (-1, -1) if window is None else _pair_of(window)
        if left < -1 or right < -1 or (left == -1 and right > 0) or (left >= 0 and right < 0 and not is_causal):
            raise ValueError(
                f"window_size must be (-1, -1), (-1, 0) or two numbers of 0 or more with {kind}, got {window!r}"
            )
        if is_causal:
            return cls(True, kind.endswith("bottom_right"), left, 0)
        return cls(False, bottom_right is not False, left, right if left >= 0 else -1)


def _pair_of(window: tuple[int, int]) -> tuple[int, int]:
    is_pair = isinstance(window, tuple | list) and len(window) == 2 and all(isinstance(each, int) for each in window)
    if not is_pair:
        raise ValueError(f"window_size must be two integers, got {window!r}")
    return window[0], window[1]


class Sequences(NamedTuple):
    """Keys, values and queries of a step's sequences, in the form of the attention kernels."""

    keys: Tensor  # [rows, max_seq, hkv, d], or pages
    values: Tensor
    table: Tensor | None  # int32 [rows, pages]; None: row i is page i
    cu_q: Tensor  # int32 [rows + 1], queries, cumulative
    cu_kv: Tensor  # int32 [rows + 1], keys, cumulative
    begins: Tensor  # int32 [rows + 1], where the queries of each row begin in thd


class Biases(NamedTuple):
    """Biases of logits, and the mask of hidden keys."""

    slopes: Tensor | None = None  # float32 [heads] or [rows, heads], of ALiBi
    # broadcastable to [rows, heads, queries, keys]; queries count from the step's first of their row
    matrix: Tensor | None = None
    is_scaled: bool = False  # whether the scale, and the cap behind it, are the matrix's too
    hidden: Tensor | None = None  # bool, likewise: keys that are not seen

    @property
    def are_none(self) -> bool:
        """Whether there are none."""
        return self.slopes is None and self.matrix is None and self.hidden is None


class _Queries(NamedTuple):
    """Tokens of a step, one after another, and the keys that they see."""

    q: Tensor  # [tokens, heads, d]
    rows: Tensor  # int64 [tokens], the sequence of each
    inside: Tensor  # int64 [tokens], its number among the step's tokens of that
    at: Tensor  # int64 [tokens], the position of each
    num_keys: Tensor  # int64 [tokens], the number of keys of its sequence that a mask without a window lets it see


def _queries(q: Tensor, form: str, mask: Mask, sequences: Sequences) -> _Queries:
    count = sequences.cu_q.shape[0] - 1
    if form.startswith("thd"):
        tokens = torch.arange(q.shape[0], device=q.device)
        rows = torch.searchsorted(sequences.begins[1:].contiguous(), tokens, right=True).clamp(max=count - 1)
        inside = tokens - sequences.begins[rows]
    else:
        q = q.transpose(0, 1) if form.startswith("sbhd") else q
        tokens = torch.arange(q.shape[0] * q.shape[1], device=q.device)
        rows, inside = tokens // q.shape[1], tokens % q.shape[1]
        q = q.flatten(0, 1)
    new, kv_lens = sequences.cu_q.diff()[rows].long(), sequences.cu_kv.diff()[rows].long()
    at = inside + kv_lens - new if mask.bottom_right else inside
    num_keys = torch.minimum(at + 1, kv_lens).clamp(min=0) if mask.is_causal else kv_lens
    return _Queries(q, rows, inside, at, torch.where(inside < new, num_keys, 0))


def _in_format(out: Tensor, q: Tensor, form: str) -> Tensor:
    """Return [tokens, heads, d] in the format of the queries."""
    if form.startswith("thd"):
        return out
    rows = q.shape[1] if form.startswith("sbhd") else q.shape[0]
    out = out.unflatten(0, (rows, -1))
    return out.transpose(0, 1) if form.startswith("sbhd") else out


def attend_token_by_token(q: Tensor, form: str, mask: Mask, sequences: Sequences, options: AttentionOptions) -> Tensor:
    """Attend under a mask without a window: for the decode kernel, each query is a row of its own."""
    tokens = _queries(q, form, mask, sequences)
    table = tokens.rows.int().unsqueeze(1) if sequences.table is None else sequences.table[tokens.rows]
    out = q.new_zeros(*tokens.q.shape[:-1], sequences.values.shape[-1])
    before = (tokens.num_keys - 1).int()
    attend_from_rows(out, tokens.q.contiguous(), sequences.keys, sequences.values, before, table, options)
    return _in_format(out, q, form)


def attend_densely(
    q: Tensor, form: str, mask: Mask, sequences: Sequences, options: AttentionOptions, biases: Biases
) -> Tensor:
    """Attend under any mask, and with any biases, by torch's operators over all places of each sequence.

    With slopes a query at i adds `-slope * abs(i - j)` to the logit of key j, after the cap.
    """
    tokens = _queries(q, form, mask, sequences)
    kv_heads = sequences.keys.shape[2]
    wide = tokens.q.float().unflatten(1, (kv_heads, -1)) * options.scale_of(q.shape[-1])  # [tokens, hkv, group, d]
    out = q.new_zeros(*tokens.q.shape[:-1], sequences.values.shape[-1])
    is_packed = form.startswith("thd")
    count = sequences.cu_q.shape[0] - 1 if is_packed else q.shape[form.index("b")]
    width = len(wide) // max(count, 1)
    for row in range(count):
        keys, values = (
            cache[row] if sequences.table is None else cache[sequences.table[row].long()].flatten(0, 1)
            for cache in (sequences.keys, sequences.values)
        )  # [places, hkv, d]
        positions = torch.arange(keys.shape[0], device=q.device)
        chunk = slice(None) if is_packed else slice(row * width, (row + 1) * width)
        at, num_keys = tokens.at[chunk, None], tokens.num_keys[chunk, None]
        logits = torch.einsum("thgd,phd->thgp", wide[chunk], keys.float())
        spread = partial(_spread, row=row, inside=tokens.inside[chunk], positions=len(positions), kv_heads=kv_heads)
        if biases.matrix is not None and biases.is_scaled:
            logits = logits + spread(biases.matrix).float() * options.scale_of(q.shape[-1])
        if options.logits_soft_cap > 0:
            logits = torch.tanh(logits / options.logits_soft_cap) * options.logits_soft_cap
        if biases.matrix is not None and not biases.is_scaled:
            logits = logits + spread(biases.matrix).float()
        if biases.slopes is not None:
            slopes = biases.slopes if biases.slopes.dim() == 1 else biases.slopes[min(row, len(biases.slopes) - 1)]
            of_row = slopes.float().view(1, kv_heads, -1, 1)
            logits = logits - of_row * (at - positions).abs()[:, None, None]
        visible = (positions < num_keys) & (tokens.rows[chunk, None] == row)
        if mask.left >= 0:
            visible = visible & (positions >= at - mask.left) & (positions <= at + mask.right)
        visible = visible[:, None, None]
        if biases.hidden is not None:
            visible = visible & ~spread(biases.hidden)
        logits = logits.masked_fill(~visible, -math.inf)
        if options.sinks is None:
            weights = torch.softmax(logits, -1)
        else:
            sinks = options.sinks.view(1, kv_heads, -1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.softmax(torch.cat((logits, sinks), -1), -1)[..., :-1]
        weights = torch.where(visible, weights, 0.0)
        is_key = (positions < sequences.cu_kv[row + 1] - sequences.cu_kv[row])[:, None, None]
        part = torch.einsum("thgp,phd->thgd", weights, torch.where(is_key, values.float(), 0.0)).flatten(1, 2)
        out[chunk] = torch.where((tokens.rows[chunk] == row)[:, None, None], part.to(out.dtype), out[chunk])
    return _in_format(out, q, form)


def _spread(matrix: Tensor, *, row: int, inside: Tensor, positions: int, kv_heads: int) -> Tensor:
    """Return a row's part [tokens, kv heads, group, places] of a matrix, each dimension of which may be one."""
    part = matrix[row if matrix.shape[0] > 1 else 0]  # [heads, queries, keys]
    part = (part.index_select(1, inside.clamp(max=part.shape[1] - 1)) if part.shape[1] > 1 else part).transpose(0, 1)
    if part.shape[-1] > 1:
        part = part[..., :positions]
        part = torch.nn.functional.pad(part, (0, positions - part.shape[-1]))
    return part.unsqueeze(1) if part.shape[1] == 1 else part.unflatten(1, (kv_heads, -1))


def attend(
    q: Tensor,
    form: str,
    mask: Mask,
    sequences: Sequences,
    options: AttentionOptions,
    biases: Biases,
    is_aligned: bool,
) -> Tensor:
    """Attend by the fastest way that has the mask and the biases; see `attend_densely`.

    Args:
        is_aligned: whether each row's newest query has its newest key's position, and thd has no padding between rows.
    """
    has_one = not form.startswith("thd") and q.shape[form.index("s")] == 1
    if biases.are_none and is_aligned and (mask.is_causal or has_one):
        return cached_attention(
            q, sequences.keys, sequences.values, sequences.cu_q, sequences.cu_kv, qkv_format=form,
            page_table=sequences.table, sm_scale=options.sm_scale, window_left=options.window_left,
            logits_soft_cap=options.logits_soft_cap, sinks=options.sinks,
        )  # fmt: skip
    if biases.are_none and mask.left < 0:
        return attend_token_by_token(q, form, mask, sequences, options)
    return attend_densely(q, form, mask, sequences, options, biases)


def biases_of(
    kind: str,
    slopes: Tensor | None,
    matrix: Tensor | None,
    hidden: Tensor | None,
    shape: tuple[int, ...] | None,
    q: Tensor,
    rows: int | None = None,
) -> Biases:
    """Return the biases of published arguments.

    Args:
        kind: `core_attention_bias_type`.
        slopes, matrix: `alibi_slopes` and `core_attention_bias`.
        hidden: the `attention_mask` of an arbitrary mask.
        shape: rows, heads, queries and keys; None: they are packed, and have no such matrices.
        q: the queries.
        rows: of packed queries, if their number is known.

    Raises:
        ValueError: an argument does not fit.
    """
    require_choice("core_attention_bias_type", kind, BIAS_TYPES)
    if ("scale" in kind) != (matrix is not None):
        must = "given" if "scale" in kind else "None"
        raise ValueError(f"core_attention_bias must be {must} with core_attention_bias_type={kind!r}")
    for name, tensor, dtypes in (
        ("core_attention_bias", matrix, (torch.float32, torch.float16, torch.bfloat16)),
        ("attention_mask", hidden, (torch.bool,)),
    ):
        if tensor is None:
            continue
        if shape is None:
            raise ValueError(f"{name} of queries and keys needs qkv_format bshd or sbhd, got thd")
        require_tensors(q.device, **{name: tensor})
        fits = tensor.dim() == 4 and all(n in (1, most) for n, most in zip(tensor.shape, shape, strict=True))
        if not fits or tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be broadcastable to {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    heads = q.shape[-2]
    if kind != "alibi":
        if slopes is not None:
            raise ValueError(f"alibi_slopes need core_attention_bias_type='alibi', got {kind!r}")
        return Biases(None, matrix, kind == "pre_scale_bias", hidden)
    if slopes is None:
        return Biases(alibi_slopes(heads, q.device), hidden=hidden)
    require_tensors(q.device, alibi_slopes=slopes)
    rows = rows if shape is None else shape[0]
    if slopes.shape not in ((heads,), (rows, heads)) and not (rows is None and slopes.shape[1:] == (heads,)):
        batch = "batch" if rows is None else rows
        raise ValueError(f"alibi_slopes must be [{heads}] or [{batch}, {heads}], got {tuple(slopes.shape)}")
    return Biases(slopes, hidden=hidden)
