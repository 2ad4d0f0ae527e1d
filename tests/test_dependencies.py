"""What pyproject.toml declares is what the package imports."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FOR_TESTS = ("test", "browser", "clients")  # extras that the tests alone import
FOR_OTHERS = {"httptools"}  # uvicorn imports it where it is there


def distribution(requirement: str) -> str:
    return re.split(r"[ ><=;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imported() -> dict[str, str]:
    """Distribution -> one of the files that import it."""
    owners = packages_distributions() | {  # namespaces of several
        "cuda": ["cuda-bindings"],
        "opentelemetry": ["opentelemetry-exporter-otlp-proto-http"],
    }
    found = {}
    for folder in ("graphdecode", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                for name in names:
                    package = name.split(".")[0]
                    if package not in sys.stdlib_module_names and package != "graphdecode":
                        found[distribution(owners.get(package, [package])[0])] = str(path.relative_to(ROOT))
    return found


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    extras = PROJECT["optional-dependencies"]
    optional = {distribution(line) for name, lines in extras.items() if name not in FOR_TESTS for line in lines}
    optional -= {"graphdecode", *FOR_OTHERS}  # an extra of ours that another one includes
    declared = {distribution(line) for line in PROJECT["dependencies"]} - FOR_OTHERS | optional
    found = imported()
    assert found.keys() - declared == set(), {name: found[name] for name in found.keys() - declared}
    assert declared - found.keys() == set()


def test_every_dependency_is_pinned_for_the_tests() -> None:
    pinned = {distribution(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    everything = [
        *PROJECT["dependencies"],
        *(line for group in PROJECT["optional-dependencies"].values() for line in group),
    ]
    assert {distribution(line) for line in everything} - {"graphdecode"} <= pinned


def test_every_package_of_the_tree_is_in_the_wheel() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        path.parent.relative_to(ROOT) for name in ("graphdecode", "kernels") for path in (ROOT / name).rglob("*.py")
    }
    kernels = {Path("graphdecode", folder) for folder in folders if folder.parts[0] == "kernels"}
    there = {folder for folder in folders if folder.parts[0] == "graphdecode"} | kernels | {Path("graphdecode/kernels")}
    assert set(packages) == {".".join(folder.parts) for folder in there}
    assert packages == sorted(packages)
