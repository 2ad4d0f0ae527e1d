"""Decoding with drafts: a row feeds its token and some guesses of what follows, and keeps those that were right.

A draft source declares what it keeps, and writes each row's drafts on the device. Each position of a row is sampled by
itself, from its own logits, with the row's parameters and the random number of its position, and is taken as a plain
step takes its token. A draft is accepted when it is that token: what comes out is what plain decoding gives. A draft
that is wrong leaves keys behind the row's length, where the next step writes its own before anybody reads them: to roll
back is to leave the length as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from graphdecode.buckets import MOST_DRAFTS, StepShape, query_widths
from graphdecode.buffers import Batch, Slot
from graphdecode.cache import LayerCache
from graphdecode.engine.steps.decode import DecodeStep, decode_attention_of, slots_of
from graphdecode.engine.steps.step import Drafting, RowInputs, StepDrafts, StepSetting, StepTokens
from graphdecode.errors import ArgumentError
from graphdecode.kernels.model.advance import skip_steps
from graphdecode.kernels.speculation.ngram_draft import ngram_draft
from graphdecode.kernels.speculation.verify_drafts import (
    ACCEPTED,
    DRAFT_COLUMNS,
    FOUND,
    MATCHED,
    VERIFIED,
    DraftRows,
    Queries,
    judge_drafts,
    settle_drafts,
    spread_queries,
)
from graphdecode.models import Chunks, Model

_HISTORY = "history"  # staging block: the rows' tokens, and how many of them may be guessed


class DraftSource(ABC):
    """Guesses the tokens that follow a row's last one; part of the captured step.

    What it writes may be anything: a draft that is wrong costs time and changes no token. A source that needs what the
    target's layers leave is given them by a model whose `decode` writes them into a slot of the source's own.
    """

    slots: Sequence[Slot] = ()  # what it keeps for each row; the step's buffers hold them
    tensors: Mapping[str, Tensor] = MappingProxyType({})  # what else it writes, by name: caches, workspaces
    constants: Sequence[Tensor] = ()  # what it only reads: weights
    # whether plain steps make the first draft, too; else `prefill` is given the tokens that they fed
    is_cheap: bool = True

    def prefill(self, chunks: Chunks) -> None:  # noqa: B027 (only sources with keys of their own)
        """Take tokens of prompts or answers, as `Model.prefill` does, for a source with keys and values of its own."""

    @abstractmethod
    def look(self, batch: Batch) -> None:
        """Write `num_drafts` and `match_lengths` of the live rows' next step, and the `drafts` that are known by then.

        A row's tokens are `history[row, : pre_step_seqlens[row] + 1]`. It runs at the end of each step, and once when
        rows are staged. The batch has the source's slots, too.
        """

    def draft(self, batch: Batch, count: int) -> None:  # noqa: B027 (only sources that look nothing up)
        """Write the first `count` drafts at the beginning of a step; cheap ones in steps that feed none, too."""


class NgramDrafts(DraftSource):
    """Prompt lookup: what followed the last tokens where `ngram_min` or more stood before; see `ngram_draft`."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._ngram_min, self._ngram_max = ngram_min, ngram_max

    def look(self, batch: Batch) -> None:
        """Look the last tokens up."""
        found, known = (batch.drafts, batch.num_drafts, batch.match_lengths), (batch.history, batch.pre_step_seqlens)
        ngram_draft(*found, *known, batch.live_rows, ngram_min=self._ngram_min, ngram_max=self._ngram_max)


class ModelDrafts(DraftSource):
    """The tokens that a small model of the same vocabulary finds most likely, one after another, in the same graph.

    Its keys and values lie in caches of its own under the numbers of the target's pages. Drafting begins with the last
    two tokens: the last draft of a step was fed to the target alone. What it missed while no drafts were wanted, it is
    given as a prompt; of a prefix that other rows shared meanwhile it may lack the keys, and guesses worse.
    """

    is_cheap = False

    def __init__(self, setting: StepSetting, model: Model, num_drafts: int) -> None:
        config, device = model.config, model.device
        if config.vocab_size != setting.model.config.vocab_size:
            raise ArgumentError(
                f"a draft model needs the target's vocabulary of {setting.model.config.vocab_size} tokens, got "
                f"{config.vocab_size}"
            )
        pages = setting.trash_page + 1
        shape = (pages, setting.page_size, config.num_key_value_heads, config.head_dim)
        self._model, self._num_drafts = model, num_drafts
        dtype = setting.kv_dtype if setting.kv_dtype.itemsize == 1 else model.dtype
        self._caches = [LayerCache.zeros(shape, dtype, device) for _ in range(model.num_layers)]
        own = replace(setting, model=model, caches=self._caches, kv_dtype=dtype)
        self._attention = decode_attention_of(own, 2 * setting.config.max_batch_size, batch_invariant=False)
        self._rows = torch.arange(2 * setting.config.max_batch_size, dtype=torch.int32, device=device)
        self._last_place = setting.max_pages_per_row * setting.page_size - 1
        caches = [tensor for layer in self._caches for tensor in layer]
        kept = [*caches, *self._attention.workspace, *model.workspace, self._rows]
        self.tensors = {f"draft_model_{place}": tensor for place, tensor in enumerate(kept)}
        self.constants = model.constants

    def prefill(self, chunks: Chunks) -> None:
        """Compute its own keys and values of a prompt's tokens; see `Model.prefill`."""
        self._model.prefill(chunks, self._caches)

    def look(self, batch: Batch) -> None:
        """Announce as many drafts as there may be."""
        batch.num_drafts.fill_(self._num_drafts)
        batch.match_lengths.zero_()

    def draft(self, batch: Batch, count: int) -> None:
        """Write `count` drafts of each row, in as many passes."""
        position, table = batch.pre_step_seqlens, batch.page_table
        before = (position - 1).clamp(min=0)
        known = batch.history.gather(1, before[:, None].to(torch.int64))
        tokens = torch.cat([known.to(torch.int64), batch.tokens[:, None]], 1).view(-1)
        positions = torch.stack([before, position], 1).view(-1)
        tables = table[:, None].expand(-1, 2, -1).reshape(2 * batch.size, -1)
        logits = self._pass(tokens, positions, tables, batch.live_rows * 2).view(batch.size, 2, -1)[:, 1]
        for index in range(count):
            if index:
                logits = self._pass(tokens, (position + index).clamp(max=self._last_place), table, batch.live_rows)
            tokens = logits.argmax(-1)
            batch.drafts[:, index].copy_(tokens)

    def _pass(self, tokens: Tensor, positions: Tensor, page_table: Tensor, live: Tensor) -> Tensor:
        rows = {"tokens": tokens, "pre_step_seqlens": positions, "page_table": page_table, "live_rows": live}
        batch = Batch(tokens.shape[0], rows | {"rows": self._rows[: tokens.shape[0]]})
        return self._model.decode(batch, self._caches, self._attention)


class SpeculativeStep(DecodeStep):
    """Plain decoding, and steps of several queries a row beside it; see `Step`.

    `source` makes what up to `num_drafts` of a row and step come from; `adapts` lets each row take fewer after some
    were wrong, and more after all were right.
    """

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
        self._known: list[tuple[Sequence[int], int]] = []  # tokens of each row that the staging block holds
        super().__init__(setting, queries=widths[-1])
        self._widths, self.constants = widths, self._source.constants
        self.drafting = Drafting(not adapts, self._found, self._source.prefill, self._source.is_cheap)

    def shapes(self) -> list[StepShape]:
        """Return the shapes of plain decoding and of several queries a row; draft sources see prompts by themselves."""
        plain = [shape for shape in super().shapes() if shape.kind == "steps"]
        return plain + [shape._replace(queries=width) for shape in self._setting.row_shapes for width in self._widths]

    def _slots(self, setting: StepSetting) -> list[Slot]:
        width = setting.max_pages_per_row * setting.page_size
        return [
            *super()._slots(setting),
            Slot("history", ("batch", width), torch.int32, staged=_HISTORY),
            Slot("draft_limit", ("batch",), torch.int32, staged=_HISTORY),
            Slot("drafts", ("batch", self._num_drafts), torch.int32),
            *(Slot(name, ("batch",), torch.int32) for name in ("num_drafts", "match_lengths")),
            *(Slot(name, (1,), torch.int32) for name in ("active_rows", "step_entries")),
            *self._source.slots,
        ]

    def _adopt_tensors(self) -> None:
        super()._adopt_tensors()
        own = {"ring_drafts": self._ring_drafts, "query_rows": self._query_rows, **self._source.tensors}
        for name, tensor in (own | ({"host_drafts": self._host_drafts} if self._is_cuda else {})).items():
            self.buffers.adopt(name, tensor)

    def run(self, shape: StepShape, batch: Batch, chunks: Chunks | None = None) -> None:
        """Run one step of one query a row, or of several."""
        if shape.queries > 1:
            self._verify(batch, shape.queries)
        else:
            super().run(shape, batch, chunks)
        if shape.part == "choose" or (shape.part == "whole" and not self._is_looped):
            self._copy_drafts(batch)

    def _take_plain(self, batch: Batch, logits: Tensor) -> None:
        """Take a token of each row; cheap drafts are made and judged, but none was fed."""
        if self._source.is_cheap:
            self._source.draft(batch, 1)
        self._take(batch, logits, batch.live_rows)
        judge_drafts(slots_of(DraftRows, batch), index=0, queries=1)
        self._settle(batch, 1, adapts=False)

    def _verify(self, batch: Batch, queries: int) -> None:
        self._source.draft(batch, min(queries - 1, self._num_drafts))
        logits = self._model.decode(self._spread(batch, queries), self._caches, self._attention)
        of_queries = logits.view(batch.size, queries, -1)
        for index in range(queries):
            self._take(batch, of_queries[:, index], batch.active_rows if index else batch.live_rows)
            judge_drafts(slots_of(DraftRows, batch), index=index, queries=queries)
        self._settle(batch, queries, adapts=self._adapts)

    def _spread(self, batch: Batch, queries: int) -> Batch:
        count, table = batch.size * queries, batch.page_table
        tokens = torch.empty(count, dtype=torch.int64, device=table.device)
        sizes = ((count,), (count, table.shape[1]), (1,))
        spread = Queries(tokens, *(torch.empty(each, dtype=torch.int32, device=table.device) for each in sizes))
        of_rows, rolling = slots_of(DraftRows, batch), self._setting.rolling
        spread_queries(spread, of_rows, table, queries=queries, trash_page=self._trash_page)
        rows = {
            "tokens": spread.query_tokens,
            "rows": batch.query_rows[:count],
            "pre_step_seqlens": spread.query_positions,
            "page_table": spread.query_pages,
            "live_rows": spread.live_queries,
        }
        if "adapters" in vars(batch):
            rows["adapters"] = batch.adapters.repeat_interleave(queries)
        if rolling is not None:
            again = spread._replace(query_pages=torch.empty_like(spread.query_pages))
            spread_queries(again, of_rows, batch.rolling_table, queries=queries, trash_page=rolling.trash_page)
            rows["rolling_table"] = again.query_pages
        return Batch(count, rows)

    def _settle(self, batch: Batch, queries: int, *, adapts: bool) -> None:
        """Look for the next step's drafts, and let all rows go on."""
        self._source.look(batch)
        settle_drafts(slots_of(DraftRows, batch), queries=queries, adapts=adapts)

    def _end_launch(self, batch: Batch) -> None:
        skip_steps(batch.step_index, batch.ring_tokens, batch.loop_limit, batch.loop_count, batch.step_entries)
        self._copy_drafts(batch)

    def _copy_drafts(self, batch: Batch) -> None:
        if self._is_cuda:
            batch.host_drafts.copy_(batch.ring_drafts, non_blocking=True)

    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Write the rows as for a plain step, their tokens, and their first drafts."""
        super().stage(rows)
        staged = self.buffers.staging(_HISTORY)
        known: list[tuple[Sequence[int], int]] = []
        for row, inputs in enumerate(rows):
            tokens, begin = inputs.token_ids, 0
            if row < len(self._known) and self._known[row][0] is tokens:
                begin = min(self._known[row][1], len(tokens))
            staged["history"][row, begin : len(tokens)] = tokens[begin:]
            staged["draft_limit"][row] = self._num_drafts if inputs.may_draft or row in self.guided_rows else 0
            known.append((tokens, len(tokens)))
        self._known = known
        self.buffers.upload(_HISTORY, len(rows))
        self.begin(len(rows))

    def begin(self, num_rows: int) -> None:
        """Look for the first drafts of rows that were staged."""
        with torch.no_grad():
            self._settle(self.buffers.narrow(num_rows), 0, adapts=False)

    def _found(self, num_rows: int) -> list[tuple[int, int]] | None:
        if self._is_cuda:
            return None
        slots: list[np.ndarray] = [self.buffers.num_drafts.numpy(), self.buffers.match_lengths.numpy()]
        return list(zip(*(slot[:num_rows].tolist() for slot in slots), strict=True))

    def read(self, steps: range, num_rows: int, *, logprobs: int | None) -> list[StepTokens]:
        """Return the tokens of some entries of the rings, with what became of the drafts."""
        read, ring = super().read(steps, num_rows, logprobs=logprobs), self._host_drafts.numpy()
        for index, step in enumerate(steps):
            entry = ring[step % len(ring), :, :num_rows].tolist()
            drafts = StepDrafts(entry[VERIFIED], entry[ACCEPTED], entry[FOUND], entry[MATCHED])
            read[index] = read[index]._replace(drafts=drafts)
        return read
