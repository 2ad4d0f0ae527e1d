"""Serve an open-loop load at several rates, and show throughput against latency.

python tools/bench_serving.py --rates 5,20,80
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from graphdecode import LLM
from graphdecode.profiling.environment import describe_environment
from graphdecode.profiling.serving import poisson_arrivals, read_trace, serve


def main(
    model: Annotated[str, typer.Option(help="A checkpoint folder, a repository id, or demo.")] = "demo",
    config: Annotated[Path | None, typer.Option(help="A bucket configuration file.")] = None,
    rates: Annotated[str, typer.Option(help="Requests per second; separated by commas.")] = "5,20,80",
    requests: Annotated[int, typer.Option(help="Requests at each rate.")] = 100,
    prompt_tokens: Annotated[str, typer.Option(help="Shortest-longest prompt.")] = "8-64",
    answer_tokens: Annotated[str, typer.Option(help="Shortest-longest answer.")] = "8-64",
    trace: Annotated[Path | None, typer.Option(help="A JSONL file of arrivals, instead of rates.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A folder for serving.json and serving.png.")] = None,
) -> None:
    """Measure what users would see at given rates of arrivals."""
    ranges = [tuple(int(n) for n in text.split("-")) for text in (prompt_tokens, answer_tokens)]
    with LLM(model, config=config, progress=True) as llm:
        if trace is not None:
            loads = {str(trace): read_trace(trace)}
        else:
            loads = {rate: poisson_arrivals(float(rate), requests, *ranges, seed) for rate in rates.split(",")}
        rows = [{"load": name, **serve(llm, arrivals, seed=seed)} for name, arrivals in loads.items()]
        result = {"environment": describe_environment(llm.device), "model": model, "rows": rows}
    table = Table("load", "req/s", "tokens/s", "TTFT ms p50", "p99", "TPOT ms p50", "ITL ms p99", "queue", "preempted")
    for row in rows:
        table.add_row(
            row["load"],
            f"{row['served_per_second']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ttft_ms']['p50']:.1f}",
            f"{row['ttft_ms']['p99']:.1f}",
            f"{row['tpot_ms']['p50']:.2f}",
            f"{row['itl_ms']['p99']:.2f}",
            str(row["longest_queue"]),
            str(row["preemptions"]),
        )
    Console().print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "serving.json").write_text(json.dumps(result, indent=1))
        plot(rows, out / "serving.png")


def plot(rows: list[dict], path: Path) -> None:
    """Draw latency against throughput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    throughput = [row["tokens_per_second"] for row in rows]
    axes.plot(throughput, [row["ttft_ms"]["p50"] for row in rows], "o-", label="first token, median")
    axes.plot(throughput, [row["ttft_ms"]["p99"] for row in rows], "o--", label="first token, p99")
    axes.plot(throughput, [row["itl_ms"]["p99"] for row in rows], "s--", label="between tokens, p99")
    for row in rows:
        axes.annotate(
            f"{row['load']}/s",
            (row["tokens_per_second"], row["ttft_ms"]["p50"]),
            textcoords="offset points",
            xytext=(0, 6),
            fontsize="small",
        )
    axes.set(xlabel="throughput (tokens/s)", ylabel="latency (ms)", yscale="log", title="Throughput against latency")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
