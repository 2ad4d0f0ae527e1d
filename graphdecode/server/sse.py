"""Answers as server-sent events, written by hand: this is what the server does for each token."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: Any) -> bytes:
    """Return one event."""
    return b"data: " + _dumps(data).encode("utf-8", "replace") + b"\n\n"
