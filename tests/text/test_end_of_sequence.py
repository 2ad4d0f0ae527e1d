"""Which tokens end an output: those of the configurations, else the tokenizer's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo_copies import demo_copy
from served import serving
from transformers import AutoTokenizer

from graphdecode import LLM, SamplingParams

END = 257
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SIZES: dict[str, Any] = {"max_batch_size": 1, "max_sequence_length": 32, "dtype": "float32", "device": "cpu"}


def folder_with(folder: Path, *, eos: Any = None, **generation: Any) -> Path:
    """Write the demo with another `eos_token_id` in config.json, and in generation_config.json or without one there."""
    return demo_copy(folder, config={"eos_token_id": eos}, generation_config={"eos_token_id": "missing", **generation})


def answer_of(llm: LLM, params: SamplingParams = GREEDY) -> tuple[list[int], str | None]:
    (output,) = llm.generate({"prompt_token_ids": list(b"12+30=")}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.outputs[0].finish_reason


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("stated", [{}, {"eos": "missing"}, {"eos": 52, "eos_token_id": None}])
def test_the_tokenizers_token_ends_where_the_configurations_name_none(tmp_path: Path, stated: Any, impl: str) -> None:
    with LLM(folder_with(tmp_path / "model", **stated), model_impl=impl, **SIZES) as llm:
        assert llm.tokenizer.eos_token_id == END
        assert answer_of(llm) == ([*b"42", END], "stop")
        ignored, reason = answer_of(llm, replace(GREEDY, ignore_eos=True))
        assert (ignored[:3], len(ignored), reason) == ([*b"42", END], 8, "length")
        held, _ = answer_of(llm, replace(GREEDY, min_tokens=5))
        assert END not in held[:5]


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("stated", [{"eos": ord("2")}, {"eos": END, "eos_token_id": [ord("2")]}])
def test_what_the_configurations_name_is_all_that_ends(tmp_path: Path, stated: Any, impl: str) -> None:
    with LLM(folder_with(tmp_path / "model", **stated), model_impl=impl, **SIZES) as llm:
        assert answer_of(llm) == ([*b"42"], "stop")


def test_without_a_tokenizer_only_the_configuration_ends(tmp_path: Path) -> None:
    with LLM(folder_with(tmp_path / "model"), skip_tokenizer_init=True, **SIZES) as llm:
        assert llm.engine.rules.eos_token_ids == ()
        assert answer_of(llm)[1] == "length"


@pytest.mark.parametrize("token", ["<|pad|>", None])
def test_a_given_tokenizers_token_ends(tmp_path: Path, token: str | None) -> None:
    folder = folder_with(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = token
    with LLM(folder, tokenizer=tokenizer, **SIZES) as llm:
        assert llm.engine.rules.eos_token_ids == ((258,) if token else ())


def test_the_server_ends_as_the_llm_does(tmp_path: Path) -> None:
    model = str(folder_with(tmp_path / "model"))
    sizes = ("--max-batch-size", "1", "--max-sequence-length", "32")
    with serving(*sizes, model=model) as server, server.client() as client:
        asked = {"prompt": list(b"12+30="), "max_tokens": 8, "temperature": 0}
        (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("42", "stop", None)
        (choice,) = client.post("/v1/completions", json=asked | {"ignore_eos": True}).json()["choices"]
        assert choice["finish_reason"] == "length"
