"""`graphdecode serve` with several models, each loaded when a request names it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from socket import socket

import torch

from graphdecode import __version__
from graphdecode.cli.checkpoint import ModelPaths
from graphdecode.cli.options import print_message
from graphdecode.config import EngineConfig, ServerConfig
from graphdecode.server.app import make_app
from graphdecode.server.door import make_door
from graphdecode.server.model_pool import ModelPool, PooledModel
from graphdecode.server.run import run
from graphdecode.server.service import Service, api_keys_of


async def serve_models(
    paths: Mapping[str, ModelPaths],
    makers: Mapping[str, Callable[[EngineConfig, ServerConfig], Service]],
    settings: EngineConfig,
    server_config: ServerConfig,
    bound: socket,
) -> None:
    """Serve models by their names until SIGTERM or Ctrl-C; those that are loaded share the memory evenly."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("graphdecode.server").setLevel(logging.INFO)
    count = min(server_config.max_models, len(paths))
    settings = settings.with_settings(memory_fraction=settings.buckets.memory_fraction / count)
    on_host = settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available())
    models = [
        PooledModel(name, paths[name].model, partial(make, settings, server_config), on_host)
        for name, make in makers.items()
    ]
    pool = ModelPool(models, server_config, partial(make_app, is_alone=False, is_guarded=False))
    door = make_door(pool, api_keys_of(server_config), __version__)

    def ready() -> None:
        print_message(f"serving {','.join(paths)} on http://{server_config.host}:{bound.getsockname()[1]}")
        print_message(f"a model is loaded when a request names it; at most {count} at a time")

    await run(pool, lambda: door, bound, ready)
