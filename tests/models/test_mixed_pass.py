"""A decode step that takes chunks of prompts along gives what the step gives behind a pass over the chunks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driven_decoder import DrivenDecoder, assert_same_bits
from family_checkpoints import FAMILIES

from graphdecode import GraphManager
from graphdecode.buffers import Batch
from graphdecode.models import Chunks, load_model

ROWS, BUCKET = 3, 4  # that decode, and those of them and padding that are computed
LENGTHS = {0: 3, 1: 40, 2: 21, 3: 0, 4: 17}  # tokens of each row before the pass
# row 2's prompt ends with its chunk: it is among those that decode, and attends to keys of this pass
CHUNKS = {3: 9, 2: 12, 4: 1}
NEAR = 2e-5  # products for other numbers of rows add up in another order


def text(row: int, begin: int, end: int) -> list[int]:
    return [(7 * position + 31 * row) % 256 for position in range(begin, end)]


@pytest.fixture
def driven(family: str, checkpoint: Callable[[str], Path], device: str) -> DrivenDecoder:
    model = load_model(checkpoint(family), device=device, dtype="float32", batch_sizes=(BUCKET,))
    driven = DrivenDecoder(model, len(LENGTHS), max_length=80)
    driven.prefill([text(row, 0, length) for row, length in LENGTHS.items()], [0] * len(LENGTHS))
    return driven


def chunks(driven: DrivenDecoder, padding: int = 0) -> Chunks:
    texts = {row: text(row, LENGTHS[row], LENGTHS[row] + count) for row, count in CHUNKS.items()}
    return driven.chunks(texts, LENGTHS, padding)


def stage(driven: DrivenDecoder) -> None:
    positions = [LENGTHS[row] + CHUNKS.get(row, 0) for row in range(ROWS)]
    driven.stage([text(row, position, position + 1)[0] for row, position in enumerate(positions)], positions)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_and_chunks_get_what_passes_of_their_own_give_them(driven: DrivenDecoder) -> None:
    before = [cache.clone() for layer in driven.caches for cache in layer]
    driven.model.prefill(chunks(driven), driven.caches)
    stage(driven)
    driven.step(driven.buffers.narrow(BUCKET))
    expected = driven.snapshot(ROWS)
    for padding in (0, 10):
        for cache, values in zip((cache for layer in driven.caches for cache in layer), before, strict=True):
            cache.copy_(values)
        batch = driven.buffers.narrow(BUCKET)
        if padding:
            driven.buffers.poison(ROWS)
        batch.logits.copy_(driven.model.mix(batch, chunks(driven, padding), driven.caches, driven.attention))
        for actual, values_before in zip(driven.snapshot(ROWS), expected, strict=True):
            torch.testing.assert_close(actual, values_before, rtol=NEAR, atol=NEAR, equal_nan=True)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt-oss", "qwen3-moe"])
@torch.no_grad()
def test_a_graph_of_it_replays_the_bits_of_the_pass(driven: DrivenDecoder) -> None:
    prompt_chunks = chunks(driven, padding=6)
    for name, tensor in prompt_chunks._asdict().items():
        if tensor is not None:  # there are no rings
            driven.buffers.adopt(f"chunk_{name}", tensor)

    def mixed(batch: Batch) -> None:
        batch.logits.copy_(driven.model.mix(batch, prompt_chunks, driven.caches, driven.attention))

    graphs = GraphManager(mixed, driven.buffers, [BUCKET], constants=driven.model.constants)
    graphs.capture(progress=False)
    stage(driven)
    graphs.run_eager(ROWS)
    eager = driven.snapshot(ROWS)
    driven.buffers.logits.fill_(torch.nan)
    stage(driven)
    graphs.replay(ROWS)
    assert_same_bits(driven.snapshot(ROWS), eager)
    graphs.close()
