"""Runs before a capture: what they keep, and whom an error is blamed on."""

import pytest
import torch
from step_buffers import make_buffers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphdecode import CaptureError, GraphManager
from graphdecode.buffers import Batch
from graphdecode.graphs import check
from graphdecode.graphs.backend import warm_up
from graphdecode.graphs.inspect.owners import Owners


@torch.library.custom_op("graphdecode_tests::fails_inside", mutates_args={"x"})
def fails_inside(x: Tensor) -> None:
    """Raise an error in an operator's body, which is no line of the step."""
    if x.shape[0]:
        raise RuntimeError("the kernel does not like it")


def test_a_warm_up_frees_what_the_step_needs_no_more() -> None:
    """A large model's intermediates, all kept to the end of a step, take a gigabyte."""
    buffers, still_there = make_buffers(), []

    def step(batch: Batch) -> None:
        first = batch.x * 2.0
        storage = StorageWeakRef(first.untyped_storage())
        second = first + 1.0
        del first
        still_there.append(not storage.expired())
        batch.y.copy_(second)

    warm_up(step, buffers.narrow(4), Owners(buffers), 2)
    assert still_there == [False, False]
    GraphManager(step, buffers, [4]).capture(progress=False)
    assert still_there[2:] == [False, False, False], "a recording has memory of its own for what its calls go on using"


def test_memory_that_is_used_again_is_not_mistaken_for_what_was_there_before() -> None:
    buffers = make_buffers()

    def step(batch: Batch) -> None:
        for _ in range(50):
            batch.y.add_(batch.x * 2.0)

    assert check(step, buffers) == []


def test_an_error_inside_of_an_operator_is_blamed_on_the_line_that_called_it() -> None:
    def step(batch: Batch) -> None:
        batch.x.add_(1.0)
        fails_inside(batch.x)

    with pytest.raises(CaptureError, match="the kernel does not like it") as caught:
        GraphManager(step, make_buffers(), [4]).capture(progress=False)
    assert caught.value.file == __file__
    assert caught.value.line == step.__code__.co_firstlineno + 2


def test_an_error_in_a_function_of_the_step_is_blamed_on_its_line() -> None:
    def inner(x: Tensor) -> None:
        x.view(7, 7)

    def step(batch: Batch) -> None:
        torch.nn.Identity()(batch.x)
        inner(batch.x)

    with pytest.raises(CaptureError) as caught:
        GraphManager(step, make_buffers(), [4]).capture(progress=False)
    assert caught.value.line == inner.__code__.co_firstlineno + 1


def test_no_row_is_live_while_buckets_are_captured() -> None:
    """A step that writes to a cache by its live rows would write what stands in the slots by chance."""
    buffers = make_buffers()
    seen = torch.zeros(1, dtype=torch.int32)
    buffers.adopt("seen", seen)
    buffers.set_live_rows(2)

    def step(batch: Batch) -> None:
        batch.seen.add_(batch.live_rows)

    graphs = GraphManager(step, buffers, [1, 2])
    graphs.capture(progress=False)
    assert int(seen) == 0
    assert int(buffers.live_rows) == 2, "what the slots held is given back"
    graphs.replay(2)
    assert int(seen) == 2
