"""How long a step should take on a GPU, from its launches, the code of each, and the bytes that it must move.

A step is the time to read what it must, and beside that for each launch the gap before it and the latency inside it, in
which memory idles; less what a kernel that begins early has already asked memory for. Good to about 20% of what is
beside the floor; it is there to see changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphdecode.kernels.attention.attention_plan import MIN_SPLIT_TILES
from step_code.figures import Figures
from step_code.launches import Gpu, Launch, RecordedStep, spread

_WARP = 32
_WARPS = 64  # that a multiprocessor holds at a time
_PROGRAMS = 32
_REGISTERS = 65536
_SHARED = 227 * 1024
_SHARED_OF_SYSTEM = 1024  # bytes of each program
_WARPS_BY_DEFAULT = 4


@dataclass(frozen=True)
class Costs:
    """What a launch and a byte cost; of an H200.

    Attributes:
        read_bandwidth: bytes per second.
        clock_hz: of a multiprocessor.
        gap_us: from one kernel of a graph to the next that depends on it.
        early_gap_us: likewise, where the next one began early (CUDA's programmatic dependent launch).
        library_us: latency inside a kernel of torch's or of cuBLAS, whose code is not looked at.
        stream_loss: share of the weights' time that is lost at the begin and the end of each stream.
        cache_loss: share of the time of keys and values that is lost, for they lie in pages.
        intake: bytes per clock that one multiprocessor takes in from the L2 cache; its port is 64 wide.
        cache_bandwidth: bytes per second that the L2 cache gives to all of them.
        flight_bytes: that must be under way for memory to give its bandwidth: 0.8 us of it.
        tile_cycles: from one tile of keys to the next, whose scores wait for those before.
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
    """What a step comes to.

    Attributes:
        launches: kernels and copies.
        made_bytes: of all tensors that the step makes for itself.
        floor_us: the bytes that it must move, over the read bandwidth.
        gaps_us: between its launches.
        latency_us: inside them; and what products take longer than memory, which only keeps up with enough programs.
        hidden_us: of both, in which memory does not idle.
        step_us: all of it.
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
        """The step over its floor."""
        return self.step_us / self.floor_us


def step_cost(
    step: RecordedStep,
    rows: int,
    context: int,
    figures: Callable[[Launch], Figures | None],
    gpu: Gpu = Gpu(),  # noqa: B008 (immutable)
    costs: Costs = Costs(),
) -> StepCost:
    """Return what a step comes to.

    Args:
        step: its launches.
        rows: of it.
        context: tokens of each row.
        figures: of a launch's code; None where it is not ours.
        gpu: how many multiprocessors there are.
        costs: of launches and bytes.
    """
    weights_us = 1e6 * step.model.read_bytes(rows) / costs.read_bandwidth
    cache_us = 1e6 * rows * (context + 1) * step.token_bytes / costs.read_bandwidth
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
    latency_us += max(loops_us - cache_us, 0.0)  # a loop runs while memory gives it keys
    step_us = weights_us * (1 + costs.stream_loss) + cache_us * (1 + costs.cache_loss)
    step_us += gaps_us + latency_us - hidden_us
    return StepCost(len(step.launches), step.made_bytes, weights_us + cache_us, gaps_us, latency_us, hidden_us, step_us)


def product_us(launch: Launch, figures: Figures, gpu: Gpu, costs: Costs = Costs()) -> float:
    """Return how long a product takes behind a kernel that lets it begin early, as a GPU would find by timing it."""
    gap, latency, hidden = _idle_us(launch, figures, launch.starts_early, gpu, costs)
    weight_us = 1e6 * launch.arguments["weight"].nbytes / costs.read_bandwidth
    return weight_us + _behind_memory_us(launch, figures, gpu, costs) + gap + latency - hidden


def _idle_us(
    launch: Launch, own: Figures | None, begins_early: bool, gpu: Gpu, costs: Costs
) -> tuple[float, float, float]:
    """Return the gap before a launch, the latency inside it, and how much of both memory does not idle."""
    gap = costs.early_gap_us if begins_early else costs.gap_us
    if own is None:
        return gap, costs.library_us, 0.0
    latency = 1e6 * own.latency_cycles / costs.clock_hz
    asked_us = 1e6 * early_bytes(launch, own, gpu) / costs.read_bandwidth if begins_early else 0.0
    return gap, latency, min(gap + latency, asked_us)


def _behind_memory_us(launch: Launch, own: Figures | None, gpu: Gpu, costs: Costs) -> float:
    """Return what a product takes longer than its weight's bytes over the bandwidth.

    A multiprocessor takes in what its programs read, the activations and a gain too, no faster than its port lets it,
    and all of them no faster than the L2 cache gives; memory gives less where little is under way, but for what was
    asked for ahead; and where the columns are split, each program writes its sums, and the last one of a block takes in
    those of all.
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
    """Return what the tiles of keys after the first of a program take; those of a row are dealt out evenly."""
    given = _by_field(launch)
    if "plan" not in given or "BLOCK_N" not in given:
        return 0.0
    rows, kv_heads = given["rows"], given["kv_heads"]
    splits = max(launch.grid[0] // kv_heads // rows, 1)
    tiles = math.ceil(context / max(given["BLOCK_N"], 1))
    tiles = max(math.ceil(tiles / splits), min(tiles, MIN_SPLIT_TILES))
    return (tiles - 1) * costs.tile_cycles / costs.clock_hz * 1e6


def early_bytes(launch: Launch, figures: Figures, gpu: Gpu) -> float:
    """Return the bytes that all programs which the chip holds have asked memory for when they wait."""
    if figures.early_loop:
        return float("inf")  # all that there is
    warps = launch.options.get("num_warps", _WARPS_BY_DEFAULT)
    at_once = min(math.prod(launch.grid), gpu.processors * programs_at_once(figures, warps))
    return figures.early_bytes * warps * min(at_once, _by_field(launch).get("asking", at_once))


def _by_field(launch: Launch) -> dict[str, Any]:
    """Return a product's arguments, those of records by the names of their fields."""
    return {name.rpartition(".")[2]: value for name, value in spread(launch.arguments).items()}


def programs_at_once(figures: Figures, warps: int) -> int:
    """Return how many programs one multiprocessor holds."""
    registers = -(-figures.registers // 8) * 8 * _WARP * warps
    return max(
        min(_PROGRAMS, _WARPS // warps, _REGISTERS // registers, _SHARED // (figures.shared + _SHARED_OF_SYSTEM)),
        1,
    )
