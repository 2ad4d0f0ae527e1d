"""Modules of transformers with recurrent states: its tokens, whatever the batch, chunks, padding and preemption."""

import math
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_decoder import DrivenDecoder
from faults import Fault, dropped
from greedy_tokens import assert_prompt_logprobs, greedy_tokens, reference_tokens
from transformers import (
    AutoModelForCausalLM,
    MiniMaxConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from adopted_models import STATEFUL, TINY, save_random
from graphdecode import LLM, SamplingParams
from graphdecode.models import UnsupportedModelError, describe_model, load_model
from graphdecode.models.forward_context import StateStep, Tokens
from graphdecode.models.transformers_backend import ModuleDecoder

NEW_TOKENS = 32  # so that the first of nine prompts still decodes when the last has come in chunks of 7
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("falcon-mamba", "zamba", "lfm2-moe", "qwen3.5-moe")]
QUICK = ("mamba", "jamba", "zamba2")  # a state alone, beside experts and attention in other layers, beside attention
OTHER_ENGINES: dict[str, dict[str, Any]] = {
    "drafts": {"speculation": {"method": "ngram", "num_tokens": 3, "ngram_min": 1}},
    "three steps a launch": {"steps_per_launch": 3},
    "prefixes": {"state_checkpoints": 32, "state_checkpoint_tokens": 8},
}


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    texts = [[rng.randrange(256) for _ in range(length)] for length in (60, 40, 31, 17, 15, 8, 7, 2, 1)]
    texts[1][:16] = texts[2][:16]
    return texts


class Adopted:
    """A checkpoint, and the tokens that transformers gives."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = save_random(STATEFUL[name](TINY), folder)
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.expected = [reference_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adopted]:
    return cache(lambda name: Adopted(name, tmp_path_factory.mktemp(name)))


def engine(folder: Path, **changes: Any) -> LLM:
    """Chunks of 7, nine rows in one bucket, and few pages."""
    sizes = {"max_batch_size": 9, "batch_sizes": [9], "max_sequence_length": 96, "page_size": 8, "total_num_pages": 42}
    return LLM(folder, dtype="float32", max_prefill_tokens=7, **sizes | changes)


def tokens_of(llm: LLM, texts: list[list[int]]) -> list[list[int]]:
    return greedy_tokens(llm, texts, NEW_TOKENS)


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_tokens_are_those_of_transformers_in_one_batch_and_alone(adopted: Callable[[str], Adopted], name: str) -> None:
    expected = adopted(name).expected
    assert len({token for answer in expected for token in answer}) > 8, "it varies"
    with engine(adopted(name).folder) as llm:
        assert isinstance(llm.model, ModuleDecoder)
        assert llm.graphs.backend in ("recorded", "cuda")
        assert tokens_of(llm, prompts()) == expected
        assert llm.stats.batch_sizes[9] > 0
        assert llm.num_preemptions > 0
        assert [tokens_of(llm, [prompt]) for prompt in prompts()] == [[answer] for answer in expected]


@pytest.mark.parametrize("other", OTHER_ENGINES)
def test_drafts_loops_and_prefixes_change_no_token(adopted: Callable[[str], Adopted], other: str) -> None:
    options = OTHER_ENGINES[other] | {"total_num_pages": "auto"}
    with engine(adopted("jamba").folder, **options) as llm:
        assert tokens_of(llm, prompts()) == adopted("jamba").expected
        outputs = llm.generate(prompts()[:1], PARAMS, use_tqdm=False)
        assert list(outputs[0].outputs[0].token_ids) == adopted("jamba").expected[0]
        assert (outputs[0].metrics.num_cached_tokens > 0) == (other == "prefixes")
        if other == "drafts":
            assert llm.stats.speculation.drafted > 0


FAULTS = {
    "a new sequence begins with an old state": Fault(
        StateStep, "load", lambda right, self, state: right(self._replace(is_new=torch.zeros_like(self.is_new)), state)
    ),
    "all tokens of a chunk advance one state at once": Fault(
        Tokens, "steps", lambda right, self, *args: right(self._replace(in_chunks=None), *args)
    ),
    "states are not stored": Fault(StateStep, "store", dropped),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_states_is_caught(adopted, monkeypatch, fault):
    expected = adopted("jamba").expected
    FAULTS[fault].plant(monkeypatch)
    with engine(adopted("jamba").folder) as llm:
        assert tokens_of(llm, prompts()) != expected


@pytest.fixture(params=QUICK[1:])
def driven(request: pytest.FixtureRequest, adopted: Callable[[str], Adopted], device: str) -> DrivenDecoder:
    """Rows of mixed lengths in the middle of their answers."""
    model = load_model(adopted(request.param).folder, device=device, dtype="float32", batch_sizes=(1, 3))
    driven = DrivenDecoder(model, 3, max_length=48)
    driven.prefill([[(7 * i + row) % 256 for i in range(length)] for row, length in enumerate((3, 30, 8))], [0] * 3)
    return driven


def test_laws_2_4_and_5_hold_for_a_modules_states(driven: DrivenDecoder) -> None:
    assert all(tensor[:3].isfinite().all() and tensor[3].isnan().all() for tensor in driven.states())
    driven.assert_captured((1, 3), (3, 30, 8))


def test_hostile_padding_behind_a_prompt_changes_no_bit(driven: DrivenDecoder) -> None:
    before, results = driven.states(), []
    for padding in (0, 5):
        driven.restore(before)
        chunks = driven.chunks({0: [5, 6, 7], 2: [8]}, {0: 3, 1: 0, 2: 8}, padding)
        passed = driven.model.prefill(chunks, driven.caches)
        results.append([driven.model.logits(passed, 0, 3), *(state[:3] for state in driven.states())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(one[1], state[1]) for one, state in zip(results[1][1:], before, strict=True))


def test_log_probabilities_of_prompts_are_those_of_the_module(adopted: Callable[[str], Adopted]) -> None:
    folder = adopted("jamba").folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with engine(folder) as llm:
        assert_prompt_logprobs(llm, model, prompts()[0])


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "RecurrentGemmaForCausalLM": (
        RecurrentGemmaConfig(**TINY.fields(num_key_value_heads=1, lru_width=64) | {"num_hidden_layers": 3}),
        r"modeling_recurrent_gemma\.py:\d+: RecurrentGemmaRecurrentBlock does not keep that of layers 0 \(linear_",
    ),
    "MiniMaxForCausalLM": (
        MiniMaxConfig(**TINY.grouped(num_local_experts=4, layer_types=["linear_attention", "full_attention"])),
        r"cannot be run here: modeling_minimax\.py:\d+: ValueError: MiniMax uses cache of its own",
    ),
    "RwkvForCausalLM": (
        RwkvConfig(vocab_size=259, hidden_size=64, num_hidden_layers=1),
        r"modeling_rwkv\.py:\d+: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_its_state_elsewhere_is_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    config, reason = REFUSED[name]
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        describe_model(tmp_path)
    assert re.search(f"{name} keeps another state than keys and values by position.*{reason}", str(caught.value))


def test_states_are_counted_before_any_weight_is_read(adopted: Callable[[str], Adopted]) -> None:
    shape = describe_model(adopted("jamba").folder)
    assert [keys is None for keys in shape.cached_keys] == [True, False]
    (state, _) = shape.recurrent
    assert state is not None
    assert state.nbytes == 4 * 128 * (4 + 8)
    assert math.prod(state.shapes[0][1]) == 128 * 4
