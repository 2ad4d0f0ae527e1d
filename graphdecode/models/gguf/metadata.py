"""The metadata of a GGUF file, asked by the names that its architecture puts before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphdecode.models.config import UnsupportedModelError


class Metadata:
    """The fields of one architecture.

    Args:
        fields: all of a file's.

    Attributes:
        architecture: GGUF's name of it.

    Raises:
        UnsupportedModelError: no architecture is named.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._all = fields
        self.architecture = self.whole("general.architecture", str)

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a number of the architecture, such as "embedding_length"; one for all layers where there are many.

        Raises:
            UnsupportedModelError: it is missing and has no default, is no number, or differs between layers.
        """
        return self.whole(f"{self.architecture}.{name}", (int, float), default)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a number that is an integer >= 1.

        Raises:
            UnsupportedModelError: it is none, or see `number`.
        """
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"{self.architecture}.{name} must be an integer >= 1, got {_shown(value)}")
        return value

    def has(self, name: str) -> bool:
        """Whether the architecture has the field."""
        return f"{self.architecture}.{name}" in self._all

    def text(self, name: str, default: str) -> str:
        """Return a text of the architecture."""
        return self.whole(f"{self.architecture}.{name}", str, default)

    def layers(self, name: str) -> list[Any]:
        """Return what the architecture has for each layer; [] where it is one value for all, or none."""
        value = self._all.get(f"{self.architecture}.{name}")
        return value.tolist() if isinstance(value, np.ndarray) else []

    def whole(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a field by its whole name."""
        value = self._all.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None:
            raise UnsupportedModelError(f"the field {key} is missing")
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise UnsupportedModelError(f"{key} must be {kinds}, got {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
