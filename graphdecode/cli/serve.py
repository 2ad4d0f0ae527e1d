"""`graphdecode serve` and `graphdecode batch`: OpenAI's requests over HTTP, or from a file."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from graphdecode.cli.checkpoint import ModelPaths, check_pages, find_model, load_checkpoint, models_named
from graphdecode.cli.options import (
    MODEL_OPTIONS,
    ConfigOption,
    ModelOption,
    ModelsOption,
    TokenizerOption,
    ctrl_c_blocked,
    print_error,
    print_message,
    settings_of,
    stderr_console,
    with_options,
    with_settings,
)
from graphdecode.config import EngineConfig, ReplicaConfig, ServerConfig, load_replica_config, load_server_config
from graphdecode.errors import ArgumentError
from graphdecode.server import bind, start_engine_process

if TYPE_CHECKING:
    from graphdecode.child import ConnectedChild
    from graphdecode.server.batch import BatchInput, BatchOutput
    from graphdecode.server.service import Service

_Result = TypeVar("_Result")

_NEEDED = {"serve": ("pydantic", "starlette", "uvicorn", "prometheus_client"), "ray": ("ray", "aiohttp")}
_SERVER_OPTIONS = (
    "host",
    "port",
    "api_keys",
    "served_model_name",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "cors_origins",
    "allowed_hosts",
    "log_requests",
    "lora_modules",
    "lora_folder",
    "root_path",
    "max_models",
    "keep_alive",
)
_OF_ONE_MODEL = ("served_model_name", "chat_template", "lora_modules", "lora_folder", "dev_endpoints")
_IN_FLIGHT_PER_ROW = 2  # requests in flight for each row
_UNBOUNDED = 2**31 - 1


def check_extra(doing: str, extra: str = "serve") -> None:
    """Raise ArgumentError if a package of an extra is missing."""
    missing = [name for name in _NEEDED[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f"{doing} needs {', '.join(missing)}: pip install 'graphdecode[{extra}]'")


def service_maker(
    model: str, paths: ModelPaths, settings: EngineConfig, server_config: ServerConfig
) -> Callable[[], Service]:
    """Return a picklable factory of a model's service; for errors see `load_checkpoint`."""
    with ctrl_c_blocked():
        from graphdecode import __version__
        from graphdecode.models import generation_defaults
        from graphdecode.server.service import Service
        from graphdecode.text.chat import check_parsers, read_template, render_chat

    check_parsers(server_config.tool_call_parser, server_config.reasoning_parser)
    checkpoint = load_checkpoint(paths, settings)
    check_pages(settings, min(settings.buckets.max_sequence_length, checkpoint.trained_length))
    if server_config.chat_template is not None:
        checkpoint.tokenizer.chat_template = read_template(Path(server_config.chat_template).expanduser())
        render_chat(checkpoint.tokenizer, [{"role": "user", "content": "Hello"}])  # raises if it is not a template
    return partial(
        Service,
        checkpoint.path,
        server_config.served_model_name or (Path(model).name if Path(model).exists() else model),
        checkpoint.tokenizer,
        generation_defaults(checkpoint.path),
        settings,
        server_config,
        version=__version__,
        progress=stderr_console().is_terminal,
    )


def _create_service(name: str, paths: ModelPaths, settings: EngineConfig, server_config: ServerConfig) -> Service:
    return service_maker(name, paths, settings, replace(server_config, served_model_name=name))()


def check_settings_of_several(
    several: Collection[str], tokenizer: str | None, server_config: ServerConfig, replicas: ReplicaConfig
) -> None:
    """Raise ArgumentError for a setting that only one model can have."""
    options = {"tokenizer": tokenizer, "replicas": replicas.enabled or None}
    options |= {name: getattr(server_config, name) or None for name in _OF_ONE_MODEL}
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(f"{name} is for one model, and --model gives {len(several)}")


def prepare_ray(doing: str, replicas: ReplicaConfig) -> None:
    """Set the environment that Ray reads at import; raise ArgumentError if it is not installed."""
    check_extra(doing, "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if replicas.ray_address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listens only on the loopback interface
        os.environ.setdefault("RAY_worker_niceness", "0")  # engines are not background work


def settings_per_engine(settings: EngineConfig, replicas: ReplicaConfig) -> EngineConfig:
    """Return the settings of each of several engines; on a CPU they share the machine's memory."""
    import torch

    on_gpus = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if on_gpus or replicas.ray_address is not None:
        return settings
    return settings.with_settings(memory_fraction=settings.buckets.memory_fraction / replicas.bounds[1])


@with_options("serving", (ServerConfig,), *_SERVER_OPTIONS)
@with_options("scale", (ReplicaConfig,), "count", "autoscale", "ray_address", "direct")
@with_settings("max_batch_size", "max_sequence_length", "pooling", *MODEL_OPTIONS)
def serve(
    overrides: dict[str, Any],
    serving: dict[str, Any],
    scale: dict[str, Any],
    model: ModelsOption = ["smollm2"],  # noqa: B006
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Serve models to OpenAI's clients until SIGTERM or Ctrl-C; requests in flight are finished first."""
    check_extra("serving")

    settings = settings_of(config, **overrides)
    server_config, replicas = load_server_config(config, **serving), load_replica_config(config, **scale)
    if (several := models_named(model)) is not None:
        check_settings_of_several(several, tokenizer, server_config, replicas)
        bound = bind(server_config.host, server_config.port)  # before what takes seconds
        from graphdecode.cli.serve_models import serve_models

        makers = {name: partial(_create_service, name, paths) for name, paths in several.items()}
        _run_loop(serve_models(several, makers, settings, server_config, bound))
        return
    (model_name,) = model
    paths = find_model(model_name, tokenizer)
    if replicas.enabled:
        prepare_ray("replicas", replicas)
        if server_config.lora_folder is not None:
            raise ArgumentError(
                "lora_folder: a request would load an adapter in only one of several engines; use lora_modules"
            )
        settings = settings_per_engine(settings, replicas)
    elif replicas.ray_address is not None or replicas.direct:
        raise ArgumentError("ray_address and direct are for several engines: --replicas or --autoscale says how many")
    free = None
    if not replicas.behind_proxies or replicas.ray_address is None or server_config.port == 0:
        free = bind(server_config.host, server_config.port)  # else the proxies of a cluster may have it already
    # its process imports torch while this one does
    engine = None if replicas.enabled else start_engine_process()
    try:
        make_service = service_maker(model_name, paths, settings, server_config)
        _run(make_service, settings, server_config, replicas, free, engine)
    except BaseException:
        if engine is not None:
            engine.process.kill()
        raise


def _run(
    make_service: Callable[[], Service],
    settings: EngineConfig,
    server_config: ServerConfig,
    replicas: ReplicaConfig,
    bound: socket | None,
    engine: ConnectedChild | None,
) -> None:
    import logging

    with ctrl_c_blocked():
        from graphdecode.server.app import make_app
        from graphdecode.server.run import run

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("graphdecode.server").setLevel(logging.INFO)
    if bound is None or replicas.behind_proxies:
        from graphdecode.server.replicas.cluster import Cluster

        if bound is not None:
            with bound:
                server_config = replace(server_config, port=bound.getsockname()[1])
        service = make_service()
        ready = partial(_print_ready, service, f"http://{server_config.host}:{server_config.port}")
        _run_loop(Cluster(make_service, settings, server_config, replicas, "proxy").run(ready))
        return
    service = make_service()
    service.client.prestarted = engine
    ready = partial(_print_ready, service, f"http://{server_config.host}:{bound.getsockname()[1]}")
    if replicas.enabled:
        from graphdecode.server.replicas.cluster import Cluster

        cluster = Cluster(make_service, settings, server_config, replicas, "direct")
        _run_loop(run(cluster, cluster.app, bound, ready))
    else:
        _run_loop(run(service, lambda: make_app(service), bound, ready))


def _run_loop(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine, which Ctrl-C cancels: asyncio arranges that where Python's own handler is in place."""
    import asyncio

    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # it is ignored
        return asyncio.run(main)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return asyncio.run(main)
    finally:
        signal.signal(signal.SIGINT, before)


def _print_ready(service: Service, address: str) -> None:
    print_message(f"serving {service.model_name} on {address}")
    if service.client.ready is not None:  # engines of several replicas have processes of their own
        rules = service.client.rules
        limit = rules.capacity.token_limit
        print_message(
            f"up to {limit} tokens a sequence (a prompt: {limit - 1}), {service.max_batch_size} sequences at a time; "
            f"{rules.length_hint}"
        )
    path, body = "completions", {"prompt": "417+385=", "max_tokens": 16}
    if service.tokenizer.chat_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    key = "-H 'Authorization: Bearer KEY' " if service.api_keys else ""
    print_message(f"try: {address} in a browser, or")
    print_message(f"curl {address}/v1/{path} {key}--json '{json.dumps(body)}'", is_prose=False)  # to be copied


@with_options("serving", (ServerConfig,), "served_model_name", "chat_template", "lora_modules")
@with_options("scale", (ReplicaConfig,), "count", "ray_address")
@with_settings("max_batch_size", "max_sequence_length", *MODEL_OPTIONS)
def batch(
    overrides: dict[str, Any],
    serving: dict[str, Any],
    scale: dict[str, Any],
    requests: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests, one a line, as OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Responses are appended to it, one a line.")],
    model: ModelOption = "smollm2",
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
    ray: Annotated[bool, typer.Option("--ray", help="Use several engines, on Ray.")] = False,
) -> None:
    """Run a file of requests; the same command resumes an interrupted run.

    The line of a request that fails has the error that a server would return; the exit code is 2 then.
    """
    check_extra("a batch")
    settings = settings_of(config, **overrides)
    # no other clients have to be served
    endless = {"max_waiting": _UNBOUNDED, "request_timeout_s": 0.0, "otlp_traces_endpoint": None}
    server_config = load_server_config(config, **endless, **serving)
    replicas = load_replica_config(config, **scale)
    if ray:
        prepare_ray("a batch with --ray", replicas)
        settings = settings_per_engine(settings, replicas)
    elif scale:
        raise ArgumentError("--replicas and --ray-address are for a batch with --ray")
    if not requests.is_file():
        wrong = "is not a file" if requests.exists() else "does not exist"
        raise ArgumentError(f"{requests} {wrong}: a batch needs a file of requests, one a line")
    from graphdecode.server.batch import BatchInput, BatchOutput

    requested = BatchInput(requests, server_config.max_body_bytes)
    if answers.exists() and answers.samefile(requests):
        raise ArgumentError(f"INPUT and OUTPUT must be two files, got {answers} for both")
    output = BatchOutput(answers, requested.custom_ids)
    try:
        if len(output.answered) < len(requested.custom_ids):
            make_service = service_maker(model, find_model(model, tokenizer), settings, server_config)
            _run_all(make_service, settings, server_config, replicas if ray else None, requested, output)
    finally:
        output.close()
        typer.echo(f"{answers} has the responses to {len(output.answered)} of {len(requested.custom_ids)} requests")
    if output.num_failed:
        print_error(f"{output.num_failed} of the responses are errors: their status_code is not 200")
        raise typer.Exit(2)


def _run_all(
    make_service: Callable[[], Service],
    settings: EngineConfig,
    server_config: ServerConfig,
    replicas: ReplicaConfig | None,
    requests: BatchInput,
    output: BatchOutput,
) -> None:
    import logging

    from tqdm import tqdm

    from graphdecode.server.batch import answer_request, run_batch

    logging.basicConfig(format="%(levelname)s: %(message)s")
    window = _IN_FLIGHT_PER_ROW * settings.buckets.max_batch_size
    if replicas is None:
        service = make_service()
        run = partial(run_batch, service, partial(answer_request, service), window=window)
    else:
        from graphdecode.server.replicas.cluster import Cluster

        cluster = Cluster(make_service, settings, server_config, replicas, "calls", application="graphdecode-batch")
        run = partial(run_batch, cluster, cluster.answer, window=window * replicas.bounds[1])
    began = time.perf_counter()
    total, before = len(requests.custom_ids), len(output.answered)
    with tqdm(total=total, initial=before, desc="requests", unit="request", leave=False, disable=None) as bar:
        used = _run_loop(run(requests=requests, output=output, on_response=bar.update))
    seconds = time.perf_counter() - began
    print_message(
        f"{total - before} of {total} requests in {seconds:.1f} s with loading: "
        f"{used['prompt_tokens']} tokens of prompts, {used['completion_tokens']} generated"
    )
