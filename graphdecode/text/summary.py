"""One line with the speed of a run."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions
from graphdecode.text.llm import LLM
from graphdecode.text.outputs import RequestOutput


class RunSummary:
    """Measures a run from its construction on; `load_seconds` None is the load time of the `LLM`."""

    def __init__(self, llm: LLM, load_seconds: float | None = None) -> None:
        self._llm = llm
        self._load_seconds = llm.load_seconds if load_seconds is None else load_seconds
        self._began = time.perf_counter()
        self._tokens = llm.stats.generated_tokens
        self._buckets = Counter(llm.stats.bucket_steps)

    def line(self, outputs: list[RequestOutput]) -> str:
        """Return time to load, tokens/s, first token, ms per token, buckets replayed, padding, backend and kernels."""
        stats = self._llm.stats
        seconds = time.perf_counter() - self._began
        tokens = stats.generated_tokens - self._tokens
        first = [t for output in outputs if (t := output.metrics.time_to_first_token) is not None]
        parts = [f"ready after {self._load_seconds:.2f} s"]
        parts.append(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")
        if first:
            parts.append(f"first token after {1000 * float(np.median(first)):.1f} ms")
        parts += stats.step_times()
        replayed = stats.bucket_steps - self._buckets
        parts.append("buckets " + (", ".join(f"{b} x{replayed[b]}" for b in sorted(replayed)) or "none"))
        parts.append(f"padding {100 * stats.padding_share:.0f}%")
        parts += stats.drafted()
        model = self._llm.model
        parts.append(f"{self._llm.graphs.backend} backend on {model.device.type}")
        reason = None if model.device.type == "cuda" else native.why_not()
        kernels = "Triton kernels" if model.device.type == "cuda" else f"compiled kernels ({instructions().name})"
        parts.append(kernels if reason is None else f"torch's operators ({' '.join(reason.split())})")
        return "; ".join(parts)
