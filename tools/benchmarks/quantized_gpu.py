"""Quantized weights on a GPU, modelled: bytes, the code that dequantizes them, and the time of a step.

    tools/bench quantized-gpu

The one form that a GPU timed, int8, took longer than is modelled here. A product takes the time to read its weight or
to issue its loop's instructions, whichever is longer; the rest of a step costs what docs/kernels.md says of it in bf16.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.kernels import MODELS
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, tiled_config
from graphdecode.kernels.linear.tiled_linear import tiled_linear_triton
from graphdecode.kernels.linear.weight_tiles import TileLayout, WeightTiles, empty_tiles, layout_of
from graphdecode.kernels.moe.expert_linear import Routed, tiled_expert_linear_triton
from harness import ROOT, markdown
from step_code.compiled import compiled
from step_code.launches import Gpu, launches_of, recorded_step
from step_code.model import Costs
from step_code.sass import Code

STEPS = ROOT / "docs" / "kernels.md"
KINDS = {
    "int8": (layout_of("s8", 0), torch.bfloat16),
    "fp8, 128 x 128": (layout_of("e4m3", 128), torch.float32),
    "Q8_0": (layout_of("s8", 32), torch.float16),
    "int4, groups of 128": (layout_of("s4", 128), torch.bfloat16),
    "with zeros": (layout_of("u4", 128, "zeros"), torch.bfloat16),
    "MXFP4": (layout_of("e2m1", 32), torch.uint8),
    "Q4_0": (layout_of("s4", 32), torch.float16),
    "Q4_K": (layout_of("u4", 32, "six bits"), torch.float16),
    "Q5_K": (layout_of("u5", 32, "six bits"), torch.float16),
    "Q6_K": (layout_of("s6", 16, "parts"), torch.float16),
}
EXPERTS = {  # how many a layer has, how many of them a row takes, channels outside and inside
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
EXPERT_ROWS, EXPERT_TILES = (1, 8, 64), (8, 16)  # of a step; of an expert, that a program takes
UNDOING = ("LOP3", "SHF", "PRMT", "HFMA2", "HMUL2", "HADD2", "SGXT")
NORMED = ("qkv", "gate_up", "lm_head")  # products that take the norm before them into their launch
COSTS = Costs()
_ROWS, _COLUMNS = 4096, 4096
_TENSOR_CYCLES = 8  # of a scheduler for one instruction of the tensor cores; see `step_code.figures`
_SCHEDULERS = 4


@dataclass(frozen=True)
class Loop:
    """The loop of one product."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread
    width: int  # bytes that a thread reads of the words at once
    instructions: float  # of a warp, for each weight of a lane
    undoing: float  # share of them that undoes codes, about
    weights_per_clock: float  # of a multiprocessor, if nothing but issuing held it up


def bits_of(layout: TileLayout, dtype: torch.dtype) -> float:
    """Return the bits of a weight, scales included."""
    return 8 * nbytes(empty_tiles(layout, _ROWS, _COLUMNS, dtype, "meta")) / (_ROWS * _COLUMNS)


def nbytes(tiles: WeightTiles) -> int:
    return sum(part.nbytes for part in tiles[:4] if part is not None)


def loop_of(layout: TileLayout, dtype: torch.dtype, rows: int, is_normed: bool, arch: int) -> Loop:
    """Compile a product as a layer has it, and read its loop."""
    config = tiled_config(rows, _ROWS, _COLUMNS, layout, Gpu().processors, arch >= 90, is_normed, arch // 10)
    return _looked_at(partial(_launch, layout, dtype, rows, is_normed, config), layout, config, arch)


def expert_loop_of(layout: TileLayout, dtype: torch.dtype, rows: int, arch: int) -> Loop:
    """Compile the gated product of experts with so many rows each, and read its loop."""
    config = tiled_config(rows, _ROWS, _COLUMNS, layout, 1, major=arch // 10)
    return _looked_at(partial(_launch_experts, layout, dtype, rows, config), layout, config, arch)


def _looked_at(launch_it: Callable[[], None], layout: TileLayout, config: SmallLinearConfig, arch: int) -> Loop:
    (launch,) = launches_of(launch_it)
    code = Code.of(compiled(launch.kernel, launch.arguments, launch.options, arch)[0].asm["cubin"])
    loop = [code.instructions[place] for place in max(code.inner_loops, key=len)]
    counts = Counter(each.operation for each in loop)
    tensor = sum(counts[name] for name in ("HMMA", "QMMA", "IMMA")) * _TENSOR_CYCLES
    weights = config.block_n * layout.step / config.num_warps  # of a warp, in one turn
    return Loop(
        code.registers,
        code.stack,
        max((each.width for each in loop if each.operation in ("LDG", "LDGSTS")), default=0),
        len(loop) * 32 / weights,
        sum(counts[name] for name in UNDOING) / len(loop),
        _SCHEDULERS * weights / max(len(loop), tensor),
    )


def _launch(layout: TileLayout, dtype: torch.dtype, rows: int, is_normed: bool, config: SmallLinearConfig) -> None:
    on_meta = partial(torch.empty, device="meta")
    tiles = empty_tiles(layout, _ROWS, _COLUMNS, dtype, "meta")
    x, out = (on_meta(rows, size, dtype=torch.bfloat16) for size in (_COLUMNS, _ROWS))
    partial_sums, counters = on_meta(1), on_meta(_ROWS, dtype=torch.int32)
    given = None, on_meta(_COLUMNS) if is_normed else None, partial_sums, counters
    epilogue = "store" if is_normed else "add"
    tiled_linear_triton(out, x, tiles, *given, 1e-5, epilogue, 1.0, config._replace(splits=4))


def _launch_experts(layout: TileLayout, dtype: torch.dtype, rows: int, config: SmallLinearConfig) -> None:
    on_meta, count, pairs = partial(torch.empty, device="meta"), 8, 8 * rows
    tiles = empty_tiles(layout, count * _ROWS, _COLUMNS, dtype, "meta")
    x, out = (on_meta(pairs, size, dtype=torch.bfloat16) for size in (_COLUMNS, _ROWS // 2))
    order, offsets = (on_meta(size, dtype=torch.int32) for size in (pairs, count + 1))
    tiled_expert_linear_triton(out, x, tiles, None, Routed(order, offsets, 1, "silu"), config)


def product_sizes(model: str) -> dict[str, list[tuple[int, int]]]:
    blocks = recorded_step(f"shape:{model}", 1).model.blocks
    found: dict[str, list[tuple[int, int]]] = {}
    for block in blocks:
        for name, linear in block.linears.items():
            found.setdefault(name, []).append((linear.out_features, linear.in_features))
    return found


def plain_steps() -> dict[tuple[str, int, int], tuple[float, float]]:
    """Return from docs/kernels.md, by model, rows and context, the whole step and its cost beside bytes."""
    pattern = re.compile(r"^\| ([\w.-]+), (\d+) rows?, context (\d+) \|(.*)\|$", re.MULTILINE)
    found = {}
    of_now = STEPS.read_text().partition("<!-- end of figures -->")[0]  # behind it stand those of an earlier version
    for model, rows, context, cells in pattern.findall(of_now):
        numbers = [float(cell) for cell in cells.split("|")[2:7]]
        _, gaps, latency, hidden, step = numbers
        found[model, int(rows), int(context)] = step, gaps + latency - hidden
    return found


def expert_table(loops: dict[tuple[str, int], Loop]) -> str:
    """Return the bytes that one layer's experts read, and the time for them, in Markdown."""
    lines = []
    for model, (count, slots, hidden, width) in EXPERTS.items():
        products = {"gate_up": [(2 * width, hidden)], "down": [(hidden, width)]}
        plain = sum(2 * rows * columns for each in products.values() for rows, columns in each)
        for rows in EXPERT_ROWS:
            taken = min(rows * slots, count)
            tile = next(tile for tile in EXPERT_TILES if -(-rows * slots // count) <= tile)
            plain_us = 1e6 * plain * taken * (1 + COSTS.stream_loss) / COSTS.read_bandwidth
            line = {"": f"{model}, {rows} row{'s' * (rows > 1)}, {taken} of {count}"}
            line["bf16"] = f"{plain * taken / 2**20:.0f}: {plain_us:.0f}"
            for kind in KINDS:
                size = sum(_bytes_of(products, kind).values()) * taken
                kind_us = _loop_us(kind, size, loops[kind, tile])
                line[kind] = f"{size / 2**20:.0f}: {kind_us:.0f} ({plain_us / kind_us:.2f}x)"
            lines.append(line)
    return by_kind("experts of a layer", lines)


def by_kind(heading: str, lines: list[dict[str, str]]) -> str:
    names = {name: f"{{{name}}}" for name in ("bf16", *KINDS)}
    return markdown({heading: "{heading}"} | names, (line | {"heading": line[""]} for line in lines))


def loop_table(loops: dict[tuple[str, str], Loop]) -> str:
    columns = {"kind": "{kind}", "bits": "{bits:.2f}", "product": "{product}", "registers": "{registers}"}
    columns |= {"spilled": "{spilled}", "read at once": "{width}", "instructions": "{instructions:.1f}"}
    columns |= {"undoing": "{undoing:.0%}", "bytes per clock": "{rate:.0f}"}
    rows = []
    for (kind, product), loop in loops.items():
        bits = bits_of(*KINDS[kind])
        rate = loop.weights_per_clock * bits / 8
        rows.append({"kind": kind, "bits": bits, "product": product, "rate": rate} | asdict(loop))
    return markdown(columns, rows)


def step_table(loops: dict[tuple[str, int, bool], Loop]) -> str:
    steps, lines = plain_steps(), []
    for model in MODELS:
        sizes = product_sizes(model)
        plain_bytes = sum(2 * rows * columns for each in sizes.values() for rows, columns in each)
        held = {kind: _bytes_of(sizes, kind) for kind in KINDS}
        whole = {kind: f"{sum(each.values()) / 2**20:.0f}" for kind, each in held.items()}
        lines.append({"": f"{model}, MiB of weights", "bf16": f"{plain_bytes / 2**20:.0f}"} | whole)
        for (of_model, rows, context), (step_us, beside_us) in steps.items():
            if of_model != model:
                continue
            cache_us = step_us - beside_us - 1e6 * plain_bytes * (1 + COSTS.stream_loss) / COSTS.read_bandwidth
            line = {"": f"{model}, {rows} row{'s' * (rows > 1)}, context {context}, µs", "bf16": f"{step_us:.0f}"}
            for kind, by_name in held.items():
                streams = (_loop_us(kind, size, loops[kind, rows, name in NORMED]) for name, size in by_name.items())
                whole_us = sum(streams) + beside_us + cache_us
                line[kind] = f"{whole_us:.0f} ({step_us / whole_us:.2f}x)"
            lines.append(line)
    return by_kind("step", lines)


def _bytes_of(sizes: dict[str, list[tuple[int, int]]], kind: str) -> dict[str, int]:
    layout, dtype = KINDS[kind]
    return {
        name: sum(
            nbytes(empty_tiles(layout, rows, -(-columns // layout.step) * layout.step, dtype, "meta"))
            for rows, columns in each
        )
        for name, each in sizes.items()
    }


def _loop_us(kind: str, size: int, loop: Loop) -> float:
    """Return the time to read so many bytes, or to issue the loop's instructions, whichever is longer."""
    issued = loop.weights_per_clock * bits_of(*KINDS[kind]) / 8 * Gpu().processors * COSTS.clock_hz
    return 1e6 * size * (1 + COSTS.stream_loss) / min(COSTS.read_bandwidth, issued)


def main(
    arch: Annotated[int, typer.Option(help="Compute capability as one number.")] = 90,
    cache: Annotated[Path, typer.Option(help="Folder for what was compiled.")] = ROOT / ".kernel-figures",
) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    loops = {
        (kind, rows, is_normed): loop_of(*KINDS[kind], rows, is_normed, arch)
        for kind in KINDS
        for rows in (1, 64)
        for is_normed in (False, True)
    }
    expert_loops = {(kind, tile): expert_loop_of(*KINDS[kind], tile, arch) for kind in KINDS for tile in EXPERT_TILES}
    named = {
        (kind, f"{rows} row{'s' * (rows > 1)}{', normed' * is_normed}"): loop
        for (kind, rows, is_normed), loop in loops.items()
    }
    named |= {(kind, f"experts, tiles of {tile}"): loop for (kind, tile), loop in expert_loops.items()}
    in_order = {key: loop for kind in KINDS for key, loop in named.items() if key[0] == kind}
    tables = [step_table(loops), "### Experts", expert_table(expert_loops), "### The loops", loop_table(in_order)]
    print("\n\n".join(tables))
    raise typer.Exit(1 if any(loop.spilled for loop in named.values()) else 0)
