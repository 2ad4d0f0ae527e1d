"""Rows follow automata by the tokens that they sampled: against automata walked by hand, in every version."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from sampling_rows import logprob_outputs, neutral_slots, random_automata

from graphdecode.kernels.model.advance import AdvanceState
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling.follow_automata import ACCEPTS, COMPLETES, NO_AUTOMATON, Guides, follow_automata
from graphdecode.kernels.sampling.sample_and_advance import sample_and_advance_triton
from graphdecode.kernels.sampling.sampling_slots import LogprobOutputs, SamplingSlots


class AutomatonRows(NamedTuple):
    """What following changes."""

    automaton_state: torch.Tensor
    token_mask: torch.Tensor
    finished: torch.Tensor
    running: torch.Tensor


ROWS, VOCAB, WORDS, LINES, CLASSES, AUTOMATA, STOPS = 9, 70, 3, 12, 5, 2, 4
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
    logits = torch.zeros(ROWS, VOCAB)
    for row, token in enumerate(sampled.tolist()):
        logits[row, token] = 1.0 if token >= 0 else torch.nan
    before = rows.finished.clone()
    slots = neutral_slots(ROWS, VOCAB)._replace(stop_ids=stop_ids)
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


@pytest.fixture(params=["torch", "native", "triton"])
def follow(request, device):
    """Follow by one of the versions, in place."""
    if request.param == "native" and native.library() is None:
        pytest.skip(f"no compiled kernels: {native.why_not()}")
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
    tables = random_automata(rng, AUTOMATA, VOCAB, LINES, CLASSES)
    live = int(rng.integers(5, ROWS))
    states = rng.integers(-1, LINES, ROWS).astype(np.int32)
    rows = AutomatonRows(
        torch.from_numpy(states),
        torch.from_numpy(rng.integers(-(2**31), 2**31, (ROWS, WORDS)).astype(np.int32)),
        torch.from_numpy(rng.choice([0, 0, 0, 1], ROWS).astype(np.int32)),
        torch.tensor([live], dtype=torch.int32),
    )
    rows.automaton_state[live:] = 2**31 - 1  # padding may hold anything
    sampled = torch.from_numpy(rng.integers(0, VOCAB, ROWS))
    sampled[1] = -2  # without a choice
    rows.running[0] = ((rows.finished == 0) & (sampled >= 0))[:live].sum()  # what the advance left
    stop_ids = torch.full((ROWS, STOPS), -1, dtype=torch.int32)
    stop_ids[:, 0], stop_ids[2:5, 1], stop_ids[3, 2:] = EOS, 31, torch.tensor([32, 64])
    automaton = torch.from_numpy(rng.integers(0, AUTOMATA, ROWS).astype(np.int32))
    others = (sampled, torch.tensor([live], dtype=torch.int32), automaton, stop_ids, tables)
    want = expected(rows, sampled.tolist(), live, automaton.tolist(), stop_ids.tolist(), tables)
    follow(rows, *others)
    assert tuple(tensor.tolist() for tensor in rows) == want, f"seed {seed}"


def test_the_operator_passes_opcheck():
    rng = np.random.default_rng(0)
    there = (
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, WORDS, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        *random_automata(rng, AUTOMATA, VOCAB, LINES, CLASSES),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([3, 4]),
        torch.tensor([2], dtype=torch.int32),
        torch.full((2, STOPS), -1, dtype=torch.int32),
    )
    torch.library.opcheck(torch.ops.graphdecode.follow_automata.default, there)
    follow_automata(Guides(*there[:7]), *there[7:])
    assert there[0].tolist() != [0, 0] or there[7].tolist() != [0, 0]
