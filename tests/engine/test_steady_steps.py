"""Law 8, counted: all that a thousand steady steps ask of torch and of the driver is a launch, and to read tokens."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from command_line import run_python
from compiled_kernels import compiled
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import LLM, SamplingParams
from graphdecode.buffers import StepBuffers

MakeLLM = Callable[..., LLM]
ROUNDS, STEPS = 3, 400  # the demo model's contexts end at 512
LOOPED_STEPS = 200  # whole launches of 8 and of 50, behind three of them
LONG = SamplingParams(temperature=0.0, max_tokens=STEPS + 50, ignore_eos=True)
# what `tolist`, `numpy` and `item` are made of; a copy would be a `_to_copy`, memory an `empty`
READS = {"aten::select", "aten::slice", "aten::detach", "aten::alias"}
READS |= {"aten::item", "aten::to", "aten::resolve_conj", "aten::resolve_neg"}


class Operators(TorchDispatchMode):
    """Counts every operator that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def steady(llm: LLM) -> Iterator[None]:
    """Four rows that go on for more steps than are counted, and are under way."""
    streams = [llm.stream([97 + row] * (5 + row), LONG) for row in range(4)]
    for _ in range(8):
        llm.step()
    before = llm.stats.batch_sizes[4]
    yield
    assert llm.stats.batch_sizes[4] >= before + STEPS
    for stream in streams:
        stream.close()


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the staging blocks that are uploaded from here on."""
    seen: list[str] = []
    upload = StepBuffers.upload

    def counting_upload(buffers: StepBuffers, block: str, live_rows: int) -> None:
        seen.append(block)
        upload(buffers, block, live_rows)

    monkeypatch.setattr(StepBuffers, "upload", counting_upload)
    return seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the recorded backend")
@compiled
@pytest.mark.parametrize("steps_per_launch", [1, 8, 50])
def test_a_recorded_steady_step_copies_nothing_allocates_nothing_and_reads_tokens_alone(
    make_llm: MakeLLM, uploads: list[str], steps_per_launch: int
) -> None:
    """The compiled step runs outside of torch, so every operator that is counted is the host's."""
    llm = make_llm(max_batch_size=4, max_sequence_length=512, total_num_pages=1000, steps_per_launch=steps_per_launch)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    streams = [llm.stream([97 + row] * (5 + row), params) for row in range(4)]
    for _ in range(3):
        llm.step()
    before = llm.stats.batch_sizes[4]
    uploads.clear()
    with Operators() as operators:
        for _ in range(LOOPED_STEPS // steps_per_launch):
            llm.step()
    assert llm.stats.batch_sizes[4] == before + LOOPED_STEPS
    assert not uploads
    assert operators.counts.keys() <= READS
    for stream in streams:
        stream.close()


def test_with_few_pages_the_page_table_is_uploaded_once_a_page(make_llm: MakeLLM, uploads: list[str]) -> None:
    llm = make_llm(max_batch_size=4, max_sequence_length=512, total_num_pages=128)
    for _ in range(ROUNDS):
        with steady(llm):
            uploads.clear()
            for _ in range(STEPS):
                llm.step()
            assert uploads
            assert set(uploads) == {"pages"}
            assert len(uploads) <= STEPS // 16 + 1


@pytest.mark.gpu
def test_a_cuda_steady_step_copies_nothing_allocates_nothing_and_waits_for_its_ring_alone(make_llm, uploads):
    llm = make_llm(max_batch_size=4, max_sequence_length=512, total_num_pages=1000)
    for _ in range(ROUNDS):
        with steady(llm):
            uploads.clear()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(STEPS):
                    llm.step()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
            counts = Counter(event.name for event in profile.events())
            assert not uploads
            assert not [name for name in counts if "HtoD" in name or name.startswith("cudaMalloc")]
            assert not counts["cudaStreamSynchronize"]
            assert counts["cudaDeviceSynchronize"] <= 1  # the profiler's own
            assert counts["cudaEventSynchronize"] <= STEPS + 1
            assert counts["cudaGraphLaunch"] == STEPS


SAMPLED = """
from graphdecode import LLM, BucketConfig, SamplingParams
llm = LLM("demo", config=BucketConfig(max_batch_size=ROWS, max_sequence_length=64), dtype="float32")
params = [SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(3)]
print([output.outputs[0].token_ids for output in llm.generate(["rev abc="] * 3, params, use_tqdm=False)])
"""


def test_seeds_reproduce_across_restarts_and_buckets() -> None:
    def run(rows: int) -> str:
        return run_python(SAMPLED.replace("ROWS", str(rows)))

    first = run(4)
    assert first.count("[") == 4
    assert run(1) == first
