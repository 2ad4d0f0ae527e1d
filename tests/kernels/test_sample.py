"""Sampling: the same draw in any company, and every filter at its edges."""

import math

import numpy as np
import pytest
import torch
from compiled_kernels import NATIVE
from sampling_rows import ended_step, kept_probabilities, make_hostile, neutral_slots, random_rows, set_row
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from graphdecode.kernels.model.cap_logits import cap_logits, cap_logits_triton
from graphdecode.kernels.native.optional_triton import tl, triton
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling.philox import noise_of_block, noise_of_ids, noise_words, philox_words
from graphdecode.kernels.sampling.sample import sample
from graphdecode.kernels.sampling.sampling_slots import (
    BAD_WORD_LENGTH,
    PROMPT_BIT,
    TOO_COLD,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    SamplingSlots,
    masked_only,
)

native_sample = versions("sample").native
sample_torch = versions("sample").torch

BLOCK = 16


@pytest.fixture(params=["torch", NATIVE, "triton"])
def draw(request, device):
    """Sample with one of the versions; a vocabulary of more than 16 ids takes several of Triton's blocks."""

    def run(logits, slots, positions=None, counts=None, recent=None, live=None):
        rows = logits.shape[0]
        positions = torch.zeros(rows, dtype=torch.int32) if positions is None else positions
        live_rows = torch.tensor([rows if live is None else live], dtype=torch.int32)
        where = device if request.param == "triton" else "cpu"
        given = [t.to(where) if t is not None else None for t in (logits, positions, live_rows, *slots, counts, recent)]
        if request.param == "triton":
            return ended_step(*given[:3], SamplingSlots(*given[3:-2]), *given[-2:], block=BLOCK).cpu()
        sampled = torch.full((rows,), -7, dtype=torch.int64)
        if request.param == "torch" or logits.dtype == torch.float16:
            sample_torch(sampled, *given)
        else:
            native_sample(sampled, *given)()
        return sampled

    return run


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties(draw):
    logits = torch.zeros(3, 50)
    logits[0, 31] = 2.0
    logits[1, [18, 7, 44]] = 3.0
    logits[2] = -torch.inf
    logits[2, 49] = -5.0
    assert draw(logits, neutral_slots(3)).tolist() == [31, 7, 49]


@pytest.mark.parametrize("vocab", [40, 48], ids=["part of a block", "whole blocks"])
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "drawn"])
def test_a_row_without_a_choice_says_why_and_its_neighbours_are_as_before(draw, vocab, temperature):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(14))
    slots = neutral_slots(9)
    for row in range(9):
        set_row(slots, row, temperature=temperature, seed=row, top_k=5 * (row % 2), top_p=(1.0, 0.8)[row % 2])
    before = draw(logits, slots)
    logits[1, 3], logits[2], logits[3, vocab - 1] = torch.nan, torch.nan, torch.inf
    logits[4], logits[5, [0, 20]] = -torch.inf, torch.tensor([torch.inf, torch.nan])
    logits[6], logits[6, vocab - 2] = -torch.inf, torch.nan
    logits[7, before[7] - 1] = -torch.inf  # a mask is none of this
    sampled = draw(logits, slots)
    expected = [WITHOUT_NUMBERS] * 3 + [WITHOUT_FINITE] + [WITHOUT_NUMBERS] * 2
    assert sampled[1:7].tolist() == expected
    assert sampled[[0, 8]].tolist() == before[[0, 8]].tolist()
    assert 0 <= sampled[7] < vocab


@pytest.mark.parametrize("largest", [4e33, -4e33, 3.4e38])
def test_logits_that_the_temperature_drives_out_of_range_have_no_choice(draw, largest):
    logits = torch.full((3, 40), -3.4e38)
    logits[:, 7] = largest
    slots = neutral_slots(3)
    for row, temperature in enumerate((1e-5, 1.5, 0.0)):
        set_row(slots, row, temperature=temperature, seed=row)
    assert draw(logits, slots).tolist() == [TOO_COLD, 7, 7]


def test_what_bias_and_penalties_drive_out_of_range_has_no_choice(draw):
    logits = torch.zeros(3, 40)
    logits[:, 5] = 3e38
    slots = neutral_slots(3)
    set_row(slots, 0, biases={5: 3e38})
    set_row(slots, 1, repetition_penalty=0.5)
    set_row(slots, 2, stops=(5,), min_position=9)
    counts = torch.full((3, 40), PROMPT_BIT, dtype=torch.int32)
    assert draw(logits, slots, counts=counts).tolist() == [WITHOUT_NUMBERS, WITHOUT_NUMBERS, 0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_and_torch_choose_the_same_tokens(seed, dtype, device):
    rows, vocab = 8, 45
    logits, positions, slots, *books = random_rows(rows, vocab, seed)
    logits, live = logits.to(dtype), torch.tensor([rows - 1], dtype=torch.int32)
    given = (logits, positions, live, *slots, *books)
    by_torch = torch.zeros(rows, dtype=torch.int64)
    sample_torch(by_torch, *given)
    logits, positions, live, *slots = (tensor.to(device) for tensor in given[:-2])
    books = [book.to(device) for book in books]
    by_triton = ended_step(logits, positions, live, SamplingSlots(*slots), *books, block=BLOCK)
    assert by_torch.tolist() == by_triton.tolist(), f"seed {seed}"
    assert by_torch[-1] == 1


def first_of_the_race(p: torch.Tensor, seed: int, position: int) -> tuple[int, float]:
    """By the definition, in float64: the token of probabilities `p` that arrives first, and the second's time over its.

    Noise is taken id by id: its call is 16 times the id's block of 64 plus the id modulo 16, its word the quarter.
    """
    arrivals = []
    for token, chance in enumerate(p.tolist()):
        words = philox_words(seed, (position, token // 64 * 16 + token % 16, 0, 0))
        exponential = -math.log1p(-(words[token % 64 // 16] + 0.5) / 2**32)
        arrivals.append(exponential / chance if chance else math.inf)
    first, second = sorted([*arrivals, math.inf])[:2]
    return arrivals.index(first), second / first


FILTERS = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5, "min_p": 0.1}]
SEEDS = [0, 7, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822]


@pytest.mark.parametrize("vocab", [1, 2, 16, 37, 64, 65, 130])
def test_the_token_that_arrives_first_is_drawn(draw, vocab):
    """Seeds of all 64 bits, any position, and ids at the borders of the blocks that noise and kernels are made in."""
    rows = 30
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 2
    positions = torch.arange(rows, dtype=torch.int32) * 71_582_000
    slots = neutral_slots(rows, vocab)
    expected = []
    for row in range(rows):
        seed, wish = SEEDS[row % len(SEEDS)], FILTERS[row % len(FILTERS)]
        set_row(slots, row, temperature=0.9, seed=seed, **wish)
        first, apart = first_of_the_race(kept_probabilities(logits[row], 0.9, **wish), seed, int(positions[row]) + 1)
        assert apart > 1 + 1e-5, "the case is too close to tell"
        expected.append(first)
    assert draw(logits, slots, positions).tolist() == expected


def test_a_token_depends_on_its_logit_and_its_rivals_alone(draw):
    """Removing tokens that were not drawn, or moving their logits down, changes no draw."""
    rows, vocab = 48, 200
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5))
    slots = neutral_slots(rows, vocab)
    for row in range(rows):
        set_row(slots, row, temperature=1.0, seed=row)
    drawn = draw(logits, slots)
    assert len(set(drawn.tolist())) > 30
    others = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(6))
    others.scatter_(1, drawn[:, None], 1.0)
    for lower in (torch.where(others < 0.6, -torch.inf, logits), logits - (others < 0.6).float()):
        assert draw(lower, slots).tolist() == drawn.tolist()


def test_the_same_seed_position_and_logits_give_the_same_token_in_every_row_bucket_and_company(draw):
    """Law: a sampled token depends on (seed, position, logits) and nothing else."""
    vocab = 45
    mine, my_positions, my_slots, *my_books = random_rows(5, vocab, 11)
    alone = [
        draw(
            mine[r : r + 1],
            SamplingSlots(*(slot[r : r + 1] for slot in my_slots)),
            my_positions[r : r + 1],
            *(book[r : r + 1] for book in my_books),
        ).item()
        for r in range(5)
    ]
    for bucket, offset in ((5, 0), (6, 1), (8, 3)):
        logits, positions, slots, *books = random_rows(bucket, vocab, 100 + bucket)
        place = [(r + offset) % bucket for r in range(5)]
        for target, source in zip(
            (logits, positions, *books, *slots), (mine, my_positions, *my_books, *my_slots), strict=True
        ):
            target[place] = source
        sampled = draw(logits, slots, positions, *books)
        assert sampled[place].tolist() == alone, f"bucket {bucket}, offset {offset}"


def test_dead_rows_with_hostile_slots_change_nothing(draw):
    """Law: padding is inert."""
    logits, positions, slots, *books = random_rows(6, 45, 5)
    calm = draw(logits, slots, positions, *books, live=4)
    make_hostile(slots, 4)
    logits[4:] = torch.nan
    positions[4:] = 2**31 - 1
    for book in books:
        book[4:] = -1
    hostile = draw(logits, slots, positions, *books, live=4)
    assert hostile.tolist() == calm.tolist()
    assert hostile[4:].tolist() == [1, 1]


def test_no_live_row_is_fine(draw):
    assert draw(torch.full((2, 20), torch.nan), neutral_slots(2), live=0).tolist() == [1, 1]


def test_seeds_reproduce_and_differ(draw):
    rows = 16
    logits = torch.zeros(rows, 40)
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, temperature=1.0, seed=row // 2)
    first = draw(logits, slots)
    assert first[::2].tolist() == first[1::2].tolist()
    assert len(set(first.tolist())) > 4
    assert draw(logits, slots).tolist() == first.tolist()
    moved = draw(logits, slots, torch.ones(rows, dtype=torch.int32))
    assert moved.tolist() != first.tolist()


@pytest.mark.parametrize(
    "wish",
    [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-6}],
    ids=["top_k 1", "top_p tiny", "top_p 0", "min_p 1", "temperature tiny"],
)
def test_a_filter_at_its_end_is_greedy(draw, wish):
    rows = 8
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(2))
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, seed=row, **{"temperature": 1.0, **wish})
    assert draw(logits, slots).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("wish", [{"top_k": 40}, {"top_k": 10**6}, {"top_k": -3}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_a_filter_that_is_off_changes_nothing(draw, wish):
    rows = 8
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(4))
    plain, filtered = neutral_slots(rows), neutral_slots(rows)
    for row in range(rows):
        set_row(plain, row, temperature=1.5, seed=row)
        set_row(filtered, row, temperature=1.5, seed=row, **wish)
    assert draw(logits, filtered).tolist() == draw(logits, plain).tolist()


def test_one_possible_token_is_always_drawn(draw):
    logits = torch.full((3, 40), -torch.inf)
    logits[:, 33] = torch.tensor([-1e4, 0.0, 3e38])
    slots = neutral_slots(3)
    for row in range(3):
        set_row(slots, row, temperature=1.0, seed=row, top_p=0.9, top_k=(0, 1, 5)[row], min_p=0.5)
    assert draw(logits, slots).tolist() == [33, 33, 33]


def test_tokens_as_large_as_the_kth_are_kept(draw):
    rows = 32
    logits = torch.full((rows, 40), -3.0)
    logits[:, [2, 20, 38]] = 1.0
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, temperature=1.0, seed=row, **({"top_k": 2} if row % 2 else {"top_p": 0.3}))
    sampled = draw(logits, slots)
    assert set(sampled[::2].tolist()) == set(sampled[1::2].tolist()) == {2, 20, 38}


def test_top_p_counts_what_top_k_left(draw):
    """0.6, 0.3 and 0.1 of three tokens kept out of many: the two likeliest hold 0.9."""
    rows = 24
    logits = torch.full((rows, 40), math.log(0.02))
    for token, p in ((30, 0.6), (3, 0.3), (17, 0.1)):
        logits[:, token] = math.log(p)
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, temperature=1.0, seed=row, top_k=3, top_p=0.85)
    assert set(draw(logits, slots).tolist()) == {3, 30}


def test_what_noise_cannot_lift_is_never_drawn_and_what_it_can_is(draw):
    """-log(E) of 32 bits is at most 22.9. Under seed 0 the word of id 21 is 0 at this position, found by search."""
    position = 679_052_650
    assert noise_words(0, position, np.zeros(1, dtype=np.int64))[0, 21] == 0
    logits = torch.full((2, 40), -torch.inf)
    logits[:, 30], logits[:, 21] = 0.0, torch.tensor([-20.0, -27.0])
    slots = neutral_slots(2)
    for row in range(2):
        set_row(slots, row, temperature=1.0)
    assert draw(logits, slots, torch.tensor([position - 1] * 2, dtype=torch.int32)).tolist() == [21, 30]


@pytest.mark.parametrize("middle", [1.0, 0.0, -3e4])
def test_thresholds_tell_neighbouring_floats_apart(draw, middle):
    """Logits one unit in the last place apart: four are kept, by count or by mass, and no fifth."""
    rows, vocab = 32, 40
    line = torch.empty(vocab)
    value = torch.tensor(middle)
    for token in torch.randperm(vocab, generator=torch.Generator().manual_seed(13)).tolist():
        line[token] = value
        value = torch.nextafter(value, torch.tensor(-torch.inf))
    best = set(line.topk(4).indices.tolist())
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, temperature=1.0, seed=row, top_k=4 if row % 2 else 0, top_p=1.0 if row % 2 else 0.0999)
    sampled = draw(line.repeat(rows, 1), slots)
    assert set(sampled[::2].tolist()) == best
    assert set(sampled[1::2].tolist()) == best


def test_bias_can_force_and_forbid(draw):
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(6))
    best = int(logits[1].argmax())
    slots = neutral_slots(2)
    set_row(slots, 0, biases={17: 100.0})
    set_row(slots, 1, biases={best: -100.0})
    logits_without = logits[1].clone()
    logits_without[best] = -torch.inf
    assert draw(logits, slots).tolist() == [17, int(logits_without.argmax())]


@pytest.mark.parametrize("stops", [(39,), (masked_only(39),), (7, masked_only(39), masked_only(0))])
def test_stop_ids_and_what_is_held_back_are_masked_below_the_minimum_position_alone(draw, stops):
    rows = 4
    logits = torch.zeros(rows, 40)
    logits[:, 39], logits[:, 5] = 9.0, 3.0
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, stops=stops, min_position=10, temperature=(0.0, 1e-3)[row % 2])
    fed = torch.tensor([8, 8, 9, 9], dtype=torch.int32)  # the new tokens stand at 9, 9, 10, 10
    assert draw(logits, slots, fed).tolist() == [5, 5, 39, 39]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(draw, penalty):
    rows, vocab = 12, 40
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(rows, vocab, generator=generator)
    ids = torch.randint(0, vocab, (rows, 15), generator=generator)
    ids[:, 0] = logits.topk(2).indices[:, 0 if penalty > 1 else 1]  # so that the best ones change places
    counts = torch.zeros(rows, vocab, dtype=torch.int32)
    for row in range(rows):
        counts[row, ids[row, :8]] |= PROMPT_BIT
        for token in ids[row, 8:].tolist():
            counts[row, token] += 1
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, repetition_penalty=penalty, temperature=(0.0, 0.8)[row % 2], seed=row)
    processed = RepetitionPenaltyLogitsProcessor(penalty=penalty)(ids, logits.clone())
    plain = neutral_slots(rows)
    for row in range(rows):
        set_row(plain, row, temperature=(0.0, 0.8)[row % 2], seed=row)
    assert draw(logits, slots, counts=counts).tolist() == draw(processed, plain).tolist()
    assert draw(logits, plain, counts=counts).tolist() != draw(processed, plain).tolist()


def test_top_k_keeps_what_transformers_keeps(draw):
    rows, vocab = 12, 40
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(10))
    warped = TopKLogitsWarper(top_k=4)(None, logits.clone())
    slots, plain = neutral_slots(rows), neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, temperature=1.0, seed=row, top_k=4)
        set_row(plain, row, temperature=1.0, seed=row)
    assert draw(logits, slots).tolist() == draw(warped, plain).tolist()


def test_presence_and_frequency_count_the_output_and_not_the_prompt(draw):
    logits = torch.zeros(4, 40)
    logits[:, 8], logits[:, 21], logits[:, 35] = 3.0, 2.0, 1.0
    counts = torch.zeros(4, 40, dtype=torch.int32)
    counts[:, 8] = torch.tensor([PROMPT_BIT, PROMPT_BIT | 1, 3, 1])
    counts[:, 21] = torch.tensor([0, 0, 1, 2])
    slots = neutral_slots(4)
    set_row(slots, 0, presence_penalty=5.0)  # only in the prompt: 3 stays
    set_row(slots, 1, presence_penalty=1.5)  # 3 - 1.5 < 2
    set_row(slots, 2, frequency_penalty=0.75)  # 3 - 2.25 and 2 - 0.75: 21 leads
    set_row(slots, 3, frequency_penalty=0.6, presence_penalty=1.6)  # 0.8, -0.8 and 1: 35 leads
    assert draw(logits, slots, counts=counts).tolist() == [8, 21, 21, 35]
    assert draw(logits, slots, counts=None).tolist() == [8, 8, 8, 8]


def test_penalties_are_added_before_they_are_taken_off(draw):
    """15.82 - (1.1 + 3 x 0.6) is 12.92 in float32, and one by one a little less; of equals the first leads."""
    logits, counts = torch.zeros(1, 40), torch.zeros(1, 40, dtype=torch.int32)
    logits[0, 8], logits[0, 21], counts[0, 8] = 15.82, 12.92, 3
    slots = neutral_slots(1)
    set_row(slots, 0, presence_penalty=1.1, frequency_penalty=0.6)
    assert draw(logits, slots, counts=counts).tolist() == [8]


def test_a_large_vocabulary_takes_the_same_path_as_a_sort():
    """More candidates than the shortcut looks at: a flat nucleus of thousands of tokens."""
    rows, vocab = 6, 6000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(12)) * 0.5
    slots = neutral_slots(rows)
    expected = []
    wishes = [{"top_p": 0.9}, {"top_k": 2000}, {"top_k": 3000, "top_p": 0.7}]
    for row in range(rows):
        set_row(slots, row, temperature=1.0, seed=row, **wishes[row % 3])
        expected.append(first_of_the_race(kept_probabilities(logits[row], 1.0, **wishes[row % 3]), row, 1)[0])
    sampled = torch.zeros(rows, dtype=torch.int64)
    sample(sampled, logits, torch.zeros(rows, dtype=torch.int32), torch.tensor([rows], dtype=torch.int32), slots)
    assert sampled.tolist() == expected


@pytest.mark.parametrize("vocab", [40, 64, 33])
def test_what_is_not_allowed_is_never_chosen(draw, vocab):
    rows = 12
    generator = torch.Generator().manual_seed(21)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    slots, masked = neutral_slots(rows, vocab), logits.clone()
    plain = neutral_slots(rows, vocab)
    for row in range(rows):
        allowed = torch.randperm(vocab, generator=generator)[: 1 + row].tolist()
        wish = {"temperature": (0.0, 1.5)[row % 2], "seed": row, "top_k": (0, 3)[row % 3 == 1]}
        set_row(slots, row, allowed=allowed, **wish)
        set_row(plain, row, **wish)
        masked[row] = -torch.inf
        masked[row, allowed] = logits[row, allowed]
    sampled = draw(logits, slots)
    assert sampled.tolist() == draw(masked, plain).tolist()
    assert all(masked[row, token] > -torch.inf for row, token in enumerate(sampled.tolist()))
    nothing = neutral_slots(1, vocab)
    set_row(nothing, 0, allowed=[7], stops=(7,), min_position=9)
    assert draw(logits[:1], nothing).tolist() == [WITHOUT_FINITE]


def test_a_bad_words_last_token_is_forbidden_behind_its_others_alone(draw):
    logits = torch.zeros(7, 40)
    logits[:, 30], logits[:, 31], logits[:, 32] = 3.0, 2.0, 1.0
    slots = neutral_slots(7)
    positions = torch.tensor([50, 50, 50, 50, 50, 31, 4], dtype=torch.int32)  # of the tokens that were fed
    recent = torch.full((7, BAD_WORD_LENGTH), -1, dtype=torch.int32)
    for row, position in enumerate(positions.tolist()):
        for back, token in enumerate([9, 8, 7, *range(20, 32)] if row < 6 else [9, 8]):  # the last one first
            recent[row, (position - back) % BAD_WORD_LENGTH] = token
    set_row(slots, 0, bad_words=[[30]])
    set_row(slots, 1, bad_words=[[8, 9, 30], [31]])
    set_row(slots, 2, bad_words=[[9, 8, 30], [8, 30], [7, 9, 30]])  # these are not the last tokens
    set_row(slots, 3, bad_words=[[*range(31, 19, -1), 7, 8, 9, 30]])  # of the greatest length
    set_row(slots, 4, bad_words=[[39, *range(30, 19, -1), 7, 8, 9, 30]])
    set_row(slots, 5, bad_words=[[5], [9, 9, 30], [9, 31], [32], [7, 8, 9, 30], [0]])  # as many as there may be
    set_row(slots, 6, bad_words=[[7, 8, 9, 30], [8, 9, 31]])  # the answer has two tokens yet
    assert draw(logits, slots, positions, recent=recent).tolist() == [31, 32, 30, 31, 30, 1, 30]
    assert draw(logits, slots, positions, recent=None).tolist() == [30] * 7


def test_the_operator_passes_opcheck():
    logits, positions, slots, *books = random_rows(3, 20, 1)
    live = torch.tensor([3], dtype=torch.int32)
    sampled = torch.zeros(3, dtype=torch.int64)
    arguments = (sampled, logits, positions, live, *slots, *books)
    torch.library.opcheck(torch.ops.graphdecode.sample.default, arguments)


# Random123's known answers for philox4x32, 7 and 10 rounds: counter, key, output.
PI, PI_KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0_A4093822
ONES, ONES_KEY = (0xFFFFFFFF,) * 4, 0xFFFFFFFF_FFFFFFFF
KNOWN_ANSWERS = [
    (7, (0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, ONES_KEY, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, PI_KEY, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, ONES_KEY, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(rounds, counter, key, words):
    assert philox_words(key, counter, rounds) == words


@triton.jit
def _noise_kernel(out, seeds, positions, IDS: tl.constexpr, BY_ID: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * IDS + tl.arange(0, IDS)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    words = noise_of_ids(seed, position, ids) if BY_ID else noise_of_block(seed, position, block * IDS, IDS)
    tl.store(out + row * tl.num_programs(1) * IDS + ids, words.to(tl.int64))


@pytest.mark.parametrize(("ids", "by_id"), [(128, False), (64, False), (32, False), (128, True)])
def test_the_kernel_makes_the_same_noise_as_the_host(ids, by_id, device):
    positions = [0, 1, 77, 2**31 - 1, 5, 0x243F6A88]
    out = torch.zeros(len(SEEDS), 256, dtype=torch.int64, device=device)
    given = torch.tensor(SEEDS, device=device), torch.tensor(positions, dtype=torch.int32, device=device)
    _noise_kernel[(len(SEEDS), 256 // ids)](out, *given, IDS=ids, BY_ID=by_id)
    blocks = torch.arange(4).numpy()
    for row, (seed, position) in enumerate(zip(SEEDS, positions, strict=True)):
        assert out[row].tolist() == noise_words(seed, position, blocks).reshape(-1).tolist()
    assert out[0, [0, 16, 32, 48]].tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_noise_is_even_and_that_of_other_ids_and_positions_is_independent():
    """Counts of 50 equal bins, and of 16 by 16 for neighbours of an id, of a word's place and of a position."""
    words = np.stack([noise_words(12345, position, np.arange(8)) for position in range(300)])  # [300, 8, 64]
    bins = words.reshape(300, 512) >> 28
    pairs = {
        "next id": (bins[:, :-1], bins[:, 1:]),
        "16 ids on": (bins[:, :-16], bins[:, 16:]),
        "next block": (bins[:, :-64], bins[:, 64:]),
        "next position": (bins[:-1], bins[1:]),
        "next seed": (bins[0], noise_words(12346, 0, np.arange(8)).reshape(-1) >> 28),
    }
    even = torch.from_numpy((words.reshape(-1) * 50 >> 32).astype(np.int64))
    assert fit_p_value(even, torch.full((50,), 0.02, dtype=torch.float64)) > 1e-4
    for name, (first, second) in pairs.items():
        cells = torch.from_numpy((first.reshape(-1) * 16 + second.reshape(-1)).astype(np.int64))
        assert fit_p_value(cells, torch.full((256,), 1 / 256, dtype=torch.float64)) > 1e-4, name


def test_noise_of_a_thousandth_in_the_logits_moves_no_draw():
    """49,152 logits, 600 draws; a draw by the cumulative distribution in the order of ids moved a fifth of them."""
    vocab, draws = 49_152, 600
    generator = torch.Generator().manual_seed(17)
    line = torch.randn(vocab, generator=generator) * 2.5
    slots = neutral_slots(1, vocab)
    set_row(slots, 0, temperature=1.0, seed=7)
    live, sampled, moved = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 0
    for position in torch.arange(draws, dtype=torch.int32):
        noisy = line + 0.001 * torch.randn(vocab, generator=generator)
        found = []
        for logits in (line, noisy):
            sample(sampled, logits[None], position[None], live, slots)
            found.append(sampled.item())
        moved += found[0] != found[1]
    assert moved <= 2


TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
CAP = 30.0


@pytest.mark.parametrize("version", ["torch", "triton", NATIVE])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 16, 2100])
@pytest.mark.parametrize("cap", [CAP, 50.0, 1e6])
def test_it_is_the_formula(version, dtype, width, cap, device):
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(1)) * 40
    logits[0] = 1e-3
    logits[1, 0], logits[2, -1] = 1e4, -1e4
    logits = logits.to(dtype)
    expected = cap * torch.tanh(logits.double() / cap)
    run = {
        "torch": versions("cap_logits").torch,
        "triton": cap_logits_triton,
        "native": lambda *given: versions("cap_logits").native(*given)(),
    }[version]
    given = logits.to(device if version == "triton" else "cpu")
    run(given, cap)
    torch.testing.assert_close(given.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=1e-9)


def test_cap_logits_passes_opcheck(device):
    torch.library.opcheck(torch.ops.graphdecode.cap_logits.default, (torch.randn(2, 16, device=device), CAP))
    logits = torch.full((1, 4), 1e9, device=device)
    cap_logits(logits, CAP)
    torch.testing.assert_close(logits, torch.full_like(logits, CAP), rtol=4e-7, atol=0.0)


SAMPLERS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.8},
    "top_k": {"temperature": 1.0, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
}


def chi_square_p_value(wish: dict[str, float], draws: int, by_position: bool) -> float:
    vocab = 30
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(8)) * 1.5
    slots = neutral_slots(draws)
    for name, value in wish.items():
        getattr(slots, name)[:] = value
    slots.sampling_flags[:] = 1
    numbers = torch.arange(draws)
    if not by_position:
        slots.seed[:] = numbers * 7919
    positions = numbers.int() if by_position else torch.zeros(draws, dtype=torch.int32)
    sampled = torch.zeros(draws, dtype=torch.int64)
    sample(sampled, logits.repeat(draws, 1), positions, torch.tensor([draws], dtype=torch.int32), slots)
    p = kept_probabilities(logits, **wish)
    assert torch.bincount(sampled, minlength=vocab)[p == 0].sum() == 0, "a token was drawn that the filters drop"
    return fit_p_value(sampled, p)


def fit_p_value(sampled: torch.Tensor, p: torch.Tensor) -> float:
    """How likely draws so far from the probabilities `p` are: Pearson's chi-square test. Impossible draws: 0."""
    counts = torch.bincount(sampled, minlength=len(p)).double()
    if counts[p == 0].sum() > 0:
        return 0.0
    expected = p[p > 0] * len(sampled)
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_of_many_seeds_follow_the_distribution(name):
    assert chi_square_p_value(SAMPLERS[name], 5000, by_position=False) > 1e-4


@pytest.mark.parametrize("name", SAMPLERS)
def test_100k_draws_of_one_seed_follow_the_distribution(name):
    assert chi_square_p_value(SAMPLERS[name], 100_000, by_position=True) > 1e-4


PENALTIES = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.3},
    "all": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.4, "top_p": 0.9},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_100k_draws_under_penalties_and_bias_follow_the_distribution(name):
    """Tokens 0..5 were in the prompt; 4..9 were generated, each once more than the one before; 10 has a bias."""
    vocab, draws, wish = 30, 100_000, PENALTIES[name]
    top_p = wish.get("top_p", 1.0)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(12)) * 1.5
    generated = torch.zeros(vocab, dtype=torch.int32)
    generated[4:10] = torch.arange(1, 7)
    counts = generated.clone()
    counts[:6] |= PROMPT_BIT
    one = neutral_slots(1)
    set_row(one, 0, temperature=0.9, seed=21, biases={10: 0.7}, **wish)
    slots = SamplingSlots(*(slot.repeat(draws, *[1] * (slot.dim() - 1)) for slot in one))
    sampled = torch.zeros(draws, dtype=torch.int64)
    live = torch.tensor([draws], dtype=torch.int32)
    sample(
        sampled, logits.repeat(draws, 1), torch.arange(draws, dtype=torch.int32), live, slots, counts.expand(draws, -1)
    )
    exact = logits.double()
    exact[10] += 0.7
    for token in range(10):
        repetition = wish.get("repetition_penalty", 1.0)
        exact[token] = exact[token] / repetition if exact[token] > 0 else exact[token] * repetition
        times = int(generated[token])
        exact[token] -= wish.get("presence_penalty", 0.0) * (times > 0) + wish.get("frequency_penalty", 0.0) * times
    p = kept_probabilities(exact, 0.9, top_p=top_p)
    assert fit_p_value(sampled, p) > 1e-4
    assert fit_p_value(sampled, kept_probabilities(logits, 0.9, top_p=top_p)) < 1e-9  # as if nothing was asked
