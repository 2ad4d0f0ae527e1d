"""The operators of speculation: three versions that agree, and lookups against a search written for the purpose."""

import random

import pytest
import torch
from compiled_kernels import NATIVE

from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling.sampling_slots import DEAD_TOKEN
from graphdecode.kernels.speculation.ngram_draft import ngram_draft
from graphdecode.kernels.speculation.verify_drafts import (
    ACCEPTED,
    CANDIDATES,
    DRAFT_COLUMNS,
    PAUSED,
    VERIFIED,
    DraftRows,
    judge_drafts,
    settle_drafts,
    spread_queries,
)

OPERATORS = {
    "ngram_draft": ngram_draft,
    "spread_queries": spread_queries,
    "judge_drafts": judge_drafts,
    "settle_drafts": settle_drafts,
}
ROWS, MOST, RING, WIDTH, PAGES, NULL_PAGE = 5, 7, 16, 40, 6, 99


@pytest.fixture(params=["torch", NATIVE, "triton"])
def run(request, device):
    """Run an operator in one of its versions over its arguments, in order; on a GPU over copies."""

    def run(name, *arguments):
        found = versions(name)
        if request.param != "triton":
            found.native(*arguments)() if request.param == "native" else found.torch(*arguments)
            return
        there = [each.to(device) if isinstance(each, torch.Tensor) else each for each in arguments]
        found.triton(*there)
        for mine, theirs in zip(arguments, there, strict=True):
            if isinstance(mine, torch.Tensor) and mine is not theirs:
                mine.copy_(theirs)

    return run


def ints(rng, low, high, *shape):
    return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)


def looked_up(tokens: list[int], ngram_min: int, ngram_max: int) -> tuple[list[int], int]:
    """Return what the rule of `ngram_draft` says, found by trying all."""
    for length in range(min(ngram_max, len(tokens) - 1), ngram_min - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):  # behind the earlier place, the latest first
            if tokens[end - length : end] == tokens[-length:]:
                text = list(tokens)
                for place in range(MOST):
                    text.append(text[end + place])
                return text[len(tokens) :], length
    return [], 0


@pytest.mark.parametrize(("ngram_min", "ngram_max"), [(1, 1), (1, 4), (2, 5), (3, 3)])
def test_drafts_are_what_followed_the_longest_and_latest_match(run, ngram_min, ngram_max) -> None:
    rng = random.Random(ngram_max)
    for letters in (1, 2, 4):
        history = torch.full((ROWS, WIDTH), 77, dtype=torch.int32)
        lengths = [1, 2, 3, WIDTH, rng.randrange(4, WIDTH)]
        texts = [[rng.randrange(letters) for _ in range(length)] for length in lengths]
        for row, text in enumerate(texts):
            history[row, : len(text)] = torch.tensor(text)
        drafts, count = torch.full((ROWS, MOST), -9, dtype=torch.int32), torch.full((ROWS,), -9, dtype=torch.int32)
        matched, positions = torch.full((ROWS,), -9, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32) - 1
        live = torch.tensor([ROWS - 1], dtype=torch.int32)
        run("ngram_draft", drafts, count, matched, history, positions, live, ngram_min, ngram_max)
        for row, text in enumerate(texts[:-1]):
            expected, length = looked_up(text, ngram_min, ngram_max)
            assert (int(count[row]), int(matched[row])) == (len(expected), length), text
            assert drafts[row, : len(expected)].tolist() == expected, text
        assert int(count[-1]) == -9  # a dead row


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_queries_stand_behind_their_rows_and_others_in_the_null_page(run, queries) -> None:
    rng = torch.Generator().manual_seed(queries)
    spread = (
        torch.full((ROWS * queries,), -1),
        ints(rng, 0, 9, ROWS * queries),
        ints(rng, 0, 9, ROWS * queries, PAGES),
        ints(rng, 0, 9, 1),
    )
    tokens, before = torch.arange(ROWS) + 100, ints(rng, 0, 20, ROWS)
    finished, drafts = torch.tensor([0, 0, 1, 0, 0], dtype=torch.int32), ints(rng, 200, 300, ROWS, MOST)
    count, table = torch.tensor([0, 2, 5, 7, 3], dtype=torch.int32), ints(rng, 0, 90, ROWS, PAGES)
    live = torch.tensor([4], dtype=torch.int32)
    given = state(0) | {"tokens": tokens, "pre_step_seqlens": before, "finished": finished, "drafts": drafts}
    given |= {"num_drafts": count, "live_rows": live}
    run("spread_queries", *spread, *rows_of(given), table, queries, NULL_PAGE)
    assert int(spread[3]) == 4 * queries
    for row in range(ROWS):
        used = 0 if row == 4 else 1 if row == 2 else 1 + min(int(count[row]), queries - 1)
        for behind in range(queries):
            query = row * queries + behind
            token, position, pages = (int(spread[0][query]), int(spread[1][query]), spread[2][query].tolist())
            if behind < used:
                expected = int(tokens[row]) if behind == 0 else int(drafts[row, behind - 1])
                assert (token, position, pages) == (expected, int(before[row]) + behind, table[row].tolist())
            else:
                assert (token, position, pages) == (DEAD_TOKEN, 0, [NULL_PAGE] * PAGES)


def state(seed: int) -> dict[str, torch.Tensor]:
    """A batch in the middle of a step."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.arange(ROWS),
        "finished": ints(rng, 0, 2, ROWS),
        "active_rows": ints(rng, 0, 9, 1),
        "running": ints(rng, 0, 9, 1),
        "step_entries": ints(rng, 0, 9, 1),
        "history": ints(rng, 0, 9, ROWS, WIDTH),
        "ring_drafts": ints(rng, 0, 8, RING, DRAFT_COLUMNS, ROWS + 1),
        "ring_tokens": torch.randint(-1, 4, (RING, ROWS + 1), generator=rng),
        "step_index": torch.randint(9, 40, (1,), generator=rng),
        "pre_step_seqlens": ints(rng, 0, WIDTH, ROWS),
        "drafts": ints(rng, 0, 4, ROWS, MOST),
        "num_drafts": ints(rng, 0, MOST + 1, ROWS),
        "match_lengths": ints(rng, 0, 5, ROWS),
        "draft_limit": ints(rng, 0, MOST + 1, ROWS),
        "last_position": ints(rng, 0, WIDTH + 9, ROWS),
        "live_rows": ints(rng, 0, ROWS + 1, 1),
    }


def rows_of(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [given[name] for name in DraftRows._fields]


@pytest.mark.parametrize("seed", range(12))
def test_all_versions_judge_and_settle_alike(run, seed) -> None:
    queries = [1, 2, 4, 8][seed % 4]
    index = seed % queries
    for name, numbers in (("judge_drafts", (index, queries)), ("settle_drafts", (queries, seed % 2 == 0))):
        ours, theirs = state(seed), state(seed)
        if name == "settle_drafts":
            for each in (ours, theirs):
                each["finished"][::2] = PAUSED
        run(name, *rows_of(ours), *numbers)
        versions(name).torch(*rows_of(theirs), *numbers)
        for each in ours:
            assert torch.equal(ours[each], theirs[each]), (name, each)


def test_a_row_is_held_at_its_first_wrong_draft_and_let_go_at_the_end(run) -> None:
    """Row 0 has two drafts, the second wrong; row 1 none; row 2 ended with a right one; row 3 had ended before."""
    given = state(0)
    given["step_index"].fill_(3)  # two tokens of this step are in the ring, entries 1 and 2
    given["finished"].copy_(torch.tensor([0, 0, 1, 1, 0]))
    given["live_rows"].fill_(4)
    given["num_drafts"].copy_(torch.tensor([2, 0, 2, 2, 2]))
    given["drafts"][:, :2] = torch.tensor([[10, 11], [10, 11], [10, 11], [10, 11], [10, 11]])
    given["pre_step_seqlens"].fill_(5)
    given["ring_tokens"][1] = torch.tensor([10, 9, 10, -1, 7, 7])
    given["ring_tokens"][2] = torch.tensor([12, -1, -1, -1, 7, 7])
    given["step_index"].fill_(2)
    run("judge_drafts", *rows_of(given), 0, 4)
    assert given["finished"].tolist() == [0, PAUSED, 1, 1, 0]
    assert int(given["active_rows"]) == 1
    assert given["history"][:2, 5].tolist() == [10, 9]
    given["step_index"].fill_(3)
    run("judge_drafts", *rows_of(given), 1, 4)
    assert given["finished"].tolist() == [PAUSED, PAUSED, 1, 1, 0]
    assert int(given["active_rows"]) == 0
    assert given["ring_drafts"][1, VERIFIED, :4].tolist() == [2, 0, 2, 0]
    assert given["ring_drafts"][1, ACCEPTED, :4].tolist() == [1, 0, 1, 0]
    given["step_index"].fill_(5)
    given["draft_limit"].fill_(4)
    given["last_position"].fill_(8)
    given["num_drafts"].fill_(7)
    run("settle_drafts", *rows_of(given), 4, True)
    assert given["finished"].tolist() == [0, 0, 1, 1, 0]
    assert int(given["running"]) == 2
    assert given["draft_limit"][:4].tolist() == [3, 4, 4, 4]
    assert given["ring_drafts"][1, CANDIDATES, :4].tolist() == [
        2,
        2,
        0,
        0,
    ]  # of 7: the limit, and the room of 8 - 1 - 5


@pytest.mark.parametrize("name", ["judge_drafts", "settle_drafts"])
def test_the_operators_say_what_they_write(name) -> None:
    given = state(1)
    numbers = (0, 2) if name == "judge_drafts" else (2, True)
    overload = getattr(torch.ops.graphdecode, name).default
    torch.library.opcheck(overload, (*rows_of(given), *numbers), test_utils=("test_schema",))
