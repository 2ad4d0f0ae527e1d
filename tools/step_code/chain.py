"""Models the step of a dense model as a chain of early CUDA C++ kernels, from their machine code.

    python -m step_code.chain       prints steps of 1, 16, 32 and 64 rows, beside the goals

A product takes the time of its weights, and of the boundary before it and the latency behind its wait: at most all of
both, at least what is not covered by the bytes that its blocks have asked for by then. With more than 8 rows it takes
longer where one of these does, for the multiprocessor with the most blocks: issue or tensor cores of its scheduler
with the most warps, shared memory, or the L2 cache, from which each block reads the activations. No GPU has run any of
this; an H200's constants are measured: 4.3 TB/s, 1.1 us for the cheapest early launch; the L2 cache's 5.5 TB/s, and 8
cycles of a tensor core's product, are others' of an H100. Attention is taken to need what its kernel is built for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphdecode.kernels.cuda.nvrtc import compiled
from graphdecode.kernels.linear.skinny_linear import MOST_ROWS, columns, grid_and_shared_bytes, macros, skinny_configs
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.kernels.linear.wide_linear import (
    GpuLimits,
    shared_bytes,
    wide_blocks,
    wide_configs,
    wide_macros,
    wide_step,
)
from graphdecode.models.shapes import SHAPES
from step_code.empty_tiles import empty_tiles
from step_code.figures import figures_of
from step_code.sass import Code, Instruction

BANDWIDTH, L2_BANDWIDTH = 4.3e12, 5.5e12
CLOCK_HZ = 1.755e9
BOUNDARY_US = 1.1
ATTENTION_US = 3.25  # the middle of what a cluster for each row and head is to take
FIXED_US = 12.0  # embedding, sampling, and the graph's launch
UNITS, THREADS_OF_UNIT, SCHEDULERS = 132, 2048, 4
LIMITS = GpuLimits(UNITS, 227 << 10, True)
TENSOR_CYCLES, SHARED_BYTES_OF_CYCLE = 8, 128
ARCH = "sm_90a"
WEIGHTS = {
    "bf16": None,
    "int8": ("s8", 0, "none", torch.bfloat16),
    "int4": ("s4", 128, "none", torch.bfloat16),
    "int4 with zeros": ("u4", 128, "zeros", torch.bfloat16),
    "fp8": ("e4m3", 128, "none", torch.float32),
    "MXFP4": ("e2m1", 32, "none", torch.uint8),
    "Q8_0": ("s8", 32, "none", torch.float16),
    "Q4_0": ("s4", 32, "none", torch.float16),
    "Q4_K": ("u4", 32, "six bits", torch.float16),
    "Q6_K": ("s6", 16, "parts", torch.float16),
}
ROWS = (1, 16, 32, 64)
GOALS_MS = {
    ("llama-3.1-8b", "bf16"): 3.95,
    ("llama-3.2-1b", "bf16"): 0.80,
    ("qwen3-0.6b", "bf16"): 0.65,
    ("llama-3.1-8b", "int8"): 2.45,
    ("llama-3.1-8b", "int4"): 1.65,
}
GOAL_OF_64_ROWS_MS = 5.3  # of the 8B in bf16


class Product(NamedTuple):
    """A product's modelled time."""

    nbytes: int
    registers: int
    busy_us: float  # what the weights take, or arithmetic if it takes longer
    latency_us: float  # behind the wait
    asked_us: float  # the time of the bytes that are in flight when it waits

    def step_us(self, *, is_covered: bool) -> float:
        """Return what it adds to a step, at least (`is_covered`) or at most."""
        idle_us = BOUNDARY_US + self.latency_us
        return self.busy_us + max(idle_us - self.asked_us * is_covered, 0.0)


class Chain(NamedTuple):
    """A step's modelled time."""

    least_us: float
    most_us: float
    floor_us: float  # of these weights


def product(height: int, width: int, weights: str, *, is_normed: bool, epilogue: str, rows: int = 1) -> Product:
    """Return the modelled product of so many rows with a weight [height, width]."""
    kind = WEIGHTS[weights]
    weight: torch.Tensor | WeightTiles
    if kind is None:
        weight = torch.empty(height, width, dtype=torch.bfloat16, device="meta")
        nbytes = weight.nbytes
    else:
        weight = empty_tiles(kind, height, width)
        nbytes = sum(part.nbytes for part in weight if isinstance(part, torch.Tensor))
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    out = torch.empty(rows, height // 2 if epilogue == "silu" else height, dtype=torch.bfloat16, device="meta")
    fused = {"is_normed": is_normed, "epilogue": epilogue}
    if rows > MOST_ROWS:
        return _wide_product(out, x, weight, nbytes, **fused)  # type: ignore[arg-type]
    config = skinny_configs(weight, rows, True)[0]
    defines = macros(out, x, weight, config, **fused)  # type: ignore[arg-type]
    blocks, own_bytes = grid_and_shared_bytes(out, x, weight, config, **fused)  # type: ignore[arg-type]
    code = Code.of(compiled("skinny_linear.cu", defines, ARCH))
    return _product(code, nbytes, 1e6 * nbytes / BANDWIDTH, blocks, own_bytes, config.warps)


def _wide_product(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | WeightTiles,
    nbytes: int,
    *,
    is_normed: bool,
    epilogue: str,
) -> Product:
    config = wide_configs(weight, len(x), True, LIMITS)[0]
    defines = wide_macros(out, x, weight, config, is_normed=is_normed, epilogue=epilogue)
    code = Code.of(compiled("wide_linear.cu", defines, ARCH))
    loop = max(([code.instructions[place] for place in each] for each in code.inner_loops), key=_tensor_products)
    parts = config.splits * config.column_warps
    steps = -(-columns(weight) // wide_step(weight) // parts)
    warps, blocks = config.row_warps * config.column_warps, wide_blocks(out, config, epilogue)
    of_scheduler = -(-warps // SCHEDULERS) * max(len(loop), TENSOR_CYCLES * _tensor_products(loop))
    of_shared = warps * 32 * sum(each.width for each in loop if each.operation in ("LDS", "STS", "LDGSTS"))
    of_shared += warps * 32 * 16 * sum(each.operation == "LDSM" for each in loop)
    cycles = steps * max(of_scheduler, of_shared / SHARED_BYTES_OF_CYCLE)
    of_block = nbytes / (blocks / config.splits) / config.splits
    l2_us = 1e6 * (nbytes + blocks * x.nbytes / config.splits) / L2_BANDWIDTH
    waves = -(-blocks // UNITS)
    busy_us = max(waves * 1e6 * max(cycles / CLOCK_HZ, of_block * UNITS / BANDWIDTH), l2_us)
    return _product(code, nbytes, busy_us, blocks, shared_bytes(weight, len(x), config), warps)


def _tensor_products(loop: list[Instruction]) -> int:
    return sum(each.operation == "HMMA" for each in loop)


def _product(code: Code, nbytes: int, busy_us: float, blocks: int, own_bytes: int, warps: int) -> Product:
    figures = figures_of(code, own_bytes, {})
    registers = -(-figures.registers // 8) * 8
    resident = min((1 << 16) // (registers * 32 * warps), THREADS_OF_UNIT // (32 * warps))
    # half of a multiprocessor's room, for the kernel before has the other half
    early = min(blocks, UNITS * max(resident // 2, 1))
    asked = min(figures.early_bytes * warps * early, nbytes)
    return Product(nbytes, figures.registers, busy_us, 1e6 * figures.latency_cycles / CLOCK_HZ, 1e6 * asked / BANDWIDTH)


def chain(name: str, weights: str = "bf16", context: int = 512, rows: int = 1) -> Chain:
    """Return the modelled step of so many rows."""
    shape = SHAPES[name]
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim, inner = shape.get("head_dim") or hidden // heads, shape["intermediate_size"]
    layer = [
        product((heads + 2 * kv_heads) * head_dim, hidden, weights, is_normed=True, epilogue="store", rows=rows),
        product(hidden, heads * head_dim, weights, is_normed=False, epilogue="add", rows=rows),
        product(2 * inner, hidden, weights, is_normed=True, epilogue="silu", rows=rows),
        product(hidden, inner, weights, is_normed=False, epilogue="add", rows=rows),
    ]
    head = product(shape["vocab_size"], hidden, "bf16", is_normed=True, epilogue="store", rows=rows)
    layers = shape["num_hidden_layers"]
    keys_us = rows * 1e6 * 4 * context * kv_heads * head_dim / BANDWIDTH
    attention_us = max(ATTENTION_US, keys_us) if rows == 1 else ATTENTION_US + keys_us
    floor_us = layers * (1e6 * sum(each.nbytes for each in layer) / BANDWIDTH + keys_us) + 1e6 * head.nbytes / BANDWIDTH

    def step_us(is_covered: bool) -> float:
        products_us = sum(each.step_us(is_covered=is_covered) for each in layer)
        return layers * (products_us + attention_us) + head.step_us(is_covered=is_covered) + FIXED_US

    return Chain(step_us(True), step_us(False), floor_us)


def main() -> None:
    """Print the steps beside the goals."""
    for rows in ROWS:
        for name in dict.fromkeys(name for name, _ in GOALS_MS):
            plain = chain(name, rows=rows)
            for weights in WEIGHTS if name == "llama-3.1-8b" else ("bf16",):
                least_us, most_us, floor_us = chain(name, weights, rows=rows)
                goal = GOALS_MS.get((name, weights)) if rows == 1 else GOAL_OF_64_ROWS_MS
                has_goal = rows == 1 or (rows, name, weights) == (64, "llama-3.1-8b", "bf16")
                print(
                    f"{rows} rows, {name} {weights}: {least_us / 1000:.2f} to {most_us / 1000:.2f} ms, "
                    f"{least_us / floor_us:.2f} to {most_us / floor_us:.2f} of the floor, "
                    f"{most_us / plain.most_us:.2f} of bf16{f'; goal {goal}' if has_goal and goal else ''}"
                )


if __name__ == "__main__":
    main()
