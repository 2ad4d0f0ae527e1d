"""What a step is told of a row, and what it tells: plain data, frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graphdecode.engine.constraint import Guide
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_PENALTIES,
    MASK_BITS,
    TOO_COLD,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    held_back,
    sampling_flags,
)

_LEAST_TEMPERATURE = 1e-5
_NO_LIMIT = 2**31 - 1

# What a step gives a row instead of a token.
ENDED_BEFORE = -1
NO_CHOICE = {  # the row ends here, and why
    WITHOUT_NUMBERS: "a logit is NaN or +inf; dtype='float32' computes what goes beyond float16's 65504",
    WITHOUT_FINITE: "every token is masked: all logits are -inf",
    TOO_COLD: "the logits leave the range of float32 when they are divided by the temperature",
}


@dataclass(frozen=True)
class RowSampling:
    """How a row's tokens are chosen, and what ends it: the values of its `SamplingSlots`, whose names the fields have.

    Without a token mask all tokens are allowed; with `num_logprobs=-1` not even the sampled one's is reported.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
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
            temperature=self.temperature,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            num_biases=len(self.bias_ids),
            masks_stops=bool(self.stop_ids) and self.min_position > 0,
            num_logprobs=self.num_logprobs,
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

        `bad_words` are tokens; `constrained` is a token mask whose owner changes it between steps, in place of the
        parameters' allowed tokens. `held_back_ids` are masked before `min_tokens` too, and end nothing.
        """
        if params.allowed_token_ids is not None:
            constrained = token_mask(params.allowed_token_ids, vocab_size)
        bias: Mapping[int, float] = params.logit_bias or {}
        return cls(
            # below, a division by it leaves the range of float32: what is left is the most likely token
            temperature=params.temperature if params.temperature >= _LEAST_TEMPERATURE else 0.0,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
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

    # prompt and answer so far; the last one is fed, the keys and values of the others are in the cache
    token_ids: Sequence[int]
    prompt_length: int  # how many of them are the prompt
    pages: Sequence[int]  # of the cache, in order, for the tokens so far and those to come
    sampling: RowSampling  # how the next tokens are chosen
    # whether tokens may be guessed ahead: not where the host says after each one what may follow
    may_draft: bool = True
    guide: Guide | None = None  # the automaton that holds the answer to its form, if the device can follow it


class StepLogprobs(NamedTuple):
    """Log-probabilities of a step's rows or a prompt's places: of the token, with its rank, and of the most likely."""

    sampled: list[float]
    ranks: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


class StepDrafts(NamedTuple):
    """What became of a step's drafts, row by row."""

    verified: list[int]  # drafts that were fed
    # how many of them were what was sampled; of a step that feeds one token a row, 1 where a draft was known that would
    # have been
    accepted: list[int]
    found: list[int]  # drafts of the next step
    matched: list[int]  # tokens that agreed where these were found


class StepTokens(NamedTuple):
    """What one step gave its rows, in row order: tokens, ENDED_BEFORE, or one of NO_CHOICE.

    A step that feeds several tokens of a row gives as many of these; `drafts` is with the first.
    """

    tokens: list[int]
    logprobs: StepLogprobs | None = None
    drafts: StepDrafts | None = None
