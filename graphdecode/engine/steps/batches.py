"""Inputs and outputs of the decode steps: one declaration of each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from graphdecode.buffers import SlotField
from graphdecode.kernels.model.advance import AdvanceState
from graphdecode.kernels.sampling.follow_automata import NO_AUTOMATON, Guides
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_BAD_WORDS,
    LogprobOutputs,
    SamplingSlots,
)
from graphdecode.kernels.speculation.verify_drafts import DraftRows
from graphdecode.models.model import ROWS, DecodeInputs

MOST_CLASSES = 1024  # token classes per automaton
HISTORY = "history"  # staging block: the rows' tokens and draft limits


def block_of(flag: int) -> str:
    """Return the staging block of slots that only rows with a flag read."""
    return f"flag_{flag}" if flag else ROWS


@dataclass(kw_only=True)
class DecodeBatch(DecodeInputs):
    """The slots and rings of a decode step, b rows; the sampling parameters are slots, too."""

    finished: Annotated[Tensor, SlotField(("batch",), torch.int32, staged=ROWS)]  # int32 [b], 1: the row ended
    logits: Annotated[Tensor, SlotField(("batch", "vocab_size"), torch.float32)]  # float32 [b, vocab]
    sampled: Annotated[Tensor, SlotField(("batch",), torch.int64, pad=1)]  # int64 [b]
    token_counts: Annotated[Tensor, SlotField(("batch", "vocab_size"), torch.int32)]  # int32 [b, vocab]
    recent_tokens: Annotated[  # int32 [b, BAD_WORD_LENGTH]
        Tensor, SlotField(("batch", BAD_WORD_LENGTH), torch.int32, pad=-1, staged=block_of(FLAG_BAD_WORDS))
    ]

    sampled_logprob: Annotated[Tensor, SlotField(("batch",), torch.float32)]  # float32 [b]
    sampled_rank: Annotated[Tensor, SlotField(("batch",), torch.int32)]  # int32 [b]
    top_logprobs: Annotated[Tensor, SlotField(("batch", "logprobs"), torch.float32)]  # float32 [b, logprobs]
    top_ids: Annotated[Tensor, SlotField(("batch", "logprobs"), torch.int32)]  # int32 [b, logprobs]

    automaton: Annotated[Tensor, SlotField(("batch",), torch.int32, staged=ROWS)]  # int32 [b]
    automaton_state: Annotated[Tensor, SlotField(("batch",), torch.int32, NO_AUTOMATON, ROWS)]  # int32 [b]
    # the tables of automata; None: no row follows one on the device
    automaton_classes: Annotated[Tensor | None, SlotField(("automata", "vocab_size"), torch.int32)] = None
    automaton_next: Annotated[Tensor | None, SlotField(("automaton_states", MOST_CLASSES), torch.int32, pad=-1)] = None
    automaton_masks: Annotated[Tensor | None, SlotField(("automaton_states", "mask_words"), torch.int32)] = None
    automaton_ends: Annotated[Tensor | None, SlotField(("automaton_states",), torch.int32)] = None

    step_index: Annotated[Tensor, SlotField((1,), torch.int64)]  # int64 [1], steps so far
    running: Annotated[Tensor, SlotField((1,), torch.int32)]  # int32 [1], live rows that have not ended
    loop_limit: Annotated[Tensor, SlotField((1,), torch.int32)]  # int32 [1], steps of the launch
    loop_count: Annotated[Tensor, SlotField((1,), torch.int32)]  # int32 [1], steps that ran

    ring_tokens: Tensor  # int64 [length, rows], see `Rings`
    ring_logprob: Tensor  # float32 [length, rows]
    ring_rank: Tensor  # int32 [length, rows]
    ring_top_logprobs: Tensor  # float32 [length, rows, logprobs]
    ring_top_ids: Tensor  # int32 [length, rows, logprobs]

    @property
    def sampling(self) -> SamplingSlots:
        """The rows' sampling parameters."""
        return self.record(SamplingSlots)  # see `sampling_slots`

    @property
    def logprobs(self) -> LogprobOutputs:
        """The outputs of log-probabilities."""
        return self.record(LogprobOutputs)

    @property
    def advance_state(self) -> AdvanceState:
        """Tensors that the end of a step changes."""
        return self.record(AdvanceState)

    @property
    def guides(self) -> Guides | None:
        """The rows' automata; None if there are no tables."""
        if self.automaton_next is None:
            return None
        return self.record(Guides, next_mask=self.sampling.token_mask)


@dataclass(kw_only=True)
class SpeculativeBatch(DecodeBatch):
    """The slots and rings of a step with drafts."""

    history: Annotated[Tensor, SlotField(("batch", "tokens_per_row"), torch.int32, staged=HISTORY)]  # int32 [b, width]
    draft_limit: Annotated[Tensor, SlotField(("batch",), torch.int32, staged=HISTORY)]  # int32 [b]
    drafts: Annotated[Tensor, SlotField(("batch", "num_drafts"), torch.int32)]  # int32 [b, most]
    num_drafts: Annotated[Tensor, SlotField(("batch",), torch.int32)]  # int32 [b]
    match_lengths: Annotated[Tensor, SlotField(("batch",), torch.int32)]  # int32 [b]
    active_rows: Annotated[Tensor, SlotField((1,), torch.int32)]  # int32 [1]
    step_entries: Annotated[Tensor, SlotField((1,), torch.int32)]  # int32 [1]

    ring_drafts: Tensor  # int32 [length, DRAFT_COLUMNS, rows]
    query_rows: Tensor  # int32 [rows * most queries]: 0, 1, ...
    host_drafts: Tensor | None = None  # of `ring_drafts`, in pinned memory; only of a GPU
    moved_states: Tensor | None = None  # scratch for the recurrent states of one tensor, if there are any

    @property
    def draft_rows(self) -> DraftRows:
        """Tensors that verification reads and writes."""
        return self.record(DraftRows)
