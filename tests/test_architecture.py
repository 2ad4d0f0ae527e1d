"""The shape of the house: where arrows may point, what stays private, and what a file may be called and weigh.

Ruff sees to the docstrings of public names.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    # what people import
    ("graphdecode", *(f"graphdecode.{name}" for name in ("__main__", "cascade", "cli", "decode", "mla", "sampling"))),
    ("graphdecode.server",),
    ("graphdecode.profiling",),
    ("graphdecode.convert",),
    ("graphdecode.text",),
    ("graphdecode.engine",),
    ("graphdecode.surfaces",),
    ("graphdecode.models",),
    ("graphdecode.linear",),
    ("graphdecode.distributed",),
    ("graphdecode.graphs",),
    ("graphdecode.attention",),
    ("graphdecode.cache",),
    (
        "graphdecode.buffers",
        "graphdecode.buckets",
        "graphdecode.child",
        "graphdecode.config",
        "graphdecode.errors",
        "graphdecode.extensions",
        "graphdecode.hub",
        "graphdecode.memory",
    ),
    ("graphdecode.kernels",),
)
RANKS = {package: rank for rank, floor in enumerate(FLOORS) for package in floor}
# a floor below that is left alone all the same, and what a floor confines itself to
FORBIDDEN = {"graphdecode.engine": {"graphdecode.surfaces"}, "graphdecode.text": {"graphdecode.surfaces"}}
GRAPHS_MAY_IMPORT = {"graphs", "buffers", "buckets", "config", "errors", "kernels"}
ENGINES_OWN = {"_runner", "_loop", "_scheduler", "_engine", "_caches"}
MAX_LINES = 700
MAX_IMPORTS = 18
MAX_KERNEL_PARAMETERS, MAX_KERNEL_LINES = 16, 100


@cache
def sources() -> dict[str, Path]:
    """Return every file that is imported as part of `graphdecode`, by module name."""
    packaged = [path for path in (ROOT / "graphdecode").rglob("*.py") if "kernels" not in path.parts]
    found = {path.relative_to(ROOT).with_suffix(""): path for path in packaged}
    found |= {Path("graphdecode") / path.relative_to(ROOT).with_suffix(""): path for path in python_files("kernels")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in found.items()}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """Yield the modules of `graphdecode` that one imports, anywhere in its text, with the line."""
    for node in ast.walk(tree_of(sources()[module])):
        if isinstance(node, ast.ImportFrom):
            is_package = sources()[module].stem == "__init__"
            above = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
            base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
            for name in node.names:
                target = f"{base}.{name.name}" if f"{base}.{name.name}" in sources() else base
                if target.partition(".")[0] == "graphdecode":
                    yield target, node.lineno
        elif isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names if name.name.partition(".")[0] == "graphdecode")


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_every_package_stands_on_a_floor() -> None:
    assert {package_of(module) for module in sources()} <= set(RANKS)


def test_an_arrow_only_ever_points_down() -> None:
    upward = [
        f"{module}:{line} imports {target}"
        for module in sources()
        for target, line in imports_of(module)
        if RANKS[package_of(target)] < RANKS[package_of(module)]
        or package_of(target) in FORBIDDEN.get(package_of(module), ())
    ]
    assert not upward, "\n".join(upward)


def test_no_imports_go_round_in_a_circle() -> None:
    arrows = {module: {target for target, _ in imports_of(module)} - {module} for module in sources()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_graphs_know_nothing_of_models_or_caches() -> None:
    of_graphs = [module for module in sources() if package_of(module) == "graphdecode.graphs"]
    imported = {target.split(".")[1] for module in of_graphs for target, _ in imports_of(module)}
    assert imported <= GRAPHS_MAY_IMPORT


def test_the_package_imports_no_other_engine() -> None:
    for module in sources():
        for node in ast.walk(tree_of(sources()[module])):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"peers", "tools", "tests"}, module


def kernels() -> Iterator[ast.FunctionDef]:
    """Yield the Triton functions that are launched."""
    for path in python_files("kernels"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert any("triton.jit" in ast.unparse(each) for each in node.decorator_list), node.name
                yield node


def test_what_a_kernel_is_given_travels_in_records() -> None:
    many = {kernel.name for kernel in kernels() if len(kernel.args.args) > MAX_KERNEL_PARAMETERS}
    assert not many


def test_long_kernels_fall_into_parts() -> None:
    lines = {kernel.name: (kernel.end_lineno or 0) - kernel.lineno + 1 for kernel in kernels()}
    assert not {name: count for name, count in lines.items() if count > MAX_KERNEL_LINES}


def record_fields() -> dict[str, str]:
    """The fields of all records among the kernels, with their annotations."""
    classes = (
        node for path in python_files("kernels") for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    lines = (line for record in classes if "NamedTuple" in map(ast.unparse, record.bases) for line in record.body)
    return {ast.unparse(line.target): ast.unparse(line.annotation) for line in lines if isinstance(line, ast.AnnAssign)}


def test_kernels_read_records_as_triton_3_6_can() -> None:
    """There a text from a record is no constant until it has a name, and a record has a list named `values`."""
    texts = {name for name, annotation in record_fields().items() if annotation == "str"}
    assert texts
    functions = [node for path in python_files("kernels") for node in ast.walk(tree_of(path))]
    for kernel in functions:
        if not isinstance(kernel, ast.FunctionDef) or "triton.jit" not in map(ast.unparse, kernel.decorator_list):
            continue
        calls = [node for node in ast.walk(kernel) if isinstance(node, ast.Call)]
        given = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
        assert not [ast.unparse(value) for value in given if isinstance(value, ast.Attribute) and value.attr in texts]
        reads = {node.attr for node in ast.walk(kernel) if isinstance(node, ast.Attribute)}
        assert "values" not in reads, kernel.name


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def private_uses(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the private names that are taken from something else than `self` or `cls`, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if not is_own(node.value):
                yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("graphdecode", "peers"):
            yield from ((name.name, node.lineno) for name in node.names if private(name.name))
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("getattr", "setattr", "hasattr", "delattr") and private(node.args[1].value):
                yield str(node.args[1].value), node.lineno


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a file defines: in modules, classes and on `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


@cache
def defined_in() -> dict[str, frozenset[str]]:
    """Return the private names that each package defines."""
    names: dict[str, set[str]] = {}
    for module, path in sources().items():
        names.setdefault(package_of(module), set()).update(filter(private, private_names(tree_of(path))))
    return {package: frozenset(found) for package, found in names.items()}


def test_packages_keep_their_private_names_to_themselves() -> None:
    """A name that no package defines is another library's; one that several do is whose the file itself defines."""
    packages = Counter(name for names in defined_in().values() for name in names)
    reached = [
        f"{module}:{line}: {name}"
        for module, path in sources().items()
        for name, line in private_uses(tree_of(path))
        if packages[name] > (name in defined_in()[package_of(module)]) and name not in set(private_names(tree_of(path)))
    ]
    assert not reached, "\n".join(reached)


def test_tests_and_tools_use_public_names_alone() -> None:
    ours = frozenset().union(*defined_in().values()) | ENGINES_OWN
    reached = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files("tests") + python_files("tools")
        for name, line in private_uses(tree_of(path))
        if name in ENGINES_OWN or name in ours - set(private_names(tree_of(path)))
    ]
    assert not reached, "\n".join(reached)


def test_architectures_are_named_in_their_families_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources().values()
        if "families" not in path.parts
        for name in re.findall(r"\b(?!Auto)\w+ForCausalLM", path.read_text())
    ]
    assert not found, "\n".join(found)


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for module, path in sources().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    assert len(found) > 100
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_a_file_is_one_noun_of_readable_length() -> None:
    files = [*sources().values(), *python_files("tests"), *python_files("tools")]
    assert not [path for path in files if path.stem in ("utils", "util", "common", "helpers", "misc")]
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {name: lines for name, lines in long.items() if lines > MAX_LINES}


def test_the_engines_loop_keeps_at_most_14_attributes() -> None:
    (loop,) = (node for node in tree_of(sources()["graphdecode.engine.loop"]).body if isinstance(node, ast.ClassDef))
    stores = (node for node in ast.walk(loop) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    assert 10 < len({node.attr for node in stores if is_own(node.value)}) <= 14


def imported_modules(module: str) -> set[str]:
    """Return the modules that one imports anywhere in its text, but for the standard library's."""
    others = {
        name
        for node in ast.walk(tree_of(sources()[module]))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if name.partition(".")[0] not in {"graphdecode", *sys.stdlib_module_names}
    }
    return others | {target for target, _ in imports_of(module)}


def test_no_file_imports_from_more_than_18_modules() -> None:
    counts = {module: len(imported_modules(module)) for module in sources()}
    assert counts["graphdecode.engine.engine"] > 9
    assert {module: count for module, count in counts.items() if count > MAX_IMPORTS} == {}
