"""The kernels of a step as machine code for sm_90: the rules of the early start, budgets, and the model of the step.

`step_budgets.json` holds what each kernel may take, `step_limits.json` what each step may, with the goals. After a
change for the better, or with a new kernel, `tools/bench kernels --write` writes both; it raises no limit of
a step, for that takes a person and a reason. The model's ratios to the floor are printed and not asserted: an H200
has others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from graphdecode.kernels.norm.rms_norm import rms_norm
from graphdecode.models.blocks import Head
from graphdecode.models.forward_context import ForwardContext
from graphdecode.models.shapes import SHAPES
from step_code.launches import recorded_step
from step_code.model import Costs, step_cost
from step_code.sass import instructions_in

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUDGETS = json.loads((HERE / "step_budgets.json").read_text())
LIMITS = json.loads((HERE / "step_limits.json").read_text())
REGISTER_SLACK = 8  # compilers differ by a few
SLACK = 1.1
STREAMING = ("weight", "linear", "attention")  # in the names of kernels that read weights, keys and values
NEEDED_BYTES_PER_CLOCK = 36  # of a multiprocessor: twice the share of an H200's bandwidth


def output_of(script: Path, arguments: list[str]) -> Any:
    """Run a script in a process that compiles, where this one may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tools"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        env={**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cache(pytestconfig, tmp_path_factory) -> Path:
    """A folder that outlives the run, for what was compiled from the same sources need not be compiled again."""
    kept = getattr(pytestconfig, "cache", None)
    return tmp_path_factory.mktemp("step-code") if kept is None else Path(kept.mkdir("step-code"))


@pytest.fixture(scope="module")
def seen(cache) -> dict[str, Any]:
    return output_of(ROOT / "tools" / "bench", ["kernels", "--json", "--cache", str(cache)])


@pytest.fixture(scope="module")
def kernels(seen) -> list[tuple[str, str, dict[str, Any]]]:
    """Step, kernel and figures of all that is ours."""
    rows = ((case, row) for case, found in seen["kernels"].items() for row in found)
    return [(case, row["label"], row["figures"]) for case, row in rows if row["figures"] is not None]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_kernel_of_a_step_breaks_a_rule_of_the_early_start_or_has_a_grid_that_cannot_be(seen):
    assert not seen["faults"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_of_a_step_keeps_its_budget_and_spills_nothing(kernels):
    for case, label, figures in kernels:
        where = f"{label} of {case}: {figures}"
        assert label in BUDGETS, f"{where} has no budget: tools/bench kernels --write"
        budget = BUDGETS[label]
        assert figures["stack"] <= budget.get("stack", 0), where
        assert figures["registers"] <= budget["registers"] + REGISTER_SLACK, where
        assert figures["shared"] <= budget["shared"] + 1024, where
        for name in ("levels", "barriers", "fences"):
            assert figures[name] <= budget[name], f"{name} of {where}: {budget[name]} are allowed"
        assert figures["latency_cycles"] <= budget["latency_cycles"] * SLACK, where
        assert figures["loop_bytes_per_clock"] >= budget.get("loop_bytes_per_clock", 0) / SLACK, where


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loops_over_weights_and_keys_ask_for_more_than_memory_gives(kernels):
    streams = [
        (label, figures)
        for _, label, figures in kernels
        if any(word in label for word in STREAMING) and figures["loop_bytes_per_clock"]
    ]
    assert {label.split("_")[0] for label, _ in streams} >= {"append"}
    for label, figures in streams:
        assert figures["loop_bytes_per_clock"] >= NEEDED_BYTES_PER_CLOCK, (label, figures)
        # in the loop that adds up a split product, partial sums come in words
        assert figures["loop_width"] == 16 or "SPLIT" in label, (label, figures)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LIMITS)
def test_a_step_has_no_launch_and_no_byte_more_than_its_limit(seen, name):
    cost, limit = seen["steps"][name], LIMITS[name]
    assert cost["launches"] <= limit["launches"], cost
    assert cost["made_bytes"] <= limit["bytes"], cost


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_document_shows_the_kernels_that_there_are(seen):
    text = (ROOT / "docs" / "kernels.md").read_text()
    for case in (
        "llama-3.1-8b, 1 row",
        "llama-3.1-8b, 64 rows",
        "qwen3-0.6b, 1 row",
        "llama-3.1-8b, 8 rows with adapters",
    ):
        _, _, shown = text.partition(f"### {case}\n")
        labels = [line.split("`")[1] for line in shown.partition("\n### ")[0].splitlines() if line.startswith("| `")]
        assert labels == [row["label"] for row in seen["kernels"][case]], "tools/bench kernels --write"


@pytest.mark.slow
def test_the_rules_find_each_fault_that_was_planted_and_none_besides(cache):
    said = output_of(HERE / "planted_faults.py", [str(cache)])
    words = {
        "ends_without_waiting": "may end without a wait",
        "never_waits": "starts early and never waits",
        "triggers_too_early": "lets the next kernel start before its own wait",
        "reads_too_early": "reads x before its wait for writes_x, which writes it",
        "writes_too_early": "writes before its wait",
    }
    assert said.pop("sound") == []
    assert said.pop("grid") == ["tall of  has 65536 programs on axis y, 65535 are possible"]
    assert {name: len(faults) for name, faults in said.items()} == dict.fromkeys(words, 1)
    for name, faults in said.items():
        assert words[name] in faults[0]


def test_code_reads_the_same_with_and_without_notes_that_a_disassembler_adds():
    code = "/*0160*/  @!P2 LDG.E R3, desc[UR8][R14.64]{} ;  /* 0x000000080e03a981 */", "/* 0x001162000c1e1900 */"
    plain, noted = (
        list(instructions_in([code[0].format(notes), code[1]]))
        for notes in ("", "  &req={0} &rd=0x0 &wr=0x5 ?trans1")  # as of CUDA 13.1, and of 12.8 for sm_120
    )
    assert noted == plain
    (load,) = plain
    assert (load.name, load.operands) == ("LDG.E", ("R3", "desc[UR8][R14.64]"))
    assert (load.predicate, load.waits, load.reads, load.writes, load.stall) == ("@!P2", {0}, 0, 5, 1)


def figures_of_nobody(launch: object) -> None:
    """Take every kernel for one whose code is not looked at."""


def test_a_launch_more_is_seen_and_costs_a_gap_and_a_latency(monkeypatch):
    def costs() -> Any:
        step = recorded_step("shape:llama-100m", 1)
        return step_cost(step, 1, 512, figures_of_nobody)

    before, forward = costs(), Head.__call__

    def twice(self: Head, x: Any, residual: Any, context: ForwardContext) -> Any:
        spare, more = (context.empty(len(self.final_norm.weight)) for _ in range(2))
        rms_norm(spare, more, self.final_norm.weight, 1e-5)
        return forward(self, x, residual, context)

    monkeypatch.setattr(Head, "__call__", twice)
    after, unit = costs(), Costs()
    assert after.launches == before.launches + 1
    assert after.made_bytes > before.made_bytes
    assert after.step_us - before.step_us == pytest.approx(unit.gap_us + unit.library_us)
    assert after.floor_us == before.floor_us


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        ("mamba2-2.7b", ["linear", "conv", "scan", "norm", "linear"]),
        ("qwen3.5-0.8b", ["linear", "conv", "delta", "norm", "linear", "linear", "linear"]),  # last an MLP's two
    ],
)
def test_a_recurrent_layer_has_no_launch_more_than_these(model, kernels):
    step = recorded_step(f"shape:{model}", 1)
    names = [launch.name for launch in step.launches]
    first = next(place for place, name in enumerate(names) if "conv" in name) - kernels.index("conv")
    assert all(word in name for word, name in zip(kernels * 3, names[first:], strict=False)), names[first : first + 30]


def test_a_layer_of_latent_attention_has_no_launch_more_than_these(monkeypatch):
    monkeypatch.setitem(SHAPES, "glm-4.7-flash", SHAPES["glm-4.7-flash"] | {"num_hidden_layers": 2})
    names = [launch.name for launch in recorded_step("shape:glm-4.7-flash", 1).launches]
    kernels = ["linear", "norm", "linear", "index_select", "norm", "copy_", "expert_linear", "rope_append"]
    kernels += ["rope_append", "decode_attention", "expert_linear", "linear"]
    second = [place for place, name in enumerate(names) if "decode_attention" in name][1]
    layer = names[second - kernels.index("decode_attention") :][: len(kernels)]
    assert all(word in name for word, name in zip(kernels, layer, strict=True)), layer


def test_a_step_without_attention_takes_as_long_after_32k_tokens_as_after_32():
    step = recorded_step("shape:mamba2-2.7b", 8)
    after_few, after_many = (step_cost(step, 8, context, figures_of_nobody) for context in (32, 32768))
    assert step.state_bytes == 64 * 4 * (3 * (5120 + 2 * 128) + 80 * 64 * 128)
    assert after_many.floor_us <= 1.02 * after_few.floor_us
    assert after_many.step_us <= 1.02 * after_few.step_us
