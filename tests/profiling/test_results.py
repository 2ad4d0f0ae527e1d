"""What is committed under tools/results is what its README describes."""

import json
import re
from pathlib import Path

import pytest

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
