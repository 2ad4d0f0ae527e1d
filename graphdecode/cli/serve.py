"""`graphdecode serve`: OpenAI's HTTP surface."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphdecode.cli.options import (
    OF_A_MODEL,
    STDERR,
    ConfigOption,
    ModelOption,
    TokenizerOption,
    chosen,
    overriding,
    settings_of,
    taking,
)
from graphdecode.cli.service import check_extra, prepare_ray, service_maker, sharing
from graphdecode.config import ReplicaConfig, ServerConfig, load_replica_config, load_server_config
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphdecode.config import EngineConfig
    from graphdecode.server.service import Service


_OF_THE_SERVER = (
    "host",
    "port",
    "api_keys",
    "served_model_name",
    "chat_template",
    "cors_origins",
    "allowed_hosts",
    "log_requests",
)


@taking("serving", chosen(ServerConfig, *_OF_THE_SERVER))
@taking("scale", chosen(ReplicaConfig, "count", "autoscale", "ray_address", "direct"))
@overriding("max_batch_size", "max_sequence_length", *OF_A_MODEL)
def serve(
    overrides: dict[str, Any],
    serving: dict[str, Any],
    scale: dict[str, Any],
    model: ModelOption = "demo",
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Serve a model to OpenAI's clients, until SIGTERM or Ctrl-C; running answers are finished first."""
    check_extra("serving")

    settings = settings_of(config, **overrides)
    limits, several = load_server_config(config, **serving), load_replica_config(config, **scale)
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
            limits = replace(limits, port=free.getsockname()[1])
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
