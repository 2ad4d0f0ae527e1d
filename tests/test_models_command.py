"""`graphdecode models`: what this machine can run, and what it takes."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import run_command

from graphdecode import LLM
from graphdecode.models import resolve_model_path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model that runs, one whose weights are missing, and a GGUF file that is none beside a config.json."""
    models = tmp_path / "models"
    shutil.copytree(resolve_model_path("demo"), models / "adder")
    shutil.copytree(resolve_model_path("demo"), models / "broken")
    (models / "broken" / "model.safetensors").unlink()
    (models / "packed").mkdir()
    (models / "packed" / "config.json").write_text("{}")
    (models / "packed" / "m.gguf").write_text("nothing")
    monkeypatch.setenv("GRAPHDECODE_MODELS", str(models))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return models


def test_each_model_is_listed_with_what_it_takes(folder: Path) -> None:
    result = run_command("models", "--json", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    records = {record["name"]: record for record in json.loads(result.stdout)}
    adder = records["adder"]
    with LLM("adder", max_batch_size=1, dtype="float32") as llm:
        assert adder["cache_bytes"] == sum(k.nbytes + v.nbytes for k, v in llm.cache.layers)
        assert adder["max_sequence_length"] == llm.capacity.max_sequence_length
    assert adder["architecture"] == "LlamaForCausalLM"
    assert (adder["format"], adder["dtype"], adder["location"]) == ("safetensors", "float32", str(folder))
    assert adder["weight_bytes"] == pytest.approx((folder / "adder" / "model.safetensors").stat().st_size, rel=0.01)
    assert (adder["fits"], adder["error"]) == (True, None)
    assert records["demo"]["location"] == "shipped"
    assert "holds no model.safetensors" in records["broken"]["error"]
    assert records["packed"]["format"] == "gguf"
    assert "m.gguf is not a GGUF file" in records["packed"]["error"]


def test_the_table_marks_models_that_cannot_run() -> None:
    lines = run_command("models").stdout.splitlines()
    assert any("adder" in line and "yes" in line for line in lines)
    assert any("broken" in line and "cannot run" in line for line in lines)
    assert any(line.startswith("broken: ") and "holds no model.safetensors" in line for line in lines)


def test_an_unknown_model_to_install_is_refused_by_name() -> None:
    for name, meant in (("gpt-9", ""), ("SmolLM", "; did you mean 'smollm2'?")):
        result = run_command("models", "install", name)
        assert result.returncode == 2
        assert f"no model {name!r} can be installed; known are smollm2{meant or '.'} Others: give" in result.stderr


def test_a_narrow_terminal_gets_lines_and_no_broken_words() -> None:
    lines = run_command("models", COLUMNS="40").stdout.splitlines()
    first = lines.index("model: adder")
    assert "architecture: LlamaForCausalLM" in lines[first:]
    assert "fits now: yes" in lines[first:]
    assert any("demo" in line and "yes" in line for line in run_command("models").stdout.splitlines())  # a table
