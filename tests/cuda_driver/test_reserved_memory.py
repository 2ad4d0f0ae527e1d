"""Memory that is unmapped while its addresses stay reserved: engines sleep, and their graphs go on afterwards."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver as cuda
from cuda_driver.allocator import done
from cuda_driver.sleeping import DEVICE, installed, is_there
from cuda_driver.stand_in import Driver

from graphdecode import LLM, SamplingParams
from graphdecode.config import EngineConfig
from graphdecode.engine import loading
from graphdecode.engine.capacity import plan_capacity
from graphdecode.engine.shard import describe_shard
from graphdecode.errors import EngineStateError, NotSupportedError
from graphdecode.memory import GRANULE, ReservedMemory, check_can_release, collector_spared, reserved

PROMPTS = [[97, 98, 99], [100] * 20, list(range(97, 120))]
OUT_OF_MEMORY = 2
IN_RANKS = """
import sys
if "pytest" not in sys.modules:
    from cuda_driver.sleeping import begin_in_a_rank
    HELD = begin_in_a_rank()
"""


@pytest.fixture(autouse=True)
def on_stand_in(driver: Driver) -> Iterator[None]:
    with installed():
        yield
        gc.collect()


def free() -> int:
    return done(cuda.cuMemGetInfo())[0]


def test_tensors_are_packed_and_keep_their_addresses_and_the_last_one_frees_the_memory(driver: Driver) -> None:
    before, memory = free(), ReservedMemory(DEVICE)
    small, large = memory.zeros((3, 5), torch.bfloat16), memory.zeros((GRANULE + 1,), torch.int8)
    assert before - free() == 2 * GRANULE
    assert large.data_ptr() - small.data_ptr() == 256
    assert not small.any()
    assert not large.any()
    memory.save()  # of what will be changed
    large.fill_(7)
    small.copy_(torch.arange(15).view(3, 5))
    memory.save()
    assert memory.unmap() == 2 * GRANULE
    assert free() == before
    assert not is_there(small)
    assert not is_there(large)
    assert memory.unmap() == 0
    memory.save()  # there is nothing to copy, and nothing is forgotten
    memory.map()
    memory.map()
    assert small.equal(torch.arange(15).view(3, 5).bfloat16())
    assert large.eq(7).all()
    memory.unmap()
    memory.map()
    assert not large.any()
    del memory, small
    assert free() == before - 2 * GRANULE
    del large
    assert free() == before


@pytest.mark.parametrize("around", [nullcontext, collector_spared])
def test_all_tensors_over_a_storage_move_with_it(around: Callable[[], AbstractContextManager[None]]) -> None:
    memory, weight = ReservedMemory(DEVICE), torch.nn.Parameter(torch.randn(64, 32))
    view, tied, other, wanted = weight[3:5].t(), weight.data, torch.randn(5), weight.detach().clone()
    with around():
        is_spared = gc.get_freeze_count() > 0
        memory.take([weight, other])
        assert (gc.get_freeze_count() > 0) == is_spared
    base = weight.data_ptr()
    assert view.data_ptr() - base == 3 * 32 * 4
    assert tied.data_ptr() == base
    assert torch.equal(weight, wanted)
    assert torch.equal(view, wanted[3:5].t())
    memory.unmap()
    assert not any(map(is_there, (weight, view, tied, other)))


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuMemcpyHtoD"])
def test_a_call_that_fails_leaves_memory_that_can_be_mapped_later(driver: Driver, call: str) -> None:
    memory = ReservedMemory(DEVICE)
    tensor = memory.zeros((GRANULE,), torch.uint8).fill_(3)
    before = free()
    memory.save()
    memory.unmap()
    driver.fail(call, OUT_OF_MEMORY)
    for _ in range(2):
        with pytest.raises(EngineStateError, match=f"driver refused {call}.*: CUDA_ERROR_OUT_OF_MEMORY"):
            memory.map()
        assert free() == before + GRANULE
        assert not is_there(tensor)
    driver.fail(None)
    memory.map()
    assert tensor.eq(3).all()


def tokens_of(llm: LLM, max_tokens: int = 12) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]


def make(**options: object) -> LLM:
    return LLM("demo", max_batch_size=3, max_sequence_length=128, dtype="float32", enable_sleep_mode=True, **options)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_its_graphs_give_the_same_tokens_afterwards(driver: Driver, level: int) -> None:
    unused = free()
    with make() as llm:
        tensors = {"weights": llm.model.constants, "kv_cache": [each for layer in llm.cache.layers for each in layer]}
        everything = [*tensors["weights"], *tensors["kv_cache"]]
        wanted, captured = tokens_of(llm), dict(llm.graphs.graphs)
        addresses, used = [each.data_ptr() for each in everything], free()
        given_back = llm.sleep(level)
        assert given_back == free() - used == unused - used
        assert 0 <= given_back - sum(each.nbytes for each in everything) < 2 * GRANULE + 256 * len(everything)
        assert not any(map(is_there, everything))
        assert llm.sleep(level) == 0
        rest = done(cuda.cuMemAlloc(free() - GRANULE))  # another process takes the device
        for _ in range(2):
            with pytest.raises(EngineStateError, match=r"refused cuMemCreate\(\d+, 0\): CUDA_ERROR_OUT_OF_MEMORY"):
                llm.wake_up()
        with pytest.raises(EngineStateError, match=r"the engine sleeps \(kv_cache, weights\)"):
            tokens_of(llm)
        done(cuda.cuMemFree(rest))
        llm.wake_up(tags=["weights"])
        assert all(map(is_there, tensors["weights"]))
        assert not any(map(is_there, tensors["kv_cache"]))
        with pytest.raises(EngineStateError, match=r"the engine sleeps \(kv_cache\)"):
            tokens_of(llm)
        if level == 2:
            llm.update_weights("demo")
        llm.wake_up()
        assert tokens_of(llm) == wanted
        assert llm.graphs.graphs == captured
        assert [each.data_ptr() for each in everything] == addresses


def test_weights_that_the_host_has_no_room_for_keep_the_engine_awake(driver: Driver) -> None:
    with make() as llm:
        wanted = tokens_of(llm)
        driver.fail("cuMemHostAlloc", OUT_OF_MEMORY)
        with pytest.raises(EngineStateError, match="refused cuMemHostAlloc"):
            llm.sleep()
        assert tokens_of(llm) == wanted
        driver.fail(None)
        assert llm.sleep() > 0
        assert llm.sleep(level=2) == 0  # deeper: the copy is dropped
        assert "cuMemFreeHost" in driver.calls()
        llm.wake_up()
        with pytest.raises(EngineStateError, match="has dropped the weights"):
            tokens_of(llm)
        llm.update_weights("demo")
        assert tokens_of(llm) == wanted


@pytest.mark.slow
def test_ranks_sleep_and_wake_up_together(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "in_ranks.py"
    module.write_text(IN_RANKS)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    with make(tensor_parallel_size=2, load_modules=[module]) as llm:
        wanted, used = tokens_of(llm, 3), free()
        for level in (1, 2):
            given_back = llm.sleep(level)
            assert given_back == 2 * (free() - used) > 0
            driver.fail("cuMemCreate", OUT_OF_MEMORY)
            with pytest.raises(EngineStateError, match="refused cuMemCreate"):
                llm.wake_up()
            driver.fail(None)
            llm.wake_up()
            if level == 2:
                llm.update_weights("demo")
            assert tokens_of(llm, 3) == wanted


def test_without_cuda_python_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved, "driver", None)
    monkeypatch.setattr(loading, "resolve_device", lambda _: DEVICE)
    monkeypatch.setattr(loading, "describe_shard", None)  # the first that looks at the model
    with pytest.raises(NotSupportedError, match="enable_sleep_mode needs cuda-python: pip install cuda-bindings"):
        loading.load_runner("demo", enable_sleep_mode=True)


def test_the_plan_counts_granules_and_cuda_without_the_mode_is_refused_by_its_name() -> None:
    settings = EngineConfig.of(None, max_batch_size=64, page_size=16)
    given = (describe_shard("demo", settings), torch.float32, DEVICE)
    room = 8 * 2**20
    plain, asleep = (
        plan_capacity(settings.with_settings(enable_sleep_mode=each, backend="eager"), *given, available_bytes=room)
        for each in (False, True)
    )
    assert 2 * GRANULE * 0.8 < plain.cache_bytes - asleep.cache_bytes <= 2 * GRANULE
    with pytest.raises(NotSupportedError, match="and this is cuda: CUDA needs enable_sleep_mode=True"):
        check_can_release(DEVICE)
