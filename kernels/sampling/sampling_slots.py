"""The per-row slots of sampling parameters in device memory.

The host fills a row's slots when it joins the batch; kernels read them in every step.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch

from ..native.registration import Float32, Int32, Int64

MASK_BITS = 32  # tokens of one word of a token mask
BAD_WORD_LENGTH = 16  # most tokens of a bad word; as many recent tokens are kept
DEAD_TOKEN = 1  # sampled for dead rows

# Codes in place of a token, for a row without a choice, which ends. In the ring, -1 means that the row had ended
# before.
WITHOUT_NUMBERS = -2  # a logit is NaN or +inf
WITHOUT_FINITE = -3  # all are -inf: masked
TOO_COLD = -4  # the largest leaves the range of float32 when it is divided by the temperature

# token_counts has for each token how often it was generated (low 30 bits), and whether it is in the prompt (this bit).
PROMPT_BIT = 1 << 30
COUNT_MASK = PROMPT_BIT - 1

# Bits of `sampling_flags`. A row without any is greedy, and its other slots are not read.
FLAG_SAMPLE = 1
FLAG_PENALTIES = 2
FLAG_BIAS = 4
FLAG_STOP_MASK = 8
FLAG_LOGPROBS = 16
FLAG_TOKEN_MASK = 32
FLAG_BAD_WORDS = 64

# Bits of an automaton's `automaton_ends`.
ACCEPTS = 1  # the output may end here
COMPLETES = 2  # nothing can follow

_ABOVE = {name: value for name, value in dict(globals()).items() if name.isupper()}
CONSTANTS: Any = namedtuple("SamplingConstants", _ABOVE)(**_ABOVE)  # for Triton and C


class SamplingCapacity(NamedTuple):
    """The limits of one row's sampling parameters; memory for them is preallocated."""

    max_logprobs: int = 20
    max_stop_token_ids: int = 128
    max_logit_biases: int = 1024
    max_bad_words: int = 128


class SlotSpec(NamedTuple):
    """One per-row slot."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()  # per row; empty: a number
    neutral: float = 0  # value without effect
    # bit of a row's `sampling_flags` without which the slot is not read; 0: always read
    flag: int = 0


def sampling_slots(capacity: SamplingCapacity, vocab_size: int) -> tuple[SlotSpec, ...]:
    """Return the specifications of the slots, in the order of `SamplingSlots`."""
    biases, words = (capacity.max_logit_biases,), (-(-vocab_size // MASK_BITS),)
    return (
        SlotSpec("sampling_flags", torch.int32),
        SlotSpec("temperature", torch.float32),
        SlotSpec("top_k", torch.int32),
        SlotSpec("top_p", torch.float32, neutral=1.0),
        SlotSpec("min_p", torch.float32),
        SlotSpec("seed", torch.int64),
        SlotSpec("repetition_penalty", torch.float32, neutral=1.0),
        SlotSpec("presence_penalty", torch.float32),
        SlotSpec("frequency_penalty", torch.float32),
        SlotSpec("bias_ids", torch.int32, biases, -1, FLAG_BIAS),
        SlotSpec("bias_values", torch.float32, biases, 0.0, FLAG_BIAS),
        SlotSpec("stop_ids", torch.int32, (capacity.max_stop_token_ids,), -1),
        SlotSpec("min_position", torch.int32),
        SlotSpec("last_position", torch.int32, neutral=2**31 - 1),
        SlotSpec("num_logprobs", torch.int32, neutral=-1),
        SlotSpec("token_mask", torch.int32, words, -1, FLAG_TOKEN_MASK),
        SlotSpec("bad_words", torch.int32, (capacity.max_bad_words, BAD_WORD_LENGTH), -1, FLAG_BAD_WORDS),
    )


class SamplingSlots(NamedTuple):
    """The slots of one bucket, named as in `sampling_slots`; unused entries of lists are last."""

    sampling_flags: Int32  # int32 [b], see the function
    temperature: Float32  # float32 [b], > 0 if FLAG_SAMPLE is set
    top_k: Int32  # int32 [b], <= 0 is off
    top_p: Float32  # float32 [b], >= 1 is off
    min_p: Float32  # float32 [b], <= 0 is off
    seed: Int64  # int64 [b], the Philox key
    repetition_penalty: Float32  # float32 [b], 1 is off; includes the prompt
    presence_penalty: Float32  # float32 [b], 0 is off
    frequency_penalty: Float32  # float32 [b], 0 is off
    bias_ids: Int32  # int32 [b, biases], distinct token ids, -1: unused
    bias_values: Float32  # float32 [b, biases], added to the logits of those ids
    # int32 [b, stop ids], -1: unused; last, encoded by `masked_only`, tokens that are only masked below `min_position`
    stop_ids: Int32
    min_position: Int32  # int32 [b], below it stop ids are masked, and end nothing
    last_position: Int32  # int32 [b], the row is finished by the token at this position
    num_logprobs: Int32  # int32 [b], top tokens to report, with FLAG_LOGPROBS
    token_mask: Int32  # int32 [b, ceil(vocab / 32)], bit i of word w is set if token 32 w + i is allowed
    # int32 [b, words, BAD_WORD_LENGTH], token sequences that are forbidden; right-aligned, padded with -1, unused: ends
    # with -1
    bad_words: Int32


class LogprobOutputs(NamedTuple):
    """Outputs of log-probabilities."""

    sampled_logprob: Float32  # float32 [b], of the sampled token
    sampled_rank: Int32  # int32 [b], its rank, from 1
    top_logprobs: Float32  # float32 [b, logprobs], of the top tokens
    top_ids: Int32  # int32 [b, logprobs]


def masked_only(token: int) -> int:
    """Encode a token in `stop_ids` that is masked below `min_position` but does not end the row; its own inverse."""
    return -2 - token
