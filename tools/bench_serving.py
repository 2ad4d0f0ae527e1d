"""Serve an open-loop load at several rates, and show throughput against latency.

    python tools/bench_serving.py --rates 5,20,80 --out serving
    python tools/bench_serving.py --prompt-tokens lognormal:64:0.8:400 --answer-tokens 8-64
    python tools/bench_serving.py --trace arrivals.jsonl --rates 10,40
    python tools/bench_serving.py http --model smollm2 --clients 32 --peer llama-cpp=/opt/llama/bin/python --out server

Requests arrive at random (Poisson), or as a trace says: JSONL with `at` (seconds), `prompt_tokens` and `answer_tokens`,
played as it is, or at the rates that are given. Arrivals do not wait for answers. Writes serving.json after every load.

With `http`: a real server over HTTP, beside the engine alone and beside other servers, in one run. Writes server.json.
"""

import json
import signal
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from graphdecode import LLM
from graphdecode.cli.options import print_error, wide_console
from graphdecode.models import resolve_model_path
from graphdecode.profiling.batch_record import check_record, record_batch_sizes
from graphdecode.profiling.environment import describe_environment
from graphdecode.profiling.load import Arrival, Lengths, at_rate, poisson_arrivals, read_trace
from graphdecode.profiling.serving import SCHEMA_VERSION, check_fits, serve
from graphdecode.profiling.serving_plot import plot_serving
from peers.servers import parse_servers
from peers.serving_contest import Contest, compare

DEFAULT_RATES = "5,20,80"
WARM_UP = [Arrival(0.0, 8, 4)] * 4


def rates_of(text: str) -> list[float]:
    """Parse rates that are separated by commas."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--rates must be numbers separated by commas, such as 5,20,80; got {text!r}") from None
    if min(rates) <= 0:
        raise ValueError(f"--rates must be > 0, got {text!r}")
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


app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A checkpoint folder, a repository id, or demo.")] = "demo",
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="A folder for serving.json and serving.png.")] = None,
    record_batches: Annotated[Path | None, typer.Option(help="Add the loads' batch sizes to a file.")] = None,
) -> None:
    """Measure what users would see at given rates of arrivals."""
    if context.invoked_subcommand is not None:
        return
    loads = loads_of(trace, rates, requests, prompt_tokens, answer_tokens, seed, burst)
    if record_batches is not None:
        check_record(record_batches)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    console = wide_console()
    rows: list[dict[str, Any]] = []
    with LLM(model, config=config, device=device, dtype=dtype, progress=True) as llm:
        for arrivals in loads.values():
            check_fits(llm, arrivals)
        serve(llm, WARM_UP, progress=False)
        about = {
            "schema": SCHEMA_VERSION,
            "environment": describe_environment(llm.device),
            "model": model,
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "backend": llm.graphs.backend,
            "max_batch_size": llm.config.max_batch_size,
            "buckets": list(llm.graphs.buckets),
            "total_num_pages": llm.capacity.total_num_pages,
            "page_size": llm.config.page_size,
            "arrivals": {"trace": trace.name}
            if trace is not None
            else {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens, "burst": burst},
            "seed": seed,
        }
        try:
            for index, (name, arrivals) in enumerate(loads.items(), 1):
                rows.append({"load": name, **serve(llm, arrivals, seed=seed + index, label=f"serving {name}")})
                if out is not None:
                    (out / "serving.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        finally:
            if rows:
                show(rows, console)
                if record_batches is not None:
                    record_batch_sizes(record_batches, batch_sizes_of(rows))
                if out is not None:
                    title = f"{model} {about['dtype']} on {about['environment']['device_name']}, open loop"
                    (out / "serving.png").write_bytes(plot_serving(rows, title))


@app.command()
def http(
    model: Annotated[str, typer.Option(help="As for `graphdecode serve`.")] = "demo",
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask at the same time.")] = 32,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=PYTHON]", help="llama-cpp or vllm, and the Python that has it; may be repeated."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The same model as a folder, for peers that do not read its file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for server.json.")] = None,
) -> None:
    """Compare our server with the engine below it, and with other servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that were started are ended
    contest = Contest(model, resolve_model_path(model), checkpoint, clients, answer_tokens, rounds)
    found = compare(contest, parse_servers(peer or []), lambda: print("measuring", file=sys.stderr, flush=True))
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()
    }
    show_servers(medians)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        about = {"schema": 1, "environment": describe_environment("cpu"), "model": model, "clients": clients}
        told = about | {"answer_tokens": answer_tokens, "medians": medians, "rounds": found}
        (out / "server.json").write_text(json.dumps(told, indent=1) + "\n")


def show_servers(medians: dict[str, dict[str, float]]) -> None:
    """Print the figures of servers, and those of the library as the limit beside them."""
    table = Table(title="servers", box=box.SIMPLE)
    for head in ("", "tokens/s", "of the library's", "first token alone, ms", "over the engine's own", "step, ms"):
        table.add_column(head, justify="right")
    library = medians["library"]
    for name, figures in medians.items():
        table.add_row(
            name,
            f"{figures['tokens_per_second']:.0f}",
            f"{figures['tokens_per_second'] / library['tokens_per_second']:.2f}",
            f"{figures['first_token_ms']:.2f}",
            f"{figures['over_engine_ms']:.2f}" if "over_engine_ms" in figures else "-",
            f"{figures['step_ms']:.2f}" if "step_ms" in figures else "-",
        )
    wide_console().print(table)


def batch_sizes_of(rows: list[dict[str, Any]]) -> Counter[int]:
    """Return how many steps of all loads had so many live rows."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update({int(size): steps for size, steps in row["batch_sizes"].items()})
    return counts


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print what users would see of each load, and how it was served."""
    users = Table(title="open loop: latencies in ms", box=box.SIMPLE)
    engine = Table(
        title="time in the queue (ms), length of the queue (requests), mean live rows of a step", box=box.SIMPLE
    )
    heads = ("load", "tokens/s", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "ITL p50", "p90", "p99")
    for head in heads:
        users.add_column(head, justify="right")
    heads = ("load", "offered/s", "served/s", "queued p50", "p90", "p99")
    for head in (*heads, "queue p50", "p90", "p99", "max", "rows", "preempted"):
        engine.add_column(head, justify="right")
    for row in rows:
        users.add_row(
            row["load"],
            f"{row['tokens_per_second']:.0f}",
            *percentiles(row["ttft_ms"]),
            *percentiles(row["tpot_ms"]),
            *percentiles(row["itl_ms"]),
        )
        steps = sum(row["batch_sizes"].values())
        live = sum(int(size) * count for size, count in row["batch_sizes"].items())
        engine.add_row(
            row["load"],
            "-" if row["offered_per_second"] is None else f"{row['offered_per_second']:.1f}",
            f"{row['served_per_second']:.1f}",
            *percentiles(row["queue_ms"]),
            *(f"{row['queue_depth'][key]:.0f}" for key in ("p50", "p90", "p99", "max")),
            f"{live / steps:.1f}",
            str(row["preemptions"]),
        )
    console.print(users)
    console.print(engine)


def percentiles(found: dict[str, float] | None) -> list[str]:
    """Return p50, p90 and p99 of a duration, or that there are none."""
    return ["-" if found is None else f"{found[key]:.{2 if found[key] < 10 else 0}f}" for key in ("p50", "p90", "p99")]


if __name__ == "__main__":
    try:
        app()
    except (ValueError, RuntimeError) as error:
        print_error(str(error))
        sys.exit(2)
