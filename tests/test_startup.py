"""What is imported when: `import graphdecode`, and the command line's quick answers, load nothing heavy."""

import ast
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repeated import holds

import graphdecode

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "numpy", "triton", "transformers", "tokenizers", "huggingface_hub", "safetensors", "tqdm", "cuda"}
SHOW_MODULES = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
RUN_COMMAND = """
import atexit, sys
from graphdecode.cli import main
atexit.register(lambda: print("MODULES", json.dumps(sorted({name.split('.')[0] for name in sys.modules}))))
sys.argv = ["graphdecode", *sys.argv[1:]]
main()
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def imported_by(code: str) -> set[str]:
    done = python(f"{code}\n{SHOW_MODULES}")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def imported_by_command(*arguments: str) -> set[str]:
    done = python("import json" + RUN_COMMAND, *arguments)
    modules = next(line for line in done.stdout.splitlines() if line.startswith("MODULES"))
    return set(json.loads(modules.removeprefix("MODULES")))


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imported_by("import graphdecode; graphdecode.__all__") & HEAVY


def test_configurations_and_errors_need_no_torch() -> None:
    assert (
        not imported_by("from graphdecode import BucketConfig, EngineConfig, GraphdecodeError; EngineConfig()") & HEAVY
    )


def test_graphs_of_ones_own_step_need_no_tokenizers() -> None:
    loaded = imported_by("from graphdecode import BucketConfig, GraphManager, Slot, StepBuffers, CaptureError")
    assert not loaded & {"transformers", "tokenizers", "huggingface_hub", "safetensors"}


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["--nonsense"], ["generate", "--help"], ["generate", "--max-tokns", "3"]),
        *(["generate"], ["generate", "-p", "a", "--top-p", "2"], ["chat", "--temperature", "-1", "Hello"]),
        *(["batch", "no-such-file", "out.jsonl"], ["serve", "--port", "70000"]),
    ],
)
def test_a_quick_answer_imports_nothing_heavy(arguments: list[str]) -> None:
    assert not imported_by_command(*arguments) & HEAVY


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_a_wrong_module_is_answered_without_torch(command: str) -> None:
    assert "torch" not in imported_by_command(command, "no_such_module:step")


@pytest.mark.parametrize("arguments", [["generate", "-p", "a"], ["chat", "Hello"], ["serve"]])
def test_a_wrong_model_is_answered_without_torch(arguments: list[str]) -> None:
    assert "torch" not in imported_by_command(*arguments, "--model", "no-such-model")


def test_an_output_of_the_demo_needs_neither_pydantic_nor_jinja2() -> None:
    loaded = imported_by_command("generate", "--prompt", "417+385=", "--max-tokens", "4")
    assert "tokenizers" in loaded
    assert not loaded & {"pydantic", "jinja2", "transformers"}


def test_help_comes_in_less_than_the_time_of_importing_torch() -> None:
    def seconds(code: str, *arguments: str) -> float:
        before = os.times()
        python(code, *arguments)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert holds(lambda _: seconds("import json" + RUN_COMMAND, "--help") < seconds("import torch"))


def test_checkers_see_the_names_that_are_there() -> None:
    tree = ast.parse((ROOT / "graphdecode" / "__init__.py").read_text())
    told = {
        name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("graphdecode.")
        for alias in node.names
        for name in (importlib.import_module(node.module).__all__ if alias.name == "*" else [alias.asname])
    }
    assert sorted(told) == graphdecode.__all__
    for name, module in told.items():
        assert getattr(graphdecode, name) is getattr(importlib.import_module(module), name)
        assert name in dir(graphdecode)


def test_modules_are_attributes_and_misspelt_names_are_not() -> None:
    assert imported_by("import graphdecode; graphdecode.graphs.inspect.check; graphdecode.attention") >= {"torch"}
    with pytest.raises(AttributeError, match="module 'graphdecode' has no attribute 'GraphManger'"):
        _ = graphdecode.GraphManger
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from graphdecode import no_such_name")


def test_a_clone_without_symbolic_links_says_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "graphdecode"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "graphdecode/__init__.py").read_text())
    (package / "kernels").write_text("../kernels")  # what git writes there
    command = [sys.executable, "-S", "-c", "import graphdecode"]  # -S: an installed package would have them
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert re.search(r"ImportError: .*symbolic link.*pip install -e.*core\.symlinks", ran.stderr)


def test_the_version_is_the_installed_one() -> None:
    assert graphdecode.__version__ == importlib.metadata.version("graphdecode")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("BatchPrefillWithPagedKVCacheWrapper", "graphdecode.attention.cached_attention attends from many queries"),
        ("single_prefill_with_kv_cache", "LLM and Engine compute prompts"),
        ("cake_top_k_top_p_sampling_from_probs", "graphdecode.sampling draws"),
    ],
)
@pytest.mark.parametrize("module", ["graphdecode", "graphdecode.decode", "graphdecode.surfaces.flashinfer"])
def test_what_flashinfer_has_beyond_this_surface_names_what_serves_instead(module, name, instead):
    said = f"'{module}' has no attribute '{name}': FlashInfer's decode, append and merge are supported"
    with pytest.raises(AttributeError, match=f"{said}.*{instead}"):
        getattr(importlib.import_module(module), name)
