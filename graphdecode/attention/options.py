"""What one layer's attention does beside scoring queries against keys."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class HeadTurn(NamedTuple):
    """What is done to the heads of queries and keys before they meet.

    Attributes:
        cos_sin: float32 [max positions, 2, rot/2], cosines and sines by position.
        q_norm: fp32 [head_dim], weight of each query head's RMSNorm, or [num_qo_heads * head_dim], of all of them
            together; None: no norm.
        k_norm: the same of the keys.
        eps: of these norms.
    """

    cos_sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


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

    def scale_of(self, head_dim: int) -> float:
        """Return what multiplies the logits of heads of so many channels."""
        return 1.0 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale
