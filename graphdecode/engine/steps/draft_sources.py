"""Where drafts come from: a source declares what it keeps, and writes each row's drafts on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from graphdecode.buffers import Batch, Slot
from graphdecode.cache import LayerCache
from graphdecode.engine.steps.decode import decode_attention_of
from graphdecode.engine.steps.step import StepSetting
from graphdecode.errors import ArgumentError
from graphdecode.kernels.speculation.ngram_draft import ngram_draft
from graphdecode.models import Chunks, Model


class DraftSource(ABC):
    """Guesses the tokens that follow a row's last one; part of the captured step.

    What it writes may be anything: a draft that is wrong costs time and changes no token. A source that needs what the
    target's layers leave, as an EAGLE-3 head does, is given them by a model whose `decode` writes them into a slot of
    the source's own.

    Attributes:
        slots: what it keeps for each row; the step's buffers hold them.
        tensors: what else it writes, by name: caches, workspaces.
        constants: what it only reads: weights.
        is_cheap: drafts cost next to nothing, so that plain steps make the first one, too, and tell whether it would
            have been right. Else plain steps make none, and `prefill` is given the tokens that they fed before drafts
            are wanted again.
    """

    slots: Sequence[Slot] = ()
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    constants: Sequence[Tensor] = ()
    is_cheap: bool = True

    def prefill(self, chunks: Chunks) -> None:  # noqa: B027 (only sources with keys of their own)
        """Take tokens of prompts or answers, as `Model.prefill` does, for a source with keys and values of its own."""

    @abstractmethod
    def look(self, batch: Batch) -> None:
        """Write `num_drafts` and `match_lengths` of the live rows' next step, and the `drafts` that are known by then.

        A row's tokens are `history[row, : pre_step_seqlens[row] + 1]`, the last of them the one to feed next. It runs
        at the end of each step, and once when rows are staged. The batch has the source's slots, too.
        """

    def draft(self, batch: Batch, count: int) -> None:  # noqa: B027 (only sources that look nothing up)
        """Write the first `count` of `drafts`, for a source that makes them when they are wanted.

        It runs at the beginning of each step; of one that feeds no draft, too, with a count of 1, where it is cheap.
        """


class NgramDrafts(DraftSource):
    """What followed the row's last tokens when at least `ngram_min` of them stood in it before; see `ngram_draft`."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._ngram_min = ngram_min
        self._ngram_max = ngram_max

    def look(self, batch: Batch) -> None:
        """Look the last tokens up."""
        found, known = (batch.drafts, batch.num_drafts, batch.match_lengths), (batch.history, batch.pre_step_seqlens)
        ngram_draft(*found, *known, batch.live_rows, ngram_min=self._ngram_min, ngram_max=self._ngram_max)


class ModelDrafts(DraftSource):
    """The tokens that a small model of the same vocabulary finds most likely, one after another, in the same graph.

    Its keys and values lie in caches of its own under the numbers of the target's pages: who owns a page of one owns
    that of the other, and a prefix that is shared is shared in both. Drafting begins with the last two tokens: the last
    draft of a step was fed to the target alone, and where it was accepted its keys are still missing here.

    What it missed while no drafts were wanted, it is given as a prompt; a prefix that other rows shared meanwhile may
    lack its keys, and then its drafts are worse.

    Raises:
        ArgumentError: its vocabulary is another.
    """

    is_cheap = False

    def __init__(self, setting: StepSetting, model: Model, num_drafts: int) -> None:
        config, device = model.config, model.device
        if config.vocab_size != setting.model.config.vocab_size:
            raise ArgumentError(
                f"a draft model needs the target's vocabulary of {setting.model.config.vocab_size} tokens, got "
                f"{config.vocab_size}"
            )
        pages = setting.caches[0].keys.shape[0]
        shape = (pages, setting.page_size, config.num_key_value_heads, config.head_dim)
        self._model = model
        self._num_drafts = num_drafts
        has_codes = setting.caches[0].keys.itemsize == 1
        dtype = setting.caches[0].keys.dtype if has_codes else model.dtype
        self._caches = [LayerCache.zeros(shape, dtype, device) for _ in range(model.num_layers)]
        own = replace(setting, model=model, caches=self._caches)
        self._attention = decode_attention_of(own, 2 * setting.config.max_batch_size, batch_invariant=False)
        self._rows = torch.arange(2 * setting.config.max_batch_size, dtype=torch.int32, device=device)
        self._last_place = setting.max_pages_per_row * setting.page_size - 1
        caches = [tensor for layer in self._caches for tensor in layer]
        kept = [*caches, *self._attention.workspace, *model.workspace, self._rows]
        self.tensors = {f"draft_model_{place}": tensor for place, tensor in enumerate(kept)}
        self.constants = model.constants

    def prefill(self, chunks: Chunks) -> None:
        """Compute its own keys and values of a prompt's tokens; see `Model.prefill`."""
        self._model.prefill(*chunks, self._caches)

    def look(self, batch: Batch) -> None:
        """There are always as many drafts as may be."""
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
