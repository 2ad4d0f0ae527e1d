"""FlashInfer's module path of the same name: `from graphdecode.decode import ...`."""

from typing import Any

from graphdecode.errors import flashinfer_hint
from graphdecode.surfaces.flashinfer import *  # noqa: F403


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{flashinfer_hint(name)}")
