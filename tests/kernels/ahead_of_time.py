"""Compile kernels for GPUs that are not here, exactly as their launchers would launch them, and measure the code.

Run as `python ahead_of_time.py ARCH`: prints one JSON object, {case: {registers, stack, shared}}, with early_loads, the
loads from global memory before the wait, for kernels that may start early. It has to be a process of its own, for
Triton's interpreter cannot be switched off again.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from graphdecode.kernels.attention import attention_plan, extend_attention, split_decode
from graphdecode.kernels.cache import rope_append
from graphdecode.kernels.linear import small_linear
from graphdecode.kernels.linear.small_linear_config import GEMV_ROWS, SmallLinearConfig, candidates, fixed_config
from graphdecode.kernels.model import act_mul, advance, embedding, skip_steps
from graphdecode.kernels.norm import rms_norm
from graphdecode.kernels.sampling import logprobs, sample
from graphdecode.kernels.sampling.sampling_slots import MAX_LOGPROBS, SAMPLING_SLOTS, LogprobOutputs, SamplingSlots

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ROWS, PAGES, PAGE_SIZE, WIDTH = 8, 64, 16, 32
HIDDEN, FEED_FORWARD, VOCAB = 4096, 14336, 128256
ATTENTION_SHAPES = [
    (head_dim, dtype, kv_dtype)
    for head_dim in (64, 128, 256)
    for dtype, kv_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
    )
]


def compiled(kernel: JITFunction, arguments: dict[str, Any], options: dict[str, Any], arch: int) -> dict[str, int]:
    """Compile one launch, with the specialisation that Triton would give its arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers:\n{usage}")
    numbers = {"registers": int(found[1]), "stack": int(found[2]), "shared": code.metadata.shared}
    before_wait, wait, _ = code.asm["ptx"].partition("griddepcontrol.wait")
    if wait:
        numbers["early_loads"] = before_wait.count("ld.global")
    return numbers


def launches(launch: Callable[[], None], arch: int) -> dict[str, dict[str, int]]:
    """Compile what `launch` would launch."""
    results: dict[str, dict[str, int]] = {}

    def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in kwargs}
        arguments = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
        results[kernel.fn.__name__.strip("_")] = compiled(kernel, arguments, options, arch)

    def native(cache: torch.Tensor) -> tuple[torch.Tensor, str]:
        return cache, ""

    def early(_: torch.device) -> bool:
        return arch >= 90

    with (
        mock.patch.object(JITFunction, "run", compile_instead),
        mock.patch.object(rms_norm, "has_early_start", early),
        mock.patch.object(act_mul, "has_early_start", early),
        mock.patch.object(split_decode, "has_early_start", early),
    ):
        if arch >= 89:
            with (
                mock.patch.object(split_decode, "cache_bytes", native),
                mock.patch.object(extend_attention, "cache_bytes", native),
            ):
                launch()
        else:
            launch()
    return results


def attention_cases(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The launches of one model shape: 32 query heads over 8 key and value heads."""
    heads, kv_heads = 32, 8
    cache = torch.empty(PAGES, PAGE_SIZE, kv_heads, head_dim, dtype=kv_dtype)
    q = torch.empty(ROWS, heads, head_dim, dtype=dtype)
    table = torch.empty(ROWS, WIDTH, dtype=torch.int32)
    lens = torch.empty(ROWS, dtype=torch.int32)
    cumulative = torch.empty(ROWS + 1, dtype=torch.int32)
    plan = torch.empty(1024, dtype=torch.int32)
    partial = torch.empty(ROWS, 1, heads, head_dim)
    partial_lse = torch.empty(ROWS, 1, heads)

    def decode(window_left: int) -> None:
        split_decode.decode_attention_triton(
            q, None, q, cache, cache, table, None, lens, plan, partial, partial_lse, 1, 33, head_dim**-0.5, 1.0,
            window_left, 0.0, "NONE", 1.0, 1e4, None,
        )  # fmt: skip

    def extend() -> None:
        extend_attention.extend_attention_triton(
            q, None, q, cache, cache, cumulative, cumulative, table, head_dim**-0.5, -1, 0.0, None
        )

    return {"decode": lambda: decode(-1), "decode-window": lambda: decode(1024), "extend": extend}


def append_case(head_dim: int, norm: bool) -> Callable[[], None]:
    """The fused append of one model shape."""
    cache = torch.empty(PAGES, PAGE_SIZE, 8, head_dim, dtype=torch.bfloat16)
    q = torch.empty(ROWS, 32, head_dim, dtype=torch.bfloat16)
    lens = torch.empty(ROWS, dtype=torch.int32)
    weight = torch.empty(head_dim, dtype=torch.bfloat16) if norm else None
    return lambda: rope_append.rope_append_triton(
        q,
        cache,
        cache,
        torch.empty(ROWS, 48 * head_dim, dtype=torch.bfloat16),
        lens,
        lens,
        lens,
        torch.empty(ROWS, WIDTH, dtype=torch.int32),
        torch.empty(4096, 2, head_dim // 2),
        weight,
        weight,
        1e-6,
    )


def step_arguments() -> dict[str, Any]:
    """The tensors of a step, and groups of them, by the names that the launchers' arguments have."""
    shapes = {slot.name: (ROWS, slot.width) if slot.width else (ROWS,) for slot in SAMPLING_SLOTS}
    tensors = {slot.name: torch.empty(shapes[slot.name], dtype=slot.dtype) for slot in SAMPLING_SLOTS}
    for name in (
        "positions",
        "pre_step_seqlens",
        "finished",
        "live_rows",
        "live",
        "running",
        "loop_limit",
        "loop_count",
    ):
        tensors[name] = torch.empty(ROWS, dtype=torch.int32)
    for name in ("tokens", "sampled", "step_index"):
        tensors[name] = torch.empty(ROWS, dtype=torch.int64)
    tensors["logits"] = torch.empty(ROWS, VOCAB)
    tensors["token_counts"] = torch.empty(ROWS, VOCAB, dtype=torch.int32)
    tensors["sampled_logprob"] = torch.empty(ROWS)
    tensors["sampled_rank"] = torch.empty(ROWS, dtype=torch.int32)
    tensors["top_logprobs"] = torch.empty(ROWS, MAX_LOGPROBS)
    tensors["top_ids"] = torch.empty(ROWS, MAX_LOGPROBS, dtype=torch.int32)
    tensors["ring_tokens"] = torch.empty(4, ROWS, dtype=torch.int64)
    tensors["ring_logprob"] = torch.empty(4, ROWS)
    tensors["ring_rank"] = torch.empty(4, ROWS, dtype=torch.int32)
    tensors["ring_top_logprobs"] = torch.empty(4, ROWS, MAX_LOGPROBS)
    tensors["ring_top_ids"] = torch.empty(4, ROWS, MAX_LOGPROBS, dtype=torch.int32)
    groups = {
        "slots": SamplingSlots,
        "outputs": LogprobOutputs,
        "logprobs": LogprobOutputs,
        "state": advance.AdvanceState,
    }
    return tensors | {name: kind(*(tensors[field] for field in kind._fields)) for name, kind in groups.items()}


def by_name(launcher: Callable[..., None], tensors: dict[str, Any]) -> Callable[[], None]:
    """Call a launcher with the tensors that its arguments name."""
    names = [name for name, p in inspect.signature(launcher).parameters.items() if p.default is p.empty]
    return lambda: launcher(*(tensors[name] for name in names))


def step_cases() -> dict[str, Callable[[], None]]:
    """The launches of the rest of a step, which no head_dim changes."""
    tensors = step_arguments()
    x, weight = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN, dtype=torch.bfloat16)
    table = torch.empty(1000, HIDDEN, dtype=torch.bfloat16)
    wide = torch.empty(ROWS, FEED_FORWARD, dtype=torch.bfloat16)
    gate_up = torch.empty(ROWS, 2 * FEED_FORWARD, dtype=torch.bfloat16)
    return {
        "embedding": lambda: embedding.embedding_triton(x, tensors["tokens"], table, tensors["live"]),
        "rms-norm": lambda: rms_norm.rms_norm_triton(x, x, weight, 1e-5),
        "add-rms-norm": lambda: rms_norm.add_rms_norm_triton(x, x, x, weight, 1e-5),
        "silu": lambda: act_mul.act_mul_triton(wide, gate_up, "silu"),
        "gelu": lambda: act_mul.act_mul_triton(wide, gate_up, "gelu"),
        "sample": by_name(sample.sample_triton, tensors),
        "logprobs": by_name(logprobs.token_logprobs_triton, tensors),
        "advance": by_name(advance.advance_triton, tensors),
        "skip-steps": by_name(skip_steps.skip_steps_triton, tensors),
    }


def linear_case(config: SmallLinearConfig, dtype: torch.dtype, rows: int) -> Callable[[], None]:
    """One configuration of the product of few rows, over the down projection of a model."""
    x, weight = torch.empty(rows, FEED_FORWARD, dtype=dtype), torch.empty(HIDDEN, FEED_FORWARD, dtype=dtype)
    out, partial = torch.empty(rows, HIDDEN, dtype=dtype), torch.empty(config.splits, rows, HIDDEN)
    counters = torch.empty(HIDDEN, dtype=torch.int32)
    fields = (config.kind, config.block_n, config.block_k, config.splits, config.num_warps, config.num_stages)
    return lambda: small_linear.small_linear_triton(out, x, weight, None, partial, counters, *fields, config.pdl)


def linear_cases(arch: int) -> dict[str, Callable[[], None]]:
    """Every tile that may be chosen: columns split and not, with and without an early start where there is one."""
    cases: dict[str, Callable[[], None]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        found = [fixed_config(HIDDEN, FEED_FORWARD, dtype.itemsize)]
        found += candidates(HIDDEN, FEED_FORWARD, dtype.itemsize, GEMV_ROWS, 132)
        for config in found:
            for splits, pdl in ((1, False), (2, False), (2, True)):
                if pdl and arch < 90:
                    continue
                chosen = dataclasses.replace(config, splits=splits, pdl=pdl)
                for rows in (1, 2, GEMV_ROWS) if config.kind == "gemv" else (ROWS,):
                    name = f"{config.kind}-{config.block_n}x{config.block_k}-{str(dtype)[6:]}-rows{rows}"
                    cases[f"{name}{'-split' * (splits > 1)}{'-pdl' * pdl}"] = linear_case(chosen, dtype, rows)
    return cases


def measure(arch: int) -> dict[str, dict[str, int]]:
    """Compile every case for one architecture."""
    cases: dict[str, Callable[[], None]] = {}
    for head_dim, dtype, kv_dtype in ATTENTION_SHAPES:
        name = f"{str(dtype)[6:]}-{str(kv_dtype)[6:]}-d{head_dim}"
        for kind, launch in attention_cases(head_dim, dtype, kv_dtype).items():
            if kind != "decode-window" or kv_dtype == torch.bfloat16:
                cases[f"{kind}-{name}"] = launch
    for head_dim in (64, 128, 256):
        cases[f"append-d{head_dim}"] = append_case(head_dim, False)
        cases[f"append-norm-d{head_dim}"] = append_case(head_dim, True)
    cases |= step_cases()
    cases |= linear_cases(arch)
    lens = torch.empty(ROWS, dtype=torch.int32)
    cases["plan"] = lambda: attention_plan.attention_plan_triton(lens, lens, lens, lens, 33, 0, -1)
    cases["plan-fixed"] = lambda: attention_plan.attention_plan_triton(lens, lens, lens, lens, 33, 1024, -1)
    return {
        f"{case}/{kernel}": numbers
        for case, launch in cases.items()
        for kernel, numbers in launches(launch, arch).items()
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1])), indent=1))
