"""What the commands share that answer requests in OpenAI's form."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from graphdecode.cli.checkpoint import find_checkpoint
from graphdecode.cli.options import STDERR
from graphdecode.config import EngineConfig, ServerConfig
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

    checkpoint = find_checkpoint(model, tokenizer, settings)
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
