"""Answers as JSON and as server-sent events, written by hand: this is what the server does for each token."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def as_json(data: Any) -> bytes:
    """Return what goes into a response."""
    return _dumps(data).encode("utf-8", "replace")


def event(data: Any) -> bytes:
    """Return one event."""
    return b"data: " + as_json(data) + b"\n\n"
