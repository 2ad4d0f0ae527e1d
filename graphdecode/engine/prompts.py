"""Prefill: chunks of prompts, many tokens of several rows in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from graphdecode.attention import TokenByTokenAttention
from graphdecode.buckets import StepShape
from graphdecode.buffers import SlotField, StepBuffers, StepSlots
from graphdecode.cache import fill_page_row
from graphdecode.engine.steps import StepLogprobs
from graphdecode.engine.steps.decode import adopt_model, decode_attention_of, or_null
from graphdecode.engine.steps.step import SequenceMemory, StepSetting, prompt_shapes
from graphdecode.kernels.sampling.logprobs import token_logprobs
from graphdecode.kernels.sampling.sampling_slots import FLAG_LOGPROBS, LogprobOutputs
from graphdecode.models import Chunks

_CHUNKS = "chunks"  # the staging block
_DUMMY_TOKEN = 1
_PROBED_TOKENS = 16
_SCORED_TOKENS = 128  # logits in memory at a time while scoring
_ALIGNED_ROWS = 4  # int32 in 16 bytes: slices at multiples of it use the same kernels as slices at 0


@dataclass(frozen=True)
class PromptChunk:
    """Some tokens of one sequence, to be computed."""

    token_ids: Sequence[int]
    start: int  # tokens of the sequence that are already cached
    memory: SequenceMemory  # includes pages for these tokens
    scored: Sequence[int] = ()  # the successor of each token, if log-probabilities are requested
    num_logprobs: int = 0  # number of top tokens for each
    pools: bool = False  # whether its hidden states are pooled

    @property
    def end(self) -> int:
        """Tokens of the sequence that are cached afterwards."""
        return self.start + len(self.token_ids)


@dataclass(kw_only=True)
class PromptSlots(StepSlots):
    """Inputs of a prefill pass: t tokens of b rows; see `Chunks`."""

    tokens: Annotated[Tensor, SlotField(("batch",), torch.int64, _DUMMY_TOKEN, _CHUNKS)]  # int64 [t]
    rows: Annotated[Tensor, SlotField(("batch",), torch.int32, staged=_CHUNKS)]  # int32 [t]
    positions: Annotated[Tensor, SlotField(("batch",), torch.int32, staged=_CHUNKS)]  # int32 [t]
    cu_seqlens_q: Annotated[Tensor, SlotField(("rows+1",), torch.int32, staged=_CHUNKS)]  # int32 [b + 1]
    cu_seqlens_kv: Annotated[Tensor, SlotField(("rows+1",), torch.int32, staged=_CHUNKS)]  # int32 [b + 1]
    state_rows: Annotated[Tensor, SlotField(("rows",), torch.int32, "null_state_row", _CHUNKS)]  # int32 [b]
    page_table: Annotated[Tensor, SlotField(("rows", "pages"), torch.int32, "null_page", _CHUNKS)]  # int32 [b, pages]
    # int32 [b], int32 [b, pages]; None: the model has no adapters, no layers with rolling pages
    adapters: Annotated[Tensor | None, SlotField(("rows",), torch.int32, "no_adapter", _CHUNKS)] = None
    rolling_table: Annotated[Tensor | None, SlotField(("rows", "pages"), torch.int32, "null_rolling_page", _CHUNKS)] = (
        None
    )
    # float32 [b, hidden], the last token's hidden state, or the sum of all; None: the model gives none
    pooled: Annotated[Tensor | None, SlotField(("rows", "hidden"), torch.float32)] = None


class Prompts:
    """Computes keys and values of prompts, and logits only to score them: a decode step feeds the last token.

    Attributes:
        buffers: slots of a pass; their rows are tokens.
        shapes: shapes that have graphs; none with `batch_invariant`, which attends token by token.
    """

    def __init__(self, setting: StepSetting) -> None:
        self._setting, self._model, self._caches = setting, setting.model, setting.caches
        # a model has rotary angles for its longest sequence alone, which may end within a page
        self._longest = min(setting.config.max_sequence_length, setting.model.config.max_position_embeddings)
        self.max_tokens = max_tokens = setting.prefill_tokens
        self._rows = rows = min(setting.config.max_batch_size, max_tokens)
        device = self._model.device
        sizes = setting.slot_sizes | {"rows": rows, "rows+1": rows + 1, "hidden": self._model.hidden_size}
        self.buffers = StepBuffers(PromptSlots, max_batch_size=max_tokens, device=device, sizes=sizes)
        self._most_logprobs = min(setting.config.max_logprobs, self._model.config.vocab_size)
        self._attention = None
        self.shapes: list[StepShape] = []
        if setting.batch_invariant:
            batch_rows = setting.config.max_batch_size
            # a CPU's attention has no workspace that grows with the rows
            attention_rows = -(-batch_rows // _ALIGNED_ROWS) * _ALIGNED_ROWS if device.type == "cuda" else max_tokens
            self._attention = TokenByTokenAttention(decode_attention_of(setting, attention_rows, batch_invariant=True))
        else:
            adopt_model(self.buffers, self._model, self._caches)
            if setting.config.backend != "eager":
                self.shapes = prompt_shapes(device.type, max_tokens, self._model.config.width)
                if self._model.hidden_size is not None:
                    self.shapes += [shape._replace(pools=True) for shape in self.shapes]

    def chunks(self, shape: StepShape, rows: int | None = None) -> Chunks:
        """Return the slots, narrowed to a shape's tokens and some chunks (None: all); the last may be padding."""
        slots, tokens, rows = self.buffers.all_rows, shape.prompt_tokens, self._rows if rows is None else rows
        rolling, adapters = slots.rolling_table, slots.adapters if shape.has_adapters else None
        return Chunks(
            slots.tokens[:tokens],
            slots.rows[:tokens],
            slots.positions[:tokens],
            slots.live_rows,
            slots.cu_seqlens_q[: rows + 1],
            slots.cu_seqlens_kv[: rows + 1],
            slots.page_table[:rows],
            slots.state_rows[:rows],
            None if rolling is None else rolling[:rows],
            None if adapters is None else adapters[:rows],
        )

    def run(self, chunks: Chunks, *, with_logits: bool = False) -> Any:
        """Compute keys and values of some chunks; `with_logits`, return the hidden states for `score`."""
        return self._model.prefill(chunks, self._caches, self._attention, with_logits=with_logits)

    def pool(self, chunks: Chunks, passed: Any) -> None:
        """Pool the hidden states of a pass `with_logits`, each chunk's into its row of the slot."""
        hidden, pooled = self._model.hidden_states(passed), self.buffers.all_rows.pooled
        assert pooled is not None
        offsets = chunks.cu_seqlens_q.clamp(0, len(hidden)).long()  # those of a larger pass, while none is live
        if self._setting.pooling == "last":
            values = hidden.index_select(0, (offsets[1:] - 1).clamp(min=0))
        else:  # adds the tokens of a chunk one after another, whatever is beside it
            values = torch.segment_reduce(hidden.float(), "sum", offsets=offsets, axis=0, unsafe=True, initial=0.0)
        pooled[: len(values)].copy_(values)

    def read_pooled(self, num_chunks: int) -> np.ndarray:
        """Return what the last pass pooled, float32 [chunks, hidden]; waits for it."""
        pooled = self.buffers.all_rows.pooled
        assert pooled is not None
        return pooled[:num_chunks].cpu().numpy().copy()

    def dummies(self) -> list[list[PromptChunk]]:
        """Return passes of 1, 2, 4, ... tokens into the null page, which compile all kernels."""
        most = min(self.max_tokens, self._longest * self._rows)
        passes = []
        for tokens in [*(2**power for power in range((most - 1).bit_length())), most]:
            lengths = [min(self._longest, tokens - begin) for begin in range(0, tokens, self._longest)]
            passes.append([PromptChunk([_DUMMY_TOKEN] * length, 0, SequenceMemory()) for length in lengths])
        return passes

    def has_finite_logits(self) -> bool:
        """Whether the logits of tokens from the whole vocabulary are finite; writes the null page only."""
        count = min(self._setting.page_size, self._longest, self.max_tokens, _PROBED_TOKENS)
        tokens = np.linspace(1, self._model.config.vocab_size - 1, count, dtype=np.int64).tolist()
        self.stage([PromptChunk(tokens, 0, SequenceMemory())])
        passed = self.run(self.chunks(StepShape(0, 1, count), 1), with_logits=True)
        return bool(self._model.logits(passed, 0, count).isfinite().all())

    def stage(self, chunks: Sequence[PromptChunk]) -> None:
        """Write chunks into the slots."""
        staged, setting = self.buffers.host_batch(_CHUNKS), self._setting
        tokens, rows, positions = staged.tokens.numpy(), staged.rows.numpy(), staged.positions.numpy()
        cu_seqlens_q, cu_seqlens_kv = staged.cu_seqlens_q.numpy(), staged.cu_seqlens_kv.numpy()
        state_rows, page_table = staged.state_rows.numpy(), staged.page_table.numpy()
        end = 0
        for row, chunk in enumerate(chunks):
            length, memory = len(chunk.token_ids), chunk.memory
            span, cached = slice(end, end + length), chunk.start + length
            tokens[span], rows[span] = chunk.token_ids, row
            positions[span] = np.arange(chunk.start, cached, dtype=np.int32)
            end += length
            cu_seqlens_q[row + 1], cu_seqlens_kv[row + 1] = end, cu_seqlens_kv[row] + cached
            state_rows[row] = state_row = or_null(memory.state_row, setting.null_state_row)
            if staged.adapters is not None:
                staged.adapters.numpy()[row] = memory.adapter
            if setting.rolling is not None and staged.rolling_table is not None:
                setting.rolling.fill(staged.rolling_table.numpy()[row], state_row)
            fill_page_row(page_table[row], memory.pages, setting.null_page)
        cu_seqlens_q[len(chunks) + 1 :] = end
        cu_seqlens_kv[len(chunks) + 1 :] = cu_seqlens_kv[len(chunks)]
        self.buffers.upload(_CHUNKS, end)

    def score(self, chunks: Sequence[PromptChunk], passed: Any) -> list[StepLogprobs | None]:
        """Return the log-probabilities of each scored chunk of a pass; None for the others."""
        begins = accumulate((len(chunk.token_ids) for chunk in chunks), initial=0)
        starts = zip(chunks, begins, strict=False)
        return [self._scored(chunk, passed, begin) if chunk.scored else None for chunk, begin in starts]

    def _scored(self, chunk: PromptChunk, passed: Any, begin: int) -> StepLogprobs:
        """Return the log-probabilities of a chunk at `begin` of the pass, by the decode step's operator."""
        device, width = self._model.device, chunk.num_logprobs
        scores = StepLogprobs([], [], [], [])
        targets = torch.tensor(chunk.scored, dtype=torch.int64).to(device)
        for first in range(0, len(targets), _SCORED_TOKENS):
            count = min(_SCORED_TOKENS, len(targets) - first)
            outputs = LogprobOutputs(
                sampled_logprob=torch.empty(count, dtype=torch.float32, device=device),
                sampled_rank=torch.empty(count, dtype=torch.int32, device=device),
                top_logprobs=torch.empty(count, self._most_logprobs, dtype=torch.float32, device=device),
                top_ids=torch.empty(count, self._most_logprobs, dtype=torch.int32, device=device),
            )
            live_rows, flags, tops = (
                torch.full((size,), value, dtype=torch.int32, device=device)
                for size, value in ((1, count), (count, FLAG_LOGPROBS), (count, width))
            )
            logits = self._model.logits(passed, begin + first, begin + first + count)
            token_logprobs(outputs, logits, targets[first : first + count], live_rows, flags, tops)
            scores.sampled.extend(outputs.sampled_logprob.tolist())
            scores.ranks.extend(outputs.sampled_rank.tolist())
            scores.top.extend(outputs.top_logprobs[:, :width].tolist())
            scores.top_ids.extend(outputs.top_ids[:, :width].tolist())
        return scores
