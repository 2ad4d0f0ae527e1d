"""The decode step of every family can be captured: nothing forbidden in it, replay is eager, padding is inert."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from driven_decoder import DrivenDecoder
from family_checkpoints import FAMILIES

from graphdecode.linear.weight_form import tensors_in
from graphdecode.models import load_model
from graphdecode.models.blocks import Block, SparseMlp
from graphdecode.models.families.deepseek import LatentAttention
from graphdecode.models.family import family_of
from graphdecode.models.recurrent_blocks import RecurrentMixer

ROWS = 6
BUCKETS = (1, 2, 4, 6)
LENGTHS = (3, 30, 8, 17, 1, 64)


@pytest.fixture(params=FAMILIES)
def driven(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], device: str) -> DrivenDecoder:
    """Rows of mixed lengths in the middle of their answers."""
    model = load_model(checkpoint(request.param), device=device, dtype="float32", batch_sizes=BUCKETS)
    driven = DrivenDecoder(model, ROWS, max_length=80)
    driven.prefill([[(7 * i + row) % 256 for i in range(length)] for row, length in enumerate(LENGTHS)], [0] * ROWS)
    return driven


def test_a_step_can_be_captured_replay_is_eager_and_padding_inert(driven: DrivenDecoder) -> None:
    driven.assert_captured(BUCKETS, LENGTHS)


def parts_of(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield blocks and all that they consist of."""
    for block in blocks:
        yield block
        yield from parts_of(value for value in vars(block).values() if isinstance(value, Block))


def test_the_bytes_of_a_step_are_those_of_its_products_and_norms(driven: DrivenDecoder) -> None:
    model = driven.model
    declared = {id(tensor) for tensor in model.constants}
    linears = [linear for block in model.blocks for linear in block.linears.values()]
    norms = [value for block in model.blocks for name, value in block.leaves() if name == "weight"]
    experts = [part.experts for part in parts_of(model.blocks) if isinstance(part, SparseMlp)]
    assert bool(experts) == (model.config.experts is not None)
    mixers = [part for block in model.layers for part in vars(block).values() if isinstance(part, RecurrentMixer)]
    of_inputs = 2 * model.num_layers + 1 if getattr(model.config, "input_size", 0) else 0  # of embeddings by layer
    latent = [part for part in parts_of(model.layers) if isinstance(part, LatentAttention)]
    assert len(latent) == sum(keys.latent_rank > 0 for keys in model.config.layer_keys)
    by_head = [tensor for part in latent for form in (part.to_keys, part.to_values) for tensor in form.tensors]
    assert experts or mixers or len(linears) == 4 * model.num_layers + 1 + of_inputs
    weights = family_of(model.config.architecture).weights(model.config).values()
    config = model.config
    stored = sum("norm" in parts[0].name or parts[0].name.endswith("router.scale") for parts in weights)
    sharing = sum(keys.shared_with is not None for keys in config.layer_keys or ())  # read no keys, and norm none
    ropes = config.layer_ropes if getattr(config, "norms_heads", False) else ()  # whose heads' norms have no weights
    assert len(norms) == stored + sharing + 2 * sum(rope is not None for rope in ropes)
    of_experts = [tensor for block in experts for tensor in block.tensors]
    names = ("conv", "conv_bias", "a_log", "dt_bias", "heads")
    float_tensors = [tensor for each in mixers for name in names for tensor in tensors_in(getattr(each, name, None))]
    float_tensors += by_head
    read = [*(tensor for linear in linears for tensor in linear.tensors), *norms, *of_experts, *float_tensors]
    assert declared >= {id(tensor) for tensor in read}
    always = sum(linear.nbytes for linear in linears) + sum(tensor.nbytes for tensor in (*norms, *float_tensors))
    assert model.weight_bytes == always + sum(tensor.nbytes for tensor in of_experts)
    for rows in (1, 2, 100):
        of_rows = sum(
            tensor.nbytes * min(rows * block.top_k, block.count) // block.count
            for block in experts
            for tensor in block.tensors
        )
        assert model.read_bytes(rows) == pytest.approx(always + of_rows, abs=10 * len(experts))
