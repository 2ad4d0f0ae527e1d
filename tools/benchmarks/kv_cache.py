"""Caches of 16 and 8 bits: perplexity of a text, bytes per token, and the decode step by context, alternating."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from graphdecode import LLM, BucketConfig
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.runner import Runner
from graphdecode.models import load_model, resolve_device
from graphdecode.profiling.latency import STEPS_PER_STAGING, LatencyProfiler, fill_pages, rows_at
from harness import ROOT, Dtype, Model, OutFolder, Sizes, alternated, medians, numbers, perplexity, record, write

Kind = Literal["auto", "fp8", "int8"]
KINDS: tuple[Kind, ...] = ("auto", "fp8", "int8")
ROUNDS = 5


def perplexity_over(model: str, kind: Kind, dtype: str, text: str, length: int) -> float:
    sizes: Any = {"max_batch_size": 1, "max_sequence_length": length}
    with LLM(model, dtype=dtype, quantize="none", kv_cache_dtype=kind, **sizes) as llm:
        return perplexity(llm, llm.tokenizer(text, verbose=False).input_ids[: length - 1])


def turn(runner: Runner, batch: int, context: int, count: int) -> list[float]:
    with rows_at(runner, batch, context) as rows:
        return LatencyProfiler(runner).replayed(rows, count)[1]


def steps(
    model: str, dtype: str, batches: list[int], contexts: list[int], count: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the median step of each kind of cache at each point, and the bytes of a token."""
    longest = max(contexts) + STEPS_PER_STAGING
    place = resolve_device("auto")
    decoder = load_model(model, device=place, dtype=dtype, quantize="none", max_sequence_length=longest)
    config = BucketConfig(max_batch_size=max(batches), batch_sizes=tuple(batches), max_sequence_length=longest)
    runners = {kind: make_runner(decoder, config, kv_cache_dtype=kind) for kind in KINDS}
    for runner in runners.values():
        runner.graphs.capture(progress=False, kinds=["steps"])
    found = []
    for context in contexts:
        for batch in batches:
            for runner in runners.values():
                with rows_at(runner, batch, context) as rows:
                    fill_pages(runner, rows)
            calls = {str(kind): partial(turn, runner, batch, context, count) for kind, runner in runners.items()}
            times = {kind: list(chain(*each)) for kind, each in alternated(calls, ROUNDS).items()}
            step_ms = {kind: round(median, 3) for kind, median in medians(times).items()}
            print(f"batch {batch} context {context:6}: {step_ms} ms a step", flush=True)
            found.append({"batch": batch, "context": context, "step_ms": step_ms})
    return found, {kind: runner.capacity.token_bytes for kind, runner in runners.items()}


def main(
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    batches: Sizes = "1,8",
    contexts: Sizes = "512,2048,8064",
    count: Annotated[int, typer.Option(help="Steps of each turn.")] = 6,
    text: Annotated[Path, typer.Option(help="What the perplexity is of.")] = ROOT / "docs" / "graphs.md",
    length: Annotated[int, typer.Option(help="Tokens of it.")] = 2048,
    skip_perplexity: Annotated[bool, typer.Option(help="Time the steps alone.")] = False,
    out: OutFolder = None,
) -> None:
    report = record("auto", model=model)
    if not skip_perplexity:
        given = text.read_text()
        report["perplexity"] = {kind: perplexity_over(model, kind, dtype, given, length) for kind in KINDS}
        print(f"perplexity of {length - 1} tokens of {text.name}: {report['perplexity']}")
    with torch.no_grad():
        report["steps"], report["token_bytes"] = steps(model, dtype, numbers(batches), numbers(contexts), count)
    print(f"bytes of a token: {report['token_bytes']}")
    write(out and out / "kv-cache.json", report)
