"""What the commands share that answer requests in OpenAI's form."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from graphdecode.cli.checkpoint import find_checkpoint
from graphdecode.cli.options import STDERR
from graphdecode.config import EngineConfig, ReplicaConfig, ServerConfig
from graphdecode.errors import ArgumentError

if TYPE_CHECKING:
    from graphdecode.server.service import Service

_NEEDED = {
    "serve": ("pydantic", "starlette", "uvicorn", "prometheus_client"),
    "ray": ("ray", "aiohttp"),
}


def check_extra(doing: str, extra: str = "serve") -> None:
    """Refuse to go on without the packages of an extra.

    Args:
        doing: what needs them, for the message.
        extra: of this package.

    Raises:
        ArgumentError: one is missing.
    """
    missing = [name for name in _NEEDED[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f"{doing} needs {', '.join(missing)}: pip install 'graphdecode[{extra}]'")


def service_maker(
    model: str, tokenizer: str | None, settings: EngineConfig, limits: ServerConfig
) -> Callable[[], Service]:
    """Return what makes the service of a model, which is yet to be started; another process can be sent it.

    Args:
        model: as it was asked for.
        tokenizer: to take in the place of its own, or None.
        settings: of the engine.
        limits: of the server.

    Raises:
        ArgumentError: there is no such model, or it cannot be loaded so.
    """
    from graphdecode import __version__
    from graphdecode.models import generation_defaults
    from graphdecode.server.service import Service
    from graphdecode.text.chat import read_template, render_chat

    checkpoint = find_checkpoint(model, tokenizer, settings)
    if limits.chat_template is not None:
        checkpoint.tokenizer.chat_template = read_template(Path(limits.chat_template).expanduser())
        render_chat(checkpoint.tokenizer, [{"role": "user", "content": "Hello"}])  # what is no template is said now
    return partial(
        Service,
        checkpoint.path,
        limits.served_model_name or (Path(model).name if Path(model).exists() else model),
        checkpoint.tokenizer,
        generation_defaults(checkpoint.path),
        settings,
        limits,
        version=__version__,
        progress=STDERR.is_terminal,
    )


def prepare_ray(doing: str, several: ReplicaConfig) -> None:
    """See that Ray is there, and set what it looks at while it is imported.

    Args:
        doing: what needs it, for the message.
        several: the replicas; without an address they are on a Ray of this machine, which nobody else shall reach.

    Raises:
        ArgumentError: it is missing.
    """
    check_extra(doing, "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    if several.ray_address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # it listens on the loopback interface alone
        os.environ.setdefault("RAY_worker_niceness", "0")  # engines are no work for the background


def sharing(settings: EngineConfig, several: ReplicaConfig) -> EngineConfig:
    """Return the settings of each of several engines on one machine: on a CPU they share its memory.

    Args:
        settings: of one engine that has the machine for itself.
        several: how many there are at most, and whether all are on this machine.
    """
    import torch

    on_gpus = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if on_gpus or several.ray_address is not None:
        return settings
    fraction = settings.buckets.memory_fraction / several.bounds[1]
    return replace(settings, buckets=settings.buckets.with_limits(memory_fraction=fraction))
