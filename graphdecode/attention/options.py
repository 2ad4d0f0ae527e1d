"""What one layer's attention does beside scoring queries against keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionOptions(NamedTuple):
    """Options that may differ from layer to layer; the same for prompts and for decode steps.

    Attributes:
        sm_scale: multiplies the logits; None: 1 / sqrt(head_dim).
        window_left: keeps the newest window_left + 1 keys of each query where it is >= 0.
        logits_soft_cap: caps the logits, `cap * tanh(logit / cap)`, where it is > 0.
        sinks: float32 [num_qo_heads], a logit of each head that takes weight and has no value; None: no sinks.
    """

    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: Tensor | None = None
