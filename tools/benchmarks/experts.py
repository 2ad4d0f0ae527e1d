"""A layer's quantized experts compared with bf16 on a CPU: both products of a step, by number of rows.

Experts have a known model's sizes and random weights, but there are fewer. Products run as in a recorded step, without
Python in between, each step with other experts. Formats alternate.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from graphdecode.graphs.inspect.observer import TorchDispatchMode, schema_of, values_of
from graphdecode.kernels.moe.expert_linear import Routed
from graphdecode.kernels.native.library import joined
from graphdecode.kernels.native.registration import bind
from graphdecode.linear.experts import ExpertForm, ExpertNames
from graphdecode.linear.forms import load_experts
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.quantization.compressed_tensors import GROUP_QUANTIZATIONS, quantized_groups
from graphdecode.linear.quantization.gguf import GgufBlocks, quantized_blocks
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight
from graphdecode.linear.weight_form import FormOptions, Shard, Stored
from graphdecode.profiling.environment import read_bandwidth
from harness import Out, Sizes, alternated, medians, numbers, record, write

MODELS = {  # slots, channels outside and inside
    "qwen3-30b-a3b": (8, 2048, 768),
    "mixtral-8x7b": (2, 4096, 14336),
}
Call = Callable[[], None]
FORMATS = {"bf16": "BF16", "int8": "INT8", "int4": "INT4", "fp8": "FP8", "q8_0": "Q8_0", "q4_k": "Q4_K"}
_ROUNDS = 5
_REPETITIONS = 2  # of a round
_STEPS = 16  # of one row, one behind another; of more rows fewer
_DEVIATION = 0.02


class RandomExperts:
    """A source of experts with random weights in one format, generated on reading."""

    def __init__(self, kind: str, shapes: dict[str, tuple[int, int]]) -> None:
        self._kind = kind
        self.tensors = {name: Stored(shape, kind) for name, shape in shapes.items()}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Write a plain tensor."""
        out.copy_(self._drawn(name))

    def read_quantized(self, name: str, expert: int | None = None) -> QuantizedWeight | None:
        """Return a tensor in groups or blocks."""
        if self._kind.startswith("Q"):
            return GgufBlocks(quantized_blocks(self._drawn(name), self._kind), self._kind)
        scheme = next((each for each in GROUP_QUANTIZATIONS.values() if each.weight_type.name == self._kind), None)
        if scheme is None:
            return None
        return quantized_groups(self._drawn(name), scheme.sized(None, [self.tensors[name].shape[1]]))

    def _drawn(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(hash_of(name))
        return torch.empty(self.tensors[name].shape).normal_(0.0, _DEVIATION, generator=generator).bfloat16()


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % (1 << 31)


def products(kind: str, model: str, experts: int) -> tuple[ExpertForm, ExpertForm]:
    _, hidden, width = MODELS[model]
    shapes = {f"{expert}.{part}": (width, hidden) for expert in range(experts) for part in ("gate", "up")}
    downs = {f"{expert}.down": (hidden, width) for expert in range(experts)}
    quantize = "gguf" if kind.startswith("Q") else None
    options = FormOptions(torch.device("cpu"), torch.bfloat16, LinearTuner(), (1,), quantize=quantize)
    source = RandomExperts(kind, shapes | downs)
    return (
        load_experts(source, ExpertNames(tuple(shapes), experts, True), None, options),
        load_experts(source, ExpertNames(tuple(downs), experts, False), None, options),
    )


def step_of(gate_up: ExpertForm, down: ExpertForm, rows: int, slots: int, seed: int) -> tuple[list[Call], int]:
    """Return both products over some rows, and the number of experts that they read."""
    generator, experts = torch.Generator().manual_seed(seed), gate_up.shape[0]
    ids = torch.rand(rows, experts, generator=generator).topk(slots).indices.flatten()
    order = torch.argsort(ids, stable=True).int()
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(ids, minlength=experts).cumsum(0)
    x = torch.randn(rows, gate_up.shape[2], generator=generator).bfloat16()
    inner, out = (x.new_empty(rows * slots, width) for width in (down.shape[2], down.shape[1]))
    given = (order, offsets)
    calls: list[Call] = [
        partial(gate_up.apply, inner, x, Routed(*given, slots, "silu")),
        partial(down.apply, out, inner, Routed(*given, 1)),
    ]
    return calls, len(ids.unique())


def seconds_of(calls: Sequence[Call]) -> float:
    """Return the shortest time of a call, in seconds, with all calls bound to their tensors and run in a row."""
    with torch.no_grad(), _Binding() as binding:
        for call in calls:
            call()
    bound = joined(binding.calls)
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        for each in bound:
            each()
        times.append(time.perf_counter() - start)
    return min(times) / len(calls)


class _Binding(TorchDispatchMode):
    """Records the operators that run, bound to their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = bind(func, *values_of(schema_of(func), args, kwargs))
        self.calls.append(partial(func, *args, **kwargs) if own is None else own)
        return func(*args, **kwargs)


def measured(model: str, experts: int, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row of the result for each format and number of rows, measured alternately."""
    slots = MODELS[model][0]
    forms = {name: products(kind, model, experts) for name, kind in FORMATS.items()}
    for rows in sizes:
        seeds = range(max(1, _STEPS // rows))
        steps = {name: [step_of(*pair, rows, slots, seed) for seed in seeds] for name, pair in forms.items()}
        taken = statistics.mean(count for _, count in steps["bf16"])
        calls = {name: [call for each, _ in own for call in each] for name, own in steps.items()}
        timed = {name: partial(seconds_of, each) for name, each in calls.items()}
        rounds = {
            name: [2e6 * each for each in found] for name, found in alternated(timed, _ROUNDS).items()
        }  # two a step
        of_step = medians(rounds)
        plain = of_step["bf16"]
        for name, (gate_up, down) in forms.items():
            us = of_step[name]
            path, nbytes = gate_up.choice(rows).path, (gate_up.nbytes + down.nbytes) * taken / experts
            yield {
                "format": name, "path": path, "rows": rows, "experts_read": taken, "read_bytes": round(nbytes),
                "us": round(us, 1), "times_bf16": round(us / plain, 3), "gb_per_second": round(nbytes / us / 1e3, 1),
                "rounds_us": [round(each, 1) for each in rounds[name]],
            }  # fmt: skip


def main(
    out: Out = None,
    model: Annotated[str, typer.Option(help=f"Whose sizes: {', '.join(MODELS)}.")] = "qwen3-30b-a3b",
    experts: Annotated[int, typer.Option(help="How many there are.")] = 32,
    rows: Sizes = "1,8,64,512",
) -> None:
    report = record(schema=1, model=model, experts=experts, slots=MODELS[model][0], rows=[])
    report["read_bandwidth"] = read_bandwidth("cpu")
    with torch.no_grad():
        for row in measured(model, experts, numbers(rows, "--rows")):
            print(json.dumps({name: value for name, value in row.items() if name != "rounds_us"}), flush=True)
            report["rows"].append(row)
    write(out, report)
