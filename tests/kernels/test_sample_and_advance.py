"""The end of a step in two launches: what the operations do one after another, and nothing of it outlives a step."""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compiled_kernels import NATIVE
from hostile_rows import hostile_rows
from sampling_rows import (
    CAPACITY,
    ended_step,
    logprob_outputs,
    make_hostile,
    neutral_slots,
    random_automata,
    random_rows,
)
from torch import Tensor

from graphdecode.kernels.model.advance import AdvanceState
from graphdecode.kernels.native.library import NativeSequence
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling import sample_and_advance as sampler
from graphdecode.kernels.sampling import sampler_memory
from graphdecode.kernels.sampling.follow_automata import ACCEPTS, COMPLETES, NO_AUTOMATON, Guides, follow_automata
from graphdecode.kernels.sampling.sample_and_advance import sample_and_advance, sample_and_advance_triton
from graphdecode.kernels.sampling.sampling_slots import LogprobOutputs, SamplingSlots

RING_LENGTH, RING_ROWS, VOCAB = 3, 7, 45
MOST = CAPACITY.max_logprobs

End = tuple[AdvanceState, Tensor, LogprobOutputs, Tensor, Tensor, SamplingSlots, Guides | None]


def end_of_step(rows: int, live: int, seed: int, *, follows: bool = True) -> End:
    """What the end of a step is given, some of its rows finished, and most of them in an automaton."""
    logits, positions, slots, counts, recent = random_rows(rows, VOCAB, seed)
    chosen = random.Random(seed)
    rings = (
        torch.full((RING_LENGTH, RING_ROWS), 77),
        torch.zeros(RING_LENGTH, RING_ROWS),
        torch.zeros(RING_LENGTH, RING_ROWS, dtype=torch.int32),
        torch.zeros(RING_LENGTH, RING_ROWS, MOST),
        torch.zeros(RING_LENGTH, RING_ROWS, MOST, dtype=torch.int32),
    )
    finished = torch.tensor([chosen.random() < 0.2 for _ in range(rows)], dtype=torch.int32)
    step, running = torch.tensor([seed]), torch.tensor([-1], dtype=torch.int32)
    tokens = torch.arange(rows) + 100
    state = AdvanceState(tokens, positions, finished, step, running, rings[0], counts, *rings[1:], recent)
    live_rows = torch.tensor([live], dtype=torch.int32)
    guides = None
    if follows:
        rng = np.random.default_rng(seed)
        states, which = (
            torch.from_numpy(rng.integers(low, high, rows, dtype=np.int32)) for low, high in ((-1, 9), (0, 2))
        )
        guides = Guides(states, slots.token_mask, which, *random_automata(rng, 2, VOCAB, 9, 4))
    return state, torch.full((rows,), -7), logprob_outputs(rows), logits, live_rows, slots, guides


def there(end: End, device: str) -> End:
    return _each(end, lambda tensor: tensor.to(device))


def copied(end: End) -> End:
    return _each(end, Tensor.clone)


def _each(end: End, moved: Callable[[Tensor], Tensor]) -> End:
    """The same over other tensors; the mask that a step leaves is the one that the slots have."""
    made = [moved(part) if isinstance(part, Tensor) else part and type(part)(*map(moved, part)) for part in end]
    if made[6] is not None:
        made[6] = made[6]._replace(next_mask=made[5].token_mask)
    return tuple(made)  # type: ignore[return-value]


def assert_same(found: End, expected: End) -> None:
    """Everything that says which token is the same to the bit; log-probabilities are sums in some order."""
    for mine, theirs in zip(written(found), written(expected), strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine, theirs)
        else:
            assert torch.equal(mine, theirs)


def written(end: End) -> tuple[Tensor, ...]:
    guides = end[6]
    return (*end[0], end[1], *(() if guides is None else (guides.automaton_state, guides.next_mask)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("version", [NATIVE, "triton"])
def test_the_end_of_a_step_is_its_operations(version: str, seed: int, device: str) -> None:
    given = end_of_step(6, 5, seed, follows=seed > 0)
    expected = copied(given)
    versions("sample_and_advance").torch(*flat(expected))
    if version == "native":
        call = versions("sample_and_advance").native(*flat(given))
        assert isinstance(call, NativeSequence)
        assert len(call.calls) == 3 + (seed > 0)
        call()
    else:
        given = there(given, device)
        sample_and_advance_triton(*given, block=16, capacity=8)
        given = there(given, "cpu")
    assert_same(given, expected)


def flat(end: End) -> tuple[Tensor, ...]:
    state, sampled, outputs, logits, live_rows, slots, guides = end
    return (*state, sampled, *outputs, logits, live_rows, *slots, *(guides or (None,) * len(Guides._fields)))


@pytest.mark.parametrize("byte", [0x00, 0xA5, 0xFF])
def test_nothing_need_be_in_the_memory_between_the_two_launches(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """Law 5: whatever an earlier step left there, counters of programs and of candidates among it."""

    def left_over(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((*sizes, dtype.itemsize), byte, dtype=torch.uint8, device=device).view(dtype).view(sizes)

    given = end_of_step(4, 4, 3)
    expected = copied(given)
    versions("sample_and_advance").torch(*flat(expected))
    monkeypatch.setattr(sampler_memory.torch, "empty", left_over)
    sample_and_advance_triton(*given, block=16, capacity=8)
    assert_same(given, expected)


def test_how_many_programs_share_a_row_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 9: the grid follows from the bucket, the tokens do not."""
    given = end_of_step(3, 3, 8)
    found = []
    for programs in (3, 6, 9):
        monkeypatch.setattr(sampler, "PROGRAMS", programs)
        mine = copied(given)
        sample_and_advance_triton(*mine, block=16, capacity=8)
        found.append(mine)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(flat(found[0]), flat(other), strict=True))


@triton.jit
def _count_kernel(counter, seen, rows):
    for row in range(3):
        done, going_on = sampler.count_row(counter, tl.program_id(0) == 0)
        tl.store(seen + 2 * row, (done == rows).to(tl.int32))
        tl.store(seen + 2 * row + 1, going_on)


@pytest.mark.parametrize("rows", [32_769, 65_536])
@pytest.mark.parametrize("ended", [0, 5])
def test_the_last_row_of_the_largest_batch_ends_it(rows: int, ended: int, device: str) -> None:
    counter = torch.tensor([rows - 3, rows - 3 - ended], dtype=torch.int32, device=device)
    seen = torch.zeros(3, 2, dtype=torch.int32, device=device)
    _count_kernel[(1,)](counter, seen, rows)
    assert seen.tolist() == [[0, rows - 2 - ended], [0, rows - 1 - ended], [1, rows - ended]]


def test_dead_rows_with_hostile_slots_change_nothing() -> None:
    """Law 4: padding is inert."""
    calm = end_of_step(6, 4, 5)
    hostile = copied(calm)
    make_hostile(hostile[5], 4)
    hostile[3][4:] = torch.nan
    for tensor in (hostile[6].automaton_state, hostile[6].automaton):  # type: ignore[union-attr]
        tensor[4:] = 2**31 - 1
    for tensor in (hostile[0].tokens, hostile[0].pre_step_seqlens, hostile[0].token_counts):
        tensor[4:] = torch.iinfo(tensor.dtype).max
    for end in (calm, hostile):
        sample_and_advance_triton(*end, block=16, capacity=8)
    assert torch.equal(hostile[6].automaton_state[:4], calm[6].automaton_state[:4])  # type: ignore[union-attr]
    for name in ("ring_tokens", "running", "step_index", "ring_rank", "ring_logprob"):
        assert torch.equal(getattr(hostile[0], name), getattr(calm[0], name)), name
    assert torch.equal(hostile[1], calm[1])
    assert (hostile[0].tokens[4:] == torch.iinfo(torch.int64).max).all()


@pytest.mark.parametrize("seed", range(2))
def test_odd_rows_with_odd_wishes_get_the_tokens_of_the_torch_version(seed: int, device: str) -> None:
    """Rows with every kind of logits and parameters, over a vocabulary of several blocks."""
    rows = 30
    logits, positions, slots, counts, recent, sizes = hostile_rows(rows, 1000 + seed)
    live = torch.tensor([rows - 1], dtype=torch.int32)
    expected = torch.zeros(rows, dtype=torch.int64)
    versions("sample").torch(expected, logits, positions, live, *slots, counts, recent)
    given = [tensor.to(device) for tensor in (logits, positions, live, *slots, counts, recent)]
    found = ended_step(*given[:3], SamplingSlots(*given[3:-2]), *given[-2:], *sizes)
    assert found.tolist() == expected.tolist(), f"seed {1000 + seed}"


def test_the_operator_passes_opcheck(device: str) -> None:
    arguments = tuple(tensor.to(device) for tensor in flat(end_of_step(2, 2, 1)))
    torch.library.opcheck(
        torch.ops.graphdecode.sample_and_advance.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    sample_and_advance(*end_of_step(2, 1, 2))


class AutomatonRows(NamedTuple):
    """What following changes."""

    automaton_state: torch.Tensor
    token_mask: torch.Tensor
    finished: torch.Tensor
    running: torch.Tensor


ROWS, AUTOMATA_VOCAB, WORDS, LINES, CLASSES, AUTOMATA, STOPS = 9, 70, 3, 12, 5, 2, 4
EOS = 69


def expected(rows, sampled, live, automaton, stop_ids, tables):
    """By the definition, a row at a time, in Python's own numbers."""
    states, masks, finished, running = (tensor.tolist() for tensor in rows)
    classes, following, of_lines, ends = (tensor.tolist() for tensor in tables)
    for row in range(live):
        token = sampled[row]
        if states[row] == NO_AUTOMATON or finished[row] or token < 0:
            continue
        line = following[states[row]][classes[automaton[row]][token]]
        if line == -1 or ends[line] & COMPLETES:
            finished[row] = 1
            running[0] -= 1
            continue
        states[row] = line
        words = [word % 2**32 for word in of_lines[line]]
        if ends[line] & ACCEPTS:
            for stop_id in stop_ids[row]:
                if stop_id >= 0:
                    words[stop_id // 32] |= 2 ** (stop_id % 32)
        masks[row] = [word - 2**32 if word >= 2**31 else word for word in words]
    return states, masks, finished, running


def ended(rows: AutomatonRows, sampled, live_rows, automaton, stop_ids, tables, device: str) -> None:
    """End a step on a GPU with logits of which these tokens are sampled, and which no stop id ends, in place."""
    logits = torch.zeros(ROWS, AUTOMATA_VOCAB)
    for row, token in enumerate(sampled.tolist()):
        logits[row, token] = 1.0 if token >= 0 else torch.nan
    before = rows.finished.clone()
    slots = neutral_slots(ROWS, AUTOMATA_VOCAB)._replace(stop_ids=stop_ids)
    slots.min_position.fill_(1000)
    slots = SamplingSlots(*(slot.to(device) for slot in slots))
    outputs = LogprobOutputs(*(tensor.to(device) for tensor in logprob_outputs(ROWS)))
    states, masks, finished, running = (tensor.to(device) for tensor in rows)
    fed, step, ring = (torch.zeros(size, dtype=torch.int64, device=device) for size in (ROWS, 1, (1, ROWS)))
    state = AdvanceState(fed, torch.zeros_like(finished), finished, step, running, ring)
    guides = Guides(states, masks, automaton.to(device), *(table.to(device) for table in tables))
    sample_and_advance_triton(state, fed.clone(), outputs, logits.to(device), live_rows.to(device), slots, guides)
    for mine, theirs in zip(rows, (states, masks, finished, running), strict=True):
        mine.copy_(theirs)
    rows.finished.copy_(torch.where(sampled < 0, before, rows.finished))  # the advance ends rows without a choice


@pytest.fixture(params=["torch", NATIVE, "triton"])
def follow(request, device):
    """Follow by one of the versions, in place."""
    chosen = versions("follow_automata")

    def run(rows, sampled, live, automaton, stop_ids, tables):
        flat = (*rows[:2], automaton, *tables, rows.finished, rows.running, sampled, live, stop_ids)
        if request.param == "torch":
            chosen.torch(*flat)
        elif request.param == "native":
            call = chosen.native(*flat)
            assert call is not None
            call()
        else:
            ended(rows, sampled, live, automaton, stop_ids, tables, device)

    return run


@pytest.mark.parametrize("seed", range(4))
def test_rows_follow_their_automata_and_others_are_left_alone(follow, seed):
    rng = np.random.default_rng(seed)
    tables = random_automata(rng, AUTOMATA, AUTOMATA_VOCAB, LINES, CLASSES)
    live = int(rng.integers(5, ROWS))
    states = rng.integers(-1, LINES, ROWS).astype(np.int32)
    rows = AutomatonRows(
        torch.from_numpy(states),
        torch.from_numpy(rng.integers(-(2**31), 2**31, (ROWS, WORDS)).astype(np.int32)),
        torch.from_numpy(rng.choice([0, 0, 0, 1], ROWS).astype(np.int32)),
        torch.tensor([live], dtype=torch.int32),
    )
    rows.automaton_state[live:] = 2**31 - 1  # padding may hold anything
    sampled = torch.from_numpy(rng.integers(0, AUTOMATA_VOCAB, ROWS))
    sampled[1] = -2  # without a choice
    rows.running[0] = ((rows.finished == 0) & (sampled >= 0))[:live].sum()  # what the advance left
    stop_ids = torch.full((ROWS, STOPS), -1, dtype=torch.int32)
    stop_ids[:, 0], stop_ids[2:5, 1], stop_ids[3, 2:] = EOS, 31, torch.tensor([32, 64])
    automaton = torch.from_numpy(rng.integers(0, AUTOMATA, ROWS).astype(np.int32))
    others = (sampled, torch.tensor([live], dtype=torch.int32), automaton, stop_ids, tables)
    want = expected(rows, sampled.tolist(), live, automaton.tolist(), stop_ids.tolist(), tables)
    follow(rows, *others)
    assert tuple(tensor.tolist() for tensor in rows) == want, f"seed {seed}"


def test_the_automata_pass_opcheck():
    rng = np.random.default_rng(0)
    there = (
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, WORDS, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        *random_automata(rng, AUTOMATA, AUTOMATA_VOCAB, LINES, CLASSES),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([3, 4]),
        torch.tensor([2], dtype=torch.int32),
        torch.full((2, STOPS), -1, dtype=torch.int32),
    )
    torch.library.opcheck(torch.ops.graphdecode.follow_automata.default, there)
    follow_automata(Guides(*there[:7]), *there[7:])
    assert there[0].tolist() != [0, 0] or there[7].tolist() != [0, 0]
