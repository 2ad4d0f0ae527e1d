"""`GET /live`: what the page shows of the machine; nothing of anybody's text is in it."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from graphdecode.server.service import Service


def live(service: Service) -> dict[str, Any]:
    """Return counts since the start, medians over what came last, and how answers are sampled; times are in seconds.

    There is a floor only below the step: one above was measured while other work took the bandwidth.
    """
    metrics, defaults = service.metrics, service.sampling_defaults
    vitals, ready = metrics.vitals, service.client.ready
    step = median(metrics.last_steps) if metrics.last_steps else None
    floor = None if ready is None or step is None else ready.floor_seconds
    told = {
        "time": time.monotonic(),
        "model": service.model_name,
        "has_chat_template": bool(service.tokenizer.chat_template),
        "buckets": [] if ready is None else ready.buckets,
        "sampling": {name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k")},
        "floor_seconds": None if floor is None or step is None or floor > step else floor,
        "step_seconds": step,
        "first_token_seconds": median(metrics.last_first_tokens) if metrics.last_first_tokens else None,
        "generated_tokens": metrics.generated_tokens,
        "restarts": service.client.restarts,
    }
    names = ("running", "waiting", "used_pages", "total_pages", "preemptions", "bucket_steps", "batch_sizes")
    return told | {name: getattr(vitals, name) if vitals else ({} if name in names[-2:] else 0) for name in names}
