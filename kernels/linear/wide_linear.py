"""Products of 9 to 64 rows on a GPU by CUDA C++, `cuda/wide_linear.cu`, for plain weights and those in tiles.

A configuration of the kind "skinny" launches it where its activation tile has more than 8 rows; see `skinny_linear`. It
has run on no GPU yet, only on a CPU by fibers. One configuration gives a row the same bits beside any number of others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.launch import loaded
from ..model.act_mul import ACTIVATIONS
from . import skinny_linear
from .code_words import CODES
from .skinny_linear import (
    ProductArguments,
    SkinnyConfig,
    alignment_reason,
    columns,
    even_bytes,
    launch_skinny_linear,
    weight_macros,
    weight_tensors,
)
from .weight_tiles import WeightTiles

MOST_ROWS = 64
STEP = 64  # columns of a plain weight that a thread copies at a time
WARP_ROWS = 32  # weight rows of a warp: two of the tensor cores' first operand
_WARP = 32
_PANEL = 8  # activation rows of the tensor cores' second operand
_MOST_WARPS = 8  # of a block: a multiprocessor has registers for so many with 64 sums a thread
_AHEAD = (4, 3, 2, 1)  # chunks of columns in flight
_CANDIDATES = 3
_CLOCKS = 4, 6  # of a scheduler for 32 x 32 of a weight and a row: plain sums, and those of groups
_IDLE = 0.5  # of a warp's clocks
_BYTES_OF_CLOCK = 18.5  # that a multiprocessor of an H200 reads
_L2_COST = 0.6  # of a byte of the activations, which come from the L2 cache, beside a byte of the weight
_RESERVED = 1 << 10  # bytes of shared memory of a block, for the system
_BLOCK_BYTES = 48 << 10  # what a multiprocessor could have read while a block begins and ends
_CLUSTERS = (1, 2, 4)  # blocks; eight leave multiprocessors idle where a GPC has less than sixteen


class WideConfig(NamedTuple):
    """Launch configuration of a product."""

    row_warps: int  # warps of a block with other rows of the weight, 32 each
    column_warps: int  # groups of such warps, which share the columns
    splits: int  # blocks of a cluster, which share the columns
    ahead: int  # chunks of columns in flight
    chunk: int  # columns
    pdl: bool = False  # whether it starts before the previous kernel ends

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _WARP * self.row_warps * self.column_warps


class GpuLimits(NamedTuple):
    """What a GPU has for a launch."""

    units: int  # multiprocessors
    shared_of_block: int  # bytes
    has_clusters: bool

    @classmethod
    def of(cls, device: torch.device) -> "GpuLimits":
        """Return the limits of a device."""
        properties = torch.cuda.get_device_properties(device)
        shared = properties.shared_memory_per_multiprocessor - _RESERVED
        return cls(properties.multi_processor_count, shared, properties.major >= 9)


def wide_step(weight: Tensor | WeightTiles) -> int:
    """Return the columns that a thread copies at a time."""
    return weight.step if isinstance(weight, WeightTiles) else STEP


def most_rows(rows: int) -> int:
    """Return the rows of x that a launch's code takes."""
    return -(-rows // (2 * _PANEL)) * 2 * _PANEL


def unsupported_reason(x: Tensor, weight: Tensor | WeightTiles) -> str | None:
    """Return why there is no launch for these operands; None if there is one."""
    reason = skinny_linear.unsupported_reason(x, weight, MOST_ROWS)
    if reason is not None or isinstance(weight, Tensor):
        return reason
    for numbers in (weight.scales, weight.seconds):
        if numbers is not None and numbers.numel() * numbers.element_size() % 4:
            return "scales are no whole words of 4 bytes"
    return alignment_reason(weight)


def _bytes_of_step(weight: Tensor | WeightTiles) -> int:
    """Return the shared memory of a step of a weight row; see `staged_weights.cuh`."""
    if isinstance(weight, Tensor):
        return 2 * STEP
    code = CODES[weight.code]
    words = 2 * weight.step // code.per_word + (2 * weight.step // code.spans_of_high if code.spans_of_high else 0)
    numbers = [part for part in (weight.scales, weight.seconds) if part is not None and weight.group]
    return words + sum(-(-part.shape[2] * part.element_size() // 4) * 4 for part in numbers)


def shared_bytes(weight: Tensor | WeightTiles, rows: int, config: WideConfig) -> int:
    """Return the shared memory that a block uses."""
    of_x, parts = most_rows(rows), config.column_warps
    stages = -(-config.ahead // (wide_step(weight) // config.chunk)) + 1
    totals = 2 * (config.chunk // 32) * of_x * 4 if isinstance(weight, WeightTiles) and weight.layout.has_totals else 0
    ring = parts * ((config.ahead + 1) * of_x * config.chunk * 2 + totals)
    ring += stages * config.threads * _bytes_of_step(weight)
    sums = 4 * of_x * (parts * (WARP_ROWS * config.row_warps + 4 + 1) + 1)
    return max(ring, sums)


def wide_configs(weight: Tensor | WeightTiles, rows: int, pdl: bool, limits: GpuLimits) -> list[WideConfig]:
    """Return the configurations that may be fastest, the likeliest first; see `_cost`."""
    steps, step = columns(weight) // wide_step(weight), wide_step(weight)
    chunk = min(step, 64 if rows > WARP_ROWS else 128)
    ranked: dict[WideConfig, tuple[float, int]] = {}
    for row_warps in range(1, _MOST_WARPS + 1):
        for column_warps in range(1, _MOST_WARPS // row_warps + 1):
            for splits in _CLUSTERS if limits.has_clusters else (1,):
                parts = column_warps * splits
                if row_warps * column_warps < min(steps, 4) or -(-steps // parts) * (parts - 1) >= steps:
                    continue  # too few warps, or one without columns
                config = WideConfig(row_warps, column_warps, splits, 1, chunk, pdl)
                for ahead in _AHEAD:
                    if shared_bytes(weight, rows, config._replace(ahead=ahead)) <= limits.shared_of_block:
                        ranked[config._replace(ahead=ahead)] = (_cost(weight, rows, config, limits.units), splits)
                        break
    return sorted(ranked, key=ranked.__getitem__)[:_CANDIDATES]


def _cost(weight: Tensor | WeightTiles, rows: int, config: WideConfig, units: int) -> float:
    """Return what the multiprocessor with the most blocks takes, in bytes that it could have read.

    That is the weight once, or the arithmetic of its scheduler with the most warps and what latency leaves idle; then
    the activations, for each block from the L2 cache, the sums of a cluster, and the begin and end of a block.
    """
    height = weight.words.shape[1] if isinstance(weight, WeightTiles) else weight.shape[0]
    nbytes = sum(part.nbytes for part in weight_tensors(weight) if part is not None)
    row_warps, column_warps, splits = config[:3]
    blocks = -(-height // (WARP_ROWS * row_warps)) * splits
    of_weight = nbytes / height * WARP_ROWS * row_warps / splits
    is_grouped = isinstance(weight, WeightTiles) and weight.group > 0
    clocks = _CLOCKS[is_grouped] * most_rows(rows) * columns(weight) / 32 / (splits * column_warps)
    of_clocks = (-(-row_warps * column_warps // 4) + _IDLE) * clocks * _BYTES_OF_CLOCK
    of_x = 2 * most_rows(rows) * columns(weight) / splits
    of_sums = 4 * most_rows(rows) * WARP_ROWS * row_warps * (splits > 1)
    return -(-blocks // units) * (max(of_weight, of_clocks) + _L2_COST * (of_x + of_sums) + _BLOCK_BYTES)


def wide_macros(
    out: Tensor, x: Tensor, weight: Tensor | WeightTiles, config: WideConfig, *, is_normed: bool, epilogue: str
) -> dict[str, int | str]:
    """Return what a launch's code is compiled for."""
    return {
        "SET_ROW_WARPS": config.row_warps,
        "SET_COLUMN_WARPS": config.column_warps,
        "SET_SPLITS": config.splits,
        "SET_AHEAD": config.ahead,
        "SET_CHUNK": config.chunk,
        "SET_ROWS": most_rows(x.shape[0]),
    } | weight_macros(out, x, weight, wide_step(weight), is_normed=is_normed, epilogue=epilogue)


def wide_blocks(out: Tensor, config: WideConfig, epilogue: str) -> int:
    """Return the number of blocks."""
    outputs = WARP_ROWS * config.row_warps // (2 if epilogue in ACTIVATIONS else 1)
    return -(-out.shape[1] // outputs) * config.splits


def launch_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor | WeightTiles,
    given: ProductArguments,
    config: SkinnyConfig | WideConfig,
) -> None:
    """Launch the kernel that a configuration is for.

    Raises:
        ValueError: it does not take these operands.
    """
    if isinstance(config, SkinnyConfig):
        launch_skinny_linear(out, x, weight, given, config)
        return
    given.checked(unsupported_reason(x, weight))
    defines = wide_macros(out, x, weight, config, is_normed=given.gain is not None, epilogue=given.epilogue)
    kernel = loaded("wide_linear.cu", "wide_linear", tuple(defines.items()), x.get_device())
    properties = torch.cuda.get_device_properties(x.device)
    blocks, own_bytes = wide_blocks(out, config, given.epilogue), shared_bytes(weight, x.shape[0], config)
    shared_of_unit = properties.shared_memory_per_multiprocessor
    kernel.launch(
        (blocks,),
        config.threads,
        given.in_order(out, x, weight),
        shared_bytes=even_bytes(blocks, own_bytes, properties.multi_processor_count, shared_of_unit),
        starts_early=config.pdl,
        cluster=config.splits,
    )
