"""Names of architectures stand in the families' files alone, and what is heavy to import is imported late."""

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run_python

from graphdecode.models import family as families
from graphdecode.models.family import FAMILIES, family_of, register_family

PACKAGE = Path(__file__).parents[2] / "graphdecode"
ARCHITECTURE = re.compile(r"\w+For(CausalLM|ConditionalGeneration)")


def named(file: Path) -> list[str]:
    """Every architecture in a file's texts, docstrings included, with its line."""
    texts = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
    return [f"{file}:{node.lineno} {node.value}" for node in texts if ARCHITECTURE.search(str(node.value))]


def test_no_file_but_the_families_names_an_architecture() -> None:
    families = PACKAGE / "models" / "families"
    files = [file for file in PACKAGE.rglob("*.py") if families not in file.parents]
    assert len(files) > 100
    assert [result for file in files for result in named(file)] == []


def test_family_names_are_unique() -> None:
    result = {name for file in (PACKAGE / "models" / "families").glob("[!_]*.py") for name in named(file)}
    assert len(result) == len(FAMILIES) >= 4
    assert {architecture: family_of(architecture).architecture for architecture in FAMILIES} == {
        architecture: architecture for architecture in FAMILIES
    }


def test_a_family_registered_during_the_builtin_import_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    other = family_of("LlamaForCausalLM")

    def import_slowly(module: str) -> object:
        register_family(other, replace=True)
        return importlib.import_module(module)

    monkeypatch.setitem(FAMILIES, other.architecture, "llama.Llama")
    monkeypatch.setattr(families, "importlib", SimpleNamespace(import_module=import_slowly))
    assert family_of(other.architecture) is other
    assert FAMILIES[other.architecture] is other


def test_models_are_imported_without_tokenizers_and_the_hub() -> None:
    script = "import sys, graphdecode.models; print({'transformers', 'huggingface_hub'} & sys.modules.keys())"
    assert run_python(script).strip() == "set()"
