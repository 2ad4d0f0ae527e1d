"""How the product of a few rows may be dealt out on a GPU."""

from typing import NamedTuple

from .weight_tiles import TileLayout

MOST_ROWS = 64  # of which a small product may be faster than cuBLAS's
TILE_ROWS = 16  # of the activations in the smallest tensor-core tile
GEMV_ROWS = 2  # rows that the CUDA-core kernel takes at most: with more, its arithmetic takes longer than the reading
# (block_n, block_k, num_warps, num_stages) by the bytes of a weight, and by the rows of a tile of activations: they fit
# all GPUs from sm_80 on, and never spill. The tensor cores of sm_90 take 64 rows of the weight at a time
DOT_TILES: dict[int, dict[int, tuple[tuple[int, int, int, int], ...]]] = {
    2: {
        16: ((64, 64, 4, 6), (128, 64, 4, 4)),
        32: ((64, 64, 4, 5), (128, 64, 4, 4)),
        64: ((128, 64, 8, 3), (64, 64, 8, 4)),
    },
    4: {16: ((32, 32, 4, 4), (64, 32, 8, 3))},
}
GEMV_TILES = {
    2: ((8, 512, 4, 3), (4, 1024, 4, 3)),
    4: ((4, 512, 8, 3),),
}
# (block_n, num_warps) for weights of few bits by the rows of a tile of activations, without a norm before the product
# and with one, which is made anew in each block; the columns follow from the weight's kind
TILED_TILES = {8: ((32, 2), (128, 8)), 16: ((64, 4), (128, 8)), 32: ((128, 8),) * 2, 64: ((128, 8),) * 2}
_ROWS_WHERE_TIGHT = 32  # of a tile where sums of activations, or scales of many groups, take registers, too
_SMALL_GROUP = 32
_SUM_COLUMNS = 512  # of the memory that tensor cores of compute capability 10 write sums into: 128 lanes wide
TILED_STAGES = 3  # of steps that are on their way at a time; two where that many registers are not there
_FIXED_PROGRAMS = 256  # two for each multiprocessor of a large GPU
_WARPS_AT_WORK = 12  # of a multiprocessor, that a split of a weight of few bits aims at
_WAVES = (1, 2, 4)  # programs for each multiprocessor that a split aims at


class SmallLinearConfig(NamedTuple):
    """How the product of one shape is dealt out.

    Attributes:
        kind: "dot" (tensor cores, any number of rows in tiles) or "gemv" (CUDA cores, one or two rows).
        block_n: rows of the weight that one program takes.
        block_k: columns of the weight that are read at a time.
        splits: parts that the columns are dealt in.
        num_warps: of one program.
        num_stages: tiles of the weight that are on the way at a time.
        pdl: whether it begins while the kernel before it still runs; sm_90 and later.
        block_m: rows of the activations in one tile of the tensor cores.
    """

    kind: str
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    pdl: bool = False
    block_m: int = TILE_ROWS

    def __str__(self) -> str:
        rows = f" of {self.block_m} rows" if self.block_m > TILE_ROWS else ""
        tail = ", early start" if self.pdl else ""
        return (
            f"{self.kind} {self.block_n}x{self.block_k}{rows}, {self.splits} splits, {self.num_warps} warps, "
            f"{self.num_stages} stages{tail}"
        )

    def counters(self, rows: int, out_features: int) -> int:
        """How many counters a product uses: one for each tile of rows and block of the weight, none without a split."""
        return 0 if self.splits == 1 else -(-rows // self.block_m) * -(-out_features // self.block_n)


def _split(in_features: int, block_k: int, blocks: int, programs: int) -> int:
    return min(max(round(programs / blocks), 1), -(-in_features // block_k))


def candidates(out_features: int, in_features: int, itemsize: int, rows: int, units: int) -> list[SmallLinearConfig]:
    """Return the configurations that may be fastest; none for more rows than the tiles of such weights have.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        itemsize: bytes of a weight.
        rows: of the activations.
        units: multiprocessors of the GPU.
    """
    of_rows = DOT_TILES[itemsize]
    if rows > max(of_rows):
        return []
    # a narrower tile than the rows need reads the weight more than once, from the L2 cache, and makes more programs
    widest = next(most for most in of_rows if rows <= most)
    tiles = [("dot", most, *tile) for most in sorted(of_rows, reverse=True) if most <= widest for tile in of_rows[most]]
    if rows <= GEMV_ROWS:
        tiles += [("gemv", TILE_ROWS, *tile) for tile in GEMV_TILES[itemsize]]
    found: dict[SmallLinearConfig, None] = {}
    for kind, block_m, block_n, block_k, num_warps, num_stages in tiles:
        blocks = -(-out_features // block_n) * -(-rows // block_m)
        for splits in (1, *(_split(in_features, block_k, blocks, waves * units) for waves in _WAVES)):
            found[SmallLinearConfig(kind, block_n, block_k, splits, num_warps, num_stages, block_m=block_m)] = None
    return list(found)


def fixed_config(out_features: int, in_features: int, itemsize: int, pdl: bool = False) -> SmallLinearConfig:
    """Return one configuration for any number of rows, which follows from the shape alone: no GPU, no clock.

    A row's result then has the same bits in any company, on any GPU of the same kind.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        itemsize: bytes of a weight.
        pdl: whether the GPU lets kernels begin early.
    """
    block_n, block_k, num_warps, num_stages = DOT_TILES[itemsize][TILE_ROWS][0]
    splits = _split(in_features, block_k, -(-out_features // block_n), _FIXED_PROGRAMS)
    return SmallLinearConfig("dot", block_n, block_k, splits, num_warps, num_stages, pdl)


def tiled_config(
    rows: int | None,
    out_features: int,
    columns: int,
    layout: TileLayout,
    units: int,
    pdl: bool = False,
    is_normed: bool = False,
    major: int = 9,
) -> SmallLinearConfig:
    """Return how the product with a weight of few bits is dealt out; see `tiled_linear`.

    Args:
        rows: of the activations; None: one configuration for any number of rows, on any GPU of the same kind.
        out_features: rows of the weight.
        columns: of it, in whole steps.
        layout: of the weight.
        units: multiprocessors of the GPU.
        pdl: whether the GPU lets kernels begin early.
        is_normed: the product is that of a norm.
        major: of the GPU's compute capability. The tensor cores of 10 write into a memory of their own, where the sums
            of all groups of a step stand at a time; a kernel that asks for more than there is cannot be launched. For
            12 the compiler spills where groups are small and rows many.
    """
    is_tight = layout.has_totals or (major == 12 and layout.group == _SMALL_GROUP)
    most_rows = _ROWS_WHERE_TIGHT if is_tight else max(TILED_TILES)
    if major == 10:
        groups = layout.step // layout.group if layout.group else 1
        columns_of_row = groups * (1 + layout.has_totals) + 2  # and those of the step before, scaled and not
        most_rows = max(most for most in TILED_TILES if most <= min(most_rows, _SUM_COLUMNS // columns_of_row))
    block_m = TILE_ROWS if rows is None else next((most for most in TILED_TILES if rows <= most), most_rows)
    block_m = min(block_m, most_rows)
    block_n, num_warps = TILED_TILES[block_m][is_normed]
    blocks = -(-out_features // block_n) * (1 if rows is None else -(-rows // block_m))
    programs = _FIXED_PROGRAMS if rows is None else units * _WARPS_AT_WORK // num_warps
    splits = _split(columns, layout.step, blocks, programs)
    has_five_parts = layout.has_totals and layout.code == "u5"  # words, high bits, a scale, a least value, a sum
    num_stages = TILED_STAGES - (block_m == 64 or (block_m == 8 and has_five_parts))
    return SmallLinearConfig("dot", block_n, layout.step, splits, num_warps, num_stages, pdl, block_m)
