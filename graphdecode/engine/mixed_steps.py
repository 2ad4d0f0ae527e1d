"""Mixed steps: decode rows and chunks of prompts in one pass, so that each weight is read once for both."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from graphdecode.buckets import BucketLadder
from graphdecode.buffers import Batch
from graphdecode.engine.prefill import Prefill, PromptChunk
from graphdecode.engine.steps import MixingStep, Step, StepSetting
from graphdecode.graphs import CaptureError, GraphManager, GraphReport
from graphdecode.graphs.capture import no_row_live, run
from graphdecode.models import MixingModel, Model

# tokens of a pass that has a graph, those of rows and of chunks together, and rows of it: among so many tokens some of
# padding weigh little. A CPU multiplies 16 or 32 rows at once, a GPU waits for weights up to some hundred
GRAPH_TOKENS = {"cuda": (64, 128, 256, 512), "cpu": (16, 32, 64)}
_GRAPH_ROWS = {"cuda": (8, 64), "cpu": (1, 8, 32)}
CACHED_BYTES = 8 * 2**20  # of weights that a CPU has in the caches of its cores: to read them once more takes no time


def pays(model: Model) -> bool:
    """Whether a model has weights that take time to be read once more."""
    return model.device.type != "cpu" or model.weight_bytes > CACHED_BYTES


class MixedSteps:
    """Steps that take chunks of prompts along.

    The rows feed their tokens and sample, as in a step of theirs alone; of the chunks keys and values are computed, no
    logits. A row whose prompt ends with one of the chunks is among the rows.

    Args:
        setting: model, caches and capacity.
        step: of the rows.
        prefill: stages the chunks.

    Attributes:
        graphs: by the tokens of a pass, for each number of rows; none before they are captured.
    """

    def __init__(self, setting: StepSetting, step: Step, prefill: Prefill) -> None:
        self._setting = setting
        self._step = step
        self._prefill = prefill
        self.graphs: dict[int, GraphManager] = {}
        for name in prefill.buffers.slots:
            step.buffers.adopt(f"chunk_{name}", prefill.buffers.tensors[name])

    @classmethod
    def of(cls, setting: StepSetting, step: Step, prefill: Prefill) -> MixedSteps | None:
        """Return the mixed steps of a kind of step and a model; None where the two have none.

        With `batch_invariant` a token's bits are those of the launch that it would be in by itself, and drafts come
        from sources that are to see prompts, too.
        """
        model = setting.model
        if setting.batch_invariant or getattr(step, "drafting", None) is not None:
            return None
        if not isinstance(step, MixingStep) or not isinstance(model, MixingModel):
            return None
        return cls(setting, step, prefill)

    def capture(self, progress: bool = True) -> None:
        """Capture the passes; where that cannot be done, prompts go by themselves, and a warning says why.

        Args:
            progress: show a bar on standard error.
        """
        self.close()
        if self._setting.config.backend == "eager" or self._setting.config.capture_when != "startup":
            return
        try:
            with no_row_live(self._prefill.buffers):  # the last chunks' pages may be somebody else's by now
                for tokens in reversed(GRAPH_TOKENS[self._setting.model.device.type]):
                    ladder = self._ladder(tokens)
                    if ladder is not None:
                        self.graphs[tokens] = self._manager(tokens, ladder)
                        self.graphs[tokens].capture(progress=progress)
        except CaptureError as error:
            self.close()
            warnings.warn(f"prompts are computed by themselves: {error}", RuntimeWarning, stacklevel=2)

    def _ladder(self, tokens: int) -> BucketLadder | None:
        """Return for how many rows there are passes of so many tokens; None where there is none."""
        buckets, most = self._setting.config.ladder, self._setting.config.max_batch_size
        rows = (min(rows, most) for rows in (*_GRAPH_ROWS[self._setting.model.device.type], most))
        fitting = [bucket for bucket in map(buckets.bucket_for, rows) if 2 * bucket <= tokens]
        return BucketLadder(fitting, max(fitting)) if fitting else None

    def _manager(self, tokens: int, ladder: BucketLadder) -> GraphManager:
        config, model = self._setting.config, self._setting.model
        return GraphManager(
            partial(self._run, tokens),
            self._step.buffers,
            ladder,
            constants=model.constants,
            backend=config.backend,
            warmup_steps=1 if model.device.type == "cpu" else config.warmup_steps,  # the step itself was looked at
            choices=lambda _rows: model.linear_choices(tokens),
            around=lambda rows, _queries: self._setting.around(f"the step of {rows} rows in {tokens} tokens"),
        )

    def _room(self, tokens: int, rows: int) -> int:
        """Return how many tokens of chunks a pass of so many takes beside a bucket's rows."""
        return min(tokens - rows, self._prefill.max_tokens)

    def _run(self, tokens: int, batch: Batch) -> None:
        cast(MixingStep, self._step).mix(batch, self._prefill.chunks(self._room(tokens, batch.size)))

    def _graph_for(self, num_rows: int, num_tokens: int) -> GraphManager | None:
        for tokens in sorted(self.graphs):
            graphs = self.graphs[tokens]
            if num_rows <= graphs.buckets[-1] and num_tokens <= self._room(tokens, graphs.bucket_for(num_rows)):
                return graphs
        return None

    def takes(self, num_rows: int, num_tokens: int) -> bool:
        """Whether so many tokens of chunks are to go along with a step of so many rows.

        They do where a graph has room for them, and where they are more than any graph has room for: then the pass is
        run operator by operator, as that of a prompt would be. In between they and the rows have graphs of their own.
        """
        if self._graph_for(num_rows, num_tokens) is not None:
            return True
        return bool(self.graphs) and num_tokens > max(self.graphs)

    def run(self, num_rows: int, chunks: Sequence[PromptChunk]) -> int:
        """Run one step of the staged rows with some staged chunks; return the bucket of rows that ran."""
        staged = self._prefill.staged(chunks)
        graphs = self._graph_for(num_rows, staged.token_ids.shape[0])
        if graphs is not None:
            return graphs.replay(num_rows)
        buffers = self._step.buffers
        buffers.set_live_rows(num_rows)
        run(partial(cast(MixingStep, self._step).mix, chunks=staged), buffers.narrow(num_rows))
        return num_rows

    def report(self) -> GraphReport:
        """Return what was captured and replayed up to now, passes of few tokens first."""
        buckets = [
            replace(bucket, along=self._room(tokens, bucket.bucket))
            for tokens in sorted(self.graphs)
            for bucket in self.graphs[tokens].report().buckets
        ]
        return GraphReport(next(iter(self.graphs.values())).backend if self.graphs else "eager", buckets)

    def close(self) -> None:
        """Release the graphs."""
        for graphs in self.graphs.values():
            graphs.close()
        self.graphs = {}
