"""Models a step's time on a GPU from its launches, the code of each, and the bytes that it must move.

A step takes the time of its reads, plus for each launch the gap before it and the latency inside it, during which
memory idles, minus the reads that kernels with an early start have requested by then. The part above the floor is
accurate to about 20%: the model is for comparing changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from step_code.figures import Figures
from step_code.launches import Gpu, Launch, RecordedStep, spread

_WARP = 32
_WARPS = 64  # on a multiprocessor at a time
_PROGRAMS = 32
_REGISTERS = 65536
_SHARED = 227 * 1024
_SHARED_OF_SYSTEM = 1024  # bytes per program
_WARPS_BY_DEFAULT = 4


@dataclass(frozen=True)
class Costs:
    """Costs of a launch and of a byte on an H200.

    Attributes:
        read_bandwidth: bytes per second.
        clock_hz: of a multiprocessor.
        gap_us: between a kernel of a graph and the next one that depends on it.
        early_gap_us: likewise, if the next one starts early (CUDA's programmatic dependent launch).
        library_us: latency inside a kernel of torch or cuBLAS, whose code is not analysed.
        stream_loss: share of the weights' time that is lost at the beginning and the end of each stream.
        cache_loss: share of the time of keys and values that is lost because they are in pages.
        intake: bytes per clock from the L2 cache to one multiprocessor; its port is 64 wide.
        cache_bandwidth: bytes per second from the L2 cache to all multiprocessors.
        flight_bytes: outstanding reads that saturate memory: 0.8 us of its bandwidth.
        tile_cycles: between two tiles of keys, since scores depend on the previous ones.
    """

    read_bandwidth: float = 4.2e12
    clock_hz: float = 1.755e9
    gap_us: float = 1.3
    early_gap_us: float = 0.85
    library_us: float = 2.5
    stream_loss: float = 0.03
    cache_loss: float = 0.09
    intake: float = 48.0
    cache_bandwidth: float = 5.5e12
    flight_bytes: float = 3.4e6
    tile_cycles: float = 600.0


@dataclass(frozen=True)
class StepCost:
    """The modelled time of a step.

    Attributes:
        launches: kernels and copies.
        made_bytes: of all tensors that the step allocates.
        floor_us: the bytes that it must move, over the read bandwidth.
        gaps_us: between its launches.
        latency_us: inside them, and the time of products beyond their reads.
        hidden_us: the part of both during which memory is busy.
        step_us: the total.
    """

    launches: int
    made_bytes: int
    floor_us: float
    gaps_us: float
    latency_us: float
    hidden_us: float
    step_us: float

    @property
    def times_floor(self) -> float:
        """The step's time over its floor."""
        return self.step_us / self.floor_us


def step_cost(
    step: RecordedStep,
    rows: int,
    context: int,
    figures: Callable[[Launch], Figures | None],
    gpu: Gpu = Gpu(),  # noqa: B008 (immutable)
    costs: Costs = Costs(),
) -> StepCost:
    """Return the modelled time of a step.

    Args:
        context: tokens of each row.
        figures: returns those of a launch; None for a library's kernel.
    """
    weights_us = 1e6 * (step.model.read_bytes(rows) + step.adapter_bytes) / costs.read_bandwidth
    moved = rows * ((context + 1) * step.token_bytes + 2 * step.state_bytes)  # states are read and written
    cache_us = 1e6 * moved / costs.read_bandwidth
    gaps_us = latency_us = hidden_us = loops_us = 0.0
    before: Figures | None = None
    for launch in step.launches:
        own = figures(launch)
        begins_early = launch.starts_early and before is not None and before.triggers
        gap, latency, hidden = _idle_us(launch, own, begins_early, gpu, costs)
        gaps_us, hidden_us = gaps_us + gap, hidden_us + hidden
        latency_us += latency + _behind_memory_us(launch, own, gpu, costs)
        loops_us += _loop_us(launch, context, costs)
        before = own
    latency_us += max(loops_us - cache_us, 0.0)  # the loop overlaps with the reads of keys
    step_us = weights_us * (1 + costs.stream_loss) + cache_us * (1 + costs.cache_loss)
    step_us += gaps_us + latency_us - hidden_us
    return StepCost(len(step.launches), step.made_bytes, weights_us + cache_us, gaps_us, latency_us, hidden_us, step_us)


def product_us(launch: Launch, figures: Figures, gpu: Gpu, costs: Costs = Costs()) -> float:
    """Return the modelled time of a product after a kernel that lets it start early."""
    gap, latency, hidden = _idle_us(launch, figures, launch.starts_early, gpu, costs)
    weight_us = 1e6 * launch.arguments["weight"].nbytes / costs.read_bandwidth
    return weight_us + _behind_memory_us(launch, figures, gpu, costs) + gap + latency - hidden


def _idle_us(
    launch: Launch, own: Figures | None, begins_early: bool, gpu: Gpu, costs: Costs
) -> tuple[float, float, float]:
    """Return the gap before a launch, its latency, and the part of both during which memory is busy."""
    gap = costs.early_gap_us if begins_early else costs.gap_us
    if own is None:
        return gap, costs.library_us, 0.0
    latency = 1e6 * own.latency_cycles / costs.clock_hz
    asked_us = 1e6 * early_bytes(launch, own, gpu) / costs.read_bandwidth if begins_early else 0.0
    return gap, latency, min(gap + latency, asked_us)


def _behind_memory_us(launch: Launch, own: Figures | None, gpu: Gpu, costs: Costs) -> float:
    """Return a product's time beyond the time to read its weight.

    Limits are a multiprocessor's port, for all that its programs read; the L2 cache, for all multiprocessors; and
    memory, which is slower with few outstanding reads, except for those requested before the wait. With split columns
    each program writes its sums, and the last one of a block reads them all.
    """
    given = _by_field(launch)
    if "splits" not in given or own is None:
        return 0.0
    rows = min(given.get("rows", given["BLOCK_M"]), given["BLOCK_M"])
    itemsize, nbytes, programs = given["weight"].element_size(), given["weight"].nbytes, math.prod(launch.grid)
    of_column = (given["BLOCK_N"] + rows) * itemsize + (0 if given["gain"] is None else given["gain"].element_size())
    taken = of_column * given["part"]
    intake, memory_s = costs.intake * costs.clock_hz, nbytes / costs.read_bandwidth
    warps = launch.options.get("num_warps", _WARPS_BY_DEFAULT)
    resident = min(programs, gpu.processors * programs_at_once(own, warps))
    stages = max(launch.options.get("num_stages", given["STAGES"]) - 1, 1)
    in_flight = resident * stages * given["BLOCK_N"] * given["BLOCK_K"] * itemsize
    ahead = min(early_bytes(launch, own, gpu) / nbytes, 1.0) if launch.starts_early else 0.0
    starved_s = memory_s * (ahead + (1 - ahead) * max(costs.flight_bytes / in_flight, 1.0))
    of_port = -(-programs // gpu.processors) * taken / intake
    of_cache, sums_s = programs * taken, 0.0
    if given["SPLIT"]:
        sums = given["BLOCK_N"] * rows * given["partial"].element_size()
        of_cache, sums_s = of_cache + 2 * programs * sums, (given["splits"] + 1) * sums / intake
    return 1e6 * (max(of_port, of_cache / costs.cache_bandwidth, starved_s) - memory_s + sums_s)


def _loop_us(launch: Launch, context: int, costs: Costs) -> float:
    """Return the time of a program's tiles of keys after the first; a row's tiles are divided evenly."""
    given = _by_field(launch)
    if "plan" not in given or "BLOCK_N" not in given:
        return 0.0
    rows, kv_heads = given["rows"], given["kv_heads"]
    splits = max(launch.grid[0] // kv_heads // rows, 1)
    tiles = math.ceil(context / max(given["BLOCK_N"], 1))
    return (math.ceil(tiles / splits) - 1) * costs.tile_cycles / costs.clock_hz * 1e6


def early_bytes(launch: Launch, figures: Figures, gpu: Gpu) -> float:
    """Return the bytes that all resident programs have requested before they wait."""
    if figures.early_loop:
        return float("inf")  # all of it
    warps = launch.options.get("num_warps", _WARPS_BY_DEFAULT)
    at_once = min(math.prod(launch.grid), gpu.processors * programs_at_once(figures, warps))
    return figures.early_bytes * warps * min(at_once, _by_field(launch).get("prefetchers", at_once))


def _by_field(launch: Launch) -> dict[str, Any]:
    """Return a product's arguments, those of records by their field names."""
    return {name.rpartition(".")[2]: value for name, value in spread(launch.arguments).items()}


def programs_at_once(figures: Figures, warps: int) -> int:
    """Return the resident programs of one multiprocessor."""
    registers = -(-figures.registers // 8) * 8 * _WARP * warps
    return max(
        min(_PROGRAMS, _WARPS // warps, _REGISTERS // registers, _SHARED // (figures.shared + _SHARED_OF_SYSTEM)),
        1,
    )
