"""Memory that is moved after capture is named before a graph reads it; a graph stays with the memory of its capture."""

from collections.abc import Callable

import pytest
import torch

from graphdecode import FrozenError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import StalePointerError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into recorded graphs")


class Model:
    """A step over two slots, a cache, a module and a weight."""

    def __init__(self, **options: object) -> None:
        slots = [Slot("x", ("batch", 8), torch.float32), Slot("y", ("batch", 8), torch.float32)]
        staged = [
            Slot("scale", ("batch",), torch.float32, staged="rows"),
            Slot("shift", (1,), torch.float32, staged="rows"),
        ]
        self.buffers = StepBuffers([*slots, *staged], max_batch_size=4, device="cpu")
        self.cache = torch.zeros(4, 8)
        self.buffers.adopt("cache", self.cache)
        self.module = torch.nn.Linear(8, 8)
        self.weight = torch.eye(8)
        constants = [self.module, {"tables": [self.weight]}]
        self.graphs = GraphManager(self.step, self.buffers, [1, 4], constants=constants, **options)
        self.graphs.capture(progress=False)

    def step(self, batch: Batch) -> None:
        hidden = self.module(batch.x) @ self.weight
        self.cache[: batch.size].add_(hidden * batch.scale[:, None] + batch.shift)
        batch.y.copy_(self.cache[: batch.size])


def replace_parameter(model: Model) -> None:
    model.module.weight = torch.nn.Parameter(torch.zeros(8, 8))


# what moves -> (how, who is named)
MOVES: dict[str, tuple[Callable[[Model], object], str]] = {
    "cache set": (lambda m: m.cache.set_(torch.ones(4, 8)), "cache"),
    "cache grown": (lambda m: m.cache.resize_(4096, 8), "cache"),
    "slot data": (lambda m: setattr(m.buffers.x, "data", torch.ones(4, 8)), "x"),
    "staged slot data": (lambda m: setattr(m.buffers.scale, "data", torch.ones(4)), "scale"),
    "weight data": (lambda m: setattr(m.weight, "data", torch.zeros(8, 8)), "constants[1]['tables'][0]"),
    "module in another dtype": (lambda m: m.module.to(torch.float64), "constants[0].weight"),
}


@pytest.mark.parametrize("move", MOVES)
def test_law_1_a_replay_refuses_after_a_move(move: str) -> None:
    model = Model()
    model.graphs.replay(2)
    how, name = MOVES[move]
    how(model)
    before = model.buffers.y.clone()
    with pytest.raises(FrozenError) as caught:
        model.graphs.replay(3)
    assert name in str(caught.value)
    assert torch.equal(model.buffers.y, before), "law 7: nothing ran"
    with pytest.raises(FrozenError):
        model.graphs.verify()


@pytest.mark.parametrize("move", [*MOVES, "parameter replaced"])
def test_the_audit_names_operator_argument_and_owner(move: str) -> None:
    model = Model()
    assert model.graphs.audit() == []
    how, name = {**MOVES, "parameter replaced": (replace_parameter, "constants[0].weight")}[move]
    how(model)
    stale = model.graphs.audit()
    assert stale
    assert {pointer.owner for pointer in stale} >= {name}
    assert {pointer.bucket for pointer in stale} == {1, 4}
    pointer = next(pointer for pointer in stale if pointer.owner == name)
    assert pointer.file == __file__
    assert name in str(pointer)
    assert pointer.node in str(pointer)
    assert f"argument {pointer.argument} (0x" in str(pointer)


def test_a_strict_manager_refuses_to_replay_what_the_audit_finds() -> None:
    model = Model(strict=True)
    model.graphs.replay(2)
    replace_parameter(model)
    with pytest.raises(StalePointerError, match=r"constants\[0\]\.weight"):
        model.graphs.replay(3)


def test_a_strict_manager_refuses_in_the_middle_of_a_steady_batch_too() -> None:
    model = Model(strict=True)
    model.graphs.replay(2)
    replace_parameter(model)
    before = model.buffers.y.clone()
    with pytest.raises(StalePointerError, match=r"constants\[0\]\.weight"):
        model.graphs.replay(2)
    assert torch.equal(model.buffers.y, before), "law 7: nothing ran"


@pytest.mark.parametrize("name", ["weight", "cache", "x", "module"])
def test_a_graph_uses_the_memory_of_its_capture(name: str) -> None:
    model = Model()
    owner = {"weight": model.weight, "cache": model.cache, "x": model.buffers.x, "module": model.module.weight}[name]
    model.buffers.set_live_rows(4)
    model.buffers.x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    model.buffers.scale.fill_(1.0)
    model.graphs.replay(4)
    expected = model.buffers.y.clone()
    model.cache.zero_()
    owner.data = torch.full_like(owner, 3.0)
    model.graphs.replay(4)
    assert torch.equal(model.buffers.y, expected)


def test_freeze_refuses_when_something_has_moved_already() -> None:
    model = Model()
    model.weight.data = torch.zeros(8, 8)
    with pytest.raises(FrozenError, match="tables"):
        model.graphs.freeze()


def test_nothing_is_stale_after_values_change_in_place() -> None:
    model = Model(strict=True)
    with torch.no_grad():
        model.module.weight.mul_(2.0)
        model.module.load_state_dict(torch.nn.Linear(8, 8).state_dict())
    model.cache.fill_(3.0)
    for batch_size in (1, 4, 2):
        model.graphs.replay(batch_size)
    assert model.graphs.audit() == []
