"""Ranks that meet on a board: sums in one order, columns in their places, and words for who is missing."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from graphdecode.distributed import SharedCollectives
from graphdecode.distributed.started import new_board
from graphdecode.kernels.collective.shared_collectives import HEADER, LIMIT_MS, area_bytes_of, board_words
from graphdecode.kernels.native import library as native

BACKENDS = ["compiled", "python"]


def small_board(ranks: int, place_bytes: int = 256) -> torch.Tensor:
    board = torch.zeros(board_words(ranks, place_bytes), dtype=torch.int64)
    board[LIMIT_MS] = 60_000
    return board


def together(ranks: int, work: Callable[[int], None], backend: str) -> None:
    """Let each rank, a thread, do its work."""

    def run(rank: int) -> None:
        if backend == "python":
            with native.switched_off():
                work(rank)
        else:
            work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_ranks_get_the_sum_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype, backend: str) -> None:
    board, generator = small_board(ranks), torch.Generator().manual_seed(ranks)
    for shape in ((1, 1), (3, 37), (16, 200)):  # the last one takes many barriers: a data area holds 256 bytes
        own = [torch.randn(shape, generator=generator).to(dtype) for _ in range(ranks)]
        expected = own[0].float()
        for x in own[1:]:
            expected = expected + x.float()
        given = [x.clone() for x in own]
        together(
            ranks,
            lambda rank, given=given: SharedCollectives(rank, ranks, print, board).all_reduce(given[rank], "x"),
            backend,
        )
        assert all(torch.equal(x, expected.to(dtype)) for x in given), shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [7, 64])
def test_all_gather_concatenates_the_columns_of_all_ranks(columns: int, backend: str) -> None:
    ranks, rows = 3, 20
    board = small_board(ranks)
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    outs = [torch.zeros(rows, columns) for _ in range(ranks)]

    def work(rank: int) -> None:
        part = whole[:, columns * rank // ranks : columns * (rank + 1) // ranks].contiguous()
        SharedCollectives(rank, ranks, print, board).all_gather(outs[rank], part, "x")

    together(ranks, work, backend)
    assert all(torch.equal(out, whole) for out in outs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_of_ranks_at_different_speeds_stay_in_order(backend: str) -> None:
    ranks, board, wrong = 3, small_board(3), []

    def work(rank: int) -> None:
        shared = SharedCollectives(rank, ranks, print, board)
        for step in range(60):
            if (step * 7 + rank * 5) % 11 == 0:
                time.sleep(0.001)
            x = torch.full((1, 5), float(step * (rank + 1)))
            shared.all_reduce(x, "x")
            if not torch.equal(x, torch.full((1, 5), float(step * 6))):
                wrong.append((rank, step))

    together(ranks, work, backend)
    assert not wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_rank_is_named_and_no_rank_waits_again(backend: str) -> None:
    board = small_board(3)
    board[LIMIT_MS] = 200
    shared = [SharedCollectives(rank, 3, print, board) for rank in range(2)]
    x = torch.ones(2, 2)
    began = time.monotonic()
    together(2, lambda rank: shared[rank].all_reduce(x.clone(), "x"), backend)
    assert time.monotonic() - began < 60
    assert shared[0].late() == shared[1].late() == "rank 2 of 3 did not reach a collective"
    shared[0].all_reduce(x, "x")
    assert torch.equal(x, torch.ones(2, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_in_different_collectives_are_named(backend: str) -> None:
    board = small_board(2)
    shared = [SharedCollectives(rank, 2, print, board) for rank in range(2)]
    together(2, lambda rank: shared[rank].all_reduce(torch.ones(2, 2 + rank), "x"), backend)
    assert "called another collective" in str(shared[0].late())


def test_ranks_that_wait_for_a_lost_rank_are_released() -> None:
    board = small_board(2)
    shared = SharedCollectives(0, 2, print, board)
    threading.Timer(0.1, shared.give_up, [1]).start()
    began = time.monotonic()
    shared.all_reduce(torch.ones(2, 2), "x")
    assert time.monotonic() - began < 60
    assert shared.late() == "rank 1 of 2 did not reach a collective"


def test_data_areas_fill_the_board_without_overlap() -> None:
    _, board = new_board(4, 30.0)
    assert board[LIMIT_MS] == 30_000
    assert HEADER + 2 * 4 * area_bytes_of(board, 4) // 8 == board.numel()
