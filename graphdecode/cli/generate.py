"""`graphdecode generate`: prompts in, outputs out."""

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

from graphdecode.cli.checkpoint import ResolvedModel, find_model, fitted, load_checkpoint
from graphdecode.cli.options import (
    MODEL_OPTIONS,
    ConfigOption,
    ModelOption,
    TokenizerOption,
    ctrl_c_blocked,
    options_of,
    print_error,
    print_message,
    settings_of,
    stdin_text,
    with_options,
    with_settings,
)
from graphdecode.cli.terminal import run_summary
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.config.settings import is_in_file
from graphdecode.errors import ArgumentError, cause

if TYPE_CHECKING:
    from graphdecode import LLM, RequestOutput
    from graphdecode.config import EngineConfig


@with_options("sampling", (SamplingParams,), *options_of(SamplingParams))
@with_settings("max_batch_size", "max_sequence_length", *MODEL_OPTIONS, "prefix_cache")
def generate(
    sampling: dict[str, Any],
    overrides: dict[str, Any],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[-]", help="- reads prompts from stdin.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be repeated.")
    ] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    model: ModelOption = "demo",
    config: ConfigOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, for each prompt.")] = 128,
    tokenizer: TokenizerOption = None,
    record_batches: Annotated[Path | None, typer.Option(help="Add this run's batch sizes to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for each prompt.")] = False,
) -> None:
    """Generate text: outputs are streamed to stdout, all else goes to stderr.

    Sampling options that are left out come from the checkpoint's generation_config.json, greedy unless that sets
    do_sample; without that file, from the library's defaults: temperature 1.
    """
    began = time.perf_counter()
    if not as_json and sampling.keys() & {"logprobs", "prompt_logprobs"}:
        raise ArgumentError("--logprobs and --prompt-logprobs need --json")
    if max_tokens < 1 and "prompt_logprobs" not in sampling:
        raise ArgumentError(f"--max-tokens must be an integer >= 1 (0 with --prompt-logprobs), got {max_tokens}")
    if "logit_bias" in sampling:
        sampling["logit_bias"] = dict(map(_bias, sampling["logit_bias"]))
    texts = _collect_prompts(prompts or [], prompt or [], prompts_file)
    settings = settings_of(config, **overrides)
    sampling_args = {"seed": settings.seed, **sampling, "max_tokens": max_tokens}
    requested, paths = SamplingParams(**sampling_args), find_model(model, tokenizer)  # fail before the slow imports
    with ctrl_c_blocked():
        from graphdecode import LLM
        from graphdecode.memory import collector_spared

    if record_batches is not None:
        from graphdecode.profiling.tuner import check_record, record_batch_sizes

        check_record(record_batches)
    checkpoint = load_checkpoint(paths, settings, overrides.get("max_sequence_length"))
    settings = _sized(settings, checkpoint, texts, requested, may_defer=not is_in_file(config, "capture_when"))
    with (
        LLM(checkpoint.path, config=settings, tokenizer=checkpoint.tokenizer, progress=True) as llm,
        collector_spared(),
    ):
        params = replace(llm.get_default_sampling_params(), **sampling_args)
        ready = time.perf_counter()
        try:
            outputs = _print_outputs(llm, texts, params, as_json)
        finally:
            if record_batches is not None:
                record_batch_sizes(record_batches, llm.stats.batch_sizes)
        print_message(run_summary(llm, outputs, ready - began, time.perf_counter() - ready))
        _hint_at_chat_template(llm, outputs)
        if model == "demo" and not all(text.endswith("=") for text in texts):
            print_message(
                "hint: the demo only continues prompts such as 417+385=, rev oceanic= and sort zebra=; for others give "
                "another --model"
            )
    refused = [output for output in outputs if output.error is not None]
    for output in refused:
        print_error(f"{textwrap.shorten(repr(output.prompt), 60)}: {output.error}")
    if refused:
        raise typer.Exit(2)


def _sized(
    settings: EngineConfig, checkpoint: ResolvedModel, texts: list[str], params: SamplingParams, *, may_defer: bool
) -> EngineConfig:
    most = params.truncate_prompt_tokens
    lengths = [len(checkpoint.tokenizer(text, verbose=False).input_ids) for text in texts]
    if most is not None and most > 0:
        lengths = [min(length, most) for length in lengths]
    outputs, length = len(texts) * params.n, checkpoint.trained_length
    return fitted(settings, lengths, params.max_tokens, outputs=outputs, trained_length=length, may_defer=may_defer)


def _collect_prompts(arguments: list[str], options: list[str], file: Path | None) -> list[str]:
    unknown = [argument for argument in arguments if argument != "-"]
    if unknown:
        raise ArgumentError(f"give prompts with --prompt, --prompts-file or - (stdin), got {unknown[0]!r}")
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


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ArgumentError(f"--logit-bias must be a token id and a number, such as 42=-5, got {text!r}") from None


def _print_outputs(llm: LLM, texts: list[str], params: SamplingParams, as_json: bool) -> list[RequestOutput]:
    """Print the outputs in the order of their prompts: text as it comes, or one JSON line per prompt.

    When interrupted, each remaining prompt still gets its line: incomplete outputs have the `finish_reason` "abort",
    and the line an `error`.
    """
    from tqdm import tqdm

    from graphdecode.text import Stream
    from graphdecode.text.router import DeferredInterrupt

    parents = [llm.input_processor.process(text, params) for text in texts]
    llm.router.submit(parents)
    waiting = deque(parents)
    hidden = not as_json and (len(texts) == 1 or sys.stdout.isatty())
    try:
        with tqdm(total=len(texts), desc="generating", unit="prompt", leave=False, disable=hidden or None) as bar:
            for text, parent in zip(texts, parents, strict=True):
                for number, state in enumerate(parent.states or [None], 1):
                    if not as_json and (len(texts) > 1 or params.n > 1):
                        print(f">>> {text}" + (f" ({number} of {params.n})" if params.n > 1 else ""))
                    for piece in Stream(parent.output, state, llm.router):
                        if not as_json:
                            print(piece, end="", flush=True)
                    if not as_json:
                        print(flush=True)
                with DeferredInterrupt():  # else a line might be cut, or printed twice
                    waiting.popleft()
                    if as_json:
                        _print_record(parent.output)
                bar.update()
    finally:
        with DeferredInterrupt():
            llm.router.abort([state for parent in waiting for state in parent.states])
            for parent in waiting if as_json else ():
                if any(output.finish_reason == "abort" for output in parent.output.outputs):
                    parent.output.error = "interrupted before the output was complete"
                _print_record(parent.output)
    return [parent.output for parent in parents]


def _hint_at_chat_template(llm: LLM, outputs: list[RequestOutput]) -> None:
    """Suggest the chat template if a chat model gives an empty output."""
    silent = any(each.finish_reason == "stop" and not each.text.strip() for o in outputs for each in o.outputs)
    if silent and llm.tokenizer.chat_template:
        print_message(
            "hint: an output is empty. This model has a chat template, which generate does not apply: use graphdecode "
            "chat or LLM.chat"
        )


def _print_record(request: RequestOutput) -> None:
    record = asdict(request)
    record["metrics"]["time_to_first_token"] = request.metrics.time_to_first_token
    print(json.dumps(record, ensure_ascii=False), flush=True)
