"""A new axis of a step is a field of `StepShape`, the step that runs it, and whoever asks for it: three files."""

from pathlib import Path

import pytest
from changed_copy import changed_copy, run_copy

# a toy: launches of two rows take the least likely tokens; for each file lines, and what stands there with it
AXIS = {
    "buckets.py": {'    part: str = "whole"': '    mirrored: bool = False\n    part: str = "whole"'},
    "engine/steps/decode.py": {
        "return [*rows, ": "return [*rows, *(shape._replace(mirrored=True) for shape in rows), ",
        '        if shape.part == "logits":\n': (
            "        logits = -logits if shape.mirrored else logits\n" + '        if shape.part == "logits":\n'
        ),
    },
    "engine/loop.py": {"StepShape(rows, queries, ": ("StepShape(rows, queries, mirrored=rows == 2, ")},
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


@pytest.mark.slow
def test_a_new_axis_touches_three_files(tmp_path: Path) -> None:
    changed_copy(tmp_path, {f"graphdecode/{name}": [*changes.items()] for name, changes in AXIS.items()})
    run_copy(tmp_path, "-c", GENERATE, GRAPHDECODE_NATIVE="0")  # there is nothing to compile
