"""Ranks in one process, a thread each: what they say to one another, and what they compare while they capture."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from graphdecode.distributed import Follower, Leader, RankError, RefusedError
from graphdecode.distributed.link import Link, Message, Watch
from graphdecode.distributed.ranks import REPLY, GroupSettings
from graphdecode.distributed.started import new_board
from graphdecode.errors import ArgumentError

Pair = tuple[Leader, Follower]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The two ends of a group of two."""
    settings = GroupSettings(2, "cpu", "shared", 60.0, 1)
    (here, there), (life, their_life) = socket.socketpair(), socket.socketpair()
    _, board = new_board(2, 60.0)
    follower = Follower(1, settings, Link(there), their_life, board)
    leader = Leader(settings, [Link(here)], [life], board, [])
    yield leader, follower
    leader.close()
    follower.close()


def both(pair: Pair, work: Callable[[int, Leader | Follower], None]) -> list[str]:
    """Let both ends do their work; return what they raised, that of rank 0 first."""
    raised = ["", ""]

    def run(rank: int) -> None:
        try:
            work(rank, pair[rank])
        except RankError as error:
            raised[rank] = str(error)

    thread = threading.Thread(target=run, args=(1,))
    thread.start()
    run(0)
    thread.join()
    return raised


def test_ranks_that_differ_before_collectives_exist_are_refused() -> None:
    settings = GroupSettings(2, "cpu", "gloo", 60.0, 1, ("127.0.0.1", 1))
    (here, there), (life, their_life) = socket.socketpair(), socket.socketpair()
    Link(there).send(Message(REPLY, (0, 0, 0), b"leaves the group"))
    with pytest.raises(RankError, match="rank 0 .*rank 1 "):
        Leader(settings, [Link(here)], [life], None, [])
    there.close()
    their_life.close()


def test_the_least_number_counts(pair: Pair) -> None:
    found = [0, 0]

    def work(rank: int, end: Leader | Follower) -> None:
        found[rank] = end.least((700, 300)[rank])

    assert both(pair, work) == ["", ""]
    assert found == [300, 300]


@pytest.mark.parametrize("refusing", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("waits", [False, True])
def test_an_attempt_is_over_for_all_when_one_rank_refuses(pair: Pair, refusing: tuple[int, ...], waits: bool) -> None:
    found = ["", ""]

    def work(rank: int, end: Leader | Follower) -> None:
        def attempt() -> str:
            if rank in refusing:
                raise ArgumentError(f"{rank} will not")
            if waits:  # for one that does not come
                end.agree("goes on")
            return "done"

        try:
            found[rank] = end.attempt(attempt)
        except RefusedError as error:
            found[rank] = f"refused: {error}"
        except ArgumentError as error:
            found[rank] = str(error)
        end.agree("is here afterwards")
        assert end.total(2**40 + rank) == 2**41 + 1

    assert both(pair, work) == ["", ""]
    if not refusing:
        assert found == ["done", "done"]
    else:
        assert found[0] == ("0 will not" if 0 in refusing else "refused: rank 1 of 2: 1 will not")
        assert found[1] == "refused: another rank refused"


def test_a_capture_that_is_the_same_on_all_ranks_succeeds(pair: Pair) -> None:
    def work(_: int, end: Leader | Follower) -> None:
        with end.collectives.captured("bucket 4"):
            x = torch.ones(4, 8)
            end.collectives.all_reduce(x, "layers.0.o")
            assert torch.equal(x, torch.full((4, 8), 2.0))

    assert both(pair, work) == ["", ""]
    for end in pair:
        assert end.collectives.manifests["bucket 4"] == ["all_reduce of [4, 8] float32 at layers.0.o"]


def test_a_collective_of_another_shape_is_refused_before_any_rank_waits(pair: Pair) -> None:
    def work(rank: int, end: Leader | Follower) -> None:
        with end.collectives.captured("bucket 4"):
            end.collectives.all_reduce(torch.ones(4, 8), "layers.0.o")
            end.collectives.all_reduce(torch.ones(4, 8 + rank), "layers.0.down")

    for text in both(pair, work):
        assert "rank 0 is in bucket 4 at collective 1: all_reduce of [4, 8] float32 at layers.0.down" in text
        assert "rank 1 is in bucket 4 at collective 1: all_reduce of [4, 9] float32 at layers.0.down" in text


def test_collectives_in_another_order_or_number_are_named(pair: Pair) -> None:
    def work(rank: int, end: Leader | Follower) -> None:
        with end.collectives.captured("bucket 8"):
            for place in ("layers.0.o", "layers.0.down")[: 2 - rank]:
                end.collectives.all_reduce(torch.ones(8, 8), place)

    for text in both(pair, work):
        assert "rank 1 ends the capture of bucket 8 with 1 collectives" in text
        assert "at layers.0.down" in text


def test_messages_arrive_as_they_were_sent() -> None:
    here, there = (Link(end) for end in socket.socketpair())
    messages = [Message(3, (1, -2, 3), b""), Message(0, (0, 0, 0), bytes(range(256)) * 4096)]
    sender = threading.Thread(target=lambda: [here.send(message) for message in messages])
    sender.start()
    assert [there.receive() for _ in messages] == messages
    sender.join()
    here.close()
    with pytest.raises(EOFError):
        there.receive()
    there.close()


def test_a_stopped_rank_that_reads_nothing_blocks_no_other() -> None:
    """Its sockets are full: rank 0 waits to tell it something, and the watch to say why it ends."""
    settings = GroupSettings(2, "cpu", "shared", 60.0, 1)
    (here, there), (life, their_life) = socket.socketpair(), socket.socketpair()
    _, board = new_board(2, 60.0)
    leader = Leader(settings, [Link(here)], [life], board, [])
    threading.Timer(0.2, their_life.close).start()
    with pytest.raises(RankError, match="rank 1 of 2"):
        leader.send(3, payload=bytes(1 << 24))
    leader.close()
    there.close()
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while mine.send(b"."):
            pass
    began = time.monotonic()
    Watch({0: mine}, 600.0, lambda rank, fate: None).fail("because")
    assert time.monotonic() - began < 60.0
    mine.close()
    theirs.close()


def test_an_error_of_all_ranks_names_no_rank(pair: Pair) -> None:
    leader, follower = pair
    follower.fail("no such model")
    leader.explain(ArgumentError("no such model"))
    with pytest.raises(RankError, match=r"rank [01] of 2 .*no such model"):
        leader.check()
