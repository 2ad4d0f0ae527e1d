"""A random life of graphs on a device: managers come, capture, fail, replay and go, beside whoever else uses torch.

A machine of hypothesis'. What has to hold all the time: no graph touches memory that has gone, every value is that of
the step without a graph, a capture that failed hinders no other, and in the end the device has what it had.
"""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from cuda_driver.allocator import DEFAULT_POOL
from cuda_driver.counting import MAX_STEPS, WIDTH, Counting
from cuda_driver.stand_in import Driver
from cuda_driver.torch_device import Device, Stream, installed
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from torch import Tensor

from graphdecode import CaptureError, GraphManager
from graphdecode.buffers import Batch

CAPACITY = 4
VERSIONS = [(2, 11), (2, 13), (2, 14)]  # of torch, whose manners differ
FAILURES = ["waits", "waits and goes on", "raises", "is interrupted"]
MOST_EAGER = 8  # of the seeds that the device's order is picked by; 0: what is queued runs at once
REFUSED = "stays eager"


class Failing(Counting):
    """A step that fails under capture as it is told to."""

    failure: str | None = None
    is_looped = False

    def step(self, batch: Batch) -> None:
        super().step(batch)
        if self.failure is None or not torch.cuda.current_stream().is_capturing():
            return
        if self.failure == "waits":  # as no capture allows, and the driver spoils it for that
            torch.cuda.synchronize()
        elif self.failure == "waits and goes on":
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
        elif self.failure == "raises":
            raise ValueError("not this time")
        else:
            raise KeyboardInterrupt


class Own:
    """A graph that a user captured with torch, on a stream of their own: a product of matrices."""

    def __init__(self) -> None:
        self.x, self.y = torch.ones(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.stream: Stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            self.y.copy_(self.x @ self.x)
            self.graph.capture_end()
        self.graph.instantiate()

    def replay(self) -> Tensor:
        self.y.fill_(0.0)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.y


def eager_buckets(graphs: GraphManager) -> list[int]:
    return [report.bucket for report in graphs.report().buckets if report.state == "eager"]


class Life(RuleBasedStateMachine):
    """See above. `driver` and `condition` are set by whoever runs it."""

    driver: Driver
    managers = Bundle("managers")
    own_graphs = Bundle("own_graphs")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.device: Device | None = None
        self.pools_of_users = {DEFAULT_POOL}
        self.present: dict[int, Any] = {}  # managers and graphs; the bundles hold numbers, and keep nobody alive

    def number_of(self, newcomer: object) -> int:
        number = max(self.present, default=0) + 1
        self.present[number] = newcomer
        return number

    @initialize(version=st.sampled_from(VERSIONS), seed=st.integers(0, MOST_EAGER))
    def begin(self, version: tuple[int, int], seed: int) -> None:
        self.driver.begin()
        self.device = self.stack.enter_context(installed(self.driver, version))
        self.stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", f".*{REFUSED}")
        self.driver.seed(seed)
        self.reserved = torch.cuda.memory_reserved()

    @rule(
        target=managers,
        ladder=st.sampled_from([[CAPACITY], [2, CAPACITY], [1, 2, CAPACITY]]),
        lazily=st.booleans(),
        looped=st.sampled_from([True, True, False]),
        failure=st.sampled_from([None, *FAILURES]),
    )
    def enter(self, ladder: list[int], lazily: bool, looped: bool, failure: str | None) -> int:
        counting = Failing(CAPACITY)
        counting.is_looped = looped
        graphs = GraphManager(
            counting.step,
            counting.buffers,
            ladder,
            constants=[counting.weight],
            capture_when="first-use" if lazily else "startup",
            loop=counting.loop() if looped else None,
        )
        if failure is not None:  # after which nothing is left in the way
            self.capture(counting, graphs, failure)
        self.capture(counting, graphs, None)
        return self.number_of((counting, graphs))

    def capture(self, counting: Failing, graphs: GraphManager, failure: str | None) -> None:
        counting.failure = failure
        try:
            graphs.capture(progress=False)
        except CaptureError:
            assert failure is not None
        except KeyboardInterrupt:
            assert failure == "is interrupted"
        counting.failure = None

    @rule(manager=managers, failure=st.sampled_from([None, *FAILURES]))
    def capture_again(self, manager: int, failure: str | None) -> None:
        self.capture(*self.present[manager], failure)
        if failure is not None:
            self.capture(*self.present[manager], None)

    @rule(
        manager=managers,
        left=st.lists(st.integers(0, MAX_STEPS + 2), min_size=1, max_size=CAPACITY),
        steps=st.integers(1, MAX_STEPS),
        failure=st.sampled_from([None, None, *FAILURES[:3]]),
    )
    def run(self, manager: int, left: list[int], steps: int, failure: str | None) -> None:
        counting, graphs = self.present[manager]
        counting.enter([0.1 * row for row in range(len(left))], left)
        counting.failure = failure  # of a bucket that is captured now, at its first use
        eager = eager_buckets(graphs)
        if counting.is_looped:
            graphs.launch(len(left), steps)
            counting.expect_steps(len(left), steps)
        else:
            graphs.replay(len(left))
            counting.expect_steps(len(left), 1)
        counting.failure = None
        assert failure is not None or eager_buckets(graphs) == eager, "a failure of before hinders another capture"
        counting.check(len(left))
        if counting.is_looped:
            assert int(counting.buffers.launched_behind) == int(counting.buffers.loop_count)

    @rule(manager=managers, failure=st.sampled_from([None, *FAILURES[:3]]))
    def use_every_bucket(self, manager: int, failure: str | None) -> None:
        """Capture again, and let the first bucket's capture fail where that comes with its first use."""
        self.capture(*self.present[manager], None)
        for rows in (CAPACITY, 2, 1):
            self.run(manager, [3] * rows, 2, failure if rows == CAPACITY else None)

    @rule(manager=consumes(managers), is_closed=st.booleans())
    def leave(self, manager: int, is_closed: bool) -> None:
        _, graphs = self.present.pop(manager)
        if is_closed:
            graphs.close()

    @rule(target=own_graphs)
    def capture_own(self) -> int:
        own = Own()
        self.pools_of_users.add(own.pool)
        return self.number_of(own)

    @rule(own=own_graphs)
    def replay_own(self, own: int) -> None:
        assert self.present[own].replay().sum().item() == WIDTH**3

    @rule(own=consumes(own_graphs))
    def drop_own(self, own: int) -> None:
        torch.cuda.synchronize()
        self.present.pop(own).graph.reset()

    @rule(on_side=st.booleans())
    def compute(self, on_side: bool) -> None:
        """Use cuBLAS, and memory, beside the graphs."""
        x = torch.ones(WIDTH, WIDTH)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream() if on_side else torch.cuda.current_stream()):
            y = x @ x
            torch.cuda.current_stream().synchronize()
        assert y.sum().item() == WIDTH**3

    @rule()
    def pin(self) -> None:
        torch.zeros(4, pin_memory=True)

    @rule()
    def empty(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.device is None:
            return
        assert self.device.problems == []
        assert self.driver.complaints() == []
        assert self.device.current == self.device.default
        assert not any(stream.is_capturing() for stream in self.device.streams)
        assert self.device.allocator.recording == {}
        for block in self.device.workspaces.blocks.values():
            assert block.pool in self.pools_of_users, "somebody else is given what lies in our graphs' pool"

    def teardown(self) -> None:
        """Let all go, and compare what the device has with what it had."""
        try:
            if self.device is not None:
                torch.cuda.synchronize()
                self.present.clear()
                gc.collect()
                self.pin()
                torch._C._cuda_clearCublasWorkspaces()  # those of eager work alone
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                assert torch.cuda.memory_reserved() == self.reserved
                kinds = [line.split()[0] for line in self.driver.alive()]
                assert not {"graph", "exec", "module", "event"} & set(kinds)
                self.nothing_is_wrong()
        finally:
            self.stack.close()


def eventful(life: Life, seed: int) -> None:
    """Live one life that a seed picks, in which much is captured, fails and is run: it finds a fault sooner."""
    chosen = random.Random(seed)
    try:
        life.begin(version=VERSIONS[seed % len(VERSIONS)], seed=seed % (MOST_EAGER + 1))
        kinds = [(True, True), (False, True), (True, False)]  # captured at a first use, looped
        managers = [life.enter([1, 2, CAPACITY], *kind, chosen.choice(FAILURES)) for kind in kinds]
        own = life.capture_own()
        for _ in range(3):
            manager = chosen.choice(managers)
            life.use_every_bucket(manager, chosen.choice(FAILURES[:3]))
            life.compute(chosen.random() < 0.5)
            left = [chosen.randint(0, MAX_STEPS + 2) for _ in range(chosen.randint(1, CAPACITY))]
            life.run(manager, left, chosen.randint(1, MAX_STEPS), None)
            life.empty()
            life.pin()
            life.replay_own(own)
            life.nothing_is_wrong()
        life.leave(managers.pop(), is_closed=True)
        life.use_every_bucket(managers[0], None)
        life.nothing_is_wrong()
    finally:
        life.teardown()


def lives(count: int, length: int) -> settings:
    """Return how many lives, of how many events; the same ones in every run."""
    once = [Phase.generate]  # a life that went wrong is told as it was
    return settings(
        suppress_health_check=list(HealthCheck),
        max_examples=count,
        stateful_step_count=length,
        phases=once,
        deadline=None,
        derandomize=True,
        database=None,
    )
