"""How much room a run at the shell takes: no more than its prompts and answers can fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphdecode.config import EngineConfig


def fitted(
    settings: EngineConfig, prompt_lengths: Sequence[int], max_tokens: int | None, *, answers: int, trained_length: int
) -> EngineConfig:
    """Return the settings with the capacity that some prompts need, which is never above what they allow.

    Args:
        settings: rows, lengths and buckets at most.
        prompt_lengths: tokens of each prompt, at least one prompt.
        max_tokens: of each answer; None means that an answer may be as long as there is room.
        answers: of all prompts together.
        trained_length: tokens of a sequence that the model was trained for.
    """
    buckets = settings.buckets
    rows, length = min(answers, buckets.max_batch_size), min(buckets.max_sequence_length, trained_length)
    if max_tokens is not None:
        length = min(length, max(max(prompt_lengths) + max_tokens, 1))
    sizes = buckets.batch_sizes
    if not isinstance(sizes, str):
        rows = buckets.ladder.bucket_for(rows)  # of the buckets that were chosen, the one that would run
        sizes = [size for size in buckets.ladder if size <= rows]
    fitting = replace(buckets, max_batch_size=rows, max_sequence_length=length, batch_sizes=sizes)
    return replace(settings, buckets=fitting)
