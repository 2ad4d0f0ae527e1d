"""What `dtype="auto"` and no `quantize` make of weights in few bits: right first, then fast, and told by its name."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf_checkpoints
import pytest
import torch
from gguf_checkpoints import quantized_file
from quantized_checkpoints import FORMS, write_pair

from graphdecode import LLM, SamplingParams
from graphdecode.engine.loading import load_runner
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions
from graphdecode.linear.kept import KeptPanels
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.plain import Panels
from graphdecode.models import describe_model, load_model

compiled = pytest.mark.skipif(native.library() is None, reason=f"no compiled kernels: {native.why_not()}")
SMALL: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 64, "device": "cpu"}
PROMPTS = [[5, 6, 7], [100, 30]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return quantized_file(tmp_path / "small.gguf", "llama", {"weight": "Q8_0"})


@pytest.fixture
def beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model whose gated activations go beyond what float16 holds."""
    random_model = gguf_checkpoints.random_model

    def planted(name: str) -> Any:
        model = random_model(name)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight *= 1e5
        return model

    monkeypatch.setattr(gguf_checkpoints, "random_model", planted)
    return quantized_file(tmp_path / "beyond.gguf", "llama", {"weight": "Q8_0"})


@compiled
def test_a_gguf_files_blocks_stay_and_none_expands_them(blocks: Path) -> None:
    kept, expanded = (load_model(blocks, device="cpu", quantize=quantize) for quantize in (None, "none"))
    assert {type(form) for form in kept.layers[0].linears.values()} == {KeptPanels}
    assert {type(form) for form in expanded.layers[0].linears.values()} == {Panels}
    assert kept.dtype == expanded.dtype == (torch.float32 if instructions().name == "portable" else torch.float16)


@compiled
def test_a_gguf_files_blocks_stay_without_timing_a_product(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(*_: Any) -> float:
        raise AssertionError("a product was timed")

    monkeypatch.setattr(LinearTuner, "best_seconds", times)
    with closing(load_runner(blocks, **SMALL)) as runner:
        assert {type(form) for form in runner.model.layers[0].linears.values()} == {KeptPanels}


@compiled
def test_groups_of_a_checkpoint_stay_and_none_expands_them(tmp_path: Path) -> None:
    packed, _ = write_pair(FORMS["gptq"], tmp_path)
    assert Panels not in {type(form) for form in load_model(packed, device="cpu").layers[0].linears.values()}
    expanded = load_model(packed, device="cpu", quantize="none").layers[0].linears
    assert {type(form) for form in expanded.values()} == {Panels}


def test_without_compiled_kernels_few_bits_are_expanded_in_float32(blocks: Path) -> None:
    with native.switched_off():
        model = load_model(blocks, device="cpu")
    assert model.dtype == torch.float32
    assert KeptPanels not in {type(form) for form in model.layers[0].linears.values()}


@compiled
def test_what_was_chosen_is_in_the_report(blocks: Path) -> None:
    with closing(load_runner(blocks, **SMALL)) as runner:
        report = runner.graphs.report()
        dtype = str(runner.model.dtype).removeprefix("torch.")
    assert report.computed_in == f"{dtype} over blocks weights, {instructions().name}"
    assert report.computed_in in str(report).splitlines()[0]
    assert report.as_dict()["computed_in"] == report.computed_in


@compiled
@pytest.mark.skipif(instructions().name == "portable", reason="it is float32 in any case")
@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_beyond_float16_are_told_and_computed_in_float32(beyond: Path, ranks: int) -> None:
    with pytest.warns(RuntimeWarning, match="beyond 65504.*computed in float32"):
        llm = LLM(beyond, skip_tokenizer_init=True, tensor_parallel_size=ranks, **SMALL)
    with llm, LLM(beyond, skip_tokenizer_init=True, dtype="float32", **SMALL) as wide:
        assert llm.model.dtype == torch.float32
        found, expected = ([o.outputs[0].token_ids for o in each.generate(PROMPTS, GREEDY)] for each in (llm, wide))
        assert found == expected


@compiled
def test_activations_beyond_float16_are_an_error_where_it_is_asked_for_and_never_an_answer(beyond: Path) -> None:
    with LLM(beyond, skip_tokenizer_init=True, dtype="float16", **SMALL) as llm:
        for output in llm.generate(PROMPTS, GREEDY):
            assert "dtype='float32' computes what goes beyond" in str(output.error)


@pytest.mark.parametrize("name", FORMS)
def test_checkpoints_say_whether_they_are_integers_of_few_bits(tmp_path: Path, name: str) -> None:
    packed, plain = write_pair(FORMS[name], tmp_path)
    assert describe_model(packed).integer_quantized == name.startswith(("int", "gptq", "awq"))
    assert not describe_model(plain).integer_quantized
