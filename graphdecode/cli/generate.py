"""`graphdecode generate`: prompts in, answers out."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphdecode.cli.checkpoint import FoundCheckpoint, find_checkpoint, fitted
from graphdecode.cli.options import (
    ALL,
    OF_A_MODEL,
    ConfigOption,
    ModelOption,
    TokenizerOption,
    overriding,
    print_error,
    sampling,
    settings_of,
    stdin_text,
    tell,
)
from graphdecode.errors import ArgumentError, cause

if TYPE_CHECKING:
    from graphdecode import LLM, RequestOutput, SamplingParams
    from graphdecode.config import EngineConfig
    from graphdecode.text import Stream
    from graphdecode.text.answer import Answer


@sampling(*ALL)
@overriding("max_batch_size", "max_sequence_length", *OF_A_MODEL, "batch_invariant", "prefix_cache")
def generate(
    sampling: dict[str, Any],
    overrides: dict[str, Any],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[-]", help="- reads prompts from stdin.")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    model: ModelOption = "demo",
    config: ConfigOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, for each prompt.")] = 128,
    tokenizer: TokenizerOption = None,
    record_batches: Annotated[Path | None, typer.Option(help="Add this run's batch sizes to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for each prompt.")] = False,
) -> None:
    """Generate text: answers go to stdout as they come, all else to stderr.

    How answers are sampled, unless options say it, is what the checkpoint's generation_config.json asks for: greedy
    where it does not set do_sample. Without that file it is the library's default: temperature 1.
    """
    began = time.perf_counter()
    if not as_json and sampling.keys() & {"logprobs", "prompt_logprobs"}:
        raise ArgumentError("--logprobs and --prompt-logprobs are printed with --json alone")
    if max_tokens < 1 and "prompt_logprobs" not in sampling:
        raise ArgumentError(f"--max-tokens must be an integer >= 1 (0 with --prompt-logprobs), got {max_tokens}")
    texts = _collect_prompts(prompts or [], prompt or [], prompts_file)
    settings = settings_of(config, **overrides)
    from graphdecode import LLM, SamplingParams
    from graphdecode.profiling.tuner import check_record, record_batch_sizes
    from graphdecode.text import RunSummary

    given = {"seed": settings.seed, **sampling, "max_tokens": max_tokens}
    asked = SamplingParams(**given)  # what cannot be is said before a model is looked for
    if record_batches is not None:
        check_record(record_batches)
    checkpoint = find_checkpoint(model, tokenizer, settings, overrides.get("max_sequence_length"))
    settings = _sized(settings, checkpoint, texts, asked)
    with LLM(checkpoint.path, config=settings, tokenizer=checkpoint.tokenizer, progress=True) as llm:
        params = replace(llm.get_default_sampling_params(), **given)
        summary = RunSummary(llm, load_seconds=time.perf_counter() - began)
        try:
            outputs = (_print_json if as_json else _print_text)(llm, texts, params)
        finally:
            if record_batches is not None:
                record_batch_sizes(record_batches, llm.stats.batch_sizes)
        tell(summary.line(outputs))
        _hint_at_chat_template(llm, outputs)
    refused = [output for output in outputs if output.error is not None]
    for output in refused:
        print_error(f"{textwrap.shorten(repr(output.prompt), 60)}: {output.error}")
    if refused:
        raise typer.Exit(2)


def _sized(
    settings: EngineConfig, checkpoint: FoundCheckpoint, texts: list[str], params: SamplingParams
) -> EngineConfig:
    """Return settings whose capacity is what these prompts can use."""
    most = params.truncate_prompt_tokens
    lengths = [len(checkpoint.tokenizer(text, verbose=False).input_ids) for text in texts]
    if most is not None and most > 0:
        lengths = [min(length, most) for length in lengths]
    answers = len(texts) * params.n
    return fitted(settings, lengths, params.max_tokens, answers=answers, trained_length=checkpoint.trained_length)


def _collect_prompts(arguments: list[str], options: list[str], file: Path | None) -> list[str]:
    unknown = [argument for argument in arguments if argument != "-"]
    if unknown:
        raise ArgumentError(f"prompts are given with --prompt, --prompts-file or - (stdin), got {unknown[0]!r}")
    texts = list(options)
    if file is not None:
        try:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"--prompts-file {file}: {cause(error)}") from error
    if arguments:
        texts += [line for line in stdin_text().splitlines() if line]
    if not texts:
        raise ArgumentError("there is no prompt: give --prompt TEXT, --prompts-file FILE, or - to read stdin")
    return texts


def _print_text(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """Stream the answers in the order of their prompts; all of them are computed side by side."""
    from tqdm import tqdm

    prompts = _streams(llm, texts, params)
    hidden = len(texts) == 1 or sys.stdout.isatty()
    with tqdm(total=len(texts), desc="generating", unit="prompt", leave=False, disable=hidden or None) as bar:
        for text, streams in zip(texts, prompts, strict=True):
            for number, stream in enumerate(streams, 1):
                if len(texts) > 1 or params.n > 1:
                    print(f">>> {text}" + (f" ({number} of {params.n})" if params.n > 1 else ""))
                for piece in stream:
                    print(piece, end="", flush=True)
                print(flush=True)
            bar.update()
    return [streams[0].request for streams in prompts]


def _streams(llm: LLM, texts: list[str], params: SamplingParams) -> list[list[Stream]]:
    """Hand all prompts in; return the streams of each one's answers, or one that is empty where it was refused."""
    from graphdecode.text import Stream

    orders = [llm.intake.order(text, llm.intake.encode(text), params) for text in texts]
    llm.router.submit(request for order in orders for request in order.requests)
    refused: list[Answer | None] = [None]
    return [[Stream(order.output, answer, llm.router) for answer in order.answers or refused] for order in orders]


def _print_json(llm: LLM, texts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """Print a line a prompt as it is answered, in the order of the prompts.

    When interrupted: a line for each prompt that is left, with what there is; answers that are not complete have the
    `finish_reason` "abort", and their line an `error`.
    """
    from tqdm import tqdm

    from graphdecode.text.router import DeferredInterrupt

    prompts = _streams(llm, texts, params)
    waiting = deque(streams[0].request for streams in prompts)
    try:
        for streams in tqdm(prompts, desc="generating", unit="prompt", leave=False, disable=None):
            for stream in streams:
                for _ in stream:
                    pass
            with DeferredInterrupt():  # a line is printed whole, and once
                _print_record(waiting.popleft())
    finally:
        with DeferredInterrupt():
            for streams in prompts[len(prompts) - len(waiting) :]:
                for stream in streams:
                    stream.close()
            for request in waiting:
                if any(answer.finish_reason == "abort" for answer in request.outputs):
                    request.error = "interrupted before the answer was complete"
                _print_record(request)
    return [streams[0].request for streams in prompts]


def _hint_at_chat_template(llm: LLM, outputs: list[RequestOutput]) -> None:
    """Suggest the chat template where a chat model gives an empty answer to a plain prompt."""
    silent = any(answer.finish_reason == "stop" and not answer.text.strip() for o in outputs for answer in o.outputs)
    if silent and llm.tokenizer.chat_template:
        tell(
            "hint: an answer is empty. This model has a chat template, and prompts are given to it as they are: "
            "graphdecode chat, and LLM.chat, make turns of a chat of them"
        )


def _print_record(request: RequestOutput) -> None:
    record = asdict(request)
    record["metrics"]["time_to_first_token"] = request.metrics.time_to_first_token
    print(json.dumps(record, ensure_ascii=False), flush=True)
