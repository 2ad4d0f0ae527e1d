"""Capture and replay of any step: the laws on toy steps, and refusals that leave the process fit to go on."""

import gc
import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run_python

from graphdecode import BucketConfig, BucketLadder, CaptureError, FrozenError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.errors import ArgumentError
from graphdecode.kernels.norm.rms_norm import rms_norm

CAPACITY = 8


@pytest.fixture
def buffers(device: str) -> StepBuffers:
    return StepBuffers(
        [
            Slot("x", ("batch", 16), torch.float32, pad=0.0),
            Slot("y", ("batch", 16), torch.float32, pad=0.0),
            Slot("count", ("batch",), torch.int32, pad=0),
        ],
        max_batch_size=CAPACITY,
        device=device,
    )


@pytest.fixture
def weight(device: str) -> torch.Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.fixture
def step(weight: torch.Tensor) -> Callable[[Batch], None]:
    gain = weight[0]

    def run(batch: Batch) -> None:
        hidden = torch.empty_like(batch.x)
        rms_norm(hidden, torch.tanh(batch.x @ weight), gain, 1e-5)
        values, _ = torch.sort(hidden, dim=-1)  # an operator with two outputs
        live = torch.arange(batch.size, device=batch.x.device) < batch.live_rows
        batch.y.copy_(torch.where(live[:, None], values + batch.count[:, None].to(torch.float32), 0.0))
        batch.count.add_(live.to(torch.int32))

    return run


def manager(step: Callable, buffers: StepBuffers, weight: torch.Tensor, **options: object) -> GraphManager:
    return GraphManager(step, buffers, BucketLadder([1, 2, 4], CAPACITY), constants=[weight], **options)


def captured(*arguments: Any, **options: object) -> GraphManager:
    graphs = manager(*arguments, **options)
    graphs.capture(progress=False)
    return graphs


def fill(buffers: StepBuffers, seed: int) -> None:
    buffers.x.copy_(torch.randn(CAPACITY, 16, generator=torch.Generator().manual_seed(seed)))
    buffers.count.copy_(torch.arange(CAPACITY))


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_law_3_every_batch_size_runs_in_its_bucket(step, buffers, weight, backend: str) -> None:
    graphs = captured(step, buffers, weight, backend=backend)
    assert graphs.buckets == (1, 2, 4, 8)
    for batch_size in range(1, CAPACITY + 1):
        assert graphs.replay(batch_size) == graphs.bucket_for(batch_size) >= batch_size


@pytest.mark.parametrize("batch_size", range(1, CAPACITY + 1))
def test_law_5_replay_is_eager_bit_for_bit(step, buffers, weight, batch_size: int) -> None:
    graphs = captured(step, buffers, weight)
    results = []
    for run in (graphs.run_eager, graphs.replay):
        fill(buffers, seed=batch_size)
        for _ in range(3):
            run(batch_size)
        results.append((buffers.y[:batch_size].clone(), buffers.count[:batch_size].clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_law_4_hostile_padding_changes_no_live_bit(step, buffers, weight) -> None:
    graphs = captured(step, buffers, weight)
    for batch_size in range(1, CAPACITY):
        fill(buffers, seed=1)
        graphs.replay(batch_size)
        clean = buffers.y[:batch_size].clone()
        fill(buffers, seed=1)
        buffers.poison(batch_size)
        graphs.replay(batch_size)
        assert torch.equal(buffers.y[:batch_size], clean)


def test_a_view_of_a_constant_that_has_other_memory_is_refused_by_the_next_capture(buffers, weight) -> None:
    gain = weight[0]

    def step(batch: Batch) -> None:
        rms_norm(batch.y, batch.x, gain, 1e-5)

    graphs = captured(step, buffers, weight)
    gain.data = torch.ones_like(gain)
    with pytest.raises(CaptureError) as caught:
        graphs.capture(progress=False)
    assert caught.value.kind == "undeclared-input"


def test_law_1_a_replay_uses_the_memory_of_the_capture(step, buffers, weight) -> None:
    graphs = captured(step, buffers, weight)
    before = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    for batch_size in (3, 8, 1):
        graphs.replay(batch_size)
    assert {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into recorded graphs")
def test_poisoned_intermediates_change_no_replay(step, buffers, weight) -> None:
    graphs = captured(step, buffers, weight)
    fill(buffers, seed=2)
    graphs.replay(5)
    expected = buffers.y.clone()
    fill(buffers, seed=2)
    for graph in graphs.graphs.values():
        graph.poison()
    graphs.replay(5)
    assert torch.equal(buffers.y, expected)


def test_a_capture_leaves_the_slots_as_they_were(step, buffers, weight) -> None:
    fill(buffers, seed=3)
    buffers.set_live_rows(5)
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    manager(step, buffers, weight).capture(progress=False)
    for name, tensor in buffers.tensors.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("batch_size", [0, CAPACITY + 1])
def test_law_7_a_batch_outside_the_capacity_changes_nothing(step, buffers, weight, batch_size: int) -> None:
    graphs = captured(step, buffers, weight)
    fill(buffers, seed=4)
    graphs.replay(3)
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    with pytest.raises(ValueError, match=f"{batch_size}$"):
        graphs.replay(batch_size)
    for name, tensor in buffers.tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_two_managers_share_a_process_and_buffers(step, buffers, weight) -> None:
    def double(batch: Batch) -> None:
        batch.y.mul_(2.0)

    first, second = manager(step, buffers, weight), manager(double, buffers, weight)
    first.capture(progress=False)
    second.capture(progress=False)
    fill(buffers, seed=6)
    first.replay(4)
    once = buffers.y.clone()
    second.replay(4)
    assert torch.equal(buffers.y[:4], 2 * once[:4])
    first.close()
    second.replay(4)
    assert torch.equal(buffers.y[:4], 4 * once[:4])


def test_frozen_graphs_refuse_every_change_of_their_memory(buffers) -> None:
    """Reallocating a slot, growing a cache, capturing again, loading weights; and thaw() drops the graphs."""
    torch.manual_seed(2)
    module = torch.nn.Linear(16, 16, bias=False, device=buffers.device)
    weights = {name: 2 * tensor for name, tensor in module.state_dict().items()}
    cache = torch.zeros(3, device=buffers.device)
    buffers.adopt("k_cache", cache)
    graphs = GraphManager(lambda batch: batch.y.copy_(batch.x @ module.weight.T), buffers, [2, 4], constants=[module])
    graphs.capture(progress=False)
    graphs.freeze()
    before = module.weight.clone()
    with pytest.raises(FrozenError, match="Linear"):
        module.load_state_dict(weights)
    assert torch.equal(module.weight, before)
    with pytest.raises(FrozenError, match="frozen"):
        graphs.capture(progress=False)
    with pytest.raises(FrozenError, match="'other'"):
        buffers.adopt("other", torch.zeros(1, device=buffers.device))
    graphs.replay(2)
    cache.resize_(1 << 16)
    with pytest.raises(FrozenError, match="k_cache"):
        graphs.replay(4)
    graphs.thaw()
    module.load_state_dict(weights)
    assert torch.equal(module.weight, 2 * before)
    with pytest.raises(RuntimeError, match="was not captured"):
        graphs.replay(2)


def test_a_frozen_slot_that_is_reallocated_is_named_and_thawed_graphs_are_captured_again(step, buffers, weight) -> None:
    graphs = captured(step, buffers, weight)
    graphs.freeze()
    graphs.thaw()
    graphs.capture(progress=False)
    graphs.freeze()
    graphs.replay(2)
    buffers.tensors["x"].set_(torch.zeros_like(buffers.x))
    with pytest.raises(FrozenError, match="x"):
        graphs.replay(3)


def test_a_hundred_captures_leave_no_tensors_behind(step, buffers, weight) -> None:
    def tensors_alive() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    for _ in range(3):
        graphs = captured(step, buffers, weight)
        graphs.close()
    before = tensors_alive()
    for _ in range(100):
        graphs = captured(step, buffers, weight)
        graphs.close()
    assert tensors_alive() <= before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory use from /proc")
def test_a_hundred_captures_leave_no_memory_behind(step, buffers, weight) -> None:
    def resident_bytes_after(captures: int) -> int:
        for _ in range(captures):
            graphs = captured(step, buffers, weight)
            graphs.replay(3)
            graphs.close()
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    resident = (resident_bytes_after(captures) for captures in (20, 100, 100, 100))
    # what captures lose, each hundred loses; what the rest of the process happens to allocate comes once
    assert any(after - before < 2 * 2**20 for before, after in itertools.pairwise(resident))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "metal"}, "backend .*metal"),
        ({"warmup_steps": 0}, "warmup_steps .*0"),
        ({"constants": ["weight"]}, "constants.* str"),
    ],
)
def test_impossible_options_are_refused(step, buffers, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphManager(step, buffers, [1, 2], **options)


def test_a_backend_or_ladder_that_does_not_fit_the_buffers_is_refused(step, buffers, weight) -> None:
    other = "recorded" if buffers.device.type == "cuda" else "cuda"
    with pytest.raises(ValueError, match=f"backend '{other}' .*{buffers.device.type}"):
        manager(step, buffers, weight, backend=other)
    with pytest.raises(ValueError, match="ladder .*16 .*8"):
        GraphManager(step, buffers, BucketLadder([1], 16))


def make_graphs(step=None):
    buffers = StepBuffers([Slot("x", ("batch", 4), torch.float32)], max_batch_size=2, device="cpu")
    return buffers, GraphManager(step or (lambda batch: batch.x.add_(1.0)), buffers, [1, 2])


@pytest.mark.parametrize("batch_size", [None, "1", 1.0, True, torch.tensor(1), 0, 3])
def test_an_invalid_batch_size_is_refused_with_its_value(batch_size):
    buffers, graphs = make_graphs()
    graphs.capture(progress=False)
    for call in (graphs.replay, graphs.run_eager, graphs.bucket_for):
        with pytest.raises(ValueError, match=r"1\.\.max_batch_size=2"):
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
        assert running.wait(60)  # the other thread is at work while this step is recorded
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
    printed = run_python(LEFT_OPEN.replace("STORE", str(tmp_path / "store")))
    assert printed.split("\n") == ["graph closed", "graph closed", "group destroyed", ""]


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "step"},
        {"buffers": {}},
        {"ladder": 2},
        {"ladder": BucketConfig(max_batch_size=8)},
        {"warmup_steps": "2"},
    ],
)
def test_arguments_of_a_wrong_type_are_named(step, buffers, weight, wrong: dict) -> None:
    given = {"step": step, "buffers": buffers, "ladder": [1], "constants": [weight], **wrong}
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        GraphManager(**given)


def test_closed_graphs_say_so(step, buffers, weight) -> None:
    graphs = GraphManager(step, buffers, [1, 4], constants=[weight])
    graphs.capture(progress=False)
    graphs.close()
    for call in (partial(graphs.replay, 1), partial(graphs.capture, progress=False)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
