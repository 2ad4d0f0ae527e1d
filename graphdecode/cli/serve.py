"""`graphdecode serve`: OpenAI's HTTP surface."""

from __future__ import annotations

import json
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
    settings_of,
)
from graphdecode.cli.service import check_extra, prepare_ray, service_maker, sharing
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphdecode.config import EngineConfig, ReplicaConfig, ServerConfig
    from graphdecode.server.service import Service


def serve(
    model: ModelOption = "demo",
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; left out: the configuration's.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Left out: the configuration's.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Clients of /v1 must bring it as a bearer token; may be repeated.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A template in Jinja; left out: the model's own.")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Requests side by side at most; left out: the configuration's.")
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
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may call the server; may be repeated.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name that clients may call the server by; may be repeated.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Engines behind one address, on Ray; left out: the configuration's.")
    ] = None,
    autoscale: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="So many engines as the load needs, on Ray.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A cluster of Ray to join; left out: a Ray on this machine alone.")
    ] = None,
    direct: Annotated[bool, typer.Option("--direct", help="Take answers from the engines past Ray's proxy.")] = False,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log prompts and answers.")] = False,
) -> None:
    """Serve a model to OpenAI's clients, until SIGTERM or Ctrl-C; running answers are finished first."""
    check_extra("serving")
    from graphdecode.config import ReplicaConfig, ServerConfig, load_replica_config, load_server_config

    settings = settings_of(
        config, device=device, dtype=dtype, quantize=quantize, kv_cache_dtype=kv_cache_dtype, speculation=speculate,
        tensor_parallel_size=tensor_parallel, model_impl=model_impl, trust_remote_code=trust_remote_code or None,
        load_modules=load_module,
    )  # fmt: skip
    settings = limited(settings, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)
    options = {
        "host": host,
        "port": port,
        "api_keys": api_key,
        "served_model_name": served_model_name,
        "chat_template": None if chat_template is None else str(chat_template),
        "cors_origins": cors_origin,
        "allowed_hosts": allowed_host,
        "log_requests": log_requests or None,
    }
    limits = load_server_config(config) if config is not None else ServerConfig()
    limits = limits.with_settings(**{name: value for name, value in options.items() if value is not None})
    several = load_replica_config(config) if config is not None else ReplicaConfig()
    scale = {"count": replicas, "autoscale": autoscale, "ray_address": ray_address, "direct": direct or None}
    several = several.with_settings(**{name: value for name, value in scale.items() if value is not None})
    if several.wanted:
        prepare_ray("replicas", several)
        settings = sharing(settings, several)
    elif several.ray_address is not None or several.direct:
        raise ArgumentError("ray_address and direct are for several engines: --replicas or --autoscale says how many")
    _run(service_maker(model, tokenizer, settings, limits), settings, limits, several)


def _run(
    make_service: Callable[[], Service], settings: EngineConfig, limits: ServerConfig, several: ReplicaConfig
) -> None:
    import asyncio
    import logging

    from graphdecode.server.app import make_app
    from graphdecode.server.run import bind, run

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("graphdecode.server").setLevel(logging.INFO)
    if several.wanted and not several.direct:
        _run_behind_proxies(make_service, settings, limits, several)
        return
    bound = bind(limits.host, limits.port)
    service, address = make_service(), f"http://{limits.host}:{bound.getsockname()[1]}"
    if several.wanted:
        from graphdecode.server.replicas.cluster import Cluster

        cluster = Cluster(make_service, settings, limits, several, "direct")
        asyncio.run(run(cluster, cluster.app, bound, lambda: _say_ready(service, address)))
    else:
        asyncio.run(run(service, lambda: make_app(service), bound, lambda: _say_ready(service, address)))


def _run_behind_proxies(
    make_service: Callable[[], Service], settings: EngineConfig, limits: ServerConfig, several: ReplicaConfig
) -> None:
    import asyncio

    from graphdecode.server.replicas.cluster import Cluster
    from graphdecode.server.run import bind

    if several.ray_address is None or limits.port == 0:  # the proxies of a cluster may listen on their port already
        with bind(limits.host, limits.port) as free:
            limits = limits.with_settings(port=free.getsockname()[1])
    service, address = make_service(), f"http://{limits.host}:{limits.port}"
    asyncio.run(Cluster(make_service, settings, limits, several, "proxy").run(lambda: _say_ready(service, address)))


def _say_ready(service: Service, address: str) -> None:
    STDERR.print(f"serving {service.model_name} on {address}", highlight=False, soft_wrap=True)
    has_template = bool(service.tokenizer.chat_template)
    for line in _how_to_try(address, has_template=has_template, guarded=bool(service.api_keys)):
        STDERR.print(line, highlight=False, soft_wrap=True, markup=False)


def _how_to_try(address: str, *, has_template: bool, guarded: bool) -> list[str]:
    path, body = "completions", {"prompt": "417+385=", "max_tokens": 16}
    if has_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    key = "-H 'Authorization: Bearer KEY' " if guarded else ""
    return [f"try: {address} in a browser, or", f"curl {address}/v1/{path} {key}--json '{json.dumps(body)}'"]
