"""An open-loop load at several rates: throughput against latency, queueing, preemptions, batch sizes.

    tools/bench serving --rates 5,20,80 --out serving
    tools/bench serving --prompt-tokens lognormal:64:0.8:400 --answer-tokens 8-64
    tools/bench serving --trace arrivals.jsonl --rates 10,40

Requests arrive at random (Poisson), or as a trace says: JSONL with `at` (seconds), `prompt_tokens` and `answer_tokens`,
played as it is, or at the rates that are given. Arrivals do not wait for answers. Writes serving.json after every load.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from graphdecode import LLM
from graphdecode.errors import ArgumentError
from graphdecode.profiling.batch_record import check_record, record_batch_sizes
from harness import Device, Dtype, Model, OutFolder, record, show, write
from serving_load import (
    SCHEMA_VERSION,
    Arrival,
    Lengths,
    at_rate,
    check_fits,
    plot_serving,
    poisson_arrivals,
    read_trace,
    serve,
)

DEFAULT_RATES = "5,20,80"
WARM_UP = [Arrival(0.0, 8, 4)] * 4


def rates_of(text: str) -> list[float]:
    """Parse rates that are separated by commas."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"--rates must be numbers separated by commas, such as 5,20,80; got {text!r}") from None
    if min(rates) <= 0:
        raise ArgumentError(f"--rates must be > 0, got {text!r}")
    return rates


def loads_of(
    trace: Path | None, rates: str | None, requests: int, prompt_tokens: str, answer_tokens: str, seed: int, burst: int
) -> dict[str, list[Arrival]]:
    """Return the loads by name."""
    if trace is not None:
        arrivals = read_trace(trace)
        if rates is None:
            return {"as traced": arrivals}
        return {f"{rate:g}/s": at_rate(arrivals, rate) for rate in rates_of(rates)}
    lengths = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--answer-tokens", answer_tokens)
    return {
        f"{rate:g}/s": poisson_arrivals(rate, requests, *lengths, seed, burst)
        for rate in rates_of(rates or DEFAULT_RATES)
    }


def main(
    model: Model = "demo",
    config: Annotated[Path | None, typer.Option(help="A bucket configuration file.")] = None,
    rates: Annotated[
        str | None, typer.Option(help=f"Requests per second; separated by commas. [default: {DEFAULT_RATES}]")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests at each rate.")] = 100,
    burst: Annotated[int, typer.Option(help="Requests that arrive together.")] = 1,
    prompt_tokens: Annotated[str, typer.Option(help="N, LOW-HIGH or lognormal:MEDIAN:SIGMA:LONGEST.")] = "8-64",
    answer_tokens: Annotated[str, typer.Option(help="The same, of answers.")] = "8-64",
    trace: Annotated[Path | None, typer.Option(help="A JSONL file of arrivals, instead of random ones.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFolder = None,
    record_batches: Annotated[Path | None, typer.Option(help="Add the loads' batch sizes to a file.")] = None,
) -> None:
    """Measure what users would see at given rates of arrivals."""
    loads = loads_of(trace, rates, requests, prompt_tokens, answer_tokens, seed, burst)
    if record_batches is not None:
        check_record(record_batches)
    rows: list[dict[str, Any]] = []
    with LLM(model, config=config, device=device, dtype=dtype, progress=True) as llm:
        for arrivals in loads.values():
            check_fits(llm, arrivals)
        serve(llm, WARM_UP, progress=False)
        drawn = {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens, "burst": burst}
        about = record(
            llm.device,
            schema=SCHEMA_VERSION,
            model=model,
            dtype=str(llm.model.dtype).removeprefix("torch."),
            backend=llm.graphs.backend,
            max_batch_size=llm.config.max_batch_size,
            buckets=list(llm.graphs.buckets),
            total_num_pages=llm.capacity.total_num_pages,
            page_size=llm.config.page_size,
            arrivals=drawn if trace is None else {"trace": trace.name},
            seed=seed,
        )
        try:
            for index, (name, arrivals) in enumerate(loads.items(), 1):
                rows.append({"load": name, **serve(llm, arrivals, seed=seed + index, label=f"serving {name}")})
                write(out and out / "serving.json", about | {"rows": rows})
        finally:
            if rows:
                show_loads(rows)
                if record_batches is not None:
                    record_batch_sizes(record_batches, batch_sizes_of(rows))
                if out is not None:
                    title = f"{model} {about['dtype']} on {about['environment']['device_name']}, open loop"
                    (out / "serving.png").write_bytes(plot_serving(rows, title))


def batch_sizes_of(rows: list[dict[str, Any]]) -> Counter[int]:
    """Return how many steps of all loads had so many live rows."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update({int(size): steps for size, steps in row["batch_sizes"].items()})
    return counts


def show_loads(rows: list[dict[str, Any]]) -> None:
    """Print what users would see of each load, and how it was served."""
    columns = {"load": "{load}", "tokens/s": "{tokens_per_second:.0f}"}
    for kind in ("ttft", "tpot", "itl"):
        columns |= percentiles(kind.upper(), f"{kind}_ms")
    show(columns, rows, "open loop: latencies in ms")
    columns = {"load": "{load}", "offered/s": "{offered_per_second:.1f}", "served/s": "{served_per_second:.1f}"}
    columns |= {"rows of a step": "{mean_rows:.1f}", "preempted": "{preemptions}"}
    show(columns, (row | {"mean_rows": mean_rows(row["batch_sizes"])} for row in rows))
    columns = {"load": "{load}"} | percentiles("queued", "queue_ms")
    columns |= {f"queue {key}": f"{{queue_depth[{key}]:.0f}}" for key in ("p50", "p90", "p99", "max")}
    show(columns, rows, "time in the queue (ms), length of the queue (requests)")


def percentiles(heading: str, key: str) -> dict[str, str]:
    """Return columns for the percentiles of a duration."""
    return {f"{heading} {each}": f"{{{key}[{each}]:.2f}}" for each in ("p50", "p90", "p99")}


def mean_rows(batch_sizes: dict[str, int]) -> float:
    """Return the mean of the live rows over all steps."""
    return sum(int(size) * count for size, count in batch_sizes.items()) / sum(batch_sizes.values())
