"""LongRoPE's factors follow from what a sequence can have, never from what it has: on both sides as in transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_checkpoints import edit_config
from test_against_transformers import assert_greedy
from transformers import AutoModelForCausalLM

from graphdecode import LLM, BucketConfig, SamplingParams

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
def test_greedy_tokens_are_those_of_transformers_where_all_its_passes_take_the_same_factors(
    folder: Path, capacity: int, lengths: tuple[int, ...]
) -> None:
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
