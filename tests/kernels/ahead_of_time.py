"""Compile kernels for GPUs that are not here, exactly as their launchers would launch them, and measure the code.

Run as `python ahead_of_time.py ARCH`: prints one JSON object, {case: {registers, stack, shared}}, with early_loads, the
loads from global memory before the wait, for kernels that may start early, with requests_per_line, how many threads ask
ahead for each line of memory, and with tensor_columns, what a kernel takes of the memory that tensor cores of sm_100
have. It has to be a process of its own, for Triton's interpreter cannot be
switched off again.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from few_bit_cases import (
    EXPERT_WIDTH,
    EXPERTS,
    FEED_FORWARD,
    HIDDEN,
    PAGE_SIZE,
    PAGES,
    ROWS,
    SLOTS,
    VOCAB,
    WIDTH,
    tiled_cases,
    tiled_expert_cases,
)

from graphdecode.kernels.attention import (
    append_attention,
    attention_plan,
    attention_records,
    attention_tile,
    decode_attention,
    extend_attention,
    work_item,
)
from graphdecode.kernels.attention.attention_torch import Positions
from graphdecode.kernels.cache import rope_append
from graphdecode.kernels.cache.kv_format import PageScales
from graphdecode.kernels.linear import add_adapters, small_linear
from graphdecode.kernels.linear.small_linear import (
    DOT_TILES,
    GEMV_ROWS,
    SmallLinearConfig,
    candidates,
)
from graphdecode.kernels.model import (
    act_mul,
    advance,
    cap_logits,
    embedding,
)
from graphdecode.kernels.moe import expert_linear, moe_route
from graphdecode.kernels.native import optional_triton
from graphdecode.kernels.norm import gated_rms_norm, rms_norm
from graphdecode.kernels.recurrent import causal_conv, gated_delta, selective_scan
from graphdecode.kernels.recurrent.state_tokens import StateTokens
from graphdecode.kernels.sampling import follow_automata, logprobs, sample_and_advance
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    LogprobOutputs,
    SamplingCapacity,
    SamplingSlots,
    sampling_slots,
)
from graphdecode.kernels.speculation import ngram_draft, verify_drafts
from graphdecode.kernels.speculation.verify_drafts import DRAFT_COLUMNS
from graphdecode.kernels.surfaces import (
    cache_append,
    cache_moves,
    draw_tokens,
    filter_probs,
    merge_states,
    query_rows,
    slot_cache,
)
from step_code.compiled import compiled
from step_code.sass import usage_of

DRAFTS, HISTORY = 7, 4096
ATTENTION_SHAPES = [
    (head_dim, dtype, kv_dtype)
    for head_dim in (64, 128, 256)
    for dtype, kv_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
    )
]


def measured(kernel: JITFunction, arguments: dict[str, Any], options: dict[str, Any], arch: int) -> dict[str, int]:
    """Compile one launch, and return what has a budget."""
    code, _ = compiled(kernel, arguments, options, arch)
    registers, stack = usage_of(code.asm["cubin"])
    numbers = {"registers": registers, "stack": stack, "shared": code.metadata.shared}
    if arch == 100:
        numbers["tensor_columns"] = code.metadata.tmem_size
    before_wait, wait, _ = code.asm["ptx"].partition("griddepcontrol.wait")
    if "prefetch.global.L2" in before_wait:
        numbers["requests_per_line"] = requests_per_line(code, before_wait)
    return numbers | ({"early_loads": before_wait.count("ld.global")} if wait else {})


def requests_per_line(code: CompiledKernel, ptx: str) -> float:
    """Return how many threads ask for each element of the tensors of lines, which their layouts may give to several."""
    shapes = re.findall(r'elementwise_inline_asm "[^"]*prefetch.*: tensor<([\dx]+)xi64', code.asm["ttgir"])
    elements = sum(math.prod(map(int, shape.split("x"))) for shape in shapes)
    return ptx.count("prefetch.global.L2") * 32 * code.metadata.num_warps / elements


def launches(launch: Callable[[], None], arch: int) -> dict[str, dict[str, int]]:
    """Compile what `launch` would launch."""
    results: dict[str, dict[str, int]] = {}

    def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = ("num_warps", "num_stages", "launch_pdl", "maxnreg", "enable_fp_fusion")
        options = {name: kwargs.pop(name) for name in names if name in kwargs}
        arguments = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
        results[kernel.fn.__name__.strip("_")] = measured(kernel, dict(arguments), options, arch)

    def native(cache: torch.Tensor) -> tuple[torch.Tensor, str]:
        return attention_tile.cache_bytes(cache) if cache.dtype == torch.int8 else (cache, "")

    def early(_: torch.device) -> bool:
        return arch >= 90

    def tile_rows(_: torch.device) -> int:
        return 128 if arch // 10 == 9 else 64

    with (
        mock.patch.object(JITFunction, "run", compile_instead),
        mock.patch.object(extend_attention, "tile_rows", tile_rows),
        mock.patch.object(optional_triton, "has_early_start", early),
    ):
        if arch >= 89:
            of_pages = mock.patch.object(attention_records, "cache_bytes", native)
            with of_pages, mock.patch.object(rope_append, "cache_bytes", native):
                launch()
        else:
            launch()
    return results


def scales_of(cache: torch.Tensor) -> PageScales | None:
    """The scales of an int8 cache."""
    pages, page_size, heads, _ = cache.shape
    of_pages = torch.empty(pages, heads, page_size, dtype=torch.bfloat16)
    return PageScales(of_pages, of_pages) if cache.dtype == torch.int8 else None


def attention_cases(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The launches of one model shape: 32 query heads over 8 key and value heads."""
    heads, kv_heads = 32, 8
    cache = torch.empty(PAGES, PAGE_SIZE, kv_heads, head_dim, dtype=kv_dtype)
    scales = scales_of(cache)
    q = torch.empty(ROWS, heads, head_dim, dtype=dtype)
    table = torch.empty(ROWS, WIDTH, dtype=torch.int32)
    lens = torch.empty(ROWS, dtype=torch.int32)
    cumulative = torch.empty(ROWS + 1, dtype=torch.int32)
    plan = torch.empty(1024, dtype=torch.int32)
    workspace = (torch.empty(ROWS, 1, heads, head_dim), torch.empty(ROWS, 1, heads, 2))
    work = work_item.SplitPlan(lens, plan, *workspace, lens)

    sinks = torch.empty(heads) if head_dim < 256 else None  # no model has both

    def decode(*options: Any) -> None:
        decode_attention.decode_attention_triton(
            q, None, q, cache, cache, table, None, work, 1, 33,
            attention_records.AttentionOptions(None, *options), 1.0, Positions(), scales,
        )  # fmt: skip

    qkv = torch.empty(ROWS, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos_sin = torch.empty(4096, 2, head_dim // 2)

    def step(norms: tuple[int, int] | None, *options: Any) -> None:
        gains = [None if norms is None else torch.empty(count * head_dim) for count in norms or (0, 0)]
        append_attention.append_attention_triton(
            q, cache, cache, qkv, table, work, attention_records.QKNormRope(cos_sin, *gains, 1e-6),
            33, attention_records.AttentionOptions(None, *options), scales=scales,
        )  # fmt: skip

    def extend(*options: Any) -> None:
        extend_attention.extend_attention_triton(
            q, None, q, cache, cache, cumulative, cumulative, table,
            attention_records.AttentionOptions(None, -1, *options), scales=scales,
        )  # fmt: skip

    return {
        "step": lambda: step(None),
        "step-norm": lambda: step((1, 1)),
        "step-norm-all": lambda: step((heads, kv_heads)),
        "step-options": lambda: step((1, 1), 1024, 50.0, sinks),
        "decode": lambda: decode(-1),
        "decode-window": lambda: decode(1024),
        "decode-options": lambda: decode(1024, 50.0, sinks),
        "extend": extend,
        "extend-options": lambda: extend(50.0, sinks),
    }


def append_case(
    head_dim: int, normed_heads: tuple[int, int] | None, kv_dtype: torch.dtype = torch.bfloat16
) -> Callable[[], None]:
    """The fused append of one model shape."""
    cache = torch.empty(PAGES, PAGE_SIZE, 8, head_dim, dtype=kv_dtype)
    q = torch.empty(ROWS, 32, head_dim, dtype=torch.bfloat16)
    lens = torch.empty(ROWS, dtype=torch.int32)
    weights = [None if normed_heads is None else torch.empty(heads * head_dim) for heads in normed_heads or (0, 0)]
    return lambda: rope_append.rope_append_triton(
        q,
        cache,
        cache,
        torch.empty(ROWS, 48 * head_dim, dtype=torch.bfloat16),
        lens,
        lens,
        lens,
        torch.empty(ROWS, WIDTH, dtype=torch.int32),
        attention_records.QKNormRope(torch.empty(4096, 2, head_dim // 2), *weights, 1e-6),
        scales=scales_of(cache),
    )


def latent_cases() -> dict[str, Callable[[], None]]:
    """Attention of 128 heads over latent keys, which are kept once, and their append: DeepSeek-V3's sizes."""
    heads, rank, rope_dim = 128, 512, 64
    keys = torch.empty(PAGES, PAGE_SIZE, 1, rope_dim + rank, dtype=torch.bfloat16)
    q, out = (torch.empty(ROWS, heads, size, dtype=torch.bfloat16) for size in (rope_dim + rank, rank))
    table, lens = torch.empty(ROWS, WIDTH, dtype=torch.int32), torch.empty(ROWS, dtype=torch.int32)
    cumulative, plan = torch.empty(ROWS + 1, dtype=torch.int32), torch.empty(1024, dtype=torch.int32)
    work = work_item.SplitPlan(lens, plan, torch.empty(ROWS, 1, heads, rank), torch.empty(ROWS, 1, heads, 2), lens)
    options, rope = (
        attention_records.AttentionOptions(0.1),
        attention_records.QKNormRope(torch.empty(4096, 2, rope_dim // 2)),
    )

    def append(count: int, cache: torch.Tensor) -> None:
        qkv = torch.empty(ROWS, (count + cache.shape[2]) * keys.shape[3], dtype=torch.bfloat16)
        given = (q[:, :count], cache, keys[:, :, :0], qkv, lens, lens, lens, table, rope)
        rope_append.rope_append_triton(*given)

    def in_parts(element: torch.dtype) -> None:
        caches = [torch.empty(PAGES, PAGE_SIZE, 1, size, dtype=element) for size in (rope_dim, rank)]
        starts, lse = torch.empty(ROWS, dtype=torch.int32), torch.empty(ROWS, heads)
        given = (q, *caches, torch.empty(ROWS * WIDTH, dtype=torch.int32), starts)
        decode_attention.decode_attention_triton(out, lse, *given, work, 1, 33, options, 1.0, Positions(), None)

    def single_queries(indptr: torch.Tensor | None) -> None:
        query_rows.query_rows_triton(lens, lens, cumulative, indptr, lens, WIDTH, PAGE_SIZE, True)

    return {
        "decode-latent-parts": lambda: in_parts(torch.bfloat16),
        "decode-latent-parts-fp8": lambda: in_parts(torch.float8_e4m3fn),
        "query-rows": lambda: single_queries(cumulative),
        "query-rows-table": lambda: single_queries(None),
        "decode-latent": lambda: decode_attention.decode_attention_triton(
            out, None, q, keys, keys[..., rope_dim:], table, None, work, 1, 33, options, 1.0, Positions(), None
        ),
        "extend-latent": lambda: extend_attention.extend_attention_triton(
            out, None, q, keys, keys[..., rope_dim:], cumulative, cumulative, table, options
        ),
        "append-latent-queries": lambda: append(heads, keys[:, :, :0]),
        "append-latent-keys": lambda: append(0, keys),
    }


def surface_cases() -> dict[str, Callable[[], None]]:
    """The launches of the drop-ins: listed pages, log-sum-exps, rotation and biases in attention, and their caches."""
    cases: dict[str, Callable[[], None]] = {}
    heads, kv_heads, head_dim, q_len = 32, 8, 128, 4
    ints = partial(torch.empty, dtype=torch.int32)
    lens, plan, cumulative, table = ints(ROWS), ints(1024), ints(ROWS + 1), ints(ROWS, WIDTH)

    def decode(dtype: torch.dtype, kv_dtype: torch.dtype, queries: int, mode: str, *options: Any) -> None:
        cache = torch.empty(PAGES, PAGE_SIZE, kv_heads, head_dim, dtype=kv_dtype)
        q, sums = torch.empty(ROWS * queries, heads, head_dim, dtype=dtype), torch.empty(ROWS * queries, heads)
        sizes = (ROWS, queries, heads)
        work = work_item.SplitPlan(lens, plan, torch.empty(*sizes, head_dim), torch.empty(*sizes, 2), lens)
        decode_attention.decode_attention_triton(
            q, sums, q, cache, cache, ints(ROWS * WIDTH), cumulative, work, queries, 33,
            attention_records.AttentionOptions(None, *options), 0.5, Positions(mode, 2.0, 1e4), None,
        )  # fmt: skip

    every = (1024, 50.0, torch.empty(heads))
    for dtype, kv_dtype, options in (
        (torch.bfloat16, torch.bfloat16, every),
        (torch.float16, torch.float8_e4m3fn, (1024,)),
        (torch.float32, torch.float32, every),
    ):
        name = f"{str(dtype)[6:]}-{str(kv_dtype)[6:]}"
        for mode in ("NONE", "ROPE_LLAMA", "ALIBI"):
            cases[f"lists-{mode.lower()}-{name}"] = partial(decode, dtype, kv_dtype, 1, mode, *options)
        cases[f"lists-queries-{name}"] = partial(decode, dtype, kv_dtype, q_len, "NONE", *options)
    sizes = attention_plan.PlanSizes(33, 0, 1024, PAGE_SIZE, q_len)
    cases["lists-plan"] = lambda: attention_plan.paged_attention_plan_triton(lens, plan, cumulative, lens, sizes)

    cache, rows = (torch.empty(count, PAGE_SIZE, kv_heads, head_dim, dtype=torch.bfloat16) for count in (PAGES, ROWS))
    new, sums = torch.empty(ROWS, 2, kv_heads, head_dim, dtype=torch.bfloat16), torch.empty(ROWS, 2, kv_heads)
    packed, slots = new[:, 0], torch.empty(ROWS, kv_heads, 512, head_dim, dtype=torch.bfloat16)
    at = new.transpose(1, 2)
    return cases | {
        "cache-append": lambda: cache_append.cache_append_triton(cache, cache, new, new, cumulative, cumulative, table),
        "cache-append-rows": lambda: cache_append.cache_append_triton(
            rows, rows, packed, packed, cumulative, cumulative, None
        ),
        "paged-append": lambda: cache_append.paged_append_triton(
            cache, cache, packed, packed, lens, lens, table.view(-1), cumulative
        ),
        "plan-row-moves": lambda: cache_moves.plan_row_moves_triton(
            ints(cache_moves.plan_words(ROWS)), lens, lens, lens, cumulative, cumulative
        ),
        "move-rows": lambda: cache_moves.move_rows_triton(rows, rows, ints(cache_moves.plan_words(ROWS))),
        "merge-states": lambda: merge_states.merge_states_triton(packed, sums[:, 0], new, sums),
        "merge-state": lambda: merge_states.merge_state_in_place_triton(
            packed, sums[:, 0], packed, sums[:, 1], torch.empty(ROWS, dtype=torch.bool)
        ),
        "slot-scatter": lambda: slot_cache.slot_scatter_triton(slots, at, lens, ints(ROWS, 2), None, 1, 0),
        "slot-scatter-shards": lambda: slot_cache.slot_scatter_triton(
            slots, at, lens, ints(ROWS, 2), ints(ROWS, 2), 2, 0
        ),
    }


def step_arguments() -> dict[str, Any]:
    """The tensors of a step, and groups of them, by the names that the launchers' arguments have."""
    capacity = SamplingCapacity()
    specs = sampling_slots(capacity, VOCAB)
    tensors = {spec.name: torch.empty(ROWS, *spec.sizes, dtype=spec.dtype) for spec in specs}
    tensors["recent_tokens"] = torch.empty(ROWS, BAD_WORD_LENGTH, dtype=torch.int32)
    of_rows = ("positions", "pre_step_seqlens", "finished", "live_rows", "live", "running")
    for name in (*of_rows, "loop_limit", "loop_count", "step_entries"):
        tensors[name] = torch.empty(ROWS, dtype=torch.int32)
    for name in ("tokens", "sampled", "step_index"):
        tensors[name] = torch.empty(ROWS, dtype=torch.int64)
    tensors["logits"] = torch.empty(ROWS, VOCAB)
    tensors["token_counts"] = torch.empty(ROWS, VOCAB, dtype=torch.int32)
    tensors["sampled_logprob"] = torch.empty(ROWS)
    tensors["sampled_rank"] = torch.empty(ROWS, dtype=torch.int32)
    tensors["top_logprobs"] = torch.empty(ROWS, capacity.max_logprobs)
    tensors["top_ids"] = torch.empty(ROWS, capacity.max_logprobs, dtype=torch.int32)
    tensors["ring_tokens"] = torch.empty(4, ROWS, dtype=torch.int64)
    tensors["ring_logprob"] = torch.empty(4, ROWS)
    tensors["ring_rank"] = torch.empty(4, ROWS, dtype=torch.int32)
    tensors["ring_top_logprobs"] = torch.empty(4, ROWS, capacity.max_logprobs)
    tensors["ring_top_ids"] = torch.empty(4, ROWS, capacity.max_logprobs, dtype=torch.int32)
    groups = {
        "slots": SamplingSlots,
        "outputs": LogprobOutputs,
        "logprobs": LogprobOutputs,
        "state": advance.AdvanceState,
    }
    ints, words = partial(torch.empty, dtype=torch.int32), tensors["token_mask"].shape[1]
    tables = (ints(8, VOCAB), ints(1024, 1024), ints(1024, words), ints(1024))
    tensors["guides"] = follow_automata.Guides(ints(ROWS), tensors["token_mask"], ints(ROWS), *tables)
    return tensors | {name: kind(*(tensors[field] for field in kind._fields)) for name, kind in groups.items()}


def by_name(launcher: Callable[..., None], tensors: dict[str, Any]) -> Callable[[], None]:
    """Call a launcher with the tensors that its arguments name."""
    names = [name for name, p in inspect.signature(launcher).parameters.items() if p.default is p.empty]
    return lambda: launcher(*(tensors[name] for name in names))


def step_cases() -> dict[str, Callable[[], None]]:
    """The launches of the rest of a step, which no head_dim changes."""
    tensors = step_arguments()
    x, weight = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN)
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16)
    table = torch.empty(1000, HIDDEN, dtype=torch.bfloat16)
    wide = torch.empty(ROWS, FEED_FORWARD, dtype=torch.bfloat16)
    gate_up = torch.empty(ROWS, 2 * FEED_FORWARD, dtype=torch.bfloat16)
    return {
        "embedding": lambda: embedding.embedding_triton(x, tensors["tokens"], table, tensors["live"], 1.0),
        "embedding-scale": lambda: embedding.embedding_triton(x, tensors["tokens"], table, tensors["live"], 11.3),
        "embedding-norm": lambda: embedding.embedding_norm_triton(
            x, x, tensors["tokens"], table, tensors["live"], weight, 11.3, 1e-5
        ),
        "cap-logits": lambda: cap_logits.cap_logits_triton(logits, 30.0),
        "rms-norm": lambda: rms_norm.rms_norm_triton(x, x, weight, 1e-5),
        "add-rms-norm": lambda: rms_norm.add_rms_norm_triton(x, x, x, weight, 1e-5, None, 0.0, 1.0),
        "add-rms-norm-post": lambda: rms_norm.add_rms_norm_triton(x, x, x, weight, 1e-5, weight, 1e-5, 0.22),
        "add-normed": lambda: rms_norm.add_rms_norm_triton(x, x, x, None, 0.0, weight, 1e-5, 1.0),
        "silu": lambda: act_mul.act_mul_triton(wide, gate_up, "silu"),
        "gelu": lambda: act_mul.act_mul_triton(wide, gate_up, "gelu"),
        "logprobs": by_name(logprobs.token_logprobs_triton, tensors),
        "sample-and-advance": by_name(sample_and_advance.sample_and_advance_triton, tensors),
        "sample-and-follow": by_name(
            partial(sample_and_advance.sample_and_advance_triton, guides=tensors["guides"]), tensors
        ),
        "skip-steps": by_name(advance.skip_steps_triton, tensors),
    }


def speculation_cases() -> dict[str, Callable[[], None]]:
    """The launches that a step with drafts adds: the first query is judged by other code than those behind it."""
    tensors, ints = step_arguments(), partial(torch.empty, dtype=torch.int32)
    table, count = ints(ROWS, WIDTH), ROWS * (DRAFTS + 1)
    sizes = {"active_rows": (1,), "step_entries": (1,), "last_position": (ROWS,), "history": (ROWS, HISTORY)}
    sizes |= {"ring_drafts": (4, DRAFT_COLUMNS, ROWS), "drafts": (ROWS, DRAFTS)}
    sizes |= dict.fromkeys(("num_drafts", "match_lengths", "draft_limit"), (ROWS,))
    tensors |= {name: ints(size) for name, size in sizes.items()}
    given = verify_drafts.DraftRows(*(tensors[name] for name in verify_drafts.DraftRows._fields))
    spread = verify_drafts.Queries(torch.empty(count, dtype=torch.int64), ints(count), ints(count, WIDTH), ints(1))

    def judge(index: int) -> Callable[[], None]:
        return partial(verify_drafts.judge_drafts_triton, given, index=index, queries=DRAFTS + 1)

    def settle(adapts: bool) -> Callable[[], None]:
        return partial(verify_drafts.settle_drafts_triton, given, queries=DRAFTS + 1, adapts=adapts)

    looked = (given.drafts, given.num_drafts, given.match_lengths, given.history, given.pre_step_seqlens)
    return {
        "ngram-draft": partial(ngram_draft.ngram_draft_triton, *looked, given.live_rows, ngram_min=2, ngram_max=5),
        "spread-queries": partial(
            verify_drafts.spread_queries_triton, spread, given, table, queries=DRAFTS + 1, null_page=PAGES - 1
        ),
        "judge-drafts": judge(0),
        "judge-drafts-behind": judge(DRAFTS),
        "settle-drafts": settle(adapts=False),
        "settle-drafts-adapting": settle(adapts=True),
    }


def linear_case(
    config: SmallLinearConfig, dtype: torch.dtype, rows: int, epilogue: str, is_normed: bool
) -> Callable[[], None]:
    """One configuration of the product of few rows, over the down projection of a model."""
    x, weight = torch.empty(rows, FEED_FORWARD, dtype=dtype), torch.empty(HIDDEN, FEED_FORWARD, dtype=dtype)
    out, partial = torch.empty(rows, HIDDEN // (1 + (epilogue == "silu")), dtype=dtype), torch.empty(1)
    counters, gain = torch.empty(HIDDEN, dtype=torch.int32), torch.empty(FEED_FORWARD) if is_normed else None
    return lambda: small_linear.small_linear_triton(
        out, x, weight, None, gain, partial, counters, 1e-5, epilogue, 1.0, config
    )


def linear_cases(arch: int) -> dict[str, Callable[[], None]]:
    """Every tile that may be chosen, with what a layer fuses with it; columns split and not."""
    cases: dict[str, Callable[[], None]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        rows_of_tiles = DOT_TILES[dtype.itemsize]
        found = {
            config._replace(splits=1, pdl=arch >= 90): None
            for rows in (1, *rows_of_tiles)
            for config in candidates(HIDDEN, FEED_FORWARD, dtype.itemsize, rows, 132)
        }
        for config in found:
            for epilogue, is_normed, splits in (
                ("store", True, 1),
                ("add", False, 1),
                ("silu", True, 2),
            ):
                count = GEMV_ROWS if config.kind == "gemv" else config.block_m
                name = f"{config.kind}-{config.block_n}x{config.block_k}-{config.num_warps}w-{str(dtype)[6:]}"
                name += f"-rows{count}-{epilogue}{'-norm' * is_normed}{'-split' * (splits > 1)}"
                cases[name] = linear_case(config._replace(splits=splits), dtype, count, epilogue, is_normed)
    return cases


def expert_cases() -> dict[str, Callable[[], None]]:
    """Routing, and the products of few and of many pairs of a model with experts."""
    cases: dict[str, Callable[[], None]] = {}
    offsets, order = (torch.empty(size, dtype=torch.int32) for size in (EXPERTS + 1, ROWS * SLOTS))
    ids, weights = torch.empty(ROWS, SLOTS, dtype=torch.int32), torch.empty(ROWS, SLOTS)

    def product(pairs: int, depth: int, width: int, dtype: torch.dtype, gate: str) -> Callable[[], None]:
        out, x = torch.empty(pairs, width, dtype=dtype), torch.empty(pairs, depth, dtype=dtype)
        outputs = width if gate == "none" else 2 * width
        weight = torch.empty(EXPERTS, outputs, depth, dtype=dtype)
        bias = torch.empty(EXPERTS, outputs, dtype=dtype) if gate == "swiglu_clamped" else None
        routed = expert_linear.Routed(order, offsets, SLOTS, gate, 1.702, 7.0)
        return lambda: expert_linear.expert_linear_triton(out, x, weight, bias, routed, False)

    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        logits, out = torch.empty(ROWS, EXPERTS, dtype=dtype), torch.empty(ROWS, HIDDEN, dtype=dtype)
        parts = torch.empty(ROWS * SLOTS, HIDDEN, dtype=dtype)
        cases |= {
            f"route-{name}": partial(
                moe_route.moe_route_triton, ids, weights, order, offsets, logits, offsets[:1], False
            ),
            f"combine-{name}": partial(moe_route.moe_combine_triton, out, parts, ids, weights, logits[:, :1]),
        }
        tiles = {ROWS * SLOTS: ""}
        if dtype.itemsize == 2:
            tiles |= {EXPERTS * 32: "-many", EXPERTS * 128: "-most"}
        for pairs, many in tiles.items():
            for gate in ("silu", "swiglu_clamped"):
                cases[f"experts-{gate}-{name}{many}"] = product(pairs, HIDDEN, EXPERT_WIDTH, dtype, gate)
            cases[f"experts-none-{name}{many}"] = product(pairs, EXPERT_WIDTH, HIDDEN, dtype, "none")
    return cases


def recurrent_cases() -> dict[str, Callable[[], None]]:
    """Layers with recurrent states: Mamba2's, gated delta nets' and LFM2's, and gated attention's gate."""
    heads, ints = 32, partial(torch.empty, dtype=torch.int32)
    plain = StateTokens(ints(ROWS), ints(ROWS), ints(1), ints(ROWS))
    of_heads = torch.empty(heads)
    cases: dict[str, Callable[[], None]] = {}
    for dtype, name, tokens in (
        (torch.bfloat16, "bfloat16", plain),
        (torch.float32, "float32", plain),
        (torch.bfloat16, "drafts", plain._replace(output_state_rows=ints(ROWS))),
    ):
        x = torch.empty(ROWS, 3 * HIDDEN, dtype=dtype)
        out, gates = torch.empty(ROWS, HIDDEN, dtype=dtype), torch.empty(ROWS, 2 * heads, dtype=dtype)
        for kind, width, given, bias, silu in (
            ("conv", 4, x[:, :HIDDEN], torch.empty(HIDDEN), True),
            ("conv-gated", 3, x, None, False),
        ):
            state, weight = torch.empty(ROWS + 1, width - 1, HIDDEN), torch.empty(width, HIDDEN)
            cases[f"{kind}-{name}"] = partial(
                causal_conv.causal_conv_triton, out, given, state, weight, bias, silu, tokens
            )
        for key_dim, value_dim in ((128, 128), (96, 192)):
            read = torch.empty(ROWS, heads * value_dim, dtype=dtype)
            qkv = torch.empty(ROWS, heads * (key_dim + value_dim), dtype=dtype)  # half as many key heads
            delta_gates = gated_delta.DeltaGates(gates, of_heads, of_heads)
            state = torch.empty(ROWS + 1, heads, key_dim, value_dim)
            cases[f"delta-{name}-{key_dim}x{value_dim}"] = partial(
                gated_delta.gated_delta_triton, read, qkv, state, delta_gates, tokens, 1.0
            )
        for states, head_dim in ((128, 64), (256, 64), (256, 128)):
            read = torch.empty(ROWS, heads * head_dim, dtype=dtype)
            xbc = torch.empty(ROWS, heads * head_dim + 2 * states, dtype=dtype)
            weights = selective_scan.ScanWeights(of_heads, of_heads, of_heads)
            state = torch.empty(ROWS + 1, heads, states, head_dim)
            cases[f"scan-{name}-{states}x{head_dim}"] = partial(
                selective_scan.selective_scan_triton, read, xbc, state, gates, weights, tokens, 0.0, float("inf")
            )
        if tokens is not plain:
            continue
        for kind, group, gain, first, sigmoid in (
            ("mamba", HIDDEN, torch.empty(HIDDEN), False, False),
            ("delta", 128, torch.empty(128), True, False),
            ("attention", HIDDEN, None, False, True),
        ):
            cases[f"gated-norm-{kind}-{name}"] = partial(
                gated_rms_norm.gated_rms_norm_triton, out, out, x, gain, 1e-6, group, first, sigmoid
            )
    return cases


def adapter_cases() -> dict[str, Callable[[], None]]:
    """Adapters of queries, keys and values, of a product of one part, in two ranks, and of the embedding."""
    cases: dict[str, Callable[[], None]] = {}
    ints = partial(torch.empty, dtype=torch.int32)
    tokens = add_adapters.AdapterTokens(ints(ROWS), ints(1), ints(ROWS), ints(4))
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        x, out = torch.empty(ROWS, HIDDEN, dtype=dtype), torch.empty(ROWS, FEED_FORWARD, dtype=dtype)
        for parts, rank in ((3, 16), (1, 64)):
            down = torch.empty(4, parts, rank, HIDDEN, dtype=dtype)
            up = torch.empty(4, rank, FEED_FORWARD, dtype=dtype)
            cases[f"adapters-{name}-{parts}x{rank}"] = partial(
                add_adapters.add_adapters_triton, out, x, down, up, torch.empty(ROWS, parts, rank), ints(parts), tokens
            )
        table, up, ids = (
            torch.empty(4, VOCAB, 16, dtype=dtype),
            torch.empty(4, 16, HIDDEN, dtype=dtype),
            ints(ROWS).long(),
        )
        cases[f"embedding-adapters-{name}"] = partial(
            add_adapters.add_embedding_adapters_triton, torch.empty(ROWS, HIDDEN), ids, table, up, tokens, 1.0
        )
    return cases


def probability_cases() -> dict[str, Callable[[], None]]:
    """Return the filters of and draws from given probabilities, of rows on their way and of all at once."""
    probs, tokens, floats = torch.empty(ROWS, VOCAB), torch.empty(ROWS, dtype=torch.int32), torch.empty(ROWS)
    seeds, valid = torch.empty(ROWS, dtype=torch.int64), torch.empty(ROWS, dtype=torch.bool)

    def filtered(values: torch.Tensor, *how: Any) -> Callable[[], None]:
        return lambda: filter_probs.filter_probs_triton(values, values, tokens, *how)

    def drawn(is_logits: bool) -> Callable[[], None]:
        return lambda: draw_tokens.draw_tokens_triton(tokens, valid, probs, tokens, seeds, tokens, is_logits)

    return {
        "filter-first": filtered(probs, floats, floats, True, False, True),
        "filter-joint": filtered(probs, floats, None, False, False, False),
        "filter-logits": filtered(probs.bfloat16(), None, None, True, True, False),
        "draw-probs": drawn(False),
        "draw-logits": drawn(True),
    }


def measure(arch: int) -> dict[str, dict[str, int]]:
    """Compile every case for one architecture."""
    cases: dict[str, Callable[[], None]] = {}
    for head_dim, dtype, kv_dtype in ATTENTION_SHAPES:
        name = f"{str(dtype)[6:]}-{str(kv_dtype)[6:]}-d{head_dim}"
        for kind, launch in attention_cases(head_dim, dtype, kv_dtype).items():
            is_apart = kind == "step" and kv_dtype == torch.int8
            if (not is_apart and kind in ("decode", "step", "extend")) or kv_dtype == torch.bfloat16:
                early = "-pdl" * (kind.startswith("step") and arch >= 90)
                cases[f"{kind}-{name}{early}"] = launch
    for head_dim in (64, 128, 256):
        cases[f"append-d{head_dim}"] = append_case(head_dim, None)
        cases[f"append-norm-d{head_dim}"] = append_case(head_dim, (1, 1))
        cases[f"append-norm-all-d{head_dim}"] = append_case(head_dim, (32, 8))
        cases[f"append-int8-d{head_dim}"] = append_case(head_dim, None, torch.int8)
    for kv_dtype in (torch.float8_e4m3fn, torch.int8):
        cases[f"append-norm-{str(kv_dtype)[6:]}-d128"] = append_case(128, (1, 1), kv_dtype)
    cases |= latent_cases()
    cases |= surface_cases()
    cases |= step_cases()
    cases |= speculation_cases()
    cases |= linear_cases(arch)
    cases |= tiled_cases(arch)
    cases |= tiled_expert_cases(arch)
    cases |= expert_cases()
    cases |= recurrent_cases()
    cases |= adapter_cases()
    cases |= probability_cases()
    lens = torch.empty(ROWS, dtype=torch.int32)
    cases["plan"] = lambda: attention_plan.attention_plan_triton(lens, lens, lens, lens, attention_plan.PlanSizes(33))
    fixed = attention_plan.PlanSizes(33, 1024)
    cases["plan-fixed"] = lambda: attention_plan.attention_plan_triton(lens, lens, lens, lens, fixed)
    return {
        f"{case}/{kernel}": numbers
        for case, launch in cases.items()
        for kernel, numbers in launches(launch, arch).items()
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1])), indent=1))
