"""The script that shows results: whatever peers they have, and how a value changed from commit to commit."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import harness
from benchmarks import generate, prompts, start
from benchmarks import results as shown_results

ROOT = Path(__file__).parents[2]


def result(model: str, ms: dict[str, float]) -> str:
    own = ms["graphdecode"]
    row = {"batch_size": 4, "ms_per_step": ms, "times_floor": {name: value / 0.5 for name, value in ms.items()}}
    row["times_faster_than"] = {name: value / own for name, value in ms.items()}
    environment = {"instructions": "avx2"} if model == "a" else {}  # older results do not say
    return json.dumps({"model": model, "dtype": "float32", "threads": 2, "environment": environment, "rows": [row]})


def show(results: Path, *options: str) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(shown_results.main)
    return CliRunner().invoke(app, ["--results", str(results), *options])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "generate-a.json").write_text(result("a", {"graphdecode": 1.0, "transformers": 3.0}))
    (tmp_path / "machine" / "generate-b.json").write_text(result("b", {"graphdecode": 2.0, "llama-cpp": 1.5}))
    return tmp_path


def test_the_table_has_a_column_for_each_peer_and_a_dash_where_it_was_not(results: Path) -> None:
    (results / "machine" / "generate-demo-float32.json").write_text(result("demo", {"graphdecode": 0.1}))
    steps = {"batch_8": {"blocks": {"ms": 3.0}}, "batch_1": {"blocks": {"ms": 2.0}, "llama_cpp": {"ms": 5.0}}}
    blocks = {"floor_ms": 1.0, "workloads": {"prompt": {"blocks": {"ms": 9.0}}, **steps}}
    (results / "machine" / "gguf-smollm2-q4_1.json").write_text(json.dumps(blocks))
    lines = show(results).stdout.splitlines()
    assert lines == [
        "| machine | model | batch | ms/step | times llama-cpp | times transformers | times the weight-read floor |",
        "|---|---|---|---|---|---|---|",
        "| machine | smollm2 q4_1 | 8 | 3.00 | - | - | 3.00 |",
        "| machine | smollm2 q4_1 | 1 | 2.00 | 2.50 | - | 2.00 |",
        "| machine | a float32 | 4 | 1.00 | - | 3.00 | 2.00 |",
        "| machine | b float32 | 4 | 2.00 | 0.75 | - | 4.00 |",
    ]


def test_the_history_has_the_commits_that_have_the_value(results: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=results, check=True)
    file = results / "machine" / "generate-a.json"
    for ms in ({"graphdecode": 1.0}, {"graphdecode": 0.5, "llama-cpp": 0.25}):
        file.write_text(result("a", ms))
        subprocess.run([*git, "add", "."], cwd=results, check=True)
        subprocess.run([*git, "commit", "-qm", "measured"], cwd=results, check=True)
    shown = show(results, "--history", "machine/generate-a.json")
    assert [line.split()[2] for line in shown.stdout.splitlines()] == ["1.0000", "0.5000"]
    metric = ("--metric", "rows.0.ms_per_step.llama-cpp")
    shown = show(results, "--history", "machine/generate-a.json", *metric)
    assert [line.split()[2] for line in shown.stdout.splitlines()] == ["0.2500"]
    nothing = show(results, "--history", "machine/generate-a.json", "--metric", "rows.7.no")
    assert nothing.exit_code == 2
    assert "no committed version of machine/generate-a.json has rows.7.no" in " ".join(nothing.stderr.split())


RESULTS = Path(__file__).parents[2] / "tools" / "results"
README = (RESULTS / "README.md").read_text()
SECTIONS = {
    name.split("-")[0].split(".")[0]: text for name, text in re.findall(r"### `(.*?)`\n(.*?)(?=\n###|\Z)", README, re.S)
}
LISTS = ("rows", "models", "costs", "ladders")
COMMITTED = sorted(RESULTS.glob("*/*.json"))


def keys_of(value: object) -> set[str]:
    """The keys of a result and of what it lists; what these hold in turn is of their kind."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value)) if value else set()
    if isinstance(value, dict):
        return set(value).union(*(keys_of(value[name]) for name in LISTS if name in value))
    return set()


@pytest.mark.parametrize("path", COMMITTED, ids=[f"{path.parent.name}/{path.name}" for path in COMMITTED])
def test_every_key_of_a_committed_result_is_described(path: Path) -> None:
    section = SECTIONS[path.stem.split("-")[0]]
    described = set(re.findall(r"`(\w+)`", section)) | {"environment"}
    assert keys_of(json.loads(path.read_text())) <= described


def test_the_tools_that_write_results_are_there() -> None:
    tools = set(re.findall(r"tools/\w+(?:\.py)?", README)) - {"tools/results"}
    assert {"tools/bench", "tools/check", "tools/gpu_check"} <= tools
    assert all((RESULTS.parents[1] / tool).exists() for tool in tools)
    subjects = set(re.findall(r"tools/(bench|check)\s+([a-z][\w-]*)", README))
    assert {("bench", "serving"), ("bench", "step"), ("check", "replicas")} <= subjects
    rooms = {"bench": "benchmarks", "check": "checks"}
    assert all((RESULTS.parent / rooms[kind] / f"{name.replace('-', '_')}.py").exists() for kind, name in subjects)


def test_regressions_against_the_committed_result_are_named(tmp_path, capsys):
    def started(name: str, **times: float) -> dict[str, Any]:
        return {"environment": {"device_name": name, "instructions": "avx2"}, "times": times}

    for machine, times in (("own", {"one": 2.0, "two": 2.0}), ("other", {"one": 1.0})):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "start.json").write_text(json.dumps(started(machine, **times)))
    found = started("own", one=2.09, two=2.2, three=9.0)
    harness.warn_if_slower("start.json", found, lambda each: each["times"], tmp_path)
    assert capsys.readouterr().out == "slower: two takes 1.10 times the committed result\n"
    harness.warn_if_slower("start.json", started("unknown", one=9.0), lambda each: each["times"], tmp_path)
    assert capsys.readouterr().out == ""


def test_each_benchmark_finds_its_figures_in_the_committed_results():
    for benchmark, pattern in ((start, "start"), (generate, "generate-*"), (prompts, "prompts-llama-100m-bfloat16")):
        for path in (ROOT / "tools" / "results").glob(f"*/{pattern}.json"):
            assert min(benchmark.figures_of(json.loads(path.read_text())).values()) > 0
