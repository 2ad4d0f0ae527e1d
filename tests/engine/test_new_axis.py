"""A new axis of a step is a field of `StepShape`, the step that runs it, and whoever asks for it: three files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# a toy: launches of two rows take the least likely tokens; for each file lines, and what stands there with it
AXIS = {
    "buckets.py": {'    part: str = "whole"\n': '    part: str = "whole"\n    mirrored: bool = False\n'},
    "engine/steps/decode.py": {
        "return [*rows, ": "return [*rows, *(shape._replace(mirrored=True) for shape in rows), ",
        '        if shape.part == "logits":\n': (
            "        logits = -logits if shape.mirrored else logits\n" + '        if shape.part == "logits":\n'
        ),
    },
    "engine/loop.py": {
        'part="logits" if in_halves else "whole")': (
            'part="logits" if in_halves else "whole", mirrored=len(self._staged) == 2)'
        )
    },
}

GENERATE = """
from graphdecode import LLM, BucketConfig, SamplingParams
config = BucketConfig(max_batch_size=2, max_sequence_length=64)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
with LLM("demo", config=config, device="cpu") as llm:
    prompts = (["417+385="], ["417+385=", "417+385="])
    outputs = [llm.generate(list(each), params, use_tqdm=False) for each in prompts]
    (alone,), mirrored = [[output.outputs[0].token_ids for output in each] for each in outputs]
    assert mirrored[0] == mirrored[1] and not set(mirrored[0]) & set(alone), (alone, mirrored)
    reports = llm.graphs.report().buckets
    assert [bucket.state for bucket in reports] == ["captured"] * 4, reports
    assert (sum(bucket.replays for bucket in reports), sum(bucket.eager_runs for bucket in reports)) == (16, 0), reports
"""


def test_a_new_axis_touches_three_files(tmp_path: Path) -> None:
    for folder in ("graphdecode", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in AXIS.items():
        path = tmp_path / "graphdecode" / name
        text = path.read_text()
        for line, toy in changes.items():
            assert text.count(line) == 1, f"{name} was rewritten: write the toy anew"
            text = text.replace(line, toy)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GRAPHDECODE_NATIVE": "0"}  # there is nothing to compile
    done = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
