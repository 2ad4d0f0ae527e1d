"""Kernels over weights of few bits, for `ahead_of_time.py`: their launches at the sizes of a model."""

from collections.abc import Callable
from functools import partial

import torch

from graphdecode.kernels.linear import dequantize_tiles, tiled_linear
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, tiled_config
from graphdecode.kernels.linear.weight_tiles import WeightTiles, tiled
from graphdecode.kernels.model import embedding
from graphdecode.kernels.moe import expert_linear

ROWS, PAGES, PAGE_SIZE, WIDTH = 8, 64, 16, 32
HIDDEN, FEED_FORWARD, VOCAB = 4096, 14336, 128256
EXPERTS, SLOTS, EXPERT_WIDTH = 128, 8, 768


def weight_of(code: str, group: int, second_kind: str, dtype: torch.dtype, rows: int, columns: int) -> WeightTiles:
    """Return one row of a weight, which stands for all of them, for nothing is launched."""
    blocks, groups = columns // 256, columns // (group or columns)
    of_blocks = {"six bits": (2 * blocks, 3 * blocks), "parts": (blocks, 16 * blocks)}
    scales, seconds = of_blocks.get(second_kind, (groups, groups))
    kinds = {"none": None, "zeros": torch.uint8, "six bits": torch.int32, "parts": torch.int8}
    beside = None if second_kind == "none" else torch.zeros(1, seconds, dtype=kinds[second_kind])
    codes = torch.zeros(1, columns, dtype=torch.uint8)
    row = tiled(codes, code, torch.zeros(1, scales, dtype=dtype), group, beside, second_kind)
    return row._replace(
        words=row.words.expand(-1, rows, -1),
        high=None if row.high is None else row.high.expand(-1, rows, -1),
        scales=row.scales.expand(-1, rows, -1),
        seconds=None if row.seconds is None else row.seconds.expand(-1, rows, -1),
    )


def tiled_cases(arch: int) -> dict[str, Callable[[], None]]:
    """Products with weights of few bits: few rows as they are, many with all that a layer fuses with them."""
    cases: dict[str, Callable[[], None]] = {}
    kinds: dict[str, tuple[str, int, str, torch.dtype]] = {
        "int8": ("s8", 0, "none", torch.bfloat16),
        "int4-zeros": ("u4", 128, "zeros", torch.bfloat16),
        "q4_k": ("u4", 32, "six bits", torch.float16),
        "q6_k": ("s6", 16, "parts", torch.float16),
        "q5_k": ("u5", 32, "six bits", torch.float16),
        "q4_0": ("s4", 32, "none", torch.float16),
    }
    for name, kind in kinds.items():
        tiles = weight_of(*kind, HIDDEN, FEED_FORWARD)
        for rows, epilogue, is_normed in ((8, "add", False), (64, "silu", True)):
            config = tiled_config(rows, HIDDEN, FEED_FORWARD, tiles.layout, 132, arch >= 90, is_normed, arch // 10)
            case = f"tiled-{name}-rows{rows}-{epilogue}{'-norm' * is_normed}"
            cases[case] = partial(launch_tiled, tiles, config._replace(splits=4), rows, epilogue, is_normed)
        cases[f"tiled-embedding-{name}"] = partial(launch_tiled_embedding, tiles)
        values = torch.empty(HIDDEN, FEED_FORWARD, dtype=torch.bfloat16)
        cases[f"dequantize-{name}"] = partial(dequantize_tiles.dequantize_tiles_triton, values, tiles, 0)
    return cases


def tiled_expert_cases(arch: int) -> dict[str, Callable[[], None]]:
    """Products of experts with weights of few bits: of few pairs each, and of many."""
    cases: dict[str, Callable[[], None]] = {}
    kinds: dict[str, tuple[str, int, str, torch.dtype]] = {
        "mxfp4": ("e2m1", 32, "none", torch.uint8),
        "int4": ("s4", 128, "none", torch.bfloat16),
        "q4_0": ("s4", 32, "none", torch.float16),
        "q8_0": ("s8", 32, "none", torch.float16),
        "q4_k": ("u4", 32, "six bits", torch.float16),
        "q5_k": ("u5", 32, "six bits", torch.float16),
        "q6_k": ("s6", 16, "parts", torch.float16),
    }
    offsets, order = (torch.empty(size, dtype=torch.int32) for size in (EXPERTS + 1, EXPERTS * 64))
    x, out = (torch.empty(EXPERTS * 64, size, dtype=torch.bfloat16) for size in (HIDDEN, EXPERT_WIDTH))
    for name, kind in kinds.items():
        tiles = weight_of(*kind, EXPERTS * 2 * EXPERT_WIDTH, HIDDEN)
        for rows in (8, 64):
            config = tiled_config(rows, EXPERT_WIDTH, HIDDEN, tiles.layout, 1, major=arch // 10)
            cases[f"tiled-experts-{name}-rows{rows}"] = partial(
                expert_linear.tiled_expert_linear_triton, out, x, tiles, None,
                expert_linear.Routed(order, offsets, SLOTS, "swiglu_clamped", 1.702, 7.0), config,
            )  # fmt: skip
    return cases


def launch_tiled_embedding(tiles: WeightTiles) -> None:
    """Gather rows of few bits."""
    out, ids = torch.empty(ROWS, FEED_FORWARD, dtype=torch.bfloat16), torch.empty(ROWS, dtype=torch.int64)
    embedding.tiled_embedding_triton(out, ids, tiles, torch.empty(1, dtype=torch.int32), 1.0)


def launch_tiled(tiles: WeightTiles, config: SmallLinearConfig, rows: int, epilogue: str, is_normed: bool) -> None:
    """Launch one product with a weight of few bits."""
    out_features = tiles.words.shape[1]
    x = torch.empty(rows, FEED_FORWARD, dtype=torch.bfloat16)
    out = torch.empty(rows, out_features // (1 + (epilogue == "silu")), dtype=torch.bfloat16)
    gain, counters = torch.empty(FEED_FORWARD) if is_normed else None, torch.empty(HIDDEN, dtype=torch.int32)
    tiled_linear.tiled_linear_triton(out, x, tiles, None, gain, torch.empty(1), counters, 1e-5, epilogue, 1.0, config)
