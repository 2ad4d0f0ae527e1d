"""How the product of a few rows may be dealt out on a GPU."""

from dataclasses import dataclass

TILE_ROWS = 16  # rows of one tensor-core tile
GEMV_ROWS = 4  # rows that the CUDA-core kernel takes at most
# (block_n, block_k, num_warps, num_stages) by the bytes of a weight: they fit all GPUs from sm_80 on, and never spill
DOT_TILES = {
    2: ((16, 256, 2, 4), (32, 256, 4, 3), (64, 128, 4, 4), (64, 256, 8, 3)),
    4: ((16, 64, 2, 4), (32, 64, 4, 3), (64, 64, 8, 3)),
}
GEMV_TILES = {
    2: ((4, 512, 4, 3), (8, 256, 4, 3), (2, 1024, 4, 3)),
    4: ((4, 512, 4, 3),),
}
_FIXED_TILE = 1  # of `DOT_TILES`
_FIXED_PROGRAMS = 256  # two for each multiprocessor of a large GPU
_WAVES = (1, 2, 4)  # programs for each multiprocessor that a split aims at


@dataclass(frozen=True)
class SmallLinearConfig:
    """How the product of one shape is dealt out.

    Attributes:
        kind: "dot" (tensor cores, any number of rows in tiles of 16) or "gemv" (CUDA cores, up to 4 rows).
        block_n: rows of the weight that one program takes.
        block_k: columns of the weight that are read at a time.
        splits: parts that the columns are dealt in.
        num_warps: of one program.
        num_stages: tiles of the weight that are on the way at a time.
        pdl: whether it begins while the kernel before it still runs; sm_90 and later.
    """

    kind: str
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    pdl: bool = False

    def __str__(self) -> str:
        tail = ", early start" if self.pdl else ""
        return (
            f"{self.kind} {self.block_n}x{self.block_k}, {self.splits} splits, {self.num_warps} warps, "
            f"{self.num_stages} stages{tail}"
        )

    def counters(self, rows: int, out_features: int) -> int:
        """How many counters a product uses: one for each tile of rows and block of the weight, none without a split."""
        return 0 if self.splits == 1 else -(-rows // TILE_ROWS) * -(-out_features // self.block_n)


def _split(in_features: int, block_k: int, blocks: int, programs: int) -> int:
    most = max(-(-in_features // block_k) // 2, 1)  # each part two tiles at least, for loads to overlap
    return min(max(round(programs / blocks), 1), most)


def candidates(out_features: int, in_features: int, itemsize: int, rows: int, units: int) -> list[SmallLinearConfig]:
    """Return the configurations that may be fastest.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        itemsize: bytes of a weight.
        rows: of the activations.
        units: multiprocessors of the GPU.
    """
    tiles = [("dot", *tile) for tile in DOT_TILES[itemsize]]
    if rows <= GEMV_ROWS:
        tiles += [("gemv", *tile) for tile in GEMV_TILES[itemsize]]
    found: dict[SmallLinearConfig, None] = {}
    for kind, block_n, block_k, num_warps, num_stages in tiles:
        blocks = -(-out_features // block_n)
        for waves in _WAVES:
            splits = _split(in_features, block_k, blocks, waves * units)
            found[SmallLinearConfig(kind, block_n, block_k, splits, num_warps, num_stages)] = None
    return list(found)


def fixed_config(out_features: int, in_features: int, itemsize: int) -> SmallLinearConfig:
    """Return one configuration for any number of rows, which follows from the shape alone: no GPU, no clock.

    A row's result then has the same bits in any company, on any GPU of the same kind.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        itemsize: bytes of a weight.
    """
    block_n, block_k, num_warps, num_stages = DOT_TILES[itemsize][_FIXED_TILE]
    splits = _split(in_features, block_k, -(-out_features // block_n), _FIXED_PROGRAMS)
    return SmallLinearConfig("dot", block_n, block_k, splits, num_warps, num_stages)
