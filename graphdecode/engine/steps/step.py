"""The interface between the runner and a step: what a step is given for each row, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphdecode.buckets import BucketLadder, StepShape
from graphdecode.buffers import Batch, StepBuffers
from graphdecode.cache import LayerState, RollingPages
from graphdecode.config import BucketConfig
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.engine.constraint import Guide
from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import BRING_YOUR_OWN, EntryPoints, refuse_taken
from graphdecode.graphs import Loop
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_PENALTIES,
    MASK_BITS,
    TOO_COLD,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    SamplingCapacity,
    held_back,
    sampling_flags,
    sampling_slots,
)
from graphdecode.models import Chunks, MixingModel, Model

_PROMPT_TOKENS = {"cuda": (16, 32, 64, 128, 256, 512), "cpu": (8, 16, 32, 64)}  # of a pass that has a graph
# of a mixed step, those of rows and of chunks together, and rows of it. A CPU multiplies 16 or 32 rows at once, a GPU
# waits for weights up to some hundred
MIXED_TOKENS = {"cuda": (64, 128, 256, 512), "cpu": (16, 32, 64)}
_MIXED_ROWS = {"cuda": (8, 64), "cpu": (1, 8, 32)}
CACHED_BYTES = 8 * 2**20  # of weights that a CPU has in the caches of its cores: to read them once more takes no time


def pays(model: Model) -> bool:
    """Whether a model has weights that take time to be read once more, so that steps had better take prompts along."""
    return model.device.type != "cpu" or model.weight_bytes > CACHED_BYTES


def prompt_shapes(device_type: str, max_tokens: int) -> list[StepShape]:
    """Return the passes of prompts by themselves; a larger one takes longer to run than to launch."""
    sizes = {min(tokens, max_tokens) for tokens in _PROMPT_TOKENS[device_type]}
    return [StepShape(0, 1, tokens) for tokens in sorted(sizes)]


def mixed_shapes(device_type: str, max_tokens: int, ladder: BucketLadder) -> list[StepShape]:
    """Return the steps that take chunks of prompts along, for some of a ladder's buckets."""
    most = ladder.max_batch_size
    buckets = {ladder.bucket_for(min(rows, most)) for rows in (*_MIXED_ROWS[device_type], most)}
    return [
        StepShape(bucket, 1, min(tokens - bucket, max_tokens))
        for tokens in MIXED_TOKENS[device_type]
        for bucket in buckets
        if 2 * bucket <= tokens
    ]


_LEAST_TEMPERATURE = 1e-5
_NO_LIMIT = 2**31 - 1
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# of `SamplingParams` and of `SamplingSlots` by one name, and the same
_MADE = {"temperature", "top_k", "seed", "bad_words"}
_AS_ASKED_FOR = {
    spec.name: float(spec.neutral)
    for spec in sampling_slots(SamplingCapacity(), 1)
    if spec.name not in _MADE and hasattr(SamplingParams, spec.name)
}
_Asked: Any = make_dataclass(
    "_Asked", [(name, float, float(value)) for name, value in _AS_ASKED_FOR.items()], frozen=True
)

# What a step gives a row instead of a token.
ENDED_BEFORE = -1
NO_CHOICE = {  # the row ends here, and why
    WITHOUT_NUMBERS: "a logit is NaN or +inf; dtype='float32' computes what goes beyond float16's 65504",
    WITHOUT_FINITE: "every token is masked: all logits are -inf",
    TOO_COLD: "the logits leave the range of float32 when they are divided by the temperature",
}


@dataclass(frozen=True)
class RowSampling(_Asked):
    """Sampling parameters of a row, and what ends it: the values of its `SamplingSlots`, whose names the fields have.

    Without a token mask all tokens are allowed; with `num_logprobs=-1` not even the sampled one's is reported.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_position: int = 0
    last_position: int = _NO_LIMIT
    num_logprobs: int = -1
    token_mask: np.ndarray | None = field(default=None, compare=False, repr=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    sampling_flags: int = field(init=False)

    def __post_init__(self) -> None:
        flags = sampling_flags(
            **{name: getattr(self, name) for name in ("temperature", "num_logprobs", *_PENALTIES)},
            num_biases=len(self.bias_ids),
            masks_stops=bool(self.stop_ids) and self.min_position > 0,
            is_masked=self.token_mask is not None,
            num_bad_words=len(self.bad_words),
        )
        object.__setattr__(self, "sampling_flags", flags)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        seed: int,
        stop_ids: tuple[int, ...],
        held_back_ids: tuple[int, ...] = (),
        prompt_length: int,
        max_length: int,
        vocab_size: int,
        bad_words: Sequence[Sequence[int]] = (),
        constrained: np.ndarray | None = None,
    ) -> RowSampling:
        """Return what a request's parameters mean for its row.

        `bad_words` are tokens; `constrained` is a token mask whose owner changes it between steps. `held_back_ids` are
        masked before `min_tokens` too, and end nothing.
        """
        if params.allowed_token_ids is not None:
            constrained = token_mask(params.allowed_token_ids, vocab_size)
        bias: Mapping[int, float] = params.logit_bias or {}
        return cls(
            **{name: getattr(params, name) for name in _AS_ASKED_FOR},
            # below, a division by it leaves the range of float32: what is left is the most likely token
            temperature=params.temperature if params.temperature >= _LEAST_TEMPERATURE else 0.0,
            top_k=max(params.top_k, 0),
            seed=seed,
            bias_ids=tuple(bias),
            bias_values=tuple(bias.values()),
            stop_ids=(*stop_ids, *map(held_back, held_back_ids)),
            min_position=min(prompt_length + params.min_tokens, max_length) if params.min_tokens else 0,
            last_position=max_length - 1,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            token_mask=constrained,
            bad_words=tuple((-1,) * (BAD_WORD_LENGTH - len(word)) + tuple(word) for word in bad_words),
        )

    @property
    def uses_penalties(self) -> bool:
        """Whether the counts of the row's tokens matter."""
        return bool(self.sampling_flags & FLAG_PENALTIES)


def token_mask(allowed: Collection[int], vocab_size: int) -> np.ndarray:
    """Return a token mask, int32 [ceil(vocab_size / 32)]: bit i of word w is set for token 32 w + i."""
    bits = np.zeros(-(-vocab_size // MASK_BITS) * MASK_BITS, dtype=bool)
    bits[np.fromiter(allowed, np.int64, len(allowed))] = True
    return np.packbits(bits, bitorder="little").view("<i4")


@dataclass(frozen=True)
class RowInputs:
    """One row of a batch, as it stands before the next step."""

    token_ids: Sequence[int]  # prompt and answer so far; the last one is fed, the others are in the cache
    prompt_length: int  # how many of them are the prompt
    pages: Sequence[int]  # of the cache, in order, for the tokens so far and those to come
    sampling: RowSampling  # how the next tokens are chosen
    may_draft: bool = True  # not where the host says after each token what may follow
    guide: Guide | None = None  # the automaton of the structured output, if the device can follow it
    state_row: int | None = None  # of its recurrent states and rolling pages; None: nobody's
    adapter: int = -1  # the slot of its adapter; -1: none


class StepLogprobs(NamedTuple):
    """Log-probabilities of a step's rows or a prompt's places: of the token, with its rank, and of the most likely."""

    sampled: list[float]
    ranks: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


class StepDrafts(NamedTuple):
    """Verified and accepted drafts of a step, row by row; 1 accepted of none fed: the first would have been."""

    verified: list[int]  # drafts that were fed
    accepted: list[int]  # how many of them were what was sampled
    found: list[int]  # drafts of the next step
    matched: list[int]  # tokens that agreed where these were found


class StepTokens(NamedTuple):
    """Output of one step, row by row: tokens, ENDED_BEFORE, or one of NO_CHOICE; `drafts` with the first of several."""

    tokens: list[int]
    logprobs: StepLogprobs | None = None
    drafts: StepDrafts | None = None


@dataclass(frozen=True)
class StepSetting:
    """The model, caches and sizes that a step is built on; nothing in it changes while the step lives."""

    model: Model  # the decoder
    caches: Sequence[LayerState]  # keys and values, or states, of each layer
    trash_page: int  # the page that nobody owns
    kv_dtype: torch.dtype  # of keys and values
    page_size: int  # tokens of a page
    max_pages_per_row: int  # width of the page table
    config: BucketConfig  # rows, steps a launch, warm-up
    batch_invariant: bool = False  # a row's bits depend neither on its neighbours nor on the bucket
    prefill_tokens: int = 1  # of a pass of prompts at most
    mixes: bool = False  # whether steps are to take prompts along where they can
    trash_state_row: int = 0  # of recurrent states, the row that nobody owns
    rolling: RollingPages | None = None  # pages of layers that keep a window alone, by the rows of states

    @property
    def row_shapes(self) -> list[StepShape]:
        """One query of each row, for each bucket."""
        return [StepShape(bucket) for bucket in self.config.ladder]

    @property
    def mixed_shapes(self) -> list[StepShape]:
        """Steps that take prompts along; none where they are not to, or cannot, or one row is all that there is."""
        # with `batch_invariant` a token's bits are those of the launch that it would be in by itself
        if not self.mixes or self.batch_invariant or self.config.backend == "eager":
            return []
        if self.config.max_batch_size == 1 or not isinstance(self.model, MixingModel):
            return []
        return mixed_shapes(self.model.device.type, self.prefill_tokens, self.config.ladder)

    @property
    def sampling_capacity(self) -> SamplingCapacity:
        """The limits of one row's sampling parameters."""
        return SamplingCapacity(*(getattr(self.config, name) for name in SamplingCapacity._fields))

    @property
    def ring_length(self) -> int:
        """Steps whose tokens the device keeps for the host."""
        return ring_length(self.config)


def ring_length(config: BucketConfig) -> int:
    """Return the steps whose tokens the device keeps for the host.

    Twice what a launch writes, for a launch in flight; or, at a first use, for the runs before a capture.
    """
    steps = config.steps_per_launch
    return max(2 * steps, steps + config.warmup_steps + 2)


@dataclass(frozen=True)
class Drafting:
    """Properties of a step that feeds drafts."""

    is_fixed: bool  # whether every launch verifies all drafts that there are, whatever that costs
    # given the staged rows, each one's drafts for the next step and how many tokens speak for them; None: not known yet
    found: Callable[[int], list[tuple[int, int]] | None]
    prefill: Callable[[Chunks], None]  # is given the chunks of each prefill, behind it
    is_cheap: bool  # whether plain steps make drafts, too; else `prefill` is to be given the tokens that they fed


class Step(ABC):
    """One kind of step: it owns its slots, and alone knows their names.

    Its shapes are captured, each over the buffers narrowed to its rows.
    """

    buffers: StepBuffers  # every tensor that it reads or writes
    constants: Sequence[Tensor] = ()  # what it only reads, beside the model's weights
    loop: Loop | None = None  # how several of them are one launch; None where a launch is one step
    drafting: Drafting | None = None  # how it feeds several tokens of a row; None where it does not
    takes_constraints: bool = False  # whether it runs in halves, too, of which the second alone reads the token masks
    guided_rows: Collection[int] = ()  # staged rows that follow their automata on the device, without staged masks

    @abstractmethod
    def shapes(self) -> Sequence[StepShape]:
        """Return the shapes that it can run; those of one query a row are the setting's `row_shapes`."""

    @abstractmethod
    def run(self, shape: StepShape, batch: Batch, chunks: Chunks | None = None) -> None:
        """Run a shape of `shapes`, or one of more prompt tokens than any, over the slots narrowed to its rows.

        `chunks` are of prompts, whose keys and values are computed in the same pass; None where the shape has none.
        """

    @abstractmethod
    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Write everything that the device has to know of these rows; for when the membership changed."""

    def begin(self, num_rows: int) -> None:  # noqa: B027 (only where the device has to do something with them)
        """Run on the device what follows the staging of rows; `stage` ends with it."""

    @abstractmethod
    def stage_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """Write the rows' pages alone; for when the rows are the same but own more pages."""

    def stage_masks(self, masks: Mapping[int, np.ndarray]) -> None:  # noqa: B027 (only where there are constraints)
        """Write the token masks of some of the staged rows, by row."""

    @abstractmethod
    def rewind(self, step_index: int) -> None:
        """Go on counting from here: a launch failed, and the host will look for later tokens behind this step."""

    @abstractmethod
    def read(self, steps: range, num_rows: int, *, logprobs: int | None) -> list[StepTokens]:
        """Return what some steps gave their live rows; their launch has come to its end.

        Args:
            steps: the numbers of their entries in the rings since the beginning, one for each token that a row feeds.
            num_rows: rows that were live.
            logprobs: most likely tokens that any row asked for; None: no row wants log-probabilities.
        """


StepMaker: TypeAlias = Callable[[StepSetting], Step]

# the kinds that came in from outside, by the names that `[model] step_kind` asks for: filled while files are imported
STEPS: dict[str, StepMaker] = {}


def register_step(name: str, make: StepMaker, *, replace: bool = False) -> None:
    """Register what makes a kind of step, by the name that settings ask for; `replace` one of that name.

    Raises:
        ArgumentError: the name is taken.
    """
    refuse_taken("a step", name, name in STEPS, replace)
    STEPS[name] = make


_OUTSIDE = EntryPoints("graphdecode.steps", register_step, STEPS)


def step_named(name: str) -> StepMaker:
    """Return what makes the steps of a kind; an ArgumentError says that it is not known."""
    _OUTSIDE.find()
    if name not in STEPS:
        known = ", ".join(STEPS) or "none"
        asked = shown(name, plain=True)
        raise ArgumentError(f"step_kind {asked} is not registered; registered are {known}; a step {BRING_YOUR_OWN}")
    return STEPS[name]
