"""A sampling parameter more touches five files: one states it, one gives it a slot, and three compute with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# file -> what stands there once, and what it becomes: `toy_p` is `min_p` by another name
TOY = {
    "graphdecode/config/sampling_params.py": [
        ("    seed: int | None = _param(", "{param}    seed: int | None = _param(")
    ],
    "kernels/sampling/sampling_slots.py": [
        ('        SlotSpec("seed",', '        SlotSpec("toy_p", torch.float32),\n        SlotSpec("seed",'),
        ("    seed: Int64\n", "    toy_p: Float32\n    seed: Int64\n"),
    ],
    "kernels/sampling/sample.py": [
        ("slots.min_p.numpy()[row]", "max(slots.min_p.numpy()[row], slots.toy_p.numpy()[row])")
    ],
    "kernels/sampling/sample_and_advance.py": [
        ("tl.load(slots.min_p + row)", "tl.maximum(tl.load(slots.min_p + row), tl.load(slots.toy_p + row))")
    ],
    "kernels/sampling/sample.c": [("a->min_p.data[row]", "fmaxf(a->min_p.data[row], a->toy_p.data[row])")],
}
PARAM = """    toy_p: float = _param(
        0.0, Values("a number in [0, 1]", lambda p: _is_number(p) and 0 <= p <= 1), "A toy."
    )
"""
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
    for name in ("graphdecode", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in TOY.items():
        file = tmp_path / name
        text = file.read_text()
        for before, after in edits:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after.replace("{param}", PARAM))
        file.write_text(text)
    assert len(TOY) <= 5

    def run(*command: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "GRAPHDECODE_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    options = ("--temperature", "50", "--seed", "1", "--device", "cpu")
    asked = ("-m", "graphdecode", "generate", "-p", "rev oceanic=", "--max-tokens", "16", *options)
    assert "cinaeco" not in run(*asked)
    assert "cinaeco" in run(*asked, "--toy-p", "1")
    assert json.loads(run("-c", BOTH_WAYS)) == ["cinaeco", "cinaeco", "toy_p must be a number in [0, 1], got 2"]
