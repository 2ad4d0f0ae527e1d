"""`graphdecode batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphdecode.cli.capacity import limited
from graphdecode.cli.options import (
    STDERR,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    KvCacheDtypeOption,
    LoadModuleOption,
    MaxSequenceLengthOption,
    ModelImplOption,
    ModelOption,
    QuantizeOption,
    SpeculateOption,
    TensorParallelOption,
    TokenizerOption,
    TrustRemoteCodeOption,
    print_error,
    settings_of,
)
from graphdecode.cli.service import check_extra, prepare_ray, service_maker, sharing
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphdecode.config import EngineConfig, ReplicaConfig, ServerConfig
    from graphdecode.server.batch import Answers
    from graphdecode.server.batch_lines import BatchInput, BatchOutput
    from graphdecode.server.service import Service

_AHEAD = 2  # requests under way for each row: a row that is free finds its next request there
_ENDLESS = 2**31 - 1


def batch(
    requests: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests, one a line, as OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Answers are added to it, one a line.")],
    model: ModelOption = "demo",
    config: ConfigOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="What the requests call the model.")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Answers side by side at most; left out: the configuration's.")
    ] = None,
    max_sequence_length: MaxSequenceLengthOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    speculate: SpeculateOption = None,
    tensor_parallel: TensorParallelOption = None,
    model_impl: ModelImplOption = None,
    trust_remote_code: TrustRemoteCodeOption = False,
    load_module: LoadModuleOption = None,
    tokenizer: TokenizerOption = None,
    ray: Annotated[bool, typer.Option("--ray", help="Answer with several engines, on Ray.")] = False,
    replicas: Annotated[
        int | None, typer.Option(help="Engines, with --ray; left out: the configuration's, or 1.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A cluster of Ray to join; left out: a Ray on this machine alone.")
    ] = None,
) -> None:
    """Answer a file of requests; the same command goes on where an earlier one was ended.

    A request that cannot be served has its line too, with the error that a server would answer; the exit code is 2
    then.
    """
    check_extra("a batch")
    from graphdecode.config import ReplicaConfig, ServerConfig, load_replica_config, load_server_config
    from graphdecode.server.batch import EngineAnswers
    from graphdecode.server.batch_lines import BatchInput, BatchOutput

    settings = settings_of(
        config, device=device, dtype=dtype, quantize=quantize, kv_cache_dtype=kv_cache_dtype, speculation=speculate,
        tensor_parallel_size=tensor_parallel, model_impl=model_impl, trust_remote_code=trust_remote_code or None,
        load_modules=load_module,
    )  # fmt: skip
    settings = limited(settings, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)
    limits = load_server_config(config) if config is not None else ServerConfig()
    # nobody else waits here: what a server refuses for their sake is answered in its turn
    limits = limits.with_settings(max_waiting=_ENDLESS, request_timeout_s=0.0, otlp_traces_endpoint=None)
    if served_model_name is not None:
        limits = limits.with_settings(served_model_name=served_model_name)
    several = load_replica_config(config) if config is not None else ReplicaConfig()
    scale = {"count": replicas, "ray_address": ray_address}
    several = several.with_settings(**{name: value for name, value in scale.items() if value is not None})
    if ray:
        prepare_ray("a batch with --ray", several)
        settings = sharing(settings, several)
    elif replicas is not None or ray_address is not None:
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
