"""`graphdecode generate`: prompts in, answers out."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphdecode.cli.capacity import check_length, fitted, limited
from graphdecode.cli.options import (
    STDERR,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    print_error,
    settings_of,
)
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from graphdecode import LLM, RequestOutput, SamplingParams


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[-]", help="- reads prompts from stdin.")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    model: ModelOption = "demo",
    config: ConfigOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most likely tokens of this much mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; left out: the configuration's.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Prompts side by side at most; left out: the configuration's.")
    ] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer at most; left out: the configuration's.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: Annotated[str | None, typer.Option(help="int8: 8-bit weights on a CPU.")] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The same bits for a request in any company; slower prompts.")
    ] = False,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Do not share prompt prefixes.")] = False,
    record_batches: Annotated[Path | None, typer.Option(help="Add this run's batch sizes to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for each prompt.")] = False,
) -> None:
    """Generate text: answers go to stdout as they come, all else to stderr."""
    began = time.perf_counter()
    texts = _collect_prompts(prompts or [], prompt or [], prompts_file)
    settings = settings_of(
        config,
        device=device,
        dtype=dtype,
        seed=seed,
        quantize=quantize,
        batch_invariant=batch_invariant or None,
        prefix_cache=False if no_prefix_cache else None,
    )
    settings = limited(settings, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)
    from graphdecode import LLM, SamplingParams
    from graphdecode.models import check_model, load_tokenizer, resolve_model_path
    from graphdecode.profiling.batch_record import check_record, record_batch_sizes
    from graphdecode.text import RunSummary

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=settings.seed, max_tokens=max_tokens, stop=stop
    )
    if record_batches is not None:
        check_record(record_batches)
    path = resolve_model_path(model)
    trained_length = check_model(path).max_position_embeddings
    check_length(max_sequence_length, trained_length)
    tokenizer = load_tokenizer(path)
    lengths = [len(tokenizer(text, verbose=False).input_ids) for text in texts]
    settings = fitted(settings, lengths, max_tokens, answers=len(texts), trained_length=trained_length)
    with LLM(path, config=settings, tokenizer=tokenizer, progress=True) as llm:
        summary = RunSummary(llm, load_seconds=time.perf_counter() - began)
        try:
            outputs = _print_json(llm, texts, params) if as_json else _print_text(llm, texts, params)
        finally:
            if record_batches is not None:
                record_batch_sizes(record_batches, llm.stats.batch_sizes)
        STDERR.print(summary.line(outputs), highlight=False, soft_wrap=True)
    refused = [output for output in outputs if output.error is not None]
    for output in refused:
        print_error(f"{textwrap.shorten(repr(output.prompt), 60)}: {output.error}")
    if refused:
        raise typer.Exit(2)


def _collect_prompts(arguments: list[str], options: list[str], file: Path | None) -> list[str]:
    unknown = [argument for argument in arguments if argument != "-"]
    if unknown:
        raise ArgumentError(f"prompts are given with --prompt, --prompts-file or - (stdin), got {unknown[0]!r}")
    texts = list(options)
    if file is not None:
        try:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"--prompts-file {file}: {error}") from error
    if arguments:
        texts += [line for line in _stdin_text().splitlines() if line]
    if not texts:
        raise ArgumentError("there is no prompt: give --prompt TEXT, --prompts-file FILE, or - to read stdin")
    return texts


def _stdin_text() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"stdin: {error}") from error


def _print_text(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """Stream the answers in the order of their prompts; all of them are computed side by side."""
    from tqdm import tqdm

    streams = [llm.stream(text, params, refuse="return") for text in texts]
    hidden = len(texts) == 1 or sys.stdout.isatty()
    with tqdm(total=len(texts), desc="generating", unit="prompt", leave=False, disable=hidden or None) as bar:
        for text, stream in zip(texts, streams, strict=True):
            if len(texts) > 1:
                print(f">>> {text}")
            for piece in stream:
                print(piece, end="", flush=True)
            print(flush=True)
            bar.update()
    return [stream.request for stream in streams]


def _print_json(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """Print each answer as it is complete, in the order of the prompts; when interrupted, all that are complete."""
    from tqdm import tqdm

    from graphdecode.engine.interrupts import DeferredInterrupt

    streams = [llm.stream(text, params, refuse="return") for text in texts]
    waiting = deque(stream.request for stream in streams)
    try:
        for stream in tqdm(streams, desc="generating", unit="prompt", leave=False, disable=None):
            for _ in stream:
                pass
            with DeferredInterrupt():  # a line is printed whole, and once
                _print_record(waiting.popleft())
    finally:
        with DeferredInterrupt():
            for request in waiting:
                if request.outputs[0].finish_reason not in (None, "abort"):
                    _print_record(request)
    return [stream.request for stream in streams]


def _print_record(request: RequestOutput) -> None:
    record = asdict(request)
    record["metrics"]["time_to_first_token"] = request.metrics.time_to_first_token
    print(json.dumps(record, ensure_ascii=False), flush=True)
