"""Prompts, chunk by chunk: many tokens of some rows in one eager pass, into the same cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from graphdecode.attention import TokenByTokenAttention
from graphdecode.buffers import Slot, StepBuffers
from graphdecode.cache import fill_page_row
from graphdecode.engine.prompt_scoring import PromptScoring
from graphdecode.engine.steps import StepLogprobs
from graphdecode.engine.steps.decode import decode_attention_of
from graphdecode.engine.steps.step import StepSetting

_CHUNKS = "chunks"  # the staging block
_DUMMY_TOKEN = 1
_ALIGNED_ROWS = 4  # so many int32 are 16 bytes: kernels that begin there are the ones that begin at 0


@dataclass(frozen=True)
class PromptChunk:
    """Some tokens of one sequence, to be computed.

    Attributes:
        token_ids: of the chunk.
        start: tokens of the sequence that are in the cache already.
        pages: of the cache, in order, with room for these.
        scored: the tokens that follow those of the chunk, one for each, where their log-probabilities are wanted.
        num_logprobs: most likely tokens that are wanted beside them.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    scored: Sequence[int] = ()
    num_logprobs: int = 0


class Prefill:
    """Computes keys and values of prompts; logits only to score a prompt, for its last token is fed to a decode step.

    Args:
        setting: model, caches and capacity.
        max_tokens: of all chunks of a pass together.
        follow: is given the tokens of each pass behind it, as the model's `prefill` was; None: nobody.
    """

    def __init__(self, setting: StepSetting, max_tokens: int, *, follow: Callable[..., None] | None = None) -> None:
        self._follow = follow
        self.max_tokens = max_tokens
        self._model = setting.model
        self._caches = setting.caches
        self._trash_page = setting.trash_page
        self._page_size = setting.page_size
        rows = setting.config.max_batch_size
        self._buffers = StepBuffers(
            [
                Slot("tokens", (max_tokens,), torch.int64, staged=_CHUNKS),
                Slot("rows", (max_tokens,), torch.int32, staged=_CHUNKS),
                Slot("positions", (max_tokens,), torch.int32, staged=_CHUNKS),
                Slot("live_tokens", (1,), torch.int32, staged=_CHUNKS),
                Slot("cu_seqlens_q", ("batch+1",), torch.int32, staged=_CHUNKS),
                Slot("cu_seqlens_kv", ("batch+1",), torch.int32, staged=_CHUNKS),
                Slot(
                    "page_table",
                    ("batch", setting.max_pages_per_row),
                    torch.int32,
                    pad=self._trash_page,
                    staged=_CHUNKS,
                ),
            ],
            max_batch_size=min(rows, max_tokens),
            device=self._model.device,
        )
        self._scoring = PromptScoring(setting.sampling_capacity.max_logprobs, self._model)
        self._attention = None
        if setting.batch_invariant:
            # a CPU's attention has no workspace that grows with the rows
            at_once = -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS if self._model.device.type == "cuda" else max_tokens
            self._attention = TokenByTokenAttention(decode_attention_of(setting, at_once, batch_invariant=True))

    def warm_up(self) -> None:
        """Run passes of 1, 2, 4, ... tokens up to the largest, into the trash page: what they compile is ready then."""
        longest = self._buffers.page_table.shape[1] * self._page_size
        most = min(self.max_tokens, longest * self._buffers.max_batch_size)
        for tokens in [*(2**power for power in range((most - 1).bit_length())), most]:
            lengths = [min(longest, tokens - begin) for begin in range(0, tokens, longest)]
            self.run([PromptChunk([_DUMMY_TOKEN] * length, 0, ()) for length in lengths])

    def run(self, chunks: Sequence[PromptChunk]) -> list[StepLogprobs | None]:
        """Compute the keys and values of some chunks in one pass; return the log-probabilities that each wants."""
        staged = self._buffers.staging(_CHUNKS)
        end = 0
        for row, chunk in enumerate(chunks):
            length = len(chunk.token_ids)
            span, cached = slice(end, end + length), chunk.start + length
            staged["tokens"][span] = chunk.token_ids
            staged["rows"][span] = row
            staged["positions"][span] = np.arange(chunk.start, cached, dtype=np.int32)
            end += length
            staged["cu_seqlens_q"][row + 1] = end
            staged["cu_seqlens_kv"][row + 1] = staged["cu_seqlens_kv"][row] + cached
            fill_page_row(staged["page_table"][row], chunk.pages, self._trash_page)
        staged["live_tokens"][0] = end
        self._buffers.upload(_CHUNKS, len(chunks))
        batch = self._buffers.narrow(len(chunks))
        tokens = (batch.tokens[:end], batch.rows[:end], batch.positions[:end], batch.live_tokens)
        where = (batch.cu_seqlens_q, batch.cu_seqlens_kv, batch.page_table)
        stream = self._model.prefill(*tokens, *where, self._caches, self._attention)
        found: list[StepLogprobs | None] = []
        end = 0
        for chunk in chunks:
            begin, end = end, end + len(chunk.token_ids)
            logits = partial(self._model.logits, stream)
            found.append(self._scoring.run(logits, begin, chunk.scored, chunk.num_logprobs) if chunk.scored else None)
        if self._follow is not None:
            self._follow(*tokens, *where)
        return found
