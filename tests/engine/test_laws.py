"""The laws, on the demo model's real decode step."""

from collections.abc import Callable

import pytest
import torch

from graphdecode import LLM, SamplingParams
from graphdecode.engine.scheduler import Sequence
from graphdecode.engine.steps import SequenceMemory

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=5, min_p=0.02, seed=2, max_tokens=40, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, max_tokens=40, ignore_eos=True, min_tokens=3),
]


class Rows:
    """Sequences in the middle of their answers, staged in an engine's decode step."""

    def __init__(self, llm: LLM, count: int) -> None:
        self.llm = llm
        self.runner = llm.engine.runner
        prompts = [[97 + (i * 7 + j) % 26 for j in range(3 + 5 * i % 23)] for i in range(count)]
        self.streams = [llm.stream(prompt, MIXED[i % len(MIXED)]) for i, prompt in enumerate(prompts)]
        for _ in range(3):
            llm.step()
        self.sequences: list[Sequence] = list(llm.engine.scheduler.decoding)
        assert len(self.sequences) == count
        self.restage()
        self.saved = {name: tensor.clone() for name, tensor in self.runner.buffers.tensors.items()}

    def restage(self) -> None:
        for sequence in self.sequences:
            self.llm.cache.reserve(sequence.request_id, len(sequence.token_ids) + 8)
        pages = self.llm.cache.pages_of
        self.runner.stage(
            [sequence.row_inputs(SequenceMemory(pages(sequence.request_id))) for sequence in self.sequences]
        )

    def restore(self) -> None:
        for name, tensor in self.runner.buffers.tensors.items():
            tensor.copy_(self.saved[name])

    def live_state(self) -> dict[str, torch.Tensor]:
        """Everything that belongs to live rows: their slots, the rings, and the cache without its null page."""
        state = {}
        count = len(self.sequences)
        for name, tensor in self.runner.buffers.tensors.items():
            slot = self.runner.buffers.slots.get(name)
            if name.startswith(("k_cache", "v_cache")):
                state[name] = tensor[:-1].clone()
            elif slot is not None and slot.batch_dim is not None:
                state[name] = tensor[:count].clone()
            elif name.startswith("ring") and name != "ring_memory":
                state[name] = tensor[:, :count].clone()
        return state

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(bits(given[name]), bits(tensor)), name


@pytest.fixture
def sixteen(make_llm: MakeLLM) -> LLM:
    return make_llm(max_batch_size=16, max_graphs=8)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9, 12, 13, 16])
def test_law_5_replay_is_eager_bit_for_bit(sixteen: LLM, count: int) -> None:
    rows = Rows(sixteen, count)
    for _ in range(3):
        sixteen.graphs.run_eager(count)
    eager = rows.live_state()
    rows.restore()
    for _ in range(3):
        sixteen.graphs.replay(count)
    assert_same_bits(rows.live_state(), eager)
    rows.close()


@pytest.mark.parametrize("bucket_index", range(8))
def test_law_4_hostile_padding_changes_no_bit_of_a_live_row_in_any_bucket(sixteen: LLM, bucket_index: int) -> None:
    buckets = sixteen.graphs.buckets
    bucket = buckets[bucket_index]
    below = buckets[bucket_index - 1] if bucket_index else 0
    for count in range(below + 1, bucket + 1):
        rows = Rows(sixteen, count)
        assert sixteen.graphs.bucket_for(count) == bucket
        for _ in range(2):
            sixteen.graphs.replay(count)
        clean = rows.live_state()
        rows.restore()
        for _ in range(2):
            rows.runner.buffers.poison(count)
            assert sixteen.graphs.replay(count) == bucket
        assert_same_bits(rows.live_state(), clean)
        rows.close()


@pytest.mark.parametrize("count", [1, 3, 5, 9, 15])
def test_law_4_stale_values_of_past_rows_change_no_bit_of_a_live_row(sixteen: LLM, count: int) -> None:
    """Padding that looks like a live row, pages and all, but feeds another token: what it wrote would be read."""
    rows = Rows(sixteen, count)
    buffers = rows.runner.buffers
    for _ in range(2):
        sixteen.graphs.replay(count)
    clean = rows.live_state()
    rows.restore()
    for _ in range(2):
        for name, slot in buffers.slots.items():
            if slot.batch_dim == 0:
                tensor = buffers.tensors[name]
                tensor[count:] = tensor[:1]
        buffers.tokens[count:] += 1
        sixteen.graphs.replay(count)
    assert_same_bits(rows.live_state(), clean)
    rows.close()


def test_law_2_joining_leaving_and_moving_rows_never_capture_again(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=4)
    captures = [(b.bucket, b.capture_ms, b.nodes) for b in llm.graphs.report().buckets]
    llm.generate([[97 + i] * (1 + 3 * i % 17) for i in range(20)], GREEDY)
    report = llm.graphs.report()
    assert [(b.bucket, b.capture_ms, b.nodes) for b in report.buckets] == captures
    assert sum(b.replays for b in report.buckets) == llm.stats.batch_sizes.total()


def test_law_1_every_tensor_stays_where_it_was_allocated(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=4)
    tensors = llm.engine.runner.buffers.tensors  # kept, so that no other tensor gets their addresses
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    outputs = llm.generate([[97 + i] * 9 for i in range(9)], GREEDY)
    assert "error" not in [output.outputs[0].finish_reason for output in outputs], "a moved slot ends each request"
    assert {name: tensor.data_ptr() for name, tensor in llm.engine.runner.buffers.tensors.items()} == before
    llm.engine.runner.buffers.verify_addresses()
