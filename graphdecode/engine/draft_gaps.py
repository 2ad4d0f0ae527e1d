"""What a source of drafts has missed: the tokens that steps without drafts fed, to be seen before the next drafts."""

from __future__ import annotations

from collections.abc import Iterable

from graphdecode.cache import PagedKVCache
from graphdecode.engine.prefill import PromptChunk
from graphdecode.engine.sequence import Sequence


def draft_gaps(sequences: Iterable[Sequence], cache: PagedKVCache, max_tokens: int) -> list[list[PromptChunk]]:
    """Return the chunks that bring a source up to date, in passes.

    One token that is missing is no gap: drafting begins with the last two.

    Args:
        sequences: about to draft, of which all tokens are known here.
        cache: theirs.
        max_tokens: of a pass.
    """
    passes: list[list[PromptChunk]] = []
    room = 0
    for sequence in sequences:
        if sequence.drafted_length >= sequence.cached_length - 1:
            continue
        pages = cache.pages_of(sequence.request_id)
        while sequence.drafted_length < sequence.cached_length:
            if room == 0:
                passes.append([])
                room = max_tokens
            start = sequence.drafted_length
            end = min(start + room, sequence.cached_length)
            passes[-1].append(PromptChunk(sequence.token_ids[start:end], start, pages))
            room -= end - start
            sequence.drafted_length = end
    return passes
