"""Plain decoding: each row feeds one token and samples its successor on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from graphdecode.attention import PagedDecodeAttention
from graphdecode.buckets import StepShape
from graphdecode.buffers import Slot, StepBuffers
from graphdecode.cache import LayerState, fill_page_row
from graphdecode.config import BucketConfig
from graphdecode.engine.constraint import TokenAutomaton
from graphdecode.engine.steps.batches import MOST_CLASSES, DecodeBatch, block_of
from graphdecode.engine.steps.step import RowInputs, Step, StepLogprobs, StepSetting, StepTokens
from graphdecode.graphs import Loop
from graphdecode.kernels.model.advance import skip_steps
from graphdecode.kernels.sampling.follow_automata import ACCEPTS, COMPLETES, NO_AUTOMATON
from graphdecode.kernels.sampling.sample_and_advance import sample_and_advance
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_BAD_WORDS,
    FLAG_TOKEN_MASK,
    MASK_BITS,
    PROMPT_BIT,
    sampling_slots,
)
from graphdecode.models import Chunks, Model
from graphdecode.models.model import PAGES, ROLLING, ROWS

B = TypeVar("B", bound=DecodeBatch)


def state_bytes(vocab_size: int) -> int:
    """Return the bytes of one automaton state in the tables."""
    return 4 * (MOST_CLASSES + -(-vocab_size // MASK_BITS) + 1)


_Allocation = tuple[int, int]  # an automaton's number, and the table row of its first state


class AutomatonTables:
    """Allocates the tables that `follow_automata` reads; automata that no row follows are evicted."""

    def __init__(self, config: BucketConfig) -> None:
        self._automata, self._lines = config.max_automata, config.max_automaton_states
        self._allocated: dict[TokenAutomaton, _Allocation] = {}

    def allocate(self, automata: Sequence[TokenAutomaton], buffers: StepBuffers) -> dict[TokenAutomaton, _Allocation]:
        """Return the positions of automata in the tables; new ones are written in order, as long as there is room."""
        distinct = list(dict.fromkeys(automata))
        for automaton in distinct:
            num_states, num_classes = automaton.following.shape
            if automaton in self._allocated or num_classes > MOST_CLASSES:
                continue
            allocation = self._room(num_states)
            if allocation is None:
                self._allocated = {each: self._allocated[each] for each in distinct if each in self._allocated}
                allocation = self._room(num_states)
            if allocation is not None:
                self._allocated[automaton] = allocation
                self._write(automaton, allocation, buffers)
        return {automaton: self._allocated[automaton] for automaton in distinct if automaton in self._allocated}

    def _room(self, num_states: int) -> _Allocation | None:
        used = {number for number, _ in self._allocated.values()}
        number = next((number for number in range(self._automata) if number not in used), None)
        line = 0
        for automaton, (_, begin) in sorted(self._allocated.items(), key=lambda item: item[1][1]):
            if line + num_states <= begin:
                break
            line = begin + len(automaton.following)
        return None if number is None or line + num_states > self._lines else (number, line)

    @staticmethod
    def _write(automaton: TokenAutomaton, allocation: _Allocation, buffers: StepBuffers) -> None:
        number, line = allocation
        following = np.where(automaton.following < 0, -1, automaton.following + line).astype(np.int32)
        ends = (ACCEPTS * automaton.accepts + COMPLETES * automaton.completes).astype(np.int32)
        buffers.write("automaton_classes", number, automaton.classes[None])
        buffers.write("automaton_next", line, following)
        buffers.write("automaton_masks", line, automaton.masks)
        buffers.write("automaton_ends", line, ends)


class Rings(NamedTuple):
    """Ring buffers in host memory for the tokens and log-probabilities of finished steps.

    GPU kernels write straight into them. Only steps with drafts read tokens back.
    """

    tokens: Tensor  # int64 [length, rows]; -1 where a row had finished before
    logprob: Tensor  # float32 [length, rows], the sampled tokens' log-probabilities
    rank: Tensor  # int32 [length, rows], their ranks
    top_logprobs: Tensor  # float32 [length, rows, logprobs], of the most likely tokens
    top_ids: Tensor  # int32 [length, rows, logprobs]

    @classmethod
    def allocate(cls, length: int, rows: int, logprobs: int, *, pin_memory: bool) -> Rings:
        """Return rings of `length` steps of `rows` rows with `logprobs` top tokens each."""

        def ring(dtype: torch.dtype, *sizes: int) -> Tensor:
            return torch.zeros(length, rows, *sizes, dtype=dtype, pin_memory=pin_memory)

        tops = ring(torch.float32, logprobs), ring(torch.int32, logprobs)
        return cls(ring(torch.int64).fill_(-1), ring(torch.float32), ring(torch.int32), *tops)


class DecodeStep(Step[B]):
    """Feed each row's token, sample its successor, and advance the row; see `Step`.

    `queries`: largest number of tokens that a row feeds per step.
    """

    takes_constraints = True
    batch_type: type[Any] = DecodeBatch
    buffers: StepBuffers[B]

    def __init__(self, setting: StepSetting, *, queries: int = 1) -> None:
        config, model = setting.config, setting.model
        rows, entries = config.max_batch_size, setting.ring_length * queries
        self._setting, self._model, self._caches = setting, model, setting.caches
        self._attention = decode_attention_of(setting, rows * queries, batch_invariant=setting.batch_invariant)
        self._specs = sampling_slots(setting.sampling_capacity, model.config.vocab_size)
        self._logprobs = min(config.max_logprobs, model.config.vocab_size)
        self.rings = Rings.allocate(entries, rows, self._logprobs, pin_memory=model.device.type == "cuda")
        self._ring_tokens = self.rings.tokens.numpy()  # a torch index takes ten times as long
        self._automata = AutomatonTables(config) if config.max_automaton_states else None
        sampling = [
            Slot(spec.name, ("batch", *spec.sizes), spec.dtype, pad=spec.neutral, staged=block_of(spec.flag))
            for spec in self._specs
        ]
        self.buffers = StepBuffers(
            self.batch_type,
            max_batch_size=rows,
            device=model.device,
            sizes=self._slot_sizes(setting),
            others=[*sampling, *self._other_slots()],
        )
        self._adopt_tensors()
        self.loop = Loop(config.steps_per_launch, epilogue=self._end_launch) if config.steps_per_launch > 1 else None

    def shapes(self) -> list[StepShape]:
        """One query of each row, whole, in halves, and with prompts."""
        rows = self._setting.row_shapes
        return [*rows, *(half for shape in rows for half in shape.halves), *self._setting.mixed_shapes]

    def _slot_sizes(self, setting: StepSetting) -> dict[str, int | None]:
        """Return the values of names in the shapes and pads of the step's slots."""
        config, vocab_size = setting.config, self._model.config.vocab_size
        has_automata = self._automata is not None
        return setting.slot_sizes | {
            "vocab_size": vocab_size,
            "logprobs": self._logprobs,
            "automata": config.max_automata if has_automata else None,
            "automaton_states": config.max_automaton_states if has_automata else None,
            "mask_words": -(-vocab_size // MASK_BITS),
        }

    def _other_slots(self) -> Sequence[Slot]:
        """Return slots that are no fields of the batch."""
        return ()

    def _adopt_tensors(self) -> None:
        adopt_model(self.buffers, self._model, self._caches)
        for name, ring in self.rings._asdict().items():
            self.buffers.adopt(f"ring_{name}", ring)
        for index, tensor in enumerate(self._attention.workspace):
            self.buffers.adopt(f"attention_workspace_{index}", tensor)

    def run(self, shape: StepShape, batch: B, chunks: Chunks | None = None) -> None:
        """Run one decode step or one half of it; with chunks, a mixed step."""
        if shape.part == "choose":
            self._sample_batch(batch, batch.logits)
            return
        if chunks is None:
            logits = self._model.decode(batch, self._caches, self._attention)
        else:
            logits = self._model.mix(batch, chunks, self._caches, self._attention)
        if shape.part == "logits":
            batch.logits.copy_(logits)
        else:
            self._sample_batch(batch, logits)

    def _sample_batch(self, batch: B, logits: Tensor) -> None:
        self._sample(batch, logits, batch.live_rows)

    def _sample(self, batch: B, logits: Tensor, live_rows: Tensor) -> None:
        sampling, guides = batch.sampling, batch.guides
        sample_and_advance(batch.advance_state, batch.sampled, batch.logprobs, logits, live_rows, sampling, guides)

    def _end_launch(self, batch: B) -> None:  # skips the ring entries of steps that did not run
        skip_steps(batch.step_index, batch.ring_tokens, batch.loop_limit, batch.loop_count)

    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Write the rows: last token, position, sampling parameters, and token counts for penalties."""
        count, staged = len(rows), self.buffers.host_batch(ROWS)
        self._stage_guides(staged, rows)
        staged.tokens.numpy()[:count] = [inputs.token_ids[-1] for inputs in rows]
        staged.pre_step_seqlens.numpy()[:count] = [len(inputs.token_ids) - 1 for inputs in rows]
        staged.finished.numpy()[:count] = 0
        staged.rows.numpy()[:count] = np.arange(count, dtype=np.int32)
        rolling = self._setting.rolling
        state_rows = [or_null(each.memory.state_row, self._setting.null_state_row) for each in rows]
        if staged.state_rows is not None:
            staged.state_rows.numpy()[:count] = state_rows
        if staged.adapters is not None:
            staged.adapters.numpy()[:count] = [inputs.memory.adapter for inputs in rows]
        table = self.buffers.host_batch(ROLLING).rolling_table if rolling is not None else None
        if rolling is not None and table is not None:
            for row, state_row in enumerate(state_rows):
                rolling.fill(table.numpy()[row], state_row)
            self.buffers.upload(ROLLING, count)
        for flag in dict.fromkeys(spec.flag for spec in self._specs):
            self._stage_block(flag, rows)
        for row, inputs in enumerate(rows):
            if inputs.sampling.uses_penalties:
                self._count_tokens(row, inputs)
        self.stage_pages([inputs.memory.pages for inputs in rows])

    def _stage_guides(self, staged: B, rows: Sequence[RowInputs]) -> None:
        states = staged.automaton_state.numpy()
        states[: len(rows)] = NO_AUTOMATON
        guides = {row: inputs.guide for row, inputs in enumerate(rows) if inputs.guide is not None}
        automata = [guide.automaton for guide in guides.values()]
        allocations = {} if self._automata is None else self._automata.allocate(automata, self.buffers)
        self.guided_rows = frozenset(row for row, guide in guides.items() if guide.automaton in allocations)
        for row in self.guided_rows:
            number, line = allocations[guides[row].automaton]
            staged.automaton[row] = number
            states[row] = line + guides[row].state

    def _stage_block(self, flag: int, rows: Sequence[RowInputs]) -> None:
        """Write the slots that only rows with a flag read; nothing is copied if no row has it."""
        flagged = [row for row, inputs in enumerate(rows) if not flag or inputs.sampling.sampling_flags & flag]
        if not flagged:
            return
        staged = self.buffers.staging(block_of(flag))
        specs = [spec for spec in self._specs if spec.flag == flag]
        for row, spec in product(flagged, specs):
            value, target = getattr(rows[row].sampling, spec.name), staged[spec.name]
            target[row] = spec.neutral if spec.sizes else value
            if spec.sizes:
                target[row, : len(value)] = value
        if flag == FLAG_BAD_WORDS:
            for row in flagged:
                _fill_recent(self.buffers.host_batch(block_of(flag)).recent_tokens.numpy()[row], rows[row])
        self.buffers.upload(block_of(flag), len(rows))

    def _count_tokens(self, row: int, inputs: RowInputs) -> None:
        generated = inputs.token_ids[inputs.prompt_length :]
        vocab_size = self._model.config.vocab_size
        counts = np.bincount(np.asarray(generated, dtype=np.int64), minlength=vocab_size).astype(np.int32)
        counts[inputs.token_ids[: inputs.prompt_length]] |= PROMPT_BIT
        self.buffers.write("token_counts", row, counts[None])

    def stage_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """Write the page table."""
        table = self.buffers.host_batch(PAGES).page_table.numpy()
        for row, owned in enumerate(pages):
            fill_page_row(table[row], owned, self._setting.null_page)
        self.buffers.upload(PAGES, len(pages))

    def stage_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Write the token masks of some rows."""
        staged = self.buffers.staging(block_of(FLAG_TOKEN_MASK))["token_mask"]
        for row, mask in masks.items():
            staged[row] = mask
        self.buffers.upload_rows("token_mask", list(masks))

    def rewind(self, step_index: int) -> None:
        """Set the step index."""
        self.buffers.all_rows.step_index.fill_(step_index)

    def read(self, steps: range, num_rows: int, *, logprobs: int | None) -> list[StepTokens]:
        """Return the tokens of steps from the rings, and the log-probabilities if requested."""
        read: list[StepTokens] = []
        ring = self._ring_tokens
        for step in steps:
            entry = step % len(ring)
            scores = None if logprobs is None else self._read_logprobs(entry, num_rows, logprobs)
            read.append(StepTokens(ring[entry, :num_rows].tolist(), scores))
        return read

    def _read_logprobs(self, entry: int, num_rows: int, most: int) -> StepLogprobs:
        rings = self.rings
        sampled = (ring[entry, :num_rows].tolist() for ring in (rings.logprob, rings.rank))
        tops = (ring[entry, :num_rows, :most].tolist() for ring in (rings.top_logprobs, rings.top_ids))
        return StepLogprobs(*sampled, *tops)


def or_null(state_row: int | None, null_row: int) -> int:
    """Return a sequence's state row, or the null row."""
    return null_row if state_row is None else state_row


def _fill_recent(staged: np.ndarray, inputs: RowInputs) -> None:
    """Write the last generated tokens, each at its position modulo BAD_WORD_LENGTH; see `advance`."""
    staged[:] = -1
    length = len(inputs.token_ids)
    for position in range(max(inputs.prompt_length, length - BAD_WORD_LENGTH), length):
        staged[position % BAD_WORD_LENGTH] = inputs.token_ids[position]


def adopt_model(buffers: StepBuffers, model: Model, caches: Sequence[LayerState]) -> None:
    """Adopt the tensors that a model writes besides slots: its cache and workspaces."""
    for layer, cache in enumerate(caches):
        for name, tensor in cache.tensors.items():
            buffers.adopt(f"{name}_{layer}", tensor)
    for index, tensor in enumerate(model.workspace):
        buffers.adopt(f"linear_workspace_{index}", tensor)


def decode_attention_of(setting: StepSetting, rows: int, *, batch_invariant: bool) -> PagedDecodeAttention:
    """Return decode attention over the caches, for at most `rows` queries."""
    config = setting.model.config
    return PagedDecodeAttention(
        max_batch_size=rows,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        head_dim_v=config.value_dim,
        page_size=setting.page_size,
        max_pages_per_row=setting.max_pages_per_row,
        dtype=setting.model.dtype,
        kv_dtype=setting.kv_dtype,
        windows=config.windows,
        batch_invariant=batch_invariant,
        device=setting.model.device,
    )
