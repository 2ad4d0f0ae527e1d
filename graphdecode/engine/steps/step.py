"""What a step is: the contract between the Runner and whatever it captures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch, StepBuffers
from graphdecode.cache import LayerCache
from graphdecode.config import BucketConfig
from graphdecode.engine.shapes import mixed_shapes
from graphdecode.engine.steps.row_inputs import RowInputs, StepTokens
from graphdecode.graphs import Loop
from graphdecode.kernels.sampling.sampling_slots import SamplingCapacity
from graphdecode.models import Chunks, Model


@dataclass(frozen=True)
class StepSetting:
    """What a step is built on; nothing in it changes while the step lives."""

    model: Model  # the decoder
    caches: list[LayerCache]  # keys and values of each layer
    page_size: int  # tokens of a page
    max_pages_per_row: int  # width of the page table
    config: BucketConfig  # rows, steps a launch, warm-up
    batch_invariant: bool = False  # a row's bits depend neither on its neighbours nor on the bucket
    prefill_tokens: int = 1  # of a pass of prompts at most
    mixes: bool = False  # whether steps are to take prompts along where they can

    @property
    def row_shapes(self) -> list[StepShape]:
        """One query of each row, for each bucket."""
        return [StepShape(bucket) for bucket in self.config.ladder]

    @property
    def mixed_shapes(self) -> list[StepShape]:
        """Steps that take prompts along; none where they are not to."""
        if not self.mixes:
            return []
        return mixed_shapes(self.model.device.type, self.prefill_tokens, self.config.ladder)

    @property
    def trash_page(self) -> int:
        """The page that nobody owns: the last one."""
        return self.caches[0].keys.shape[0] - 1

    @property
    def sampling_capacity(self) -> SamplingCapacity:
        """How much one row may ask of sampling."""
        config = self.config
        return SamplingCapacity(
            config.max_logprobs, config.max_stop_token_ids, config.max_logit_biases, config.max_bad_words
        )

    @property
    def ring_length(self) -> int:
        """Steps whose tokens the device keeps for the host."""
        return ring_length(self.config)


def ring_length(config: BucketConfig) -> int:
    """Return the steps whose tokens the device keeps for the host.

    Twice what a launch writes: the host reads one launch while the next is under way; or, at a first use, while the
    runs before a capture write their entries behind it.
    """
    steps = config.steps_per_launch
    return max(2 * steps, steps + config.warmup_steps + 2)


@dataclass(frozen=True)
class Drafting:
    """What a step that feeds drafts tells of it."""

    is_fixed: bool  # whether every launch verifies all drafts that there are, whatever that costs
    # given the number of staged rows, returns each row's drafts for the next step and how many tokens speak for them;
    # None where only the rings will tell
    found: Callable[[int], list[tuple[int, int]] | None]
    prefill: Callable[[Chunks], None]  # is given the chunks of each prefill, behind it
    is_cheap: bool  # whether plain steps make drafts, too; else `prefill` is to be given the tokens that they fed


class Step(ABC):
    """One kind of step: it owns its slots, and alone knows their names.

    Its shapes are captured, each over the buffers narrowed to its rows. The Runner tells it which rows there are, asks
    it for the tokens, and launches its graphs.

    Attributes:
        buffers: every tensor that it reads or writes.
        constants: what it only reads, beside the model's weights.
        loop: how several of them are one launch; None where a launch is one step.
        drafting: how it feeds several tokens of a row; None where it does not.
        holds_forms: whether its rows can be held to forms; it runs in halves then, of which the second alone reads the
            token masks.
        guided_rows: the staged rows that follow their automata on the device; the host need not stage their masks.
    """

    buffers: StepBuffers
    constants: Sequence[Tensor] = ()
    loop: Loop | None = None
    drafting: Drafting | None = None
    holds_forms: bool = False
    guided_rows: Collection[int] = ()

    @abstractmethod
    def shapes(self) -> Sequence[StepShape]:
        """Return the shapes that it can run; those of one query a row are the setting's `row_shapes`."""

    @abstractmethod
    def run(self, shape: StepShape, batch: Batch, chunks: Chunks | None = None) -> None:
        """Run a shape.

        Args:
            shape: one of `shapes`, or one of as many rows as there are and more prompt tokens than any.
            batch: the slots, narrowed to its rows.
            chunks: of prompts, whose keys and values are computed in the same pass; None where the shape has none.
        """

    @abstractmethod
    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Write everything that the device has to know of these rows; for when the membership changed."""

    def begin(self, num_rows: int) -> None:  # noqa: B027 (only where the device has to do something with them)
        """Do on the device what follows the staging of rows; `stage` ends with it."""

    @abstractmethod
    def stage_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """Write the rows' pages alone; for when the rows are the same but own more pages."""

    def stage_masks(self, masks: Mapping[int, np.ndarray]) -> None:  # noqa: B027 (only where forms are held)
        """Write the token masks of some of the staged rows, by row."""

    @abstractmethod
    def rewind(self, step_index: int) -> None:
        """Go on counting from here: a launch failed, and the host will look for later tokens behind this step."""

    @abstractmethod
    def read(self, steps: range, num_rows: int, *, logprobs: int | None) -> list[StepTokens]:
        """Return what some steps gave their rows; their launch has come to its end.

        Args:
            steps: the numbers of their entries in the rings since the beginning; a step has as many of them as it feeds
                tokens of a row.
            num_rows: rows that were live.
            logprobs: most likely tokens that any row asked for; None: no row wants log-probabilities.
        """
