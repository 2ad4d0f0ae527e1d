"""Rotary angles are those of transformers, for every rope type, option and spelling, to the end of a long context."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_checkpoints
import pytest
import torch
from family_checkpoints import edit_config
from test_against_transformers import assert_greedy
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.models import UnsupportedModelError
from graphdecode.models.rope import RopeConfig, cos_sin_table, inverse_frequencies

MAX_POSITIONS = 131072
LLAMA3 = family_checkpoints.LLAMA3 | {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "nothing": {},
    "theta": {"rope_theta": 1e6},
    "null-scaling": {"rope_theta": 5e5, "rope_scaling": None},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "linear-older": {"rope_theta": 30000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama3": {"rope_parameters": LLAMA3},
    "llama3-32": {"rope_parameters": LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0}},
    "llama3-older": {
        "rope_theta": 500000.0,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    },
    "yarn": {"rope_parameters": YARN},
    "yarn-older": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn-attention-factor": {"rope_parameters": YARN | {"attention_factor": 0.7}},
    "yarn-odd-factor": {"rope_parameters": YARN | {"factor": 3.3}},
    "linear-odd-factor": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.3}},
    "llama3-odd-factor": {"rope_parameters": LLAMA3 | {"factor": 3.3}},
    "yarn-betas": {"rope_parameters": YARN | {"beta_fast": 64, "beta_slow": 2}},
    "yarn-exact-borders": {"rope_parameters": YARN | {"truncate": False}},
    "yarn-mscale": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "yarn-one-mscale": {"rope_parameters": YARN | {"mscale": 0.5}},
    "yarn-factor-from-lengths": {"rope_parameters": YARN | {"factor": None}},
    "yarn-outer-length": {"rope_parameters": YARN, "original_max_position_embeddings": 16384},
    "yarn-no-ramp": {"rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}},
}


SHORT = [1.0 + 0.1 * i for i in range(6)]
LONG = [1.0 + 2.5 * i for i in range(6)]


def theirs(settings: dict[str, Any], head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig.from_dict({"head_dim": head_dim, "max_position_embeddings": MAX_POSITIONS} | settings)
    return LlamaRotaryEmbedding(config)


def copied(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy for one reader: transformers completes the dictionaries that it is given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers_bit_for_bit(name: str, head_dim: int) -> None:
    rope = RopeConfig.from_dict(copied(ROPES[name]), MAX_POSITIONS)
    reference = theirs(copied(ROPES[name]), head_dim)
    assert torch.equal(inverse_frequencies(rope, head_dim), reference.inv_freq)
    assert rope.attention_factor == reference.attention_scaling


@pytest.mark.parametrize("name", ROPES)
def test_the_table_is_that_of_transformers_at_both_ends_of_a_long_context(name: str) -> None:
    rope = RopeConfig.from_dict(copied(ROPES[name]), MAX_POSITIONS)
    table = cos_sin_table(rope, 64, MAX_POSITIONS, torch.device("cpu"))
    positions = torch.cat([torch.arange(70), torch.arange(MAX_POSITIONS - 70, MAX_POSITIONS)])
    with torch.no_grad():
        cos, sin = theirs(copied(ROPES[name]), 64)(torch.zeros(1), positions[None])

    def half(angles: Tensor) -> Tensor:
        return angles[0, :, :32]

    torch.testing.assert_close(table[positions], torch.stack([half(cos), half(sin)], 1), rtol=0, atol=1e-6)


def longrope(original: int, **changes: Any) -> dict[str, Any]:
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG, **changes}
    return {"rope_parameters": scaling, "original_max_position_embeddings": original}


@pytest.mark.parametrize("changes", [{}, {"factor": 3.0}, {"attention_factor": 1.19}, {"partial_rotary_factor": 0.75}])
def test_longrope_is_that_of_transformers_on_both_sides_of_the_original_context(changes: dict[str, Any]) -> None:
    """transformers looks at the sequence; here it is what a sequence can have, so that no step differs from another."""
    head_dim = 16 if "partial_rotary_factor" in changes else 12
    settings = longrope(128, **changes)
    rope = RopeConfig.from_dict(copied(settings), MAX_POSITIONS, may_be_partial=True)
    config = Phi3Config(hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=MAX_POSITIONS, **settings)
    for positions in (100, 128, 129, 4096):
        reference = Phi3RotaryEmbedding(config)
        cos, sin = reference(torch.zeros(1), torch.arange(positions)[None])
        assert torch.equal(inverse_frequencies(rope, head_dim, positions), reference.inv_freq)
        assert rope.attention_factor == reference.attention_scaling
        table = cos_sin_table(rope, head_dim, positions, torch.device("cpu"))
        theirs = torch.stack([cos[0, :, :6], sin[0, :, :6]], 1)
        torch.testing.assert_close(table, theirs, rtol=0, atol=1e-6)


def test_a_layer_without_rope_has_a_table_of_no_channels() -> None:
    assert cos_sin_table(None, 64, 100, torch.device("cpu")).shape == (100, 2, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' .*default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor .*None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor .*'2'"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "factor .*None"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor .*None"),
        ({"rope_parameters": YARN | {"factor": -1.0}}, "factor .*-1.0"),
        ({"rope_theta": 0}, "rope_theta .*0"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters .*full_attention"),
        ({"rope_parameters": "yarn"}, "rope_parameters .*'yarn'"),
        (longrope(128, long_factor=None), "long_factor .*None"),
        (longrope(1), "original_max_position_embeddings .*1"),
        (longrope(128, short_factor=[1.0, "2"]), "short_factor .*'2'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_a_rope_that_cannot_be_computed_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        RopeConfig.from_dict(settings, MAX_POSITIONS)


CONTEXT = 64  # that the model was first trained for


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """Phi-3 whose context was stretched fourfold."""
    for file in checkpoint("phi3-longrope-short").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path, lambda settings: settings.update(original_max_position_embeddings=CONTEXT))
    edit_config(tmp_path, lambda settings: settings["rope_parameters"].pop("original_max_position_embeddings"))
    return tmp_path


@pytest.mark.parametrize(("capacity", "lengths"), [(CONTEXT, (3, 17, 40)), (160, (65, 70, 130))])
def test_greedy_tokens_are_those_of_transformers_where_all_its_passes_take_the_same_factors(folder, capacity, lengths):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    config = BucketConfig(max_batch_size=3, max_sequence_length=capacity, page_size=8)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(folder, config=config, dtype="float32", max_prefill_tokens=32) as llm:
        outputs = llm.generate(prompts, params)
    for output in outputs:
        assert_greedy(model, output.prompt_token_ids, output.outputs[0].token_ids)


def test_a_short_sequence_has_the_factors_of_the_longest_that_there_may_be(folder: Path) -> None:
    """Or its keys in the cache would be wrong once it has grown."""
    prompt, params = list(range(40, 70)), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = []
    for capacity in (CONTEXT, CONTEXT + 1, 200):
        config = BucketConfig(max_batch_size=1, max_sequence_length=capacity, page_size=8)
        with LLM(folder, config=config, dtype="float32") as llm:
            answers.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert answers[0] != answers[1] == answers[2]
