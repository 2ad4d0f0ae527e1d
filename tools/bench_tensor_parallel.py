"""Measure a decode step of several ranks of one thread beside that of one rank with as many threads, on a CPU.

    python tools/bench_tensor_parallel.py --model FOLDER [--dtype float32] [--quantize gguf] [--ranks 2] [--rows 1,8]
                                          [--rounds 5] [--out FILE]

Both engines are there at the same time, each in processes of its own, and take turns. The weights' bytes are those that
each rank holds, all of them; with --out the run is added to a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from graphdecode import Engine, EngineConfig, Request, SamplingParams
from graphdecode.engine.loading import load_engine
from graphdecode.profiling.environment import describe_environment

_SCHEMA = 1
_STEPS = 40  # of a turn
_WARM_STEPS = 4


def engine_of(given: argparse.Namespace, ranks: int) -> Engine:
    """Load the model over some ranks, which share the threads."""
    rows = [int(each) for each in given.rows.split(",")]
    settings = EngineConfig.of(
        None, tensor_parallel_size=ranks, dtype=given.dtype, quantize=given.quantize, max_batch_size=max(rows),
        batch_sizes=rows, max_sequence_length=128, prefix_cache=False,
    )  # fmt: skip
    return load_engine(given.model, settings)


def step_ms(engine: Engine, rows: int) -> float:
    """Return the mean time of a step of so many rows."""
    params = SamplingParams(temperature=0.0, max_tokens=_WARM_STEPS + _STEPS + 1, ignore_eos=True)
    first, *_ = [engine.add(Request([5 + row, 6, 7, 8], params)) for row in range(rows)]
    tokens, times = 0, {}
    while engine.has_work:
        for event in engine.step():
            if event.request_id == first:
                tokens += len(event.token_ids)
                times[tokens] = time.perf_counter()
    return 1000 * (times[_WARM_STEPS + _STEPS] - times[_WARM_STEPS]) / _STEPS


def serve(given: argparse.Namespace, ranks: int) -> None:
    """Answer each number of rows on standard input with the time of a step, after a first line with the bytes."""
    engine = engine_of(given, ranks)
    print(sum(held.nbytes for held in engine.model.constants), flush=True)
    for line in sys.stdin:
        print(step_ms(engine, int(line)), flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given, given.serve)
        return
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--serve"]
    engines = {
        ranks: subprocess.Popen([*command, str(ranks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for ranks in (1, given.ranks)
    }

    def heard(ranks: int, said: str = "") -> float:
        process = engines[ranks]
        assert process.stdin is not None
        assert process.stdout is not None
        if said:
            print(said, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    nbytes = {ranks: int(heard(ranks)) for ranks in engines}
    run: dict[str, Any] = {"model": Path(given.model).stem, "dtype": given.dtype, "quantize": given.quantize}
    run |= {"ranks": given.ranks, "threads": torch.get_num_threads(), "rank_bytes": nbytes[given.ranks]}
    run |= {"model_bytes": nbytes[1], "share_of_bytes": round(nbytes[given.ranks] / nbytes[1], 4), "rows": []}
    for rows in given.rows.split(","):
        turns = [{ranks: heard(ranks, rows) for ranks in engines} for _ in range(given.rounds)]
        medians = {ranks: statistics.median(turn[ranks] for turn in turns) for ranks in engines}
        row: dict[str, Any] = {"batch_size": int(rows), "one_rank_ms": round(medians[1], 3)}
        row |= {"ranks_ms": round(medians[given.ranks], 3)}
        row |= {"times_one_rank": round(statistics.median(turn[given.ranks] / turn[1] for turn in turns), 3)}
        row |= {"turns_ms": [[round(turn[ranks], 3) for ranks in engines] for turn in turns]}
        run["rows"].append(row)
        print(row, flush=True)
    print({key: value for key, value in run.items() if key != "rows"})
    for process in engines.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    if given.out is not None:
        found = {"schema": _SCHEMA, "runs": []} | (json.loads(given.out.read_text()) if given.out.exists() else {})
        found |= {"environment": describe_environment("cpu"), "runs": [*found["runs"], run]}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
