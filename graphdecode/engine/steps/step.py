"""What a step is: the contract between the Runner and whatever it captures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from graphdecode.buffers import Batch, StepBuffers
from graphdecode.cache import LayerCache
from graphdecode.config import BucketConfig
from graphdecode.engine.steps.row_inputs import RowInputs, StepTokens
from graphdecode.graphs import Loop
from graphdecode.kernels.sampling.sampling_slots import SamplingCapacity
from graphdecode.models import Chunks, Model


@dataclass(frozen=True)
class StepSetting:
    """What a step is built on; nothing in it changes while the step lives.

    Attributes:
        model: the decoder.
        caches: keys and values of each layer.
        page_size: tokens of a page.
        max_pages_per_row: width of the page table.
        config: rows, steps a launch, warm-up.
        batch_invariant: a row's bits depend neither on its neighbours nor on the bucket.
        around: is entered around each capture, with what is captured.
    """

    model: Model
    caches: list[LayerCache]
    page_size: int
    max_pages_per_row: int
    config: BucketConfig
    batch_invariant: bool = False
    around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()

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


@runtime_checkable
class HeldStep(Protocol):
    """What a step has beside that of `Step` whose rows can be held to forms.

    Attributes:
        halves: the step in two, of which the second alone reads the token masks.
        guided_rows: the staged rows that follow their automata on the device; the host need not stage their masks.
    """

    halves: tuple[Callable[[Batch], None], Callable[[Batch], None]]
    guided_rows: Collection[int]

    def stage_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Write the token masks of some of the staged rows, by row."""


@runtime_checkable
class MixingStep(Protocol):
    """What a step has beside that of `Step` which can take chunks of prompts along in its pass."""

    def mix(self, batch: Batch, chunks: Chunks) -> None:
        """Run one step of a bucket's rows, and compute the keys and values of chunks of prompts."""


@dataclass(frozen=True)
class Drafting:
    """What a step that feeds drafts tells of it.

    Attributes:
        wider: steps of more queries a row than one, by their number.
        is_fixed: whether every launch verifies all drafts that there are, whatever that costs.
        found: given the number of staged rows, returns each row's drafts for the next step and how many tokens speak
            for them; None where only the rings will tell.
        prefill: is given what `Model.prefill` is, up to the page table, behind each prefill.
        constants: what the drafts' source only reads.
        is_cheap: whether plain steps make drafts, too; else `prefill` is to be given the tokens that they fed.
    """

    wider: Mapping[int, Callable[[Batch], None]]
    is_fixed: bool
    found: Callable[[int], list[tuple[int, int]] | None]
    prefill: Callable[..., None]
    constants: Sequence[Tensor]
    is_cheap: bool


class Step(Protocol):
    """One kind of step: it owns its slots, and alone knows their names.

    It is called with the buffers narrowed to a bucket, and captured so. The Runner tells it which rows there are, asks
    it for the tokens, and launches its graphs.

    Attributes:
        buffers: every tensor that it reads or writes.
        loop: how several of them are one launch; None where a launch is one step.
        drafting: how it feeds several tokens of a row; a step that does not may leave it out.
    """

    buffers: StepBuffers
    loop: Loop | None
    drafting: Drafting | None

    def __call__(self, batch: Batch) -> None:
        """Run the step over a bucket's rows."""

    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Write everything that the device has to know of these rows; for when the membership changed."""

    def stage_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """Write the rows' pages alone; for when the rows are the same but own more pages."""

    def rewind(self, step_index: int) -> None:
        """Go on counting from here: a launch failed, and the host will look for later tokens behind this step."""

    def read(self, steps: range, num_rows: int, *, logprobs: int | None) -> list[StepTokens]:
        """Return what some steps gave their rows; their launch has come to its end.

        Args:
            steps: the numbers of their entries in the rings since the beginning; a step has as many of them as it feeds
                tokens of a row.
            num_rows: rows that were live.
            logprobs: most likely tokens that any row asked for; None: no row wants log-probabilities.
        """
