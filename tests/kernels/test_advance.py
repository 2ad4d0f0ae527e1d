"""The step that advances itself: what it changes, what it leaves, and many steps with no host between them."""

import pytest
import torch
from compiled_kernels import NATIVE
from sampling_rows import CAPACITY, logprob_outputs, make_hostile, neutral_slots, set_row

from graphdecode.kernels.model.advance import AdvanceState, skip_steps, skip_steps_triton
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling.sample_and_advance import sample_and_advance, sample_and_advance_triton
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_BAD_WORDS,
    FLAG_STOP_MASK,
    PROMPT_BIT,
    WITHOUT_NUMBERS,
    LogprobOutputs,
    SamplingSlots,
)

advance_torch = versions("advance").torch
native_advance = versions("advance").native

NO_LOGPROBS = (None,) * len(LogprobOutputs._fields)
MOST = CAPACITY.max_logprobs
RING_LENGTH = 4
RING_ROWS = 6
VOCAB = 96


def new_state(rows: int, with_logprobs: bool = False) -> AdvanceState:
    rings = ()
    if with_logprobs:
        rings = (
            torch.zeros(RING_LENGTH, RING_ROWS),
            torch.zeros(RING_LENGTH, RING_ROWS, dtype=torch.int32),
            torch.zeros(RING_LENGTH, RING_ROWS, MOST),
            torch.zeros(RING_LENGTH, RING_ROWS, MOST, dtype=torch.int32),
        )
    return AdvanceState(
        torch.arange(rows) + 100,
        torch.arange(rows, dtype=torch.int32) * 10,
        torch.zeros(rows, dtype=torch.int32),
        torch.tensor([6]),
        torch.tensor([-1], dtype=torch.int32),
        torch.full((RING_LENGTH, RING_ROWS), 77),
        torch.zeros(rows, VOCAB, dtype=torch.int32),
        *rings,
    )


def ended(state: AdvanceState, sampled, live_rows, slots, outputs: LogprobOutputs, device: str) -> None:
    """End a step on a GPU with logits of which these tokens are sampled, in place."""
    logits = torch.zeros(len(sampled), VOCAB)
    for row, token in enumerate(sampled[: live_rows.item()].tolist()):
        logits[row, token] = 100.0 if token >= 0 else torch.nan
    # here a stop id is given where its mask would forbid it
    slots = slots._replace(sampling_flags=slots.sampling_flags & ~FLAG_STOP_MASK)
    there = type(state)(*(t if t is None else t.to(device) for t in state))
    made = LogprobOutputs(*(t.to(device) for t in outputs))
    given = (torch.empty_like(sampled), logits, live_rows, *slots)
    found, logits, live_rows, *slots = (t.to(device) for t in given)
    sample_and_advance_triton(there, found, made, logits, live_rows, SamplingSlots(*slots))
    assert found[: live_rows.item()].tolist() == sampled[: live_rows.item()].tolist()
    for mine, theirs in zip((*state, *outputs), (*there, *made), strict=True):
        if mine is not None:
            mine.copy_(theirs)


@pytest.fixture(params=["torch", NATIVE, "triton"])
def step(request, device):
    """Advance by one of the versions, in place."""

    def run(state, sampled, slots, live=None, logprobs=NO_LOGPROBS):
        live_rows = torch.tensor([len(sampled) if live is None else live], dtype=torch.int32)
        sampled = torch.as_tensor(sampled)
        arguments = (*state, sampled, live_rows, *slots, *logprobs)
        if request.param == "torch":
            advance_torch(*arguments)
            return
        if request.param == "native":
            native_advance(*arguments)()
            return
        outputs = logprob_outputs(len(sampled)) if logprobs is NO_LOGPROBS else logprobs
        ended(state, sampled, live_rows, slots, outputs, device)

    return run


def test_a_running_row_moves_on(step):
    state = new_state(3)
    step(state, [5, 6, 7], neutral_slots(3))
    assert state.tokens.tolist() == [5, 6, 7]
    assert state.pre_step_seqlens.tolist() == [1, 11, 21]
    assert state.finished.tolist() == [0, 0, 0]
    assert state.running.tolist() == [3]
    assert state.step_index.tolist() == [7]
    assert state.ring_tokens[6 % RING_LENGTH].tolist() == [5, 6, 7, -1, -1, -1]
    assert (state.ring_tokens[[0, 1, 3]] == 77).all()


def test_a_row_finishes_by_stop_id_or_by_position_and_does_not_advance(step):
    state, slots = new_state(4), neutral_slots(4)
    set_row(slots, 0, stops=(9, 4))
    set_row(slots, 1, stops=(9, 4))
    slots.last_position[2] = 21
    slots.last_position[3] = 32
    step(state, [4, 5, 6, 7], slots)
    assert state.finished.tolist() == [1, 0, 1, 0]
    assert state.tokens.tolist() == [100, 5, 102, 7]
    assert state.pre_step_seqlens.tolist() == [0, 11, 20, 31]
    assert state.running.tolist() == [2]
    assert state.ring_tokens[2].tolist() == [4, 5, 6, 7, -1, -1]


def test_a_row_without_a_choice_ends_with_its_code_in_the_ring_and_is_never_fed(step):
    state, slots = new_state(3), neutral_slots(3)
    for row in range(3):
        set_row(slots, row, frequency_penalty=0.5)
    counts = state.token_counts.clone()
    counts[[0, 2], [5, 7]] = 1
    for later in range(2):
        step(state, [5 + later, WITHOUT_NUMBERS, 7], slots)
        assert state.tokens.tolist() == [5 + later, 101, 7]
        assert state.pre_step_seqlens.tolist() == [1 + later, 10, 21 + later]
        assert state.finished.tolist() == [0, 1, 0]
        assert state.running.tolist() == [2]
    assert state.ring_tokens[2].tolist() == [5, WITHOUT_NUMBERS, 7, -1, -1, -1]
    assert state.ring_tokens[3].tolist() == [6, -1, 7, -1, -1, -1]
    counts[0, 6], counts[2, 7] = 1, 2
    assert torch.equal(state.token_counts, counts)


def test_finished_rows_stay_as_they_are(step):
    state = new_state(3)
    state.finished[1] = 1
    step(state, [5, 6, 7], neutral_slots(3))
    assert state.tokens.tolist() == [5, 101, 7]
    assert state.pre_step_seqlens.tolist() == [1, 10, 21]
    assert state.finished.tolist() == [0, 1, 0]
    assert state.ring_tokens[2].tolist() == [5, -1, 7, -1, -1, -1]
    assert state.running.tolist() == [2]


def test_a_stop_id_below_the_minimum_position_is_not_obeyed(step):
    state, slots = new_state(2), neutral_slots(2)
    set_row(slots, 0, stops=(4,), min_position=2)
    set_row(slots, 1, stops=(4,), min_position=11)
    step(state, [4, 4], slots)  # the new tokens stand at 1 and 11
    assert state.finished.tolist() == [0, 1]


def test_tokens_are_counted_for_rows_with_penalties_alone(step):
    state, slots = new_state(3), neutral_slots(3)
    set_row(slots, 0, presence_penalty=0.5)
    set_row(slots, 1, frequency_penalty=0.5)
    state.token_counts[1, 6] = PROMPT_BIT | 3
    state.finished[0] = 0
    step(state, [5, 6, 7], slots)
    expected = torch.zeros(3, VOCAB, dtype=torch.int32)
    expected[0, 5] = 1
    expected[1, 6] = PROMPT_BIT | 4
    assert torch.equal(state.token_counts, expected)


def test_logprobs_go_to_the_ring_for_rows_that_want_them(step):
    state, slots = new_state(3, with_logprobs=True), neutral_slots(3)
    set_row(slots, 1, num_logprobs=3)
    set_row(slots, 2, num_logprobs=3)
    state.finished[2] = 1
    outputs = logprob_outputs(3)
    outputs.top_logprobs.copy_(torch.rand(3, MOST))
    step(state, [5, 6, 7], slots, logprobs=outputs)
    assert state.ring_logprob[2].tolist() == [0, outputs.sampled_logprob[1], 0, 0, 0, 0]
    assert state.ring_rank[2].tolist() == [0, outputs.sampled_rank[1], 0, 0, 0, 0]
    assert torch.equal(state.ring_top_logprobs[2, 1, :3], outputs.top_logprobs[1, :3])
    assert torch.equal(state.ring_top_ids[2, 1, :3], outputs.top_ids[1, :3])
    assert state.ring_top_logprobs.count_nonzero() == outputs.top_logprobs[1, :3].count_nonzero() > 0
    assert state.ring_top_ids.count_nonzero() == outputs.top_ids[1, :3].count_nonzero() > 0


def test_more_likely_tokens_than_are_copied_at_once_go_to_the_ring(step):
    state = new_state(2)._replace(
        ring_logprob=torch.zeros(RING_LENGTH, RING_ROWS),
        ring_rank=torch.zeros(RING_LENGTH, RING_ROWS, dtype=torch.int32),
        ring_top_logprobs=torch.zeros(RING_LENGTH, RING_ROWS, 75),
        ring_top_ids=torch.zeros(RING_LENGTH, RING_ROWS, 75, dtype=torch.int32),
    )
    slots = neutral_slots(2)
    set_row(slots, 0, num_logprobs=70)
    outputs = LogprobOutputs(
        torch.zeros(2), torch.ones(2, dtype=torch.int32), torch.rand(2, 75), torch.randint(1, 99, (2, 75)).int()
    )
    step(state, [5, 6], slots, logprobs=outputs)
    assert torch.equal(state.ring_top_ids[2, 0, :70], outputs.top_ids[0, :70])
    assert torch.equal(state.ring_top_logprobs[2, 0, :70], outputs.top_logprobs[0, :70])
    assert state.ring_top_ids.count_nonzero() == outputs.top_ids[0, :70].count_nonzero() >= 69


def test_the_last_tokens_are_remembered_for_rows_with_bad_words(step):
    recent = torch.full((4, BAD_WORD_LENGTH), -1, dtype=torch.int32)
    state, slots = new_state(4)._replace(recent_tokens=recent), neutral_slots(4)
    for row in (0, 2, 3):
        set_row(slots, row, bad_words=[[1]])
    state.finished[3] = 1
    assert slots.sampling_flags[0] == FLAG_BAD_WORDS
    for tokens in [[5, 6, 7, 8], [9, 10, 11, 12]]:  # at 1 and 2, and at 21 and 22
        step(state, tokens, slots)
    expected = torch.full((4, BAD_WORD_LENGTH), -1, dtype=torch.int32)
    expected[0, 1:3], expected[2, 5:7] = torch.tensor([5, 9]), torch.tensor([7, 11])
    assert torch.equal(state.recent_tokens, expected)


def test_every_stop_id_that_there_is_room_for_ends_a_row(step):
    for count in range(1, CAPACITY.max_stop_token_ids + 1):
        state, slots = new_state(3), neutral_slots(3)
        set_row(slots, 0, stops=tuple(range(20, 20 + count)))
        set_row(slots, 2, stops=(7,))
        step(state, [19 + count, 6, 3], slots)
        assert state.finished.tolist() == [1, 0, 0]


def test_dead_rows_with_hostile_slots_change_nothing(step):
    """Law: padding is inert."""
    calm, hostile = new_state(4), new_state(4)
    slots = neutral_slots(4)
    step(calm, [5, 6, 1, 1], slots, live=2)
    make_hostile(slots, 2)
    for tensor in (hostile.tokens, hostile.pre_step_seqlens, hostile.token_counts):
        tensor[2:] = torch.iinfo(tensor.dtype).max
    step(hostile, [5, 6, 2**62, -(2**62)], slots, live=2)
    for name in ("tokens", "pre_step_seqlens", "finished", "token_counts"):
        assert torch.equal(getattr(hostile, name)[:2], getattr(calm, name)[:2]), name
    assert (hostile.tokens[2:] == torch.iinfo(torch.int64).max).all()
    assert (hostile.token_counts[2:] == torch.iinfo(torch.int32).max).all()
    assert torch.equal(hostile.ring_tokens, calm.ring_tokens)
    assert hostile.running.tolist() == [2]


def test_many_steps_need_no_host(device):
    """A toy model whose next token is the fed one plus one: rows stop by id, by position, or run on."""
    rows, steps = 3, 9
    state = new_state(rows)._replace(ring_tokens=torch.zeros(16, RING_ROWS, dtype=torch.int64))
    state.tokens.copy_(torch.tensor([2, 10, 20]))
    slots = neutral_slots(rows)
    set_row(slots, 0, stops=(6,))
    slots.last_position[1] = 13  # fed at 10 to begin with: 11, 12, 13 are sampled
    state = AdvanceState(*(t if t is None else t.to(device) for t in state))
    slots = type(slots)(*(t.to(device) for t in slots))
    live = torch.tensor([rows], dtype=torch.int32, device=device)
    sampled = torch.zeros(rows, dtype=torch.int64, device=device)
    outputs = LogprobOutputs(*(t.to(device) for t in logprob_outputs(rows)))
    for _ in range(steps):
        logits = torch.nn.functional.one_hot(state.tokens + 1, VOCAB).float()
        sample_and_advance(state, sampled, outputs, logits, live, slots)
    ring = state.ring_tokens.cpu()[6:15]
    assert ring[:, 0].tolist() == [3, 4, 5, 6] + [-1] * 5
    assert ring[:, 1].tolist() == [11, 12, 13] + [-1] * 6
    assert ring[:, 2].tolist() == list(range(21, 30))
    assert state.running.item() == 1
    assert state.pre_step_seqlens.tolist() == [3, 12, 29]


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_the_operator_passes_opcheck(with_logprobs):
    state, slots = new_state(2, with_logprobs), neutral_slots(2)
    outputs = logprob_outputs(2) if with_logprobs else NO_LOGPROBS
    live = torch.tensor([2], dtype=torch.int32)
    arguments = (*state, torch.tensor([5, 6]), live, *slots, *outputs)
    torch.library.opcheck(torch.ops.graphdecode.advance.default, arguments)


skip_steps_torch = versions("skip_steps").torch

LENGTH, ROWS = 7, 5


def int32(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


@pytest.fixture(params=["torch", "triton"])
def skip(request, device):
    """Skip by one of the two versions, in place."""

    def run(step_index, ring, limit, count, entries):
        per_step = [] if entries is None else [int32(entries)]
        if request.param == "torch":
            skip_steps_torch(step_index, ring, int32(limit), int32(count), *per_step)
            return
        there = [tensor.to(device) for tensor in (step_index, ring, int32(limit), int32(count), *per_step)]
        skip_steps_triton(*there)
        step_index.copy_(there[0])
        ring.copy_(there[1])

    return run


@pytest.mark.parametrize(("limit", "count"), [(3, 1), (7, 1), (5, 5), (1, 1), (6, 2), (0, 3)])
@pytest.mark.parametrize("step", [0, 4, 2**40 + 3])
@pytest.mark.parametrize("entries", [None, 3])
def test_skipped_places_hold_no_tokens_and_all_others_what_they_held(skip, entries, step, limit, count):
    ring = torch.arange(LENGTH * ROWS).view(LENGTH, ROWS)
    expected, index = ring.clone(), torch.tensor([step])
    skipped = max(limit - count, 0) * (entries or 1)
    for later in range(skipped):
        expected[(step + later) % LENGTH] = -1
    skip(index, ring, limit, count, entries)
    assert index.tolist() == [step + skipped]
    assert torch.equal(ring, expected)


def test_skip_steps_passes_opcheck(device):
    tensors = [torch.tensor([4]), torch.zeros(LENGTH, ROWS, dtype=torch.int64), int32(3), int32(1)]
    arguments = tuple(tensor.to(device) for tensor in tensors)
    torch.library.opcheck(torch.ops.graphdecode.skip_steps.default, (*arguments, None))
    skip_steps(*arguments)
    assert arguments[0].tolist() == [6]
