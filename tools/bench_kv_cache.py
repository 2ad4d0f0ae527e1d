"""What a cache of 8 bits costs and saves: perplexity, memory of a token, and the decode step by context, in turns.

    python tools/bench_kv_cache.py                                        SmolLM2 in bf16
    python tools/bench_kv_cache.py --contexts 512,2048 --batches 1 --out results

The perplexity is that of a text that is in the repository; its prompt is computed in chunks, and each chunk's queries
see their keys as the cache holds them. Steps of all kinds of cache run over the same weights, A B C A B C, over pages
that were written.
"""

import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.engine.loading import make_runner, resolve_device
from graphdecode.models import load_model
from graphdecode.profiling.environment import describe_environment
from graphdecode.profiling.latency import STEPS_PER_STAGING, LatencyProfiler, fill_pages, rows_at

ROOT = Path(__file__).parent.parent
KINDS = ("auto", "fp8", "int8")
ROUNDS = 5
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Step:
    """One point: batch, context, and the median step of each kind of cache, in ms."""

    batch: int
    context: int
    step_ms: dict[str, float]


def perplexity(model: str, kind: str, dtype: str, text: str, length: int) -> float:
    """Return the perplexity of a text's first tokens over a kind of cache."""
    with LLM(model, dtype=dtype, kv_cache_dtype=kind, max_batch_size=1, max_sequence_length=length) as llm:
        ids = llm.tokenizer(text, verbose=False).input_ids[: length - 1]
        (output,) = llm.generate([ids], SamplingParams(prompt_logprobs=0, max_tokens=1), use_tqdm=False)
    assert output.prompt_logprobs is not None
    scored = [entry[token].logprob for entry, token in zip(output.prompt_logprobs, ids, strict=True) if entry]
    return math.exp(-sum(scored) / len(scored))


def steps(
    model: str, dtype: str, batches: list[int], contexts: list[int], count: int
) -> tuple[list[Step], dict[str, int]]:
    """Return the steps, and the bytes of a token in each kind of cache."""
    longest = max(contexts) + STEPS_PER_STAGING
    decoder = load_model(model, device=resolve_device("auto"), dtype=dtype, max_sequence_length=longest)
    config = BucketConfig(max_batch_size=max(batches), batch_sizes=tuple(batches), max_sequence_length=longest)
    runners = {kind: make_runner(decoder, config, kv_cache_dtype=kind) for kind in KINDS}
    for runner in runners.values():
        runner.graphs.capture(progress=False)
    found: list[Step] = []
    for context in contexts:
        for batch in batches:
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(ROUNDS):
                for kind, runner in runners.items():
                    with rows_at(runner, batch, context) as rows:
                        if turn == 0:
                            fill_pages(runner, rows)
                        times[kind] += LatencyProfiler(runner).replayed(rows, count)[1]
            step = Step(batch, context, {kind: round(statistics.median(taken), 3) for kind, taken in times.items()})
            print(f"batch {batch} context {context:6}: {step.step_ms} ms a step", flush=True)
            found.append(step)
    return found, {kind: runner.capacity.token_bytes for kind, runner in runners.items()}


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="A name that leads to a model.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Of weights.")] = "bfloat16",
    batches: Annotated[str, typer.Option(help="By commas.")] = "1,8",
    contexts: Annotated[str, typer.Option(help="By commas.")] = "512,2048,8064",
    count: Annotated[int, typer.Option(help="Steps of each turn.")] = 6,
    text: Annotated[Path, typer.Option(help="What the perplexity is of.")] = ROOT / "docs" / "architecture.md",
    length: Annotated[int, typer.Option(help="Tokens of it.")] = 2048,
    skip_perplexity: Annotated[bool, typer.Option(help="Time the steps alone.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for kv-cache.json.")] = None,
) -> None:
    """Compare kinds of cache on one model."""
    report: dict[str, object] = {"model": model, "environment": describe_environment(resolve_device("auto"))}
    if not skip_perplexity:
        given = text.read_text()
        report["perplexity"] = {kind: perplexity(model, kind, dtype, given, length) for kind in KINDS}
        print(f"perplexity of {length - 1} tokens of {text.name}: {report['perplexity']}")
    with torch.no_grad():
        found, token_bytes = steps(
            model, dtype, *(list(map(int, given.split(","))) for given in (batches, contexts)), count
        )
    print(f"bytes of a token: {token_bytes}")
    report |= {"steps": [asdict(step) for step in found], "token_bytes": token_bytes}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "kv-cache.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    app()
