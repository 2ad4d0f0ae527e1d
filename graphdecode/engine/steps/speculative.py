"""Speculative decoding: a row feeds its token and some drafts, and keeps the accepted drafts.

A draft source writes each row's drafts on the device. Each position of a row is sampled from its own logits, with the
row's parameters and the random number of its position, as in a plain step. A draft is accepted if it equals that token,
so the output is that of plain decoding. A rejected draft leaves keys past the row's length, which the next step
overwrites before they are read: no rollback is needed. The recurrent state after each query is kept, and that after the
last accepted one becomes the row's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from graphdecode.buckets import MOST_DRAFTS, StepShape, query_widths
from graphdecode.buffers import Slot
from graphdecode.cache import LayerCache, LayerState, RecurrentState, stateful
from graphdecode.engine.steps.batches import HISTORY, SpeculativeBatch
from graphdecode.engine.steps.decode import DecodeStep, decode_attention_of
from graphdecode.engine.steps.step import Drafting, RowInputs, StepDrafts, StepSetting, StepTokens
from graphdecode.errors import ArgumentError
from graphdecode.kernels.model.advance import skip_steps
from graphdecode.kernels.speculation.ngram_draft import ngram_draft
from graphdecode.kernels.speculation.verify_drafts import (
    ACCEPTED,
    CANDIDATES,
    DRAFT_COLUMNS,
    MATCHED,
    VERIFIED,
    Queries,
    judge_drafts,
    settle_drafts,
    spread_queries,
)
from graphdecode.models import Chunks, DecodeInputs, Model

B = TypeVar("B")


class DraftSource(ABC, Generic[B]):
    """Drafts the tokens that follow a row's last one; part of the captured step.

    A rejected draft costs time and changes no token. A source that reads the target's hidden states declares a slot for
    them, which the model's `decode` writes.
    """

    slots: Sequence[Slot] = ()  # its own slots in the step's buffers
    tensors: Mapping[str, Tensor] = MappingProxyType({})  # other tensors that it writes, by name: caches, workspaces
    constants: Sequence[Tensor] = ()  # weights
    is_cheap: bool = True  # plain steps make the first draft, too; if False, `prefill` gets the tokens that they fed

    def prefill(self, chunks: Chunks) -> None:
        """Compute its own keys and values of prompt or output tokens; see `Model.prefill`."""

    @abstractmethod
    def look(self, batch: B) -> None:
        """Write `num_drafts` and `match_lengths` for the next step of live rows, and the `drafts` known so far.

        A row's tokens are `history[row, : pre_step_seqlens[row] + 1]`. Runs at the end of each step, and after rows are
        staged. The batch has the source's slots, too.
        """

    def draft(self, batch: B, count: int) -> None:
        """Write the first `count` drafts at the beginning of a step; cheap sources do so in plain steps, too."""


class NgramDrafts(DraftSource[SpeculativeBatch]):
    """Prompt lookup: the tokens that followed an earlier match of the last ones; see `ngram_draft`."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._ngram_min, self._ngram_max = ngram_min, ngram_max

    def look(self, batch: SpeculativeBatch) -> None:
        """Find drafts by the last tokens."""
        outputs, inputs = (batch.drafts, batch.num_drafts, batch.match_lengths), (batch.history, batch.pre_step_seqlens)
        ngram_draft(*outputs, *inputs, batch.live_rows, ngram_min=self._ngram_min, ngram_max=self._ngram_max)


class ModelDrafts(DraftSource[SpeculativeBatch]):
    """The most likely tokens of a small model with the same vocabulary, in the same graph.

    Its caches use the target's page numbers. Drafting begins with the last two tokens, since the last draft of a step
    was fed only to the target. Tokens of plain steps are prefilled before the next drafts. Keys of a shared prefix may
    be missing, which makes drafts worse.
    """

    is_cheap = False

    def __init__(self, setting: StepSetting, model: Model, num_drafts: int) -> None:
        config, device = model.config, model.device
        if config.vocab_size != setting.model.config.vocab_size:
            raise ArgumentError(
                f"a draft model needs the target's vocabulary of {setting.model.config.vocab_size} tokens, got "
                f"{config.vocab_size}"
            )
        pages = setting.null_page + 1
        self._model, self._num_drafts = model, num_drafts
        dtype = setting.kv_dtype if setting.kv_dtype.itemsize == 1 else model.dtype
        self._caches: list[LayerState] = [
            RecurrentState({})
            if keys is None
            else LayerCache.zeros(
                (pages, setting.page_size, keys.heads, keys.head_dim), dtype, device, latent_rank=keys.latent_rank
            )
            for keys in config.cached_keys
        ]
        draft_setting = replace(setting, model=model, caches=self._caches, kv_dtype=dtype)
        self._attention = decode_attention_of(draft_setting, 2 * setting.config.max_batch_size, batch_invariant=False)
        self._rows = torch.arange(2 * setting.config.max_batch_size, dtype=torch.int32, device=device)
        self._last_position = setting.max_pages_per_row * setting.page_size - 1
        caches = [tensor for layer in self._caches for tensor in layer]
        tensors = [*caches, *self._attention.workspace, *model.workspace, self._rows]
        self.tensors = {f"draft_model_{index}": tensor for index, tensor in enumerate(tensors)}
        self.constants = model.constants

    def prefill(self, chunks: Chunks) -> None:
        """Compute the draft model's keys and values; see `Model.prefill`."""
        self._model.prefill(chunks, self._caches, with_logits=False)

    def look(self, batch: SpeculativeBatch) -> None:
        """Set the largest number of drafts."""
        batch.num_drafts.fill_(self._num_drafts)
        batch.match_lengths.zero_()

    def draft(self, batch: SpeculativeBatch, count: int) -> None:
        """Write `count` drafts of each row, one per pass."""
        position, table = batch.pre_step_seqlens, batch.page_table
        before = (position - 1).clamp(min=0)
        previous = batch.history.gather(1, before[:, None].to(torch.int64))
        tokens = torch.cat([previous.to(torch.int64), batch.tokens[:, None]], 1).view(-1)
        positions = torch.stack([before, position], 1).view(-1)
        tables = table[:, None].expand(-1, 2, -1).reshape(2 * batch.size, -1)
        logits = self._pass(tokens, positions, tables, batch.live_rows * 2).view(batch.size, 2, -1)[:, 1]
        for index in range(count):
            if index:
                logits = self._pass(tokens, (position + index).clamp(max=self._last_position), table, batch.live_rows)
            tokens = logits.argmax(-1)
            batch.drafts[:, index].copy_(tokens)

    def _pass(self, tokens: Tensor, positions: Tensor, page_table: Tensor, live: Tensor) -> Tensor:
        count = tokens.shape[0]
        batch = DecodeInputs(
            size=count,
            tokens=tokens,
            pre_step_seqlens=positions,
            rows=self._rows[:count],
            page_table=page_table,
            live_rows=live,
        )
        return self._model.decode(batch, self._caches, self._attention)


class SpeculativeStep(DecodeStep[SpeculativeBatch]):
    """Plain decoding, and steps with several queries per row; see `Step`.

    `source` makes the draft source, of up to `num_drafts` drafts per row and step. With `adapts`, the draft limit of a
    row falls after rejected drafts, and rises when all were accepted.
    """

    batch_type = SpeculativeBatch

    def __init__(
        self,
        setting: StepSetting,
        source: Callable[[StepSetting], DraftSource],
        *,
        num_drafts: int = MOST_DRAFTS,
        adapts: bool = True,
    ) -> None:
        rows, device = setting.config.max_batch_size, setting.model.device
        widths = query_widths(num_drafts)
        self._is_cuda = device.type == "cuda"
        self._is_looped = setting.config.steps_per_launch > 1
        self._num_drafts, self._adapts, self._source = num_drafts, adapts, source(setting)
        sizes = (setting.ring_length * widths[-1], DRAFT_COLUMNS, rows)
        self._ring_drafts = self._host_drafts = torch.zeros(sizes, dtype=torch.int32, device=device)
        if self._is_cuda:
            self._host_drafts = torch.zeros(sizes, dtype=torch.int32, pin_memory=True)
        self._query_rows = torch.arange(rows * widths[-1], dtype=torch.int32, device=device)
        self._states = [tensor for layer in stateful(setting.caches) for tensor in layer]
        largest = max((state[0].numel() for state in self._states), default=0)
        self._moved = torch.empty(rows * largest, device=device)  # scratch for committing the states of one tensor
        self._staged_history: list[tuple[Sequence[int], int]] = []  # per row: tokens, how many are staged
        super().__init__(setting, queries=widths[-1])
        self._widths, self.constants = widths, self._source.constants
        self.drafting = Drafting(not adapts, self._draft_candidates, self._source.prefill, self._source.is_cheap)

    def shapes(self) -> list[StepShape]:
        """Return the shapes of plain decoding and of several queries per row; none are mixed."""
        shapes = [shape for shape in super().shapes() if shape.kind == "steps"]
        return shapes + [shape._replace(queries=width) for shape in self._setting.row_shapes for width in self._widths]

    def _slot_sizes(self, setting: StepSetting) -> dict[str, int | None]:
        width = setting.max_pages_per_row * setting.page_size
        return super()._slot_sizes(setting) | {"tokens_per_row": width, "num_drafts": self._num_drafts}

    def _other_slots(self) -> Sequence[Slot]:
        return self._source.slots

    def _adopt_tensors(self) -> None:
        super()._adopt_tensors()
        tensors = {"ring_drafts": self._ring_drafts, "query_rows": self._query_rows, **self._source.tensors}
        tensors |= {"host_drafts": self._host_drafts} if self._is_cuda else {}
        tensors |= {"moved_states": self._moved} if self._states else {}
        for name, tensor in tensors.items():
            self.buffers.adopt(name, tensor)

    def run(self, shape: StepShape, batch: SpeculativeBatch, chunks: Chunks | None = None) -> None:
        """Run one step, with one query per row or several."""
        if shape.queries > 1:
            self._verify(batch, shape.queries)
        else:
            super().run(shape, batch, chunks)
        if shape.part == "choose" or (shape.part == "whole" and not self._is_looped):
            self._copy_drafts(batch)

    def _sample_batch(self, batch: SpeculativeBatch, logits: Tensor) -> None:
        """Sample a token of each row; cheap drafts are made and verified, but not fed."""
        if self._source.is_cheap:
            self._source.draft(batch, 1)
        self._sample(batch, logits, batch.live_rows)
        judge_drafts(batch.draft_rows, index=0, queries=1)
        self._finish_step(batch, 1, adapts=False)

    def _verify(self, batch: SpeculativeBatch, queries: int) -> None:
        self._source.draft(batch, min(queries - 1, self._num_drafts))
        before = batch.pre_step_seqlens.clone() if self._states else batch.pre_step_seqlens
        logits = self._model.decode(self._inputs_of_queries(batch, queries), self._caches, self._attention)
        of_queries = logits.view(batch.size, queries, -1)
        for index in range(queries):
            self._sample(batch, of_queries[:, index], batch.active_rows if index else batch.live_rows)
            judge_drafts(batch.draft_rows, index=index, queries=queries)
        if self._states:
            self._commit_states(batch, (batch.pre_step_seqlens - before - 1).clamp(min=0), queries)
        self._finish_step(batch, queries, adapts=self._adapts)

    def _commit_states(self, batch: SpeculativeBatch, accepted: Tensor, queries: int) -> None:
        """Commit the states after each row's last accepted query, int32 [b]."""
        state_rows = self._setting.draft_state_row + batch.query_rows[: batch.size] * queries + accepted
        assert batch.state_rows is not None
        assert batch.moved_states is not None
        rows = batch.state_rows.to(torch.int64)
        for state in self._states:  # through memory that all graphs share: a recorded graph would keep its own
            moved = batch.moved_states[: batch.size * state[0].numel()].view(-1, *state.shape[1:])
            state.index_copy_(0, rows, torch.index_select(state, 0, state_rows, out=moved))

    def _inputs_of_queries(self, batch: SpeculativeBatch, queries: int) -> DecodeInputs:
        count, table = batch.size * queries, batch.page_table
        tokens = torch.empty(count, dtype=torch.int64, device=table.device)
        sizes = ((count,), (count, table.shape[1]), (1,))
        spread = Queries(tokens, *(torch.empty(each, dtype=torch.int32, device=table.device) for each in sizes))
        of_rows, rolling = batch.draft_rows, self._setting.rolling
        spread_queries(spread, of_rows, table, queries=queries, null_page=self._setting.null_page)
        inputs = DecodeInputs(
            size=count,
            tokens=spread.query_tokens,
            rows=batch.query_rows[:count],
            pre_step_seqlens=spread.query_positions,
            page_table=spread.query_pages,
            live_rows=spread.live_queries,
        )
        if self._states:
            inputs.scan_rows = inputs.rows // queries
            inputs.output_state_rows = inputs.rows + self._setting.draft_state_row
            inputs.state_rows = batch.state_rows
        if batch.adapters is not None:
            inputs.adapters = batch.adapters.repeat_interleave(queries)
        if rolling is not None and batch.rolling_table is not None:
            rolled = spread._replace(query_pages=torch.empty_like(spread.query_pages))
            spread_queries(rolled, of_rows, batch.rolling_table, queries=queries, null_page=rolling.null_page)
            inputs.rolling_table = rolled.query_pages
        return inputs

    def _finish_step(self, batch: SpeculativeBatch, queries: int, *, adapts: bool) -> None:
        """Find the next step's drafts, and update the draft counts."""
        self._source.look(batch)
        settle_drafts(batch.draft_rows, queries=queries, adapts=adapts)

    def _end_launch(self, batch: SpeculativeBatch) -> None:
        skip_steps(batch.step_index, batch.ring_tokens, batch.loop_limit, batch.loop_count, batch.step_entries)
        self._copy_drafts(batch)

    def _copy_drafts(self, batch: SpeculativeBatch) -> None:
        if batch.host_drafts is not None:
            batch.host_drafts.copy_(batch.ring_drafts, non_blocking=True)

    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Write the rows as for a plain step, their history and their first drafts."""
        super().stage(rows)
        staged, before = self.buffers.host_batch(HISTORY), self._staged_history
        history, limits = staged.history.numpy(), staged.draft_limit.numpy()
        for row, inputs in enumerate(rows):
            tokens, begin = inputs.token_ids, 0
            if row < len(before) and before[row][0] is tokens:
                begin = min(before[row][1], len(tokens))
            history[row, begin : len(tokens)] = tokens[begin:]
            limits[row] = self._num_drafts if inputs.may_draft or row in self.guided_rows else 0
        self._staged_history = [(inputs.token_ids, len(inputs.token_ids)) for inputs in rows]
        self.buffers.upload(HISTORY, len(rows))
        self.begin(len(rows))

    def begin(self, num_rows: int) -> None:
        """Find the first drafts of staged rows."""
        with torch.no_grad():
            self._finish_step(self.buffers.narrow(num_rows), 0, adapts=False)

    def _draft_candidates(self, num_rows: int) -> list[tuple[int, int]] | None:
        if self._is_cuda:
            return None
        batch = self.buffers.all_rows
        slots: list[np.ndarray] = [batch.num_drafts.numpy(), batch.match_lengths.numpy()]
        return list(zip(*(slot[:num_rows].tolist() for slot in slots), strict=True))

    def read(self, steps: range, num_rows: int, *, logprobs: int | None) -> list[StepTokens]:
        """Return the tokens of ring entries, with the counts of drafts."""
        read, ring = super().read(steps, num_rows, logprobs=logprobs), self._host_drafts.numpy()
        for index, step in enumerate(steps):
            entry = ring[step % len(ring), :, :num_rows].tolist()
            drafts = StepDrafts(entry[VERIFIED], entry[ACCEPTED], entry[CANDIDATES], entry[MATCHED])
            read[index] = read[index]._replace(drafts=drafts)
        return read
