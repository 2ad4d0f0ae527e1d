"""Graphs beside other threads, odd arguments, and the end of the process."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from graphdecode import GraphManager, Slot, StepBuffers


def make_graphs(step=None):
    buffers = StepBuffers([Slot("x", ("batch", 4), torch.float32)], max_batch_size=2, device="cpu")
    return buffers, GraphManager(step or (lambda batch: batch.x.add_(1.0)), buffers, [1, 2])


@pytest.mark.parametrize("batch_size", [None, "1", 1.0, True, torch.tensor(1), 0, 3])
def test_a_batch_size_that_is_none_is_refused_with_its_value(batch_size):
    buffers, graphs = make_graphs()
    graphs.capture(progress=False)
    for call in (graphs.replay, graphs.run_eager, graphs.bucket_for):
        with pytest.raises(ValueError, match=r"1\.\.max_batch_size=2, got "):
            call(batch_size)
    assert not buffers.x.any()


def test_a_recording_holds_nothing_of_what_another_thread_runs():
    running, over = threading.Event(), threading.Event()
    elsewhere = torch.zeros(8)

    def work():
        while not over.is_set():
            elsewhere.add_(1.0)
            running.set()

    def step(batch):
        running.clear()
        assert running.wait(10)  # the other thread is at work while this step is recorded
        batch.x.add_(1.0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        buffers, graphs = make_graphs(step)
        report = graphs.capture(progress=False)
    finally:
        over.set()
        thread.join()
    assert all(bucket.nodes.total() == 1 for bucket in report.buckets)
    before = elsewhere.clone()
    graphs.replay(2)
    assert torch.equal(elsewhere, before)
    assert buffers.x.eq(1.0).all()


LEFT_OPEN = """
import atexit
import torch
import torch.distributed as dist
from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.graphs.recorded import RecordedStepGraph

close = RecordedStepGraph.close
RecordedStepGraph.close = lambda graph: (print("graph closed", flush=True), close(graph))
dist.init_process_group("gloo", init_method="file://STORE", rank=0, world_size=1)
atexit.register(lambda: (print("group destroyed", flush=True), dist.destroy_process_group()))
buffers = StepBuffers([Slot("x", ("batch",), torch.float32)], max_batch_size=2, device="cpu")
graphs = GraphManager(lambda batch: batch.x.add_(1.0), buffers, [1, 2])
graphs.capture(progress=False)
"""


def test_graphs_that_were_left_open_end_before_the_process_group(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN.replace("STORE", str(tmp_path / "store"))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.split("\n") == ["graph closed", "graph closed", "group destroyed", ""], done.stderr


def test_two_managers_replay_in_turn_and_one_outlives_the_other():
    first_buffers, first = make_graphs()
    second_buffers, second = make_graphs(lambda batch: batch.x.sub_(2.0))
    first.capture(progress=False)
    second.capture(progress=False)
    for _ in range(3):
        first.replay(2)
        second.replay(2)
    first.close()
    second.replay(2)
    assert first_buffers.x.eq(3.0).all()
    assert second_buffers.x.eq(-8.0).all()
