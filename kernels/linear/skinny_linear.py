"""Products of 1 to 8 rows on a GPU by CUDA C++, `cuda/skinny_linear.cu`, for plain weights and those in tiles.

The operators of Triton's kernels (`small_linear`, `tiled_linear`) launch it for configurations of the kind "skinny",
over the same weights; `wide_linear` has more rows. It has run on no GPU yet, only on a CPU by fibers: a contest at
load, which also checks results, takes it where it is faster; without a measurement Triton's kernels serve.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.launch import Argument, loaded
from ..cuda.nvrtc import unavailable_reason
from ..model.act_mul import ACTIVATIONS
from .code_words import CODES
from .weight_tiles import WeightTiles, columns_of

MOST_ROWS = 8
_TILE_ROWS = 8  # weight rows of the tensor cores' second operand
_WARP = 32
_WIDE_STEP, _NARROW_STEP = 128, 64  # columns of a plain weight that a warp reads at a time
_REGISTERS = 1 << 16  # of a multiprocessor
_IN_FLIGHT, _ROWS_IN_FLIGHT = 32, 16  # registers of a thread that the first loads fill, with one or two rows, and more
_CANDIDATES = 3
_EVEN_BLOCKS = 8  # blocks of a multiprocessor from which they need no placement
_NUMBERS = {
    torch.float16: ("FLOAT16", 2),
    torch.bfloat16: ("BFLOAT16", 2),
    torch.float32: ("FLOAT32", 4),
    torch.uint8: ("EXPONENT", 1),
}
_SECONDS = {"none": "NONE", "least": "LEAST", "zeros": "ZEROS", "six bits": "SIX_BITS", "parts": "PARTS"}


class SkinnyConfig(NamedTuple):
    """Launch configuration of a product."""

    warps: int  # of a block, which share the columns
    tiles: int  # weight rows of a block, by eights
    ahead: int  # steps of columns whose weights are in flight, the first of them before the wait
    pdl: bool = False  # whether it starts before the previous kernel ends

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _WARP * self.warps


def unsupported_reason(x: Tensor, weight: Tensor | WeightTiles, most_rows: int = MOST_ROWS) -> str | None:
    """Return why there is no launch for these operands; None if there is one."""
    if (reason := unavailable_reason()) is not None:
        return reason
    first = weight.words if isinstance(weight, WeightTiles) else weight
    if x.dtype not in (torch.float16, torch.bfloat16) or (isinstance(weight, Tensor) and weight.dtype != x.dtype):
        return f"x is {x.dtype}; it takes 16-bit floats"
    if x.shape[0] > most_rows:
        return f"x has {x.shape[0]} rows; it takes 1..{most_rows}"
    if x.shape[1] % 8 or (isinstance(weight, Tensor) and x.shape[1] % _NARROW_STEP):
        return f"x has {x.shape[1]} columns; it takes multiples of {_NARROW_STEP}, or 8 for a quantized weight"
    if x.stride(0) % 8 or x.data_ptr() % 16 or first.data_ptr() % 16:
        return "rows are not at multiples of 16 bytes"
    return None


def step_of(weight: Tensor | WeightTiles) -> int:
    """Return the columns that a warp reads at a time."""
    if isinstance(weight, WeightTiles):
        return weight.step
    return _WIDE_STEP if weight.shape[1] % _WIDE_STEP == 0 else _NARROW_STEP


def columns(weight: Tensor | WeightTiles) -> int:
    """Return the columns of a weight, with padding."""
    return columns_of(weight) if isinstance(weight, WeightTiles) else weight.shape[1]


def registers_of_step(weight: Tensor | WeightTiles) -> int:
    """Return the registers of a thread that a step of eight weight rows takes: a row's words, and two rows' numbers."""
    step = step_of(weight)
    if isinstance(weight, Tensor):
        return step // 8
    code = CODES[weight.code]
    words = step // code.per_word // 8 + (step // code.spans_of_high // 8 if code.spans_of_high else 0)
    numbers = [part for part in (weight.scales, weight.seconds) if part is not None and weight.group]
    return words + 2 * sum(-(-part.shape[2] * part.element_size() // 4) for part in numbers)


def skinny_configs(weight: Tensor | WeightTiles, rows: int, pdl: bool) -> list[SkinnyConfig]:
    """Return the configurations that may be fastest, the likeliest first.

    That has all weights in flight before the wait, if registers suffice. More warps of a block share a row's columns;
    more tiles of rows share the activations.
    """
    own, steps = registers_of_step(weight), -(-columns(weight) // step_of(weight))
    in_flight = _IN_FLIGHT if rows <= 2 else _ROWS_IN_FLIGHT
    ranked: dict[SkinnyConfig, tuple[bool, int, int]] = {}
    for tiles in (1, 2):
        for warps in (4, 8, 16) if rows <= 2 and isinstance(weight, Tensor) else (4, 8):
            part = -(-steps // warps)
            ahead = min(part, max(in_flight // (own * tiles), 1))
            if warps < 2 * steps:
                ranked[SkinnyConfig(warps, tiles, ahead, pdl)] = (ahead < part, tiles, warps)
    return sorted(ranked, key=ranked.__getitem__)[:_CANDIDATES]


def _programs(weight: Tensor | WeightTiles, rows: int, config: SkinnyConfig) -> int:
    """Return how many blocks of a multiprocessor the compiler leaves registers for, so that it spills none."""
    has_all = config.ahead * config.warps * step_of(weight) >= columns(weight)
    if isinstance(weight, WeightTiles):
        has_totals = weight.layout.has_totals
        if (weight.group > 0 and rows > 2) or (has_totals and not has_all):
            registers = 200
        elif rows > 2 or has_totals or (weight.group > 0 and not has_all):
            registers = 160
        else:
            registers = 128 if weight.group else 80 if has_all else 96
    else:
        registers = 128 if rows > 2 else 64 if has_all else 96
    return max(_REGISTERS // (registers * config.threads), 1)


class _Sizes(NamedTuple):
    """Sizes of a launch, as the kernel derives them."""

    most_rows: int  # 1, 2, 4 or 8
    outputs: int  # columns of the result of a block
    shared_bytes: int


def _sizes(rows: int, weight: Tensor | WeightTiles, config: SkinnyConfig, *, is_normed: bool, is_gated: bool) -> _Sizes:
    most_rows, step = 1 << (rows - 1).bit_length(), step_of(weight)
    part = -(-columns(weight) // step // config.warps)
    longest = 256 if most_rows >= 4 else 512 if is_normed or most_rows == 2 else 1024  # columns of x at once
    narrow = isinstance(weight, WeightTiles) and weight.words.shape[2] == 16
    stride = min(longest // step, part) * step + 8 * (2 if narrow else 4)
    block_rows = _TILE_ROWS * config.tiles
    values = most_rows * (block_rows + 1)
    shared_bytes = config.warps * (2 * most_rows * stride + 4 * values)
    return _Sizes(most_rows, block_rows // 2 if is_gated else block_rows, shared_bytes)


def macros(
    out: Tensor, x: Tensor, weight: Tensor | WeightTiles, config: SkinnyConfig, *, is_normed: bool, epilogue: str
) -> dict[str, int | str]:
    """Return what a launch's code is compiled for."""
    is_gated = epilogue in ACTIVATIONS
    most_rows = _sizes(x.shape[0], weight, config, is_normed=is_normed, is_gated=is_gated).most_rows
    return {
        "SET_WARPS": config.warps,
        "SET_TILES": config.tiles,
        "SET_AHEAD": config.ahead,
        "SET_PROGRAMS": _programs(weight, most_rows, config),
        "SET_ROWS": most_rows,
    } | weight_macros(out, x, weight, step_of(weight), is_normed=is_normed, epilogue=epilogue)


def weight_macros(
    out: Tensor, x: Tensor, weight: Tensor | WeightTiles, step: int, *, is_normed: bool, epilogue: str
) -> dict[str, int | str]:
    """Return the constants of `product.cuh`; `step`: columns of a plain weight that are read at a time."""
    constants: dict[str, int | str] = {
        "SET_COLUMNS": columns(weight),
        "SET_DEPTH": x.shape[1],
        "SET_WIDTH": out.shape[1],
        "SET_IS_BFLOAT": int(x.dtype == torch.bfloat16),
        "SET_IS_FLOAT_OUT": int(out.dtype == torch.float32),
        "SET_IS_NORMED": int(is_normed),
        "SET_EPILOGUE": epilogue.upper(),
    }
    if isinstance(weight, Tensor):
        return constants | {"SET_STEP": step}
    tiled = (weight.code.upper(), weight.words.shape[2], weight.group, weight.step)
    kinds = (_NUMBERS[weight.scales.dtype][0], _SECONDS[weight.second_kind])
    return constants | {"SET_TILED": ",".join(map(str, (*tiled, *kinds)))}


def weight_tensors(weight: Tensor | WeightTiles) -> tuple[Tensor | None, ...]:
    """Return the tensors of a weight in the order of a launch's arguments: words, high, scales and seconds."""
    return (weight, None, None, None) if isinstance(weight, Tensor) else tuple(weight[:4])


def alignment_reason(weight: Tensor | WeightTiles) -> str | None:
    """Return why a weight's tensors cannot be read 16 bytes at a time; None if they can."""
    if any(part is not None and part.data_ptr() % 16 for part in weight_tensors(weight)):
        return "the weight is not at multiples of 16 bytes"
    return None


def grid_and_shared_bytes(
    out: Tensor, x: Tensor, weight: Tensor | WeightTiles, config: SkinnyConfig, *, is_normed: bool, epilogue: str
) -> tuple[int, int]:
    """Return the number of blocks, and the shared memory that each uses."""
    sizes = _sizes(x.shape[0], weight, config, is_normed=is_normed, is_gated=epilogue in ACTIVATIONS)
    return -(-out.shape[1] // sizes.outputs), sizes.shared_bytes


def even_bytes(blocks: int, shared_bytes: int, units: int, shared_of_unit: int) -> int:
    """Return the shared memory that a block asks for so that blocks come to lie evenly on multiprocessors.

    A multiprocessor's share of few blocks asks for half of its memory: beside the same of the kernel before there is
    room for one share, and not for two.
    """
    share = -(-blocks // units)
    reserved = 1 << 10  # of a block, for the system
    even = shared_of_unit // 2 // share - reserved
    return max(shared_bytes, even // 128 * 128) if share < _EVEN_BLOCKS else shared_bytes


class ProductArguments(NamedTuple):
    """Arguments of a launch beside its result, activations and weight; see `small_linear`."""

    bias: Tensor | None
    gain: Tensor | None
    eps: float
    epilogue: str
    scale: float

    def checked(self, reason: str | None) -> None:
        """Raise a ValueError with the reason, if there is one, why the kernel does not take the operands."""
        if self.gain is not None and self.gain.data_ptr() % 16:
            reason = reason or "gains are not at a multiple of 16 bytes"
        if reason is not None:
            raise ValueError(f"config.kind is 'skinny': {reason}")

    def in_order(self, out: Tensor, x: Tensor, weight: Tensor | WeightTiles) -> tuple[Argument, ...]:
        """Return all arguments in the kernels' order."""
        rows = (x.shape[0], x.stride(0), out.stride(0))
        return (out, x, *weight_tensors(weight), self.bias, self.gain, *rows, self.eps, self.scale)


def launch_skinny_linear(
    out: Tensor, x: Tensor, weight: Tensor | WeightTiles, given: ProductArguments, config: SkinnyConfig
) -> None:
    """Launch the kernel.

    Raises:
        ValueError: it does not take these operands.
    """
    given.checked(unsupported_reason(x, weight))
    epilogue, gain = given.epilogue, given.gain
    forms = {"is_normed": gain is not None, "epilogue": epilogue}
    defines = macros(out, x, weight, config, **forms)  # type: ignore[arg-type]
    blocks, shared_bytes = grid_and_shared_bytes(out, x, weight, config, **forms)  # type: ignore[arg-type]
    properties = torch.cuda.get_device_properties(x.device)
    shared_of_unit = properties.shared_memory_per_multiprocessor
    kernel = loaded("skinny_linear.cu", "skinny_linear", tuple(defines.items()), x.get_device())
    kernel.launch(
        (blocks,),
        config.threads,
        given.in_order(out, x, weight),
        shared_bytes=even_bytes(blocks, shared_bytes, properties.multi_processor_count, shared_of_unit),
        starts_early=config.pdl,
    )
