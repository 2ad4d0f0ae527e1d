"""What a row may ask of sampling: the per-row slots in device memory, named once.

The host fills a row's slots when it joins the batch; the kernels read them at every step, so what a row
asks for is data and not part of a captured graph.
"""

from typing import NamedTuple

import torch

from ..native.signature import Float32, Int32, Int64

MAX_BIASES = 64
MAX_STOP_IDS = 8
MAX_LOGPROBS = 20
DEAD_TOKEN = 1  # what is sampled for rows past the live ones

# token_counts holds, for each token of a row, how often it was generated (low 30 bits) and whether the
# prompt has it (this bit).
PROMPT_BIT = 1 << 30

# Bits of `sampling_flags`. A row with none of them is plain greedy, and no other slot of it is read.
FLAG_SAMPLE = 1
FLAG_PENALTIES = 2
FLAG_BIAS = 4
FLAG_STOP_MASK = 8
FLAG_LOGPROBS = 16


class SlotSpec(NamedTuple):
    """One per-row slot: [rows] of `dtype`, or [rows, width] where width > 0; `neutral` asks for nothing."""

    name: str
    dtype: torch.dtype
    width: int
    neutral: float


SAMPLING_SLOTS = (
    SlotSpec("sampling_flags", torch.int32, 0, 0),
    SlotSpec("temperature", torch.float32, 0, 0.0),
    SlotSpec("top_k", torch.int32, 0, 0),
    SlotSpec("top_p", torch.float32, 0, 1.0),
    SlotSpec("min_p", torch.float32, 0, 0.0),
    SlotSpec("seed", torch.int64, 0, 0),
    SlotSpec("repetition_penalty", torch.float32, 0, 1.0),
    SlotSpec("presence_penalty", torch.float32, 0, 0.0),
    SlotSpec("frequency_penalty", torch.float32, 0, 0.0),
    SlotSpec("bias_ids", torch.int32, MAX_BIASES, -1),
    SlotSpec("bias_values", torch.float32, MAX_BIASES, 0.0),
    SlotSpec("stop_ids", torch.int32, MAX_STOP_IDS, -1),
    SlotSpec("min_position", torch.int32, 0, 0),
    SlotSpec("last_position", torch.int32, 0, 2**31 - 1),
    SlotSpec("num_logprobs", torch.int32, 0, -1),
)


class SamplingSlots(NamedTuple):
    """The slots of one bucket, by the names of `SAMPLING_SLOTS`.

    Attributes:
        sampling_flags: int32 [b], what the row asks for; see `sampling_flags`.
        temperature: float32 [b], > 0 where FLAG_SAMPLE is set.
        top_k: int32 [b], <= 0 is off.
        top_p: float32 [b], >= 1 is off.
        min_p: float32 [b], <= 0 is off.
        seed: int64 [b], the Philox key.
        repetition_penalty: float32 [b], 1 is off; counts the prompt too.
        presence_penalty: float32 [b], 0 is off; counts the output alone.
        frequency_penalty: float32 [b], 0 is off; counts the output alone.
        bias_ids: int32 [b, MAX_BIASES], distinct token ids, -1 where unused.
        bias_values: float32 [b, MAX_BIASES], added to the logits of those ids.
        stop_ids: int32 [b, MAX_STOP_IDS], -1 where unused.
        min_position: int32 [b], below it the stop ids are neither sampled nor obeyed.
        last_position: int32 [b], the row is finished by the token at this position.
        num_logprobs: int32 [b], for the host; the kernels obey FLAG_LOGPROBS.
    """

    sampling_flags: Int32
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seed: Int64
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    bias_ids: Int32
    bias_values: Float32
    stop_ids: Int32
    min_position: Int32
    last_position: Int32
    num_logprobs: Int32


class LogprobOutputs(NamedTuple):
    """Where log-probabilities go.

    Attributes:
        sampled_logprob: float32 [b], of the sampled token.
        sampled_rank: int32 [b], its place among all tokens, from 1.
        top_logprobs: float32 [b, MAX_LOGPROBS], of the likeliest.
        top_ids: int32 [b, MAX_LOGPROBS].
    """

    sampled_logprob: Float32
    sampled_rank: Int32
    top_logprobs: Float32
    top_ids: Int32


def sampling_flags(
    *,
    temperature: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    num_biases: int = 0,
    masks_stops: bool = False,
    num_logprobs: int = -1,
) -> int:
    """Return the value of the slot `sampling_flags` for a row that asks for these.

    Args:
        temperature: 0 is greedy.
        repetition_penalty: 1 is off.
        presence_penalty: 0 is off.
        frequency_penalty: 0 is off.
        num_biases: how many entries of bias_ids are used.
        masks_stops: the row has stop ids, and a min_position beyond its first generated position.
        num_logprobs: -1 is off.
    """
    penalised = repetition_penalty != 1.0 or presence_penalty != 0.0 or frequency_penalty != 0.0
    return (
        FLAG_SAMPLE * (temperature > 0)
        | FLAG_PENALTIES * penalised
        | FLAG_BIAS * (num_biases > 0)
        | FLAG_STOP_MASK * masks_stops
        | FLAG_LOGPROBS * (num_logprobs >= 0)
    )
