"""A sampling parameter more touches five files: one states it, one gives it a slot, and three compute with it."""

import json
from functools import partial
from pathlib import Path

import pytest
from changed_copy import changed_copy, run_copy

PARAM = """    toy_p: float = _param(0.0, number(0, 1), "A toy.")
"""
# file -> what stands there once, and what it becomes: `toy_p` is `min_p` by another name
TOY = {
    "graphdecode/config/sampling_params.py": [
        ("    seed: int | None = _param(", f"{PARAM}    seed: int | None = _param(")
    ],
    "kernels/sampling/sampling_slots.py": [
        ('        SlotSpec("seed",', '        SlotSpec("toy_p", torch.float32),\n        SlotSpec("seed",'),
        ("    seed: Int64", "    toy_p: Float32\n    seed: Int64"),
    ],
    "kernels/sampling/sample.py": [("slots.top_p, slots.min_p,", "slots.top_p, slots.min_p.maximum(slots.toy_p),")],
    "kernels/sampling/sample_and_advance.py": [
        ("tl.load(slots.min_p + row)", "tl.maximum(tl.load(slots.min_p + row), tl.load(slots.toy_p + row))")
    ],
    "kernels/sampling/sample.c": [("a->min_p.data[row]", "fmaxf(a->min_p.data[row], a->toy_p.data[row])")],
}
BOTH_WAYS = """
import json, sys
from graphdecode.server.completions import Completion
from graphdecode.server.protocol import sampling_params
from graphdecode import LLM, SamplingParams

body = Completion(prompt="rev oceanic=", toy_p=1.0, temperature=50.0, seed=1)
params = sampling_params(body, SamplingParams(), max_tokens=16, logprobs=None)
found = []
for backend in ("recorded", "eager"):
    with LLM("demo", backend=backend, max_batch_size=1, max_sequence_length=64, device="cpu") as llm:
        found.append(llm.generate("rev oceanic=", params)[0].outputs[0].text.strip())
try:
    SamplingParams(toy_p=2)
except ValueError as error:
    found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_sampling_parameter_more_touches_five_files(tmp_path: Path) -> None:
    assert len(TOY) <= 5
    changed_copy(tmp_path, TOY)
    run = partial(run_copy, tmp_path, GRAPHDECODE_CACHE_DIR=str(tmp_path / "cache"))
    options = ("--temperature", "50", "--seed", "1", "--device", "cpu")
    prefetched = ("-m", "graphdecode", "generate", "-p", "rev oceanic=", "--max-tokens", "16", *options)
    assert "cinaeco" not in run(*prefetched)
    assert "cinaeco" in run(*prefetched, "--toy-p", "1")
    assert json.loads(run("-c", BOTH_WAYS)) == ["cinaeco", "cinaeco", "toy_p must be a number in [0, 1], got 2"]
