"""A model that was not written for graphs, as a user's step: transformers' Llama over its own static cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import check

ROWS, CAPACITY, VOCABULARY = 4, 32, 128


class TransformersStep:
    """A Llama, its cache, and the buffers that hold all that a step reads."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=CAPACITY,
        )
        self.model = LlamaForCausalLM(config).eval().to(device)
        self.cache = StaticCache(config=config, max_cache_len=CAPACITY)
        slots = [
            Slot("tokens", ("batch",), torch.int64, pad=1),
            Slot("position", (1,), torch.int64),
            Slot("logits", ("batch", VOCABULARY), torch.float32),
        ]
        self.buffers = StepBuffers(slots, max_batch_size=ROWS, device=device)
        with torch.no_grad():
            self(self.buffers.narrow(ROWS))  # allocates the cache
        self.state = [
            value for layer in self.cache.layers for value in vars(layer).values() if isinstance(value, Tensor)
        ]

    def __call__(self, batch: Batch) -> None:
        positions = batch.position[None].expand(batch.size, 1)
        output = self.model(input_ids=batch.tokens[:, None], position_ids=positions, past_key_values=self.cache)
        batch.logits.copy_(output.logits[:, -1])

    def declare_cache(self) -> None:
        for index, tensor in enumerate(self.state):
            self.buffers.adopt(f"cache_{index}", tensor)

    def generate(self, run: Callable[[int], int], count: int) -> list[Tensor]:
        for tensor in self.state:
            tensor.zero_()
        self.buffers.position.zero_()
        self.buffers.set_live_rows(ROWS)
        self.buffers.tokens.copy_(torch.tensor([3, 5, 7, 9]))
        logits = []
        for _ in range(count):
            run(ROWS)
            logits.append(self.buffers.logits.clone())
            self.buffers.tokens.copy_(logits[-1].argmax(-1))
            self.buffers.position.add_(1)
        return logits


@pytest.fixture
def llama(device: str) -> TransformersStep:
    return TransformersStep(device)


def test_the_check_names_the_state_that_the_cache_keeps_to_itself(llama: TransformersStep) -> None:
    findings = check(llama, llama.buffers, constants=[llama.model])
    assert {finding.kind for finding in findings} == {"undeclared-input"}
    assert any("cache_utils.py" in (finding.file or "") for finding in findings)


def test_law_5_it_replays_as_it_runs_once_its_state_is_declared(llama: TransformersStep) -> None:
    llama.declare_cache()
    assert not check(llama, llama.buffers, constants=[llama.model])
    graphs = GraphManager(llama, llama.buffers, [ROWS], constants=[llama.model])
    graphs.capture(progress=False)
    eager, replayed = llama.generate(graphs.run_eager, 12), llama.generate(graphs.replay, 12)
    for before, after in zip(eager, replayed, strict=True):
        assert torch.equal(before, after)
    assert len({tuple(logits.argmax(-1).tolist()) for logits in replayed}) > 1, "it does not always say the same"
