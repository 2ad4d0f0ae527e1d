"""Law 1 as far as buffers go: one allocation, one address, changed in place."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode.buffers import FrozenError, Slot, StepBuffers


@pytest.fixture
def buffers(device: str) -> StepBuffers:
    return StepBuffers(
        [
            Slot("tokens", ("batch",), torch.int64, pad=1, staged="rows"),
            Slot("cu_seqlens", ("batch+1",), torch.int32, pad=-5, staged="rows"),
            Slot("pages", ("batch", 3), torch.int32, pad=9, staged="pages"),
            Slot("x", ("batch", 2), torch.float32, pad=0.5),
            Slot("done", ("batch",), torch.bool, pad=False),
            Slot("total", (4,), torch.float32),
        ],
        max_batch_size=8,
        device=device,
    )


def test_fresh_slots_hold_their_pads(buffers: StepBuffers) -> None:
    assert buffers.tokens.tolist() == [1] * 8
    assert buffers.cu_seqlens.tolist() == [-5] * 9
    assert (buffers.pages == 9).all()
    assert (buffers.x == 0.5).all()
    assert buffers.live_rows.tolist() == [0]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_narrowing_is_a_view_at_the_same_address(buffers: StepBuffers, size: int) -> None:
    batch = buffers.narrow(size)
    assert batch.size == size
    assert batch.tokens.shape == (size,)
    assert batch.cu_seqlens.shape == (size + 1,)
    assert batch.pages.shape == (size, 3)
    assert batch.total.shape == (4,)
    for name in buffers.slots:
        assert getattr(batch, name).data_ptr() == buffers.tensors[name].data_ptr()


@pytest.mark.parametrize("size", [0, 9])
def test_narrowing_outside_the_capacity_is_refused(buffers: StepBuffers, size: int) -> None:
    with pytest.raises(ValueError, match=rf"1\.\.max_batch_size=8.* {size}"):
        buffers.narrow(size)


def test_an_upload_moves_a_block_and_pads_its_tails(buffers: StepBuffers) -> None:
    staged = buffers.staging("rows")
    staged["tokens"][:] = 77
    staged["cu_seqlens"][:4] = np.arange(4)
    buffers.pages.fill_(3)
    buffers.upload("rows", 3)
    assert buffers.tokens.tolist() == [77] * 3 + [1] * 5
    assert buffers.cu_seqlens.tolist() == [0, 1, 2, 3] + [-5] * 5
    assert buffers.live_rows.tolist() == [3]
    assert (buffers.pages == 3).all(), "another block was touched"


def test_an_upload_is_one_copy_of_few_large_elements(buffers: StepBuffers) -> None:
    class Copies(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                self.seen.append(args[0])
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        buffers.upload("rows", 3)
    assert [copy.element_size() for copy in copies.seen] == [8]
    begin, end = copies.seen[0].data_ptr(), copies.seen[0].data_ptr() + copies.seen[0].nbytes
    assert all(begin <= slot.data_ptr() < end for slot in (buffers.tokens, buffers.cu_seqlens, buffers.live_rows))


def test_an_upload_outside_the_capacity_changes_nothing(buffers: StepBuffers) -> None:
    before = buffers.tokens.clone()
    buffers.staging("rows")["tokens"][:] = 5
    with pytest.raises(ValueError, match=r"live_rows .*0\.\.max_batch_size=8.* 9"):
        buffers.upload("rows", 9)
    assert torch.equal(buffers.tokens, before)


def test_fewer_live_rows_leave_pads_behind(buffers: StepBuffers) -> None:
    buffers.set_live_rows(8)
    buffers.x.fill_(7.0)
    buffers.set_live_rows(2)
    assert buffers.x[:2].eq(7.0).all()
    assert buffers.x[2:].eq(0.5).all()
    assert buffers.live_rows.tolist() == [2]


def test_poison_fills_every_tail_and_nothing_else(buffers: StepBuffers) -> None:
    for tensor in buffers.tensors.values():
        tensor.fill_(1)
    buffers.poison(3)
    assert buffers.x[:3].eq(1).all()
    assert buffers.x[3:].isnan().all()
    assert buffers.tokens[:3].eq(1).all()
    assert set(buffers.tokens[3:].tolist()) == {-(2**63), 2**63 - 1}
    assert buffers.cu_seqlens[:4].eq(1).all()
    assert not buffers.cu_seqlens[4:].eq(1).any()
    assert buffers.total.eq(1).all(), "a slot that does not follow the batch has no tail"


def test_a_slot_cannot_be_rebound(buffers: StepBuffers) -> None:
    with pytest.raises(AttributeError, match=r"buffers\.x\.copy_"):
        buffers.x = torch.zeros(8, 2)


def test_frozen_buffers_adopt_nothing_until_thawed(buffers: StepBuffers, device: str) -> None:
    buffers.freeze()
    with pytest.raises(FrozenError, match="'cache'"):
        buffers.adopt("cache", torch.zeros(3, device=device))
    buffers.thaw()
    buffers.adopt("cache", torch.zeros(3, device=device))
    assert buffers.narrow(2).cache.shape == (3,)


def test_a_moved_slot_is_named(buffers: StepBuffers) -> None:
    buffers.x.data = torch.zeros_like(buffers.x)
    with pytest.raises(FrozenError, match="'x'"):
        buffers.freeze()


@pytest.mark.parametrize("name", ["live_rows", "narrow", "device", "tokens"])
def test_duplicate_and_reserved_slot_names_are_refused(name: str) -> None:
    slots = [Slot("tokens", ("batch",), torch.int64), Slot(name, ("batch",), torch.int64)]
    with pytest.raises(ValueError, match=repr(name)):
        StepBuffers(slots, max_batch_size=2, device="cpu")


@pytest.mark.parametrize(
    ("argument", "fields"),
    [
        ("name", {"name": 3}),
        ("shape", {"shape": 4}),
        ("shape", {"shape": "batch"}),
        ("size", {"shape": (True,)}),
        ("dtype", {"dtype": "float32"}),
        ("pad", {"dtype": torch.int32, "pad": 1.5}),
        ("pad", {"dtype": torch.int8, "pad": 128}),
        ("pad", {"dtype": torch.uint8, "pad": float("nan")}),
        ("pad", {"dtype": torch.bool, "pad": 2}),
        ("pad", {"pad": "0"}),
        ("staged", {"staged": True}),
    ],
)
def test_an_invalid_field_of_a_slot_is_named_with_its_value(argument: str, fields: dict) -> None:
    declared = {"name": "x", "shape": ("batch",), "dtype": torch.float32, **fields}
    with pytest.raises(ValueError, match=argument) as refused:
        Slot(**declared)
    given = next(reversed(fields.values()))
    assert repr(given[0] if isinstance(given, tuple) else given) in str(refused.value)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("max_batch_size", {"max_batch_size": "2"}),
        ("max_batch_size", {"max_batch_size": 2.5}),
        ("device", {"device": "gpu"}),
        ("slots", {"slots": ["x"]}),
        ("'huge'", {"slots": [Slot("huge", ("batch", 2**46), torch.float32)]}),
        ("'huge'", {"slots": [Slot("huge", (2**46,), torch.float32, staged="rows")]}),
    ],
)
def test_invalid_buffers_are_refused_by_argument(argument: str, options: dict) -> None:
    given = {"slots": [Slot("x", ("batch",), torch.float32)], "max_batch_size": 2, "device": "cpu", **options}
    with pytest.raises(ValueError, match=argument):
        StepBuffers(given.pop("slots"), **given)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is cuda:1, "):
        StepBuffers([Slot("x", ("batch",), torch.float32)], max_batch_size=2, device="cuda:1")


@pytest.mark.parametrize("tensor", [[1.0], torch.eye(2).to_sparse()])
def test_only_tensors_with_storage_are_adopted(tensor: object) -> None:
    buffers = StepBuffers([], max_batch_size=2, device="cpu")
    with pytest.raises(ValueError, match="'cache'"):
        buffers.adopt("cache", tensor)
    assert "cache" not in buffers.tensors


def test_complex_slots_are_padded_and_poisoned() -> None:
    buffers = StepBuffers([Slot("z", ("batch",), torch.complex64, pad=1.0)], max_batch_size=2, device="cpu")
    buffers.poison(1)
    assert buffers.z[0] == 1.0
    assert buffers.z[1].isnan()


@pytest.mark.parametrize("shape", [("rows",), (0,), ("batch", "batch")])
def test_impossible_shapes_are_refused(shape: tuple) -> None:
    with pytest.raises(ValueError, match="slot 'x'"):
        Slot("x", shape, torch.float32)


def test_an_unknown_slot_lists_the_declared_ones(buffers: StepBuffers) -> None:
    with pytest.raises(AttributeError, match=r"no slot 'token'; declared are \[.*'tokens'"):
        _ = buffers.narrow(2).token
