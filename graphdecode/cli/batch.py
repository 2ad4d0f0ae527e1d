"""`graphdecode batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphdecode.cli.options import (
    OF_A_MODEL,
    STDERR,
    ConfigOption,
    ModelOption,
    TokenizerOption,
    chosen,
    overriding,
    print_error,
    settings_of,
    taking,
)
from graphdecode.cli.service import check_extra, prepare_ray, service_maker, sharing
from graphdecode.config import ReplicaConfig, ServerConfig, load_replica_config, load_server_config
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphdecode.config import EngineConfig
    from graphdecode.server.batch import Answers
    from graphdecode.server.batch_lines import BatchInput, BatchOutput
    from graphdecode.server.service import Service

_AHEAD = 2  # requests under way for each row: a row that is free finds its next request there
_ENDLESS = 2**31 - 1


@taking("serving", chosen(ServerConfig, "served_model_name"))
@taking("scale", chosen(ReplicaConfig, "count", "ray_address"))
@overriding("max_batch_size", "max_sequence_length", *OF_A_MODEL)
def batch(
    overrides: dict[str, Any],
    serving: dict[str, Any],
    scale: dict[str, Any],
    requests: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests, one a line, as OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Answers are added to it, one a line.")],
    model: ModelOption = "demo",
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
    ray: Annotated[bool, typer.Option("--ray", help="Answer with several engines, on Ray.")] = False,
) -> None:
    """Answer a file of requests; the same command goes on where an earlier one was ended.

    A request that cannot be served has its line too, with the error that a server would answer; the exit code is 2
    then.
    """
    check_extra("a batch")
    from graphdecode.server.batch import EngineAnswers
    from graphdecode.server.batch_lines import BatchInput, BatchOutput

    settings = settings_of(config, **overrides)
    # nobody else waits here: what a server refuses for their sake is answered in its turn
    endless = {"max_waiting": _ENDLESS, "request_timeout_s": 0.0, "otlp_traces_endpoint": None}
    limits = load_server_config(config, **endless, **serving)
    several = load_replica_config(config, **scale)
    if ray:
        prepare_ray("a batch with --ray", several)
        settings = sharing(settings, several)
    elif scale:
        raise ArgumentError("--replicas and --ray-address are for a batch with --ray")
    asked = BatchInput(requests, limits.max_body_bytes)
    if answers.exists() and answers.samefile(requests):
        raise ArgumentError(f"INPUT and OUTPUT must be two files, got {answers} for both")
    output = BatchOutput(answers, asked.custom_ids)
    try:
        if len(output.answered) < len(asked.custom_ids):
            make_service = service_maker(model, tokenizer, settings, limits)
            own = None if ray else EngineAnswers(make_service())
            rows = settings.buckets.max_batch_size * (several.bounds[1] if ray else 1)
            _run(own or _answers_on_ray(make_service, settings, limits, several), rows, asked, output)
    finally:
        output.close()
        typer.echo(f"{len(output.answered)} of {len(asked.custom_ids)} requests have their answer in {answers}")
    if output.num_failed:
        print_error(f"{output.num_failed} of the answers are errors: their status_code is not 200")
        raise typer.Exit(2)


def _answers_on_ray(
    make_service: Callable[[], Service], settings: EngineConfig, limits: ServerConfig, several: ReplicaConfig
) -> Answers:
    from graphdecode.server.replicas.batch_answers import ReplicaAnswers
    from graphdecode.server.replicas.cluster import Cluster

    return ReplicaAnswers(Cluster(make_service, settings, limits, several, "calls", application="graphdecode-batch"))


def _run(answers: Answers, rows: int, requests: BatchInput, output: BatchOutput) -> None:
    import asyncio
    import logging

    from tqdm import tqdm

    from graphdecode.server.batch import BatchRun

    logging.basicConfig(format="%(levelname)s: %(message)s")
    began = time.perf_counter()
    total, before = len(requests.custom_ids), len(output.answered)
    with tqdm(total=total, initial=before, desc="answering", unit="request", leave=False, disable=None) as bar:
        batch = BatchRun(answers, requests, output, window=_AHEAD * rows, on_answer=bar.update)
        asyncio.run(batch.run())  # which Ctrl-C cancels
    seconds = time.perf_counter() - began
    STDERR.print(
        f"{total - before} requests in {seconds:.1f} s with loading: {batch.prompt_tokens} tokens of prompts, "
        f"{batch.completion_tokens} generated",
        highlight=False,
        soft_wrap=True,
    )
