"""Runs the model: prefill chunks eagerly, decode steps by replaying graphs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from graphdecode.attention import PagedDecodeAttention, TokenByTokenAttention
from graphdecode.buffers import Batch, Slot, StepBuffers
from graphdecode.cache import PagedKVCache
from graphdecode.config import BucketConfig
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.rings import Rings
from graphdecode.engine.scheduler import Chunk
from graphdecode.engine.sequence import Sequence
from graphdecode.graphs import GraphManager, Loop
from graphdecode.kernels.model.advance import AdvanceState, advance
from graphdecode.kernels.model.skip_steps import skip_steps
from graphdecode.kernels.sampling.sample import sample
from graphdecode.kernels.sampling.sampling_slots import (
    MAX_LOGPROBS,
    PROMPT_BIT,
    SAMPLING_SLOTS,
    LogprobOutputs,
    SamplingSlots,
    sampling_flags,
)
from graphdecode.models import Decoder

ROWS = "rows"  # staging block: everything that the host knows of a row, but its pages
PAGES = "pages"  # staging block: the page table
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Launch:
    """Decode steps that are under way: which rows they belong to, and where in the ring their tokens land.

    The places of all `num_steps` belong to the launch; steps that did not run leave no tokens there.
    """

    sequences: tuple[Sequence, ...]
    first_step: int
    num_steps: int
    bucket: int
    started: float
    done: torch.cuda.Event | None


@dataclass(frozen=True)
class StepLogprobs:
    """Log-probabilities of one decode step, in row order: of the sampled tokens, and the most likely ones."""

    sampled: list[float]
    top: list[list[float]]
    top_ids: list[list[int]]


@dataclass(frozen=True)
class StepTokens:
    """What one decode step gave its rows, in row order: tokens, -1 where a row had finished before."""

    tokens: list[int]
    logprobs: StepLogprobs | None = None


class Runner:
    """The model, its cache, its buffers and its graphs.

    Args:
        model: the decoder.
        cache: its key-value cache.
        config: buckets, capture and loop.
        capacity: what the configuration means for this model.
        prefill_budget: tokens of a prefill at most.
        batch_invariant: give a token the same bits in any batch, in a prompt as in a decode step.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        config: BucketConfig,
        capacity: Capacity,
        *,
        prefill_budget: int,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.capacity = capacity
        self.prefill_budget = prefill_budget
        self.steps_per_launch = config.steps_per_launch
        self._is_cuda = model.device.type == "cuda"
        self._steps_launched = 0
        rows, pages = config.max_batch_size, cache.max_pages_per_row
        self._caches = cache.layers
        self.buffers = StepBuffers(
            self._decode_slots(model.config.vocab_size, rows, pages), max_batch_size=rows, device=model.device
        )
        self._chunk_buffers = StepBuffers(
            [
                Slot("tokens", (prefill_budget,), torch.int64, staged="chunks"),
                Slot("rows", (prefill_budget,), torch.int32, staged="chunks"),
                Slot("positions", (prefill_budget,), torch.int32, staged="chunks"),
                Slot("live_tokens", (1,), torch.int32, staged="chunks"),
                Slot("cu_seqlens_q", ("batch+1",), torch.int32, staged="chunks"),
                Slot("cu_seqlens_kv", ("batch+1",), torch.int32, staged="chunks"),
                Slot("page_table", ("batch", pages), torch.int32, pad=cache.trash_page, staged="chunks"),
            ],
            max_batch_size=min(rows, prefill_budget),
            device=model.device,
        )
        self._attention = self._decode_attention(rows, batch_invariant)
        # a CPU's attention has no workspace that grows with the rows
        tokens_at_once = rows if self._is_cuda else prefill_budget
        self._prefill_attention = (
            TokenByTokenAttention(self._decode_attention(tokens_at_once, True)) if batch_invariant else None
        )
        # twice what a launch writes: the host reads one launch while the next is under way; or, at a first use, while
        # the runs before a capture write their entries behind it
        length = max(2 * self.steps_per_launch, self.steps_per_launch + config.warmup_steps + 2)
        self._rings = Rings.allocate(length, rows, model.device)
        # on a GPU each launch ends with a copy of the rings into pinned memory: the host only ever reads its own
        self._host_rings = Rings.allocate(length, rows, "cpu", pin_memory=True) if self._is_cuda else self._rings
        self._adopt_tensors()
        loop = Loop(self.steps_per_launch, epilogue=self._end_launch) if self.steps_per_launch > 1 else None
        self.graphs = GraphManager(
            self._step,
            self.buffers,
            config.ladder,
            constants=model.constants,
            backend=config.backend,
            warmup_steps=config.warmup_steps,
            capture_when=config.capture_when,
            choices=model.linear_choices,
            loop=loop,
        )

    def _decode_attention(self, rows: int, batch_invariant: bool) -> PagedDecodeAttention:
        config = self.model.config
        return PagedDecodeAttention(
            max_batch_size=rows,
            num_qo_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            page_size=self.cache.page_size,
            max_pages_per_row=self.cache.max_pages_per_row,
            dtype=self.model.dtype,
            batch_invariant=batch_invariant,
            device=self.model.device,
        )

    def _decode_slots(self, vocab_size: int, rows: int, pages: int) -> list[Slot]:
        slots = [
            Slot("tokens", ("batch",), torch.int64, pad=1, staged=ROWS),
            Slot("pre_step_seqlens", ("batch",), torch.int32, staged=ROWS),
            Slot("finished", ("batch",), torch.int32, staged=ROWS),
            Slot("rows", ("batch",), torch.int32, staged=ROWS),
            Slot("page_table", ("batch", pages), torch.int32, pad=self.cache.trash_page, staged=PAGES),
            Slot("sampled", ("batch",), torch.int64, pad=1),
            Slot("token_counts", ("batch", vocab_size), torch.int32),
            Slot("sampled_logprob", ("batch",), torch.float32),
            Slot("top_logprobs", ("batch", MAX_LOGPROBS), torch.float32),
            Slot("top_ids", ("batch", MAX_LOGPROBS), torch.int32),
            Slot("step_index", (1,), torch.int64),
            Slot("running", (1,), torch.int32),
            Slot("loop_limit", (1,), torch.int32),
            Slot("loop_count", (1,), torch.int32),
        ]
        for spec in SAMPLING_SLOTS:
            shape: tuple[int | str, ...] = ("batch", spec.width) if spec.width else ("batch",)
            slots.append(Slot(spec.name, shape, spec.dtype, pad=spec.neutral, staged=ROWS))
        return slots

    def _adopt_tensors(self) -> None:
        for layer, (keys, values) in enumerate(self._caches):
            self.buffers.adopt(f"k_cache_{layer}", keys)
            self.buffers.adopt(f"v_cache_{layer}", values)
        for name, ring in self._rings._asdict().items():
            self.buffers.adopt(f"ring_{name}", ring)
        for index, tensor in enumerate(self._attention.workspace):
            self.buffers.adopt(f"attention_workspace_{index}", tensor)
        for index, tensor in enumerate(self.model.workspace):
            self.buffers.adopt(f"linear_workspace_{index}", tensor)
        if self._is_cuda:
            self.buffers.adopt("host_rings", self._host_rings.memory)

    def _step(self, batch: Batch) -> None:
        """One decode step: feed each row's token, sample its successor, and make the row ready for the next step."""
        logits = self.model.decode(batch, self._caches, self._attention)
        slots = SamplingSlots(*(getattr(batch, name) for name in SamplingSlots._fields))
        logprobs = LogprobOutputs(*(getattr(batch, name) for name in LogprobOutputs._fields))
        sample(batch.sampled, logits, batch.pre_step_seqlens, batch.live_rows, slots, batch.token_counts, logprobs)
        state = AdvanceState(*(getattr(batch, name) for name in AdvanceState._fields))
        advance(state, batch.sampled, batch.live_rows, slots, logprobs)
        if self.steps_per_launch == 1:
            self._copy_rings(batch)

    def _end_launch(self, batch: Batch) -> None:
        """What follows the steps of a launch: the next one's begin where the host expects them."""
        skip_steps(batch.step_index, batch.ring_tokens, batch.loop_limit, batch.loop_count)
        self._copy_rings(batch)

    def _copy_rings(self, batch: Batch) -> None:
        if self._is_cuda:
            batch.host_rings.copy_(batch.ring_memory, non_blocking=True)

    def prefill(self, chunks: list[Chunk]) -> None:
        """Compute the keys and values of some sequences' next tokens, all chunks in one pass."""
        staged = self._chunk_buffers.staging("chunks")
        end = 0
        for row, chunk in enumerate(chunks):
            length = chunk.end - chunk.start
            span = slice(end, end + length)
            staged["tokens"][span] = chunk.sequence.token_ids[chunk.start : chunk.end]
            staged["rows"][span] = row
            staged["positions"][span] = np.arange(chunk.start, chunk.end, dtype=np.int32)
            end += length
            staged["cu_seqlens_q"][row + 1] = end
            staged["cu_seqlens_kv"][row + 1] = staged["cu_seqlens_kv"][row] + chunk.end
            self.cache.fill_page_row(chunk.sequence.sequence_id, staged["page_table"][row])
        staged["live_tokens"][0] = end
        self._chunk_buffers.upload("chunks", len(chunks))
        batch = self._chunk_buffers.narrow(len(chunks))
        self.model.prefill(
            batch.tokens[:end],
            batch.rows[:end],
            batch.positions[:end],
            batch.live_tokens,
            batch.cu_seqlens_q,
            batch.cu_seqlens_kv,
            batch.page_table,
            self._caches,
            self._prefill_attention,
        )

    def stage_rows(self, sequences: list[Sequence]) -> None:
        """Write everything that a decode step needs to know of its rows; for when the membership changed."""
        staged = self.buffers.staging(ROWS)
        for row, sequence in enumerate(sequences):
            self._stage_row(staged, row, sequence)
        count = len(sequences)
        staged["finished"][:count] = 0
        staged["rows"][:count] = np.arange(count, dtype=np.int32)
        self.buffers.upload(ROWS, count)
        for row, sequence in enumerate(sequences):
            if sequence.params.uses_penalties:
                self._count_tokens(row, sequence)
        self.stage_pages(sequences)

    def _stage_row(self, staged: dict[str, np.ndarray], row: int, sequence: Sequence) -> None:
        params = sequence.params
        staged["tokens"][row] = sequence.token_ids[-1]
        staged["pre_step_seqlens"][row] = len(sequence.token_ids) - 1
        # below, a division by it leaves the range of float32: what is left is the most likely token
        temperature = params.temperature if params.temperature >= _LEAST_TEMPERATURE else 0.0
        staged["temperature"][row] = temperature
        staged["top_k"][row] = max(params.top_k, 0)
        staged["top_p"][row] = params.top_p
        staged["min_p"][row] = params.min_p
        staged["seed"][row] = sequence.seed
        staged["repetition_penalty"][row] = params.repetition_penalty
        staged["presence_penalty"][row] = params.presence_penalty
        staged["frequency_penalty"][row] = params.frequency_penalty
        bias = params.logit_bias or {}
        staged["bias_ids"][row] = -1
        staged["bias_ids"][row, : len(bias)] = list(bias)
        staged["bias_values"][row, : len(bias)] = list(bias.values())
        staged["stop_ids"][row] = -1
        staged["stop_ids"][row, : len(sequence.stop_ids)] = sequence.stop_ids
        staged["min_position"][row] = min(sequence.prompt_length + params.min_tokens, sequence.max_length)
        staged["last_position"][row] = sequence.max_length - 1
        logprobs = -1 if params.logprobs is None else params.logprobs
        staged["num_logprobs"][row] = logprobs
        staged["sampling_flags"][row] = sampling_flags(
            temperature=temperature,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            num_biases=len(bias),
            masks_stops=bool(sequence.stop_ids) and params.min_tokens > 0,
            num_logprobs=logprobs,
        )

    def _count_tokens(self, row: int, sequence: Sequence) -> None:
        vocab_size = self.model.config.vocab_size
        generated = sequence.token_ids[sequence.prompt_length :]
        counts = np.bincount(np.asarray(generated, dtype=np.int64), minlength=vocab_size).astype(np.int32)
        counts[sequence.token_ids[: sequence.prompt_length]] |= PROMPT_BIT
        self.buffers.token_counts[row].copy_(torch.from_numpy(counts))

    def stage_pages(self, sequences: Iterable[Sequence]) -> None:
        """Write the page table; for when the rows are the same but own more pages."""
        table = self.buffers.staging(PAGES)["page_table"]
        count = 0
        for sequence in sequences:
            self.cache.fill_page_row(sequence.sequence_id, table[count])
            count += 1
        self.buffers.upload(PAGES, count)

    def launch(self, sequences: list[Sequence], num_steps: int) -> Launch:
        """Start decode steps of the staged rows: one launch.

        Args:
            sequences: the rows.
            num_steps: at most `steps_per_launch`; fewer run if all rows finish before.
        """
        first_step, started = self._steps_launched, time.perf_counter()
        try:
            if self.steps_per_launch == 1:
                bucket = self.graphs.replay(len(sequences))
            else:
                bucket = self.graphs.launch(len(sequences), num_steps)
        except BaseException:
            self.buffers.step_index.fill_(first_step)  # the host would look for later tokens in the wrong places
            raise
        self._steps_launched += num_steps
        done = None
        if self._is_cuda:
            done = torch.cuda.Event()
            done.record()
        return Launch(tuple(sequences), first_step, num_steps, bucket, started, done)

    def read(self, launch: Launch) -> list[StepTokens]:
        """Wait for a launch and return what its steps gave, step by step."""
        if launch.done is not None:
            launch.done.synchronize()
        count = len(launch.sequences)
        wants_logprobs = any(sequence.params.logprobs is not None for sequence in launch.sequences)
        steps: list[StepTokens] = []
        for step in range(launch.first_step, launch.first_step + launch.num_steps):
            place = step % self._host_rings.tokens.shape[0]
            tokens = self._host_rings.tokens[place, :count].tolist()
            steps.append(StepTokens(tokens, self._read_logprobs(place, count) if wants_logprobs else None))
        return steps

    def _read_logprobs(self, place: int, count: int) -> StepLogprobs:
        rings = (self._host_rings.logprob, self._host_rings.top_logprobs, self._host_rings.top_ids)
        return StepLogprobs(*(ring[place, :count].tolist() for ring in rings))

    def close(self) -> None:
        """Release the graphs, once what is under way has come to its end."""
        if self._is_cuda:
            torch.cuda.synchronize(self.model.device)
        self.graphs.close()
