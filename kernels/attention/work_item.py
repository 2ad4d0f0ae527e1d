"""Work items of a decode plan on a GPU, and the merge of a split row's partial results.

The plan holds the number of items, and for each of them 16 bytes, which are loaded at once: its row, which of the row's
splits it is, how many there are, and the row's length. The program that arrives last merges a row's partial results, in
the order of the splits: nothing depends on who that is.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Float32, Int32, Written
from .attention_tile import window_begin, with_sinks

ITEM_SIZE = 4
MERGED_VALUES = 4096  # of partial results that one program holds at a time


@triton.jit
def span_of(kv_len, split, splits, q_len, window_left, META: tl.constexpr):
    """Return the keys [begin, end) of a split; which other splits there are is a matter of whole tiles of the plan."""
    lowest = 0
    if META.HAS_WINDOW:
        lowest = tl.maximum(window_begin(kv_len - q_len, window_left, META.IS_CHUNKED), 0)
    chunk = tl.cdiv(tl.cdiv(kv_len - lowest, tl.maximum(splits, 1)), META.TILE) * META.TILE
    begin = lowest + split * chunk
    return begin, tl.minimum(begin + chunk, kv_len)


class SplitPlan(NamedTuple):
    """A step's plan, and the workspace of its split rows; launches that run one after another share it."""

    kv_lens: Int32  # int32 [>= rows], tokens of each row, the queries' own included; 0 for padding, which comes last
    plan: Int32  # int32, what `attention_plan` wrote for at least as many rows
    partial: Written[Float32]  # fp32 [items, q_len, num_qo_heads, dv], workspace; a CPU reads none of it
    # fp32 [items, q_len, num_qo_heads, 2], workspace: largest logits, and sums of the weights beside them
    partial_sums: Written[Float32]
    counters: Written[Int32]  # int32 [rows * q_len * num_qo_heads] at least, all 0, and 0 again afterwards


class Results(NamedTuple):
    """The outputs of a decode kernel, partial results of splits included."""

    out: Tensor
    lse: Tensor | None
    partial: Tensor
    partial_sums: Tensor
    counters: Tensor


class Heads(NamedTuple):
    """Queries a row, query heads a kv head, and kv heads."""

    q_len: int
    group: int
    kv_heads: int


class Item(NamedTuple):
    """A work item of one kv head."""

    item: Any
    kv_head: Any
    items: Any
    row: Any
    split: Any
    splits: Any
    kv_len: Any


@triton.jit
def item_of(plan, kv_heads, META: tl.constexpr):
    """Return the work item of a program; the items' heads are neighbours in the grid."""
    item = tl.program_id(0) // kv_heads
    entry = plan + META.HEADER + item * 4
    items = tl.load(plan)
    row = tl.load(entry)
    split = tl.load(entry + 1)
    splits = tl.load(entry + 2)
    return Item(item, tl.program_id(0) % kv_heads, items, row, split, splits, tl.load(entry + 3))


@triton.jit
def _flat_rows(row, m, kv_head, heads):
    """Return the indices of queries times heads `m` of a row, or of a work item, for a kv head, in [queries, heads]."""
    token = row * heads.q_len + m // heads.group
    return token.to(tl.int64) * (heads.kv_heads * heads.group) + kv_head * heads.group + m % heads.group


@triton.jit
def _store_results(results, flat_rows, active, result, log_sum, META: tl.constexpr):
    """Write rows [M, BLOCK_V] of the output, and their log-sum-exps, at the indices `flat_rows` [M]."""
    values = tl.arange(0, META.BLOCK_V)
    in_bounds = active[:, None] & (values < META.VALUE_DIM)[None, :]
    at = results.out + flat_rows[:, None] * META.VALUE_DIM + values[None, :]
    tl.store(at, result.to(results.out.dtype.element_ty), mask=in_bounds)
    if META.HAS_LSE:
        tl.store(results.lse + flat_rows, log_sum, mask=active)


@triton.jit
def clear_row(results, row, kv_head, heads, META: tl.constexpr):
    """Write the result of a row without keys: 0, and a log-sum-exp of -inf."""
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_V: tl.constexpr = META.BLOCK_V
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    flat_rows = _flat_rows(row, m, kv_head, heads)
    nothing = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    no_sum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    _store_results(results, flat_rows, m < heads.q_len * heads.group, nothing, no_sum, META)


@triton.jit
def _merge(results, row, first, splits, kv_head, heads, v_unit, META: tl.constexpr):
    """Write a row's result from those of its splits, MERGE_S at a time: (VALUE_DIM + 2) * 4 bytes of each query."""
    MERGE_M: tl.constexpr = META.MERGE_M
    MERGE_S: tl.constexpr = META.MERGE_S
    BLOCK_V: tl.constexpr = META.BLOCK_V
    values = tl.arange(0, BLOCK_V)
    is_channel = values < META.VALUE_DIM
    flat = tl.arange(0, MERGE_S * MERGE_M)
    m = tl.program_id(1) * META.BLOCK_M + flat % MERGE_M
    active = m < heads.q_len * heads.group
    acc = tl.zeros([MERGE_M, BLOCK_V], tl.float32)
    total = tl.zeros([MERGE_M], tl.float32)
    top = tl.full([MERGE_M], -float("inf"), tl.float32)
    for begin in range(0, splits, MERGE_S):
        split = begin + flat // MERGE_M
        in_bounds = active & (split < splits)
        flat_rows = _flat_rows(first + split, m, kv_head, heads)
        tops = tl.load(results.partial_sums + 2 * flat_rows, mask=in_bounds, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(results.partial_sums + 2 * flat_rows + 1, mask=in_bounds, other=0.0, cache_modifier=".cg")
        at = results.partial + flat_rows[:, None] * META.VALUE_DIM + values[None, :]
        parts = tl.load(at, mask=in_bounds[:, None] & is_channel[None, :], other=0.0, cache_modifier=".cg")
        tops = tl.reshape(tops, [MERGE_S, MERGE_M])
        totals = tl.reshape(totals, [MERGE_S, MERGE_M])
        parts = tl.reshape(parts, [MERGE_S, MERGE_M, BLOCK_V])
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(tops - base[None, :])
        shrink = tl.exp2(top - base)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        total = total * shrink + tl.sum(totals * weights, axis=0)
        top = new_top
    norm = tl.where(total == 0.0, 1.0, total)
    m = tl.program_id(1) * META.BLOCK_M + tl.arange(0, MERGE_M)
    active = m < heads.q_len * heads.group
    flat_rows = _flat_rows(row, m, kv_head, heads)
    _store_results(results, flat_rows, active, acc / norm[:, None] * v_unit, top + tl.log2(norm), META)


@triton.jit
def deliver(results, acc, total, top, item, row, heads, sinks, v_unit, META: tl.constexpr):
    """Write an item's result: straight out where its row was not split; else the last to arrive merges the row's.

    The row's first split takes the sinks along. Until then largest logits and sums of weights stay apart: a log-sum-exp
    of large logits is rounded.
    """
    BLOCK_M: tl.constexpr = META.BLOCK_M
    of_row = heads.q_len * heads.kv_heads * heads.group
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    active = m < heads.q_len * heads.group
    within = _flat_rows(0, m, item.kv_head, heads)
    if META.HAS_SINKS:
        is_first = item.split + tl.zeros([BLOCK_M], tl.int32) == 0
        head = item.kv_head * heads.group + m % heads.group
        acc, total, top = with_sinks(acc, total, top, sinks, head, active & is_first)
    if item.splits == 1:
        norm = tl.where(total == 0.0, 1.0, total)
        flat_rows = row.to(tl.int64) * of_row + within
        _store_results(results, flat_rows, active, acc / norm[:, None] * v_unit, top + tl.log2(norm), META)
    else:
        values = tl.arange(0, META.BLOCK_V)
        in_bounds = active[:, None] & (values < META.VALUE_DIM)[None, :]
        flat_rows = item.item.to(tl.int64) * of_row + within
        at = results.partial + flat_rows[:, None] * META.VALUE_DIM + values[None, :]
        tl.store(at, acc, mask=in_bounds, cache_modifier=".cg")
        tl.store(results.partial_sums + 2 * flat_rows, top, mask=active, cache_modifier=".cg")
        tl.store(results.partial_sums + 2 * flat_rows + 1, total, mask=active, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them says so
        counter = results.counters + (row * heads.kv_heads + item.kv_head) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1, sem="acq_rel") == item.splits - 1:
            _merge(results, row, item.item - item.split, item.splits, item.kv_head, heads, v_unit, META)
            tl.store(counter, 0)  # ready for the next layer


def merge_sizes(queries: int, tile: dict[str, int]) -> dict[str, int]:
    """Return how many queries' (times heads of a group) partial results a program merges, and of how many splits."""
    merged = min(triton.next_power_of_2(queries), tile["BLOCK_M"])
    room = MERGED_VALUES if tile["BLOCK_V"] <= 128 else MERGED_VALUES // 2  # wider ones would spill
    return {"MERGE_M": merged, "MERGE_S": max(room // (merged * tile["BLOCK_V"]), 1)}
