"""Prompts, chunk by chunk: many tokens of some rows in one pass, into the same cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from graphdecode.attention import TokenByTokenAttention
from graphdecode.buckets import BucketLadder
from graphdecode.buffers import Batch, Slot, StepBuffers
from graphdecode.cache import fill_page_row
from graphdecode.engine.prompt_scoring import PromptScoring
from graphdecode.engine.steps import StepLogprobs
from graphdecode.engine.steps.decode import adopt_model, decode_attention_of
from graphdecode.engine.steps.step import StepSetting
from graphdecode.graphs import BucketReport, CaptureError, GraphManager, GraphReport
from graphdecode.models import Chunks

_CHUNKS = "chunks"  # the staging block
# tokens of a pass that has a graph; a CPU's graph keeps what is between its operators, and more tokens are worth less
_GRAPH_TOKENS = {"cuda": (16, 32, 64, 128, 256, 512), "cpu": (8, 16, 32, 64)}
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


def pass_sizes(device_type: str, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens of passes that have graphs, and those of the largest pass."""
    return (*(tokens for tokens in _GRAPH_TOKENS[device_type] if tokens < max_tokens), max_tokens)


class Prefill:
    """Computes keys and values of prompts; logits only to score a prompt, for its last token is fed to a decode step.

    A pass of few tokens would take longer to launch, operator by operator, than to run: it replays a graph of its own,
    of as many tokens or somewhat more. `live_rows` counts tokens here.

    Args:
        setting: model, caches and capacity.
        max_tokens: of all chunks of a pass together.
        follow: is given the tokens of each pass behind it, as the model's `prefill` was; None: nobody.

    Attributes:
        buffers: every tensor that a pass reads or writes.
        graphs: of passes, once they are captured; None where there are none.
    """

    def __init__(self, setting: StepSetting, max_tokens: int, *, follow: Callable[..., None] | None = None) -> None:
        self._follow = follow
        self.max_tokens = max_tokens
        self._model = setting.model
        self._caches = setting.caches
        self._trash_page = setting.trash_page
        self._page_size = setting.page_size
        self._rows = min(setting.config.max_batch_size, max_tokens)
        self.buffers = StepBuffers(
            [
                Slot("tokens", ("batch",), torch.int64, pad=_DUMMY_TOKEN, staged=_CHUNKS),
                Slot("rows", ("batch",), torch.int32, staged=_CHUNKS),
                Slot("positions", ("batch",), torch.int32, staged=_CHUNKS),
                Slot("cu_seqlens_q", (self._rows + 1,), torch.int32, staged=_CHUNKS),
                Slot("cu_seqlens_kv", (self._rows + 1,), torch.int32, staged=_CHUNKS),
                Slot(
                    "page_table",
                    (self._rows, setting.max_pages_per_row),
                    torch.int32,
                    pad=self._trash_page,
                    staged=_CHUNKS,
                ),
            ],
            max_batch_size=max_tokens,
            device=self._model.device,
        )
        self._scoring = PromptScoring(setting.sampling_capacity.max_logprobs, self._model)
        self._attention = None
        self._setting = setting
        self.graphs: GraphManager | None = None
        if setting.batch_invariant:
            rows = setting.config.max_batch_size
            # a CPU's attention has no workspace that grows with the rows
            at_once = -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS if self._model.device.type == "cuda" else max_tokens
            self._attention = TokenByTokenAttention(decode_attention_of(setting, at_once, batch_invariant=True))
        else:
            adopt_model(self.buffers, self._model, self._caches)

    def _make_graphs(self, capture_when: str) -> GraphManager:
        config, most = self._setting.config, _GRAPH_TOKENS[self._model.device.type][-1]
        sizes = [tokens for tokens in pass_sizes(self._model.device.type, self.max_tokens) if tokens <= most]
        return GraphManager(
            self._whole_pass,
            self.buffers,
            BucketLadder(sizes, min(most, self.max_tokens)),
            constants=self._model.constants,
            backend=config.backend,
            warmup_steps=config.warmup_steps,
            capture_when=capture_when,
            choices=self._model.linear_choices,
            around=lambda tokens, _queries: self._setting.around(f"the pass of {tokens} prompt tokens"),
        )

    def _whole_pass(self, batch: Batch) -> None:
        self._model.prefill(*self.chunks(batch.size), self._caches, self._attention)

    def chunks(self, tokens: int, rows: int | None = None) -> Chunks:
        """Return what `stage` writes, narrowed to so many tokens and chunks; behind those that are there is padding.

        Args:
            tokens: of all chunks together.
            rows: chunks; None: as many as there can be.
        """
        buffers, rows = self.buffers, self._rows if rows is None else rows
        return Chunks(
            buffers.tokens[:tokens],
            buffers.rows[:tokens],
            buffers.positions[:tokens],
            buffers.live_rows,
            buffers.cu_seqlens_q[: rows + 1],
            buffers.cu_seqlens_kv[: rows + 1],
            buffers.page_table[:rows],
        )

    def capture(self, progress: bool = True, *, are_rare: bool = False) -> None:
        """Capture the passes of few tokens; where that cannot be done, they stay as they are, and a warning says why.

        Args:
            progress: show a bar on standard error.
            are_rare: capture each after its first use.
        """
        if self._attention is not None or self._setting.config.backend == "eager":
            return  # with `batch_invariant` tokens are taken one by one
        self.close()
        graphs = self._make_graphs("first-use" if are_rare else self._setting.config.capture_when)
        try:
            graphs.capture(progress=progress)
            self.graphs = graphs
        except CaptureError as error:
            graphs.close()
            warnings.warn(f"prompts are computed without graphs: {error}", RuntimeWarning, stacklevel=2)

    def report(self) -> GraphReport:
        """Return what was captured and replayed up to now, by tokens; the largest pass runs operator by operator."""
        found = GraphReport("eager", []) if self.graphs is None else self.graphs.report()
        if self.max_tokens not in [bucket.bucket for bucket in found.buckets]:
            choices = self._model.linear_choices(self.max_tokens)
            found.buckets.append(BucketReport(self.max_tokens, "eager", choices=choices))
        return found

    def close(self) -> None:
        """Release the graphs."""
        if self.graphs is not None:
            self.graphs.close()
        self.graphs = None

    def warm_up(self) -> None:
        """Run passes of 1, 2, 4, ... tokens up to the largest, into the trash page: what they compile is ready then."""
        longest = self.buffers.page_table.shape[1] * self._page_size
        most = min(self.max_tokens, longest * self._rows)
        for tokens in [*(2**power for power in range((most - 1).bit_length())), most]:
            lengths = [min(longest, tokens - begin) for begin in range(0, tokens, longest)]
            self.run([PromptChunk([_DUMMY_TOKEN] * length, 0, ()) for length in lengths])

    def run(self, chunks: Sequence[PromptChunk]) -> list[StepLogprobs | None]:
        """Compute the keys and values of some chunks in one pass; return the log-probabilities that each wants."""
        self.stage(chunks)
        return self.compute(chunks)

    def compute(self, chunks: Sequence[PromptChunk]) -> list[StepLogprobs | None]:
        """Do the same for chunks that were staged; of these it looks at the lengths and at what is scored."""
        staged = self.staged(chunks)
        found: list[StepLogprobs | None] = [None] * len(chunks)
        end, is_scored = sum(len(chunk.token_ids) for chunk in chunks), any(chunk.scored for chunk in chunks)
        if self.graphs is not None and end <= self.graphs.buckets[-1] and not is_scored:
            self.graphs.replay(end)
        else:
            stream = self._model.prefill(*staged, self._caches, self._attention)
            found = self._scored(chunks, stream)
        if self._follow is not None:
            self._follow(*staged)
        return found

    def follow(self, chunks: Sequence[PromptChunk]) -> None:
        """Let `follow` alone have a pass over some staged chunks, whose keys and values the model has."""
        if self._follow is not None:
            self._follow(*self.staged(chunks))

    def stage(self, chunks: Sequence[PromptChunk]) -> None:
        """Tell the device of some chunks."""
        staged = self.buffers.staging(_CHUNKS)
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
        staged["cu_seqlens_q"][len(chunks) + 1 :] = end
        staged["cu_seqlens_kv"][len(chunks) + 1 :] = staged["cu_seqlens_kv"][len(chunks)]
        self.buffers.upload(_CHUNKS, end)

    def staged(self, chunks: Sequence[PromptChunk]) -> Chunks:
        """Return some staged chunks as the device knows them, without padding; of these it looks at the lengths."""
        return self.chunks(sum(len(chunk.token_ids) for chunk in chunks), len(chunks))

    def _scored(self, chunks: Sequence[PromptChunk], stream: Any) -> list[StepLogprobs | None]:
        found: list[StepLogprobs | None] = []
        end = 0
        for chunk in chunks:
            begin, end = end, end + len(chunk.token_ids)
            logits = partial(self._model.logits, stream)
            found.append(self._scoring.run(logits, begin, chunk.scored, chunk.num_logprobs) if chunk.scored else None)
        return found
