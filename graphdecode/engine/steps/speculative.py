"""Decoding with drafts: a row feeds its token and some guesses of what follows, and keeps those that were right.

Each position of a row is sampled by itself, from its own logits, with the row's parameters and the random number of
its position, and is taken as a plain step takes its token. A draft is accepted when it is that token: what comes out is
what plain decoding gives. A draft that is wrong leaves keys behind the row's length, where the next step writes its own
before anybody reads them: to roll back is to leave the length as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from graphdecode.buckets import MOST_DRAFTS, StepShape, query_widths
from graphdecode.buffers import Batch, Slot
from graphdecode.engine.steps.decode import DecodeStep
from graphdecode.engine.steps.draft_sources import DraftSource
from graphdecode.engine.steps.step import Drafting, RowInputs, StepDrafts, StepSetting, StepTokens
from graphdecode.kernels.model.skip_steps import skip_steps
from graphdecode.kernels.speculation.draft_slots import ACCEPTED, DRAFT_COLUMNS, FOUND, MATCHED, VERIFIED, DraftSlots
from graphdecode.kernels.speculation.judge_drafts import judge_drafts
from graphdecode.kernels.speculation.settle_drafts import settle_drafts
from graphdecode.kernels.speculation.spread_queries import Queries, spread_queries
from graphdecode.models import Chunks

_HISTORY = "history"  # staging block: the rows' tokens, and how many of them may be guessed


class SpeculativeStep(DecodeStep):
    """Plain decoding, and steps of several queries a row beside it; see `Step`.

    Args:
        setting: see `DecodeStep`.
        source: makes what the drafts come from.
        num_drafts: of a row and step at most.
        adapts: let each row take fewer drafts after some were wrong, and more after all were right.
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
        self._num_drafts = num_drafts
        self._adapts = adapts
        self._source = source(setting)
        sizes = (setting.ring_length * widths[-1], DRAFT_COLUMNS, rows)
        self._ring_drafts = self._host_drafts = torch.zeros(sizes, dtype=torch.int32, device=device)
        if self._is_cuda:
            self._host_drafts = torch.zeros(sizes, dtype=torch.int32, pin_memory=True)
        self._query_rows = torch.arange(rows * widths[-1], dtype=torch.int32, device=device)
        self._known: list[tuple[Sequence[int], int]] = []  # tokens of each row that the staging block holds
        super().__init__(setting, queries=widths[-1])
        self._widths = widths
        self.constants = self._source.constants
        self.drafting = Drafting(not adapts, self._found, self._source.prefill, self._source.is_cheap)

    def shapes(self) -> list[StepShape]:
        """Those of plain decoding, and more queries of each row; drafts' sources are to see prompts by themselves."""
        plain = [shape for shape in super().shapes() if shape.kind == "steps"]
        return plain + [shape._replace(queries=width) for shape in self._setting.row_shapes for width in self._widths]

    def _slots(self, setting: StepSetting) -> list[Slot]:
        width = setting.max_pages_per_row * setting.page_size
        return [
            *super()._slots(setting),
            Slot("history", ("batch", width), torch.int32, staged=_HISTORY),
            Slot("draft_limit", ("batch",), torch.int32, staged=_HISTORY),
            Slot("drafts", ("batch", self._num_drafts), torch.int32),
            Slot("num_drafts", ("batch",), torch.int32),
            Slot("match_lengths", ("batch",), torch.int32),
            Slot("active_rows", (1,), torch.int32),
            Slot("step_entries", (1,), torch.int32),
            *self._source.slots,
        ]

    def _adopt_tensors(self) -> None:
        super()._adopt_tensors()
        self.buffers.adopt("ring_drafts", self._ring_drafts)
        self.buffers.adopt("query_rows", self._query_rows)
        for name, tensor in self._source.tensors.items():
            self.buffers.adopt(name, tensor)
        if self._is_cuda:
            self.buffers.adopt("host_drafts", self._host_drafts)

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
        self._judge(batch, 0, 1)
        self._settle(batch, 1, adapts=False)

    def _verify(self, batch: Batch, queries: int) -> None:
        self._source.draft(batch, min(queries - 1, self._num_drafts))
        logits = self._model.decode(self._spread(batch, queries), self._caches, self._attention)
        of_queries = logits.view(batch.size, queries, -1)
        for index in range(queries):
            self._take(batch, of_queries[:, index], batch.active_rows if index else batch.live_rows)
            self._judge(batch, index, queries)
        self._settle(batch, queries, adapts=self._adapts)

    def _spread(self, batch: Batch, queries: int) -> Batch:
        count, table = batch.size * queries, batch.page_table
        tokens = torch.empty(count, dtype=torch.int64, device=table.device)
        sizes = ((count,), (count, table.shape[1]), (1,))
        spread = Queries(tokens, *(torch.empty(each, dtype=torch.int32, device=table.device) for each in sizes))
        state = (batch.tokens, batch.pre_step_seqlens, batch.finished, batch.drafts, batch.num_drafts, table)
        spread_queries(spread, *state, batch.live_rows, queries=queries, trash_page=self._trash_page)
        rows: dict[str, Tensor] = {
            "tokens": spread.query_tokens,
            "rows": batch.query_rows[:count],
            "pre_step_seqlens": spread.query_positions,
            "page_table": spread.query_pages,
            "live_rows": spread.live_queries,
        }
        return Batch(count, rows)

    def _judge(self, batch: Batch, index: int, queries: int) -> None:
        written = (batch.finished, batch.active_rows, batch.history, batch.ring_drafts)
        read = (batch.ring_tokens, batch.step_index, batch.pre_step_seqlens, batch.drafts, batch.num_drafts)
        judge_drafts(*written, *read, batch.live_rows, index=index, queries=queries)

    def _settle(self, batch: Batch, queries: int, *, adapts: bool) -> None:
        """Look for the next step's drafts, and let all rows go on."""
        self._source.look(batch)
        drafts = DraftSlots(*(getattr(batch, name) for name in DraftSlots._fields))
        written = (batch.finished, batch.running, batch.step_entries, batch.ring_drafts)
        read = (batch.pre_step_seqlens, batch.last_position, batch.step_index, batch.live_rows)
        settle_drafts(*written, drafts, *read, queries=queries, adapts=adapts)

    def _end_launch(self, batch: Batch) -> None:
        """What follows the steps of a launch: the next one's begin where the host expects them."""
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
        """Return each row's drafts for the next step, and how many tokens speak for them; None: not known here yet."""
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
