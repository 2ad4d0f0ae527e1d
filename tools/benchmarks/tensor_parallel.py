"""A decode step of several ranks of one thread, compared with one rank with as many threads, on a CPU.

Both engines run in processes of their own, alternately. The run is added to the file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from graphdecode import Engine, EngineConfig, Request, SamplingParams
from graphdecode.engine.loading import load_engine
from harness import (
    Dtype,
    JsonProcess,
    Model,
    Out,
    Rounds,
    Sizes,
    alternated,
    command_of,
    medians,
    numbers,
    read,
    record,
    write,
)

_STEPS = 40  # of a turn
_WARM_STEPS = 4


def step_ms(engine: Engine, rows: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=_WARM_STEPS + _STEPS + 1, ignore_eos=True)
    first, *_ = [engine.add(Request([5 + row, 6, 7, 8], params)) for row in range(rows)]
    tokens, times = 0, {}
    while engine.has_work:
        for event in engine.step():
            if event.request_id == first:
                tokens += len(event.token_ids)
                times[tokens] = time.perf_counter()
    return 1000 * (times[_WARM_STEPS + _STEPS] - times[_WARM_STEPS]) / _STEPS


def serve(model: str, ranks: int, sizes: list[int], **settings: Any) -> None:
    """Print the bytes of the weights, then answer each number of rows on standard input with the time of a step."""
    config = EngineConfig.of(
        None,
        tensor_parallel_size=ranks,
        max_batch_size=max(sizes),
        batch_sizes=sizes,
        max_sequence_length=128,
        prefix_cache=False,
        **settings,
    )
    engine = load_engine(model, config)
    print(sum(held.nbytes for held in engine.model.constants), flush=True)
    for line in sys.stdin:
        print(step_ms(engine, json.loads(line)), flush=True)
    engine.close()


def main(
    model: Model,
    dtype: Dtype = "float32",
    quantize: Annotated[str | None, typer.Option(help="As for LLM.")] = None,
    ranks: Annotated[int, typer.Option(help="That share the threads.", min=2)] = 2,
    rows: Sizes = "1,8",
    rounds: Rounds = 5,
    out: Out = None,
    of_ranks: Annotated[int, typer.Option("--serve", hidden=True)] = 0,
) -> None:
    sizes = numbers(rows, "--rows")
    if of_ranks:
        serve(model, of_ranks, sizes, dtype=dtype, quantize=quantize)
        return
    command = command_of("bench", "tensor-parallel", *sys.argv[1:], "--serve")
    engines = {name: JsonProcess([*command, str(count)]) for name, count in (("one", 1), ("ranks", ranks))}
    nbytes = {name: int(engine.read()) for name, engine in engines.items()}
    run: dict[str, Any] = {"model": Path(model).stem, "dtype": dtype, "quantize": quantize, "ranks": ranks}
    run |= {"threads": torch.get_num_threads(), "rank_bytes": nbytes["ranks"], "model_bytes": nbytes["one"]}
    run |= {"share_of_bytes": round(nbytes["ranks"] / nbytes["one"], 4), "rows": []}
    for size in sizes:
        turns = alternated({name: partial(engine.ask, size) for name, engine in engines.items()}, rounds)
        of_step, pairs = medians(turns), list(zip(turns["one"], turns["ranks"], strict=True))
        row = {
            "batch_size": size,
            "one_rank_ms": round(of_step["one"], 3),
            "ranks_ms": round(of_step["ranks"], 3),
            "times_one_rank": round(statistics.median(several / one for one, several in pairs), 3),
            "turns_ms": [[round(each, 3) for each in pair] for pair in pairs],
        }
        run["rows"].append(row)
        print(row, flush=True)
    print({key: value for key, value in run.items() if key != "rows"})
    for engine in engines.values():
        engine.close()
    found = read(out, schema=1, runs=[])
    write(out, found | record(runs=[*found["runs"], run]))
