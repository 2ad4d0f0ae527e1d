"""Door 4: another kind of step, made outside of the package, under the same Engine, Runner and graphs."""

from collections.abc import Sequence

import pytest
import torch

from graphdecode import BucketConfig, Engine, Request, SamplingParams
from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch, Slot, StepBuffers
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.steps import RowInputs, Step, StepSetting, StepTokens
from graphdecode.models import Chunks, load_model

VOCABULARY = 259


class CountUp(Step):
    """The next token is the last one plus one, until the row has all that it may have."""

    def __init__(self, setting: StepSetting) -> None:
        rows = setting.config.max_batch_size
        slots = [
            Slot("tokens", ("batch",), torch.int64, staged="rows"),
            Slot("left", ("batch",), torch.int32, staged="rows"),
            Slot("step_index", (1,), torch.int64),
        ]
        self.buffers = StepBuffers(slots, max_batch_size=rows, device=setting.model.device)
        self.ring = torch.full((setting.ring_length, rows), -1, dtype=torch.int64, device=setting.model.device)
        self.buffers.adopt("ring", self.ring)
        self.row_shapes = setting.row_shapes

    def shapes(self) -> list[StepShape]:
        return self.row_shapes

    def run(self, shape: StepShape, batch: Batch, chunks: Chunks | None = None) -> None:
        is_running = batch.left > 0
        batch.tokens.copy_(torch.where(is_running, (batch.tokens + 1) % VOCABULARY, batch.tokens))
        arguments = torch.where(is_running, batch.tokens, -1)
        batch.ring[:, : batch.size].index_copy_(0, batch.step_index % batch.ring.shape[0], arguments[None])
        batch.left.copy_((batch.left - 1).clamp(min=0))
        batch.step_index.add_(1)

    def stage(self, rows: Sequence[RowInputs]) -> None:
        staged = self.buffers.staging("rows")
        for row, inputs in enumerate(rows):
            staged["tokens"][row] = inputs.token_ids[-1]
            staged["left"][row] = inputs.sampling.last_position + 1 - len(inputs.token_ids)
        self.buffers.upload("rows", len(rows))

    def stage_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """It reads no keys."""

    def rewind(self, step_index: int) -> None:
        self.buffers.step_index.fill_(step_index)

    def read(self, steps: range, num_rows: int, *, logprobs: bool) -> list[StepTokens]:
        return [StepTokens(self.ring[step % len(self.ring), :num_rows].tolist()) for step in steps]


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_step_from_outside_is_captured_staged_and_read_like_the_decode_step(backend: str) -> None:
    config = BucketConfig(max_batch_size=4, max_sequence_length=64, backend=backend)
    runner = make_runner(load_model("demo", device="cpu"), config, step=CountUp)
    runner.graphs.capture(progress=False)
    engine = Engine(runner)
    prompts = [[5], [250, 7], [97, 98, 99], [256], [1, 2], [3]]
    lengths = [3, 9, 1, 6, 4, 8]
    arguments: dict[int, list[int]] = {}
    for prompt, length in zip(prompts, lengths, strict=True):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        arguments[engine.add(Request(prompt, params))] = []
    while engine.has_work:
        for event in engine.step():
            arguments[event.request_id] += event.token_ids
    expected = [
        [(prompt[-1] + 1 + n) % VOCABULARY for n in range(length)]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert list(arguments.values()) == expected
    assert engine.cache.pool.used == 0
    engine.close()
