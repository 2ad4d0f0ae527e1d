"""The interface of a step: what the runner gives it for each row, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from graphdecode.buckets import BucketLadder, StepShape
from graphdecode.buffers import StepBuffers
from graphdecode.cache import LayerState, RollingPages
from graphdecode.config import BucketConfig
from graphdecode.config.sampling_params import SamplingParams
from graphdecode.engine.constraint import Guide
from graphdecode.errors import ArgumentError, shown
from graphdecode.extensions import HOW_TO_REGISTER, EntryPoints, refuse_duplicate
from graphdecode.graphs import Loop
from graphdecode.kernels.linear.add_adapters import NO_ADAPTER
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_BAD_WORDS,
    FLAG_BIAS,
    FLAG_LOGPROBS,
    FLAG_PENALTIES,
    FLAG_SAMPLE,
    FLAG_STOP_MASK,
    FLAG_TOKEN_MASK,
    MASK_BITS,
    TOO_COLD,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    SamplingCapacity,
    masked_only,
    sampling_slots,
)
from graphdecode.models import Chunks, Model

_PROMPT_TOKENS = {"cuda": (16, 32, 64, 128, 256, 512), "cpu": (8, 16, 32, 64)}  # prefill passes that have graphs
# sizes of mixed steps: tokens of rows and chunks together, and rows. A CPU multiplies 16 or 32 rows at once; up to a
# few hundred rows, a GPU waits for weights
MIXED_TOKENS = {"cuda": (64, 128, 256, 512), "cpu": (16, 32, 64)}
_MIXED_ROWS = {"cuda": (8, 64), "cpu": (1, 8, 32)}
STARTUP_TOKENS = 512  # larger passes are captured after the first that needs them
# larger passes: prompt tokens. They have graphs where the host takes longer to launch an eager pass than the device to
# compute it: nine launches a layer of 0.13 ms, against 24 width^2 operations a token and layer at 500 TFLOP/s
LARGE_PASSES: dict[str, tuple[int, ...]] = {"cuda": (768, 1024, 1536, 2048), "cpu": ()}
_TOKENS_TIMES_SQUARED_WIDTH = 9 * 0.13e-3 * 500e12 / 24
CACHED_BYTES = 8 * 2**20  # weights of this size stay in a CPU's caches


def should_mix(model: Model) -> bool:
    """Whether mixed steps save time: they do if a second read of the weights, for the prompts, is not free."""
    return model.device.type != "cpu" or model.weight_bytes > CACHED_BYTES


def large_passes(device_type: str, max_tokens: int, width: int) -> list[int]:
    """Return the prompt tokens of passes beyond STARTUP_TOKENS with graphs.

    `width`: of the model's layers, all query heads together.
    """
    sizes = LARGE_PASSES[device_type] if max_tokens > max(_PROMPT_TOKENS[device_type]) else ()
    return sorted({min(size, max_tokens) for size in sizes if size * width**2 <= _TOKENS_TIMES_SQUARED_WIDTH})


def prompt_shapes(device_type: str, max_tokens: int, width: int) -> list[StepShape]:
    """Return the shapes of prefill passes with graphs; larger ones take longer to run than to launch."""
    sizes = {min(tokens, max_tokens) for tokens in _PROMPT_TOKENS[device_type]}
    return [StepShape(0, 1, tokens) for tokens in sorted(sizes.union(large_passes(device_type, max_tokens, width)))]


def mixed_shapes(device_type: str, max_tokens: int, ladder: BucketLadder, width: int) -> list[StepShape]:
    """Return the shapes of mixed steps, for some buckets of a ladder."""
    most = ladder.max_batch_size
    buckets = {ladder.bucket_for(min(rows, most)) for rows in (*_MIXED_ROWS[device_type], most)}
    shapes = [
        StepShape(bucket, 1, min(tokens - bucket, max_tokens))
        for tokens in MIXED_TOKENS[device_type]
        for bucket in buckets
        if 2 * bucket <= tokens
    ]
    sizes = large_passes(device_type, max_tokens, width)
    ends = {min(buckets), most}
    return shapes + [StepShape(bucket, 1, tokens) for tokens in sizes for bucket in ends if 2 * bucket <= tokens]


_LEAST_TEMPERATURE = 1e-5
_NO_LIMIT = 2**31 - 1
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_CONVERTED = {"temperature", "top_k", "seed", "bad_words"}  # slots whose value differs from the parameter's
_COPIED = {  # slots that hold the parameter of the same name -> neutral value
    spec.name: float(spec.neutral)
    for spec in sampling_slots(SamplingCapacity(), 1)
    if spec.name not in _CONVERTED and hasattr(SamplingParams, spec.name)
}
_CopiedParams: Any = make_dataclass(
    "_CopiedParams", [(name, float, value) for name, value in _COPIED.items()], frozen=True
)

# codes in place of a token
ENDED_BEFORE = -1  # the row had ended
NO_CHOICE = {  # no token can be sampled, and why
    WITHOUT_NUMBERS: "a logit is NaN or +inf",
    WITHOUT_FINITE: "every token is masked: all logits are -inf",
    TOO_COLD: "the logits leave the range of float32 when they are divided by the temperature",
}


@dataclass(frozen=True)
class RowSampling(_CopiedParams):
    """Sampling parameters and stop conditions of a row; fields are named like its `SamplingSlots`.

    `token_mask=None` allows all tokens; `num_logprobs=-1` reports none.
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
        flags = (
            FLAG_SAMPLE * (self.temperature > 0)
            | FLAG_PENALTIES * any(getattr(self, name) != _COPIED[name] for name in _PENALTIES)
            | FLAG_BIAS * bool(self.bias_ids)
            | FLAG_STOP_MASK * (bool(self.stop_ids) and self.min_position > 0)
            | FLAG_LOGPROBS * (self.num_logprobs >= 0)
            | FLAG_TOKEN_MASK * (self.token_mask is not None)
            | FLAG_BAD_WORDS * bool(self.bad_words)
        )
        object.__setattr__(self, "sampling_flags", flags)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        seed: int,
        stop_ids: tuple[int, ...],
        masked_only_ids: tuple[int, ...] = (),
        prompt_length: int,
        max_length: int,
        vocab_size: int,
        bad_words: Sequence[Sequence[int]] = (),
        constrained: np.ndarray | None = None,
    ) -> RowSampling:
        """Return the slot values of a request.

        `bad_words` are token ids; `constrained` is a token mask that the constraint changes between steps.
        `masked_only_ids` are also masked before `min_tokens`, but end no output.
        """
        if params.allowed_token_ids is not None:
            constrained = token_mask(params.allowed_token_ids, vocab_size)
        bias: Mapping[int, float] = params.logit_bias or {}
        return cls(
            **{name: getattr(params, name) for name in _COPIED},
            # smaller temperatures overflow float32: greedy instead
            temperature=params.temperature if params.temperature >= _LEAST_TEMPERATURE else 0.0,
            top_k=max(params.top_k, 0),
            seed=seed,
            bias_ids=tuple(bias),
            bias_values=tuple(bias.values()),
            stop_ids=(*stop_ids, *map(masked_only, masked_only_ids)),
            min_position=min(prompt_length + params.min_tokens, max_length) if params.min_tokens else 0,
            last_position=max_length - 1,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            token_mask=constrained,
            bad_words=tuple((-1,) * (BAD_WORD_LENGTH - len(word)) + tuple(word) for word in bad_words),
        )

    @property
    def uses_penalties(self) -> bool:
        """Whether sampling reads the row's token counts."""
        return bool(self.sampling_flags & FLAG_PENALTIES)


def token_mask(allowed: Collection[int], vocab_size: int) -> np.ndarray:
    """Return a token mask, int32 [ceil(vocab_size / 32)]: bit i of word w is set for token 32 w + i."""
    bits = np.zeros(-(-vocab_size // MASK_BITS) * MASK_BITS, dtype=bool)
    bits[np.fromiter(allowed, np.int64, len(allowed))] = True
    return np.packbits(bits, bitorder="little").view("<i4")


class SequenceMemory(NamedTuple):
    """A sequence's device memory."""

    pages: Sequence[int] = ()  # in order, for cached tokens and some next ones
    state_row: int | None = None  # row of its recurrent states and rolling pages; None: the null row
    adapter: int = NO_ADAPTER  # slot of its adapter


@dataclass(frozen=True)
class RowInputs:
    """One row of a batch before the next step."""

    token_ids: Sequence[int]  # prompt and output; the last one is fed, the others are cached
    prompt_length: int
    memory: SequenceMemory
    sampling: RowSampling
    may_draft: bool = True  # False if the host writes a token mask before each step
    guide: Guide | None = None  # the automaton of the structured output, if the device can follow it


class StepLogprobs(NamedTuple):
    """Log-probabilities of sampled tokens, by row of a step or by prompt token, with ranks and the top tokens."""

    sampled: list[float]
    ranks: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


class StepDrafts(NamedTuple):
    """Drafts of a step, row by row; verified 0 and accepted 1: the first draft was right, but not fed."""

    verified: list[int]  # drafts that were fed
    accepted: list[int]  # how many of them equal the sampled tokens
    candidates: list[int]  # drafts for the next step
    match_lengths: list[int]  # match lengths of these


class StepTokens(NamedTuple):
    """Output of one ring entry, row by row: a token, ENDED_BEFORE, or one of NO_CHOICE; a step's first has `drafts`."""

    tokens: list[int]
    logprobs: StepLogprobs | None = None
    drafts: StepDrafts | None = None


@dataclass(frozen=True)
class StepSetting:
    """The model, caches and sizes that a step is built on."""

    model: Model
    caches: Sequence[LayerState]  # keys and values, or states, of each layer
    null_page: int  # page of padding rows
    kv_dtype: torch.dtype  # dtype of the cache
    page_size: int  # tokens of a page
    max_pages_per_row: int  # width of the page table
    config: BucketConfig
    batch_invariant: bool = False  # a row's bits do not depend on other rows or the bucket
    prefill_tokens: int = 1  # largest prefill pass
    mixes: bool = False  # whether to use mixed steps if the model can
    null_state_row: int = 0  # state row of padding rows
    rolling: RollingPages | None = None  # pages of layers with a window, by state row
    draft_state_row: int = 0  # first state row for drafts; there are as many as a step has queries
    pooling: str = "last"  # which hidden states embeddings are made of: "last" or "mean"

    @property
    def row_shapes(self) -> list[StepShape]:
        """One query per row, for each bucket."""
        return [StepShape(bucket) for bucket in self.config.ladder]

    @property
    def mixed_shapes(self) -> list[StepShape]:
        """Shapes of mixed steps, if any."""
        # with `batch_invariant` a token's bits must be those of a pass by itself
        if not self.mixes or self.batch_invariant or self.config.backend == "eager":
            return []
        if self.config.max_batch_size == 1 or not self.model.supports_mix:
            return []
        sizes = (self.model.device.type, self.prefill_tokens, self.config.ladder)
        return mixed_shapes(*sizes, self.model.config.width)

    @property
    def sampling_capacity(self) -> SamplingCapacity:
        """The limits of one row's sampling parameters."""
        return SamplingCapacity(*(getattr(self.config, name) for name in SamplingCapacity._fields))

    @property
    def slot_sizes(self) -> dict[str, int | None]:
        """Values of names in the shapes and pads of slots; None: without the slots that have it."""
        return {
            "pages": self.max_pages_per_row,
            "null_page": self.null_page,
            "null_state_row": self.null_state_row,
            "null_rolling_page": None if self.rolling is None else self.rolling.null_page,
            "no_adapter": None if self.model.adapters is None else NO_ADAPTER,
        }

    @property
    def ring_length(self) -> int:
        """See the function."""
        return ring_length(self.config)


def ring_length(config: BucketConfig) -> int:
    """Return how many steps the token rings hold: two launches, and the warm-up of a capture after them."""
    return 2 * config.steps_per_launch + config.warmup_steps + 2


@dataclass(frozen=True)
class Drafting:
    """Properties of a step with speculation."""

    is_fixed: bool  # every launch verifies all drafts
    # number of staged rows -> each one's drafts for the next step and match length; None: not known yet
    candidates: Callable[[int], list[tuple[int, int]] | None]
    prefill: Callable[[Chunks], None]  # called after each prefill with its chunks
    is_cheap: bool  # plain steps make drafts, too; if False, `prefill` also gets the tokens that they fed


B = TypeVar("B")


class Step(ABC, Generic[B]):
    """One kind of step, over batches of one class; only it knows the names of its slots.

    Each shape is captured over the buffers narrowed to its rows.
    """

    buffers: StepBuffers[B]  # every tensor that it writes, and the slots that it reads
    constants: Sequence[Tensor] = ()  # tensors that it only reads, besides the model's weights
    loop: Loop | None = None  # set: several steps per launch
    drafting: Drafting | None = None  # set: several queries per row
    takes_constraints: bool = False  # can run in halves, of which only the second reads token masks
    guided_rows: Collection[int] = ()  # staged rows whose automata are followed on the device

    @abstractmethod
    def shapes(self) -> Sequence[StepShape]:
        """Return the shapes that it can run; those with one query per row are the setting's `row_shapes`."""

    @abstractmethod
    def run(self, shape: StepShape, batch: B, chunks: Chunks | None = None) -> None:
        """Run one of `shapes`, or one with more prompt tokens, over narrowed slots.

        `chunks`: prompts whose keys and values are computed in the same pass, if the shape has prompt tokens.
        """

    @abstractmethod
    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Write all slots of these rows, after the batch has changed."""

    def begin(self, num_rows: int) -> None:
        """Run the device work after staging; called by `stage`, and on other ranks."""

    @abstractmethod
    def stage_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """Write only the rows' pages, if the same rows own more pages."""

    def stage_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Write the token masks of some staged rows, by row."""

    @abstractmethod
    def rewind(self, step_index: int) -> None:
        """Set the index of the next ring entry, after a failed launch."""

    @abstractmethod
    def read(self, steps: range, num_rows: int, *, logprobs: int | None) -> list[StepTokens]:
        """Return the outputs of a finished launch.

        Args:
            steps: its ring entries, counted from the first step; one per query of a row.
            num_rows: rows that were live.
            logprobs: largest number of top tokens that a row requested; None: no log-probabilities.
        """


StepMaker: TypeAlias = Callable[[StepSetting], Step]

STEPS: dict[str, StepMaker] = {}  # registered kinds, by the name in `[model] step_kind`


def register_step(name: str, make: StepMaker, *, replace: bool = False) -> None:
    """Register a kind of step by its name in settings; `replace` one of that name.

    Raises:
        ArgumentError: the name is taken.
    """
    refuse_duplicate("a step", name, name in STEPS, replace)
    STEPS[name] = make


_OUTSIDE = EntryPoints("graphdecode.steps", register_step, STEPS)


def step_maker(name: str) -> StepMaker:
    """Return the constructor of a registered kind of step; raise ArgumentError if the name is unknown."""
    _OUTSIDE.find()
    if name not in STEPS:
        known = ", ".join(STEPS) or "none"
        requested = shown(name, plain=True)
        raise ArgumentError(
            f"step_kind {requested} is not registered; registered are {known}; a step {HOW_TO_REGISTER}"
        )
    return STEPS[name]
