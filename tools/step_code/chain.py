"""Models the step of a dense model as a chain of early CUDA C++ kernels, from their machine code.

    python -m step_code.chain       prints steps of one row, beside the goals

A product takes the time of its weights, and of the boundary before it and the latency behind its wait: at most all of
both, at least what is not covered by the bytes that its blocks have asked for by then. No GPU has run any of this; an
H200's constants are measured: 4.3 TB/s, 1.1 us for the cheapest early launch. Attention is taken to need what its
kernel is built for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphdecode.kernels.cuda.nvrtc import compiled
from graphdecode.kernels.linear.skinny_linear import grid_and_shared_bytes, macros, skinny_configs
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.models.shapes import SHAPES
from step_code.empty_tiles import empty_tiles
from step_code.figures import figures_of
from step_code.sass import Code

BANDWIDTH = 4.3e12
CLOCK_HZ = 1.755e9
BOUNDARY_US = 1.1
ATTENTION_US = 3.25  # the middle of what a cluster for each row and head is to take
FIXED_US = 12.0  # embedding, sampling, and the graph's launch
UNITS, THREADS_OF_UNIT = 132, 2048
ARCH = "sm_90a"
WEIGHTS = {
    "bf16": None,
    "int8": ("s8", 0, "none", torch.bfloat16),
    "int4": ("s4", 128, "none", torch.bfloat16),
}
GOALS_MS = {
    ("llama-3.1-8b", "bf16"): 3.95,
    ("llama-3.2-1b", "bf16"): 0.80,
    ("qwen3-0.6b", "bf16"): 0.65,
    ("llama-3.1-8b", "int8"): 2.45,
    ("llama-3.1-8b", "int4"): 1.65,
}


class Product(NamedTuple):
    """A product's modelled time of one row."""

    nbytes: int
    registers: int
    latency_us: float  # behind the wait
    asked_us: float  # the time of the bytes that are in flight when it waits

    def step_us(self, *, is_covered: bool) -> float:
        """Return what it adds to a step, at least (`is_covered`) or at most."""
        idle_us = BOUNDARY_US + self.latency_us
        return 1e6 * self.nbytes / BANDWIDTH + max(idle_us - self.asked_us * is_covered, 0.0)


class Chain(NamedTuple):
    """A step's modelled time."""

    least_us: float
    most_us: float
    floor_us: float  # of these weights


def product(rows: int, columns: int, weights: str, *, is_normed: bool, epilogue: str) -> Product:
    """Return the modelled product of one row with a weight [rows, columns]."""
    kind = WEIGHTS[weights]
    weight: torch.Tensor | WeightTiles
    if kind is None:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        nbytes = weight.nbytes
    else:
        weight = empty_tiles(kind, rows, columns)
        nbytes = sum(part.nbytes for part in weight if isinstance(part, torch.Tensor))
    x = torch.empty(1, columns, dtype=torch.bfloat16, device="meta")
    out = torch.empty(1, rows // 2 if epilogue == "silu" else rows, dtype=torch.bfloat16, device="meta")
    config = skinny_configs(weight, 1, True)[0]
    defines = macros(out, x, weight, config, is_normed=is_normed, epilogue=epilogue)
    blocks, shared_bytes = grid_and_shared_bytes(out, x, weight, config, is_normed=is_normed, epilogue=epilogue)
    figures = figures_of(Code.of(compiled("skinny_linear.cu", defines, ARCH)), shared_bytes, {})
    registers = -(-figures.registers // 8) * 8
    resident = min((1 << 16) // (registers * config.threads), THREADS_OF_UNIT // config.threads)
    # half of a multiprocessor's room, for the kernel before has the other half
    early = min(blocks, UNITS * max(resident // 2, 1))
    asked = min(figures.early_bytes * config.warps * early, nbytes)
    return Product(nbytes, figures.registers, 1e6 * figures.latency_cycles / CLOCK_HZ, 1e6 * asked / BANDWIDTH)


def chain(name: str, weights: str = "bf16", context: int = 512) -> Chain:
    """Return the modelled step of one row."""
    shape = SHAPES[name]
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim, inner = shape.get("head_dim") or hidden // heads, shape["intermediate_size"]
    layer = [
        product((heads + 2 * kv_heads) * head_dim, hidden, weights, is_normed=True, epilogue="store"),
        product(hidden, heads * head_dim, weights, is_normed=False, epilogue="add"),
        product(2 * inner, hidden, weights, is_normed=True, epilogue="silu"),
        product(hidden, inner, weights, is_normed=False, epilogue="add"),
    ]
    head = product(shape["vocab_size"], hidden, "bf16", is_normed=True, epilogue="store")
    layers = shape["num_hidden_layers"]
    keys_us = 1e6 * 4 * context * kv_heads * head_dim / BANDWIDTH
    floor_us = layers * (1e6 * sum(each.nbytes for each in layer) / BANDWIDTH + keys_us) + 1e6 * head.nbytes / BANDWIDTH

    def step_us(is_covered: bool) -> float:
        products_us = sum(each.step_us(is_covered=is_covered) for each in layer)
        return layers * (products_us + max(ATTENTION_US, keys_us)) + head.step_us(is_covered=is_covered) + FIXED_US

    return Chain(step_us(True), step_us(False), floor_us)


def main() -> None:
    """Print the steps beside the goals."""
    bf16: dict[str, Chain] = {}
    for (name, weights), goal_ms in GOALS_MS.items():
        least_us, most_us, floor_us = step = chain(name, weights)
        plain = bf16.setdefault(name, step)
        print(
            f"{name} {weights}: {least_us / 1000:.2f} to {most_us / 1000:.2f} ms, {least_us / floor_us:.2f} to "
            f"{most_us / floor_us:.2f} of the floor, {most_us / plain.most_us:.2f} of bf16; goal {goal_ms}"
        )


if __name__ == "__main__":
    main()
