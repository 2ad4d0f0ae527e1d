"""How far each dtype, weight form and cache is from float64 of the same weights.

Bounds only ever go down, save that of bfloat16 where the processor multiplies it: attention's weights are rounded, too.

The reference and the comparison are those of `tools/bench accuracy`; which figures they gave is in `tools/results/`.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import accuracy
from benchmarks.accuracy import SUBJECTS, Distance, Scored, distances, text_ids
from float64_model import Float64Model
from graphdecode.hub.model_path import installable
from graphdecode.kernels.native import library as native
from graphdecode.models import load_model, resolve_model_path

DEMO_TOKENS, DEMO_STEPS = 192, 16
TOKENS, STEPS = 128, 64
# subject: mean |difference of log-probability| and share of other first tokens, at most
OF_DEMO = {
    "default": (2e-5, 0.0),
    "float32": (2e-5, 0.0),
    "bfloat16": (0.06, 0.02),
    "float16": (0.009, 0.01),
    "bfloat16, cache int8": (0.06, 0.02),
    "float16, cache fp8": (0.33, 0.07),
}
OF_SMOLLM2 = {"default": (0.0025, 0.004), "bfloat16": (0.018, 0.01), "float16 in blocks": (0.0025, 0.004)}
OF_A_LONG_TEXT = OF_SMOLLM2 | {
    "float16": (0.0035, 0.004),
    "bfloat16 in blocks": (0.015, 0.007),
    "bfloat16, cache int8": (0.021, 0.012),
    "float16, cache int8": (0.016, 0.012),
}


@cache
def reference(path: Path, tokens: int) -> tuple[list[int], Tensor]:
    ids = text_ids(path, tokens)
    return ids, Float64Model(path).log_probabilities(ids)


def check(distances_by_pass: dict[str, Distance], mean: float, other_first: float) -> None:
    assert set(distances_by_pass) == {"prompt", "step_1", "step_8"}
    for kind, distance in distances_by_pass.items():
        most = mean if kind == "prompt" else 1.2 * mean  # of fewer tokens the mean is less certain
        assert not distance.exceeds(most, max(other_first, 1.0 / distance.tokens)), (kind, distance)


@pytest.mark.parametrize("name", OF_DEMO)
def test_the_demo_is_as_near_to_float64_as_it_was(name: str) -> None:
    path = resolve_model_path("demo")
    ids, expected = reference(path, DEMO_TOKENS)
    check(distances(path, SUBJECTS[name], expected, ids, DEMO_STEPS), *OF_DEMO[name])


def smollm2() -> Path:
    path = installable("smollm2").installed_file()
    if path is None:
        pytest.skip("needs smollm2: tools/quickstart, or graphdecode models install smollm2")
    return path


@pytest.mark.parametrize("name", OF_SMOLLM2)
def test_smollm2_is_as_near_to_float64_as_it_was(name: str) -> None:
    if native.library() is None and SUBJECTS[name].quantize == "gguf":
        pytest.skip("what multiplies blocks is compiled")
    ids, expected = reference(smollm2(), TOKENS)
    check(distances(smollm2(), SUBJECTS[name], expected, ids, STEPS), *OF_SMOLLM2[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_LONG_TEXT)
def test_smollm2_is_as_near_over_a_long_text(name: str) -> None:
    ids, expected = reference(smollm2(), accuracy.TOKENS)
    check(distances(smollm2(), SUBJECTS[name], expected, ids), *OF_A_LONG_TEXT[name])


def demo_logits(ids: list[int], dtype: str) -> Tensor:
    return Scored(load_model("demo", device="cpu", dtype=dtype), tokens=len(ids), rows=1).prompt(ids)


def test_a_planted_rounding_is_found() -> None:
    ids, expected = reference(resolve_model_path("demo"), DEMO_TOKENS)
    logits = demo_logits(ids, "float32")
    assert not Distance.of(logits, expected, ids).exceeds(*OF_DEMO["float32"])
    for dtype, name in ((torch.float16, "float32"), (torch.bfloat16, "float16")):
        assert Distance.of(logits.to(dtype), expected, ids).exceeds(*OF_DEMO[name])


def test_what_is_no_number_is_found() -> None:
    ids, expected = reference(resolve_model_path("demo"), DEMO_TOKENS)
    logits = demo_logits(ids, "float32")
    for value in (float("nan"), float("inf")):
        spoilt = logits.clone()
        spoilt[5, 7] = value
        with pytest.raises(ValueError, match="no finite numbers"):
            Distance.of(spoilt, expected, ids)
    figures = Distance(10, float("nan"), 0.0, 0.0, 0.0, None)
    assert figures.exceeds(1.0, 1.0)


def test_another_most_likely_token_is_reported_with_its_margin() -> None:
    ids, expected = reference(resolve_model_path("demo"), DEMO_TOKENS)
    logits = expected.clone()
    first, second = logits[3].topk(2).indices
    logits[3, second] = logits[3, first] + 1.0
    distance = Distance.of(logits, expected, ids)
    assert distance.other_first == pytest.approx(1 / (DEMO_TOKENS - 1))
    assert distance.first_margin == pytest.approx(float(expected[3, first] - expected[3, second]))
