"""Private names of torch, which a release may take away: each is known here, and the package does without it."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("graphdecode", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]

PRIVATE_NAMES = {
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._cuda_endAllocateToPool",
    "torch._C._cuda_releasePool",
    "torch._neg_view",
    "torch.cpu._is_amx_tile_supported",
    "torch.cpu._is_avx512_bf16_supported",
    "torch.cuda._sleep",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch.ops.mkldnn._linear_pointwise",
    "torch.ops.mkldnn._reorder_linear_weight",
}
DISPATCH_MODE = "torch.utils._python_dispatch.TorchDispatchMode"

REMOVE = """
import sys, types, torch
import torch.utils._python_dispatch as dispatch

class Without:  # an operators' namespace that lacks some names
    def __init__(self, namespace, names):
        self.__dict__.update(namespace=namespace, names=names)

    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        return getattr(self.namespace, name)

class HidingMode(types.ModuleType):  # torch's module, without the mode for us; transformers and torch use it too
    def __getattribute__(self, name):
        if name == "TorchDispatchMode" and sys._getframe(1).f_globals["__name__"].startswith("graphdecode"):
            raise AttributeError(name)
        return super().__getattribute__(name)

hidden = {}
for path in sys.argv[1:]:
    owner, _, name = path.rpartition(".")
    if owner.startswith("torch.ops."):
        hidden.setdefault(owner.removeprefix("torch.ops."), set()).add(name)
    elif owner.startswith("torch.utils."):
        dispatch.__class__ = HidingMode
    elif hasattr(eval(owner), name):
        delattr(eval(owner), name)
for namespace, names in hidden.items():
    setattr(torch.ops, namespace, Without(getattr(torch.ops, namespace), names))
"""
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, graphdecode
lacks_ray = importlib.util.find_spec("ray") is None  # an extra that one package alone imports
for module in pkgutil.walk_packages(graphdecode.__path__, "graphdecode."):
    if module.name != "graphdecode.__main__" and not (lacks_ray and ".server.replicas." in module.name):
        importlib.import_module(module.name)
"""
GENERATE = """
from graphdecode import LLM, BucketConfig, SamplingParams
config = BucketConfig(max_batch_size=2, max_sequence_length=64, backend=BACKEND)
for quantize in (None, "int8"):
    with LLM("demo", config=config, quantize=quantize) as llm:
        text = llm.generate("417+385=", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text
        print(llm.graphs.backend, text.strip())
"""


def private_names(path: Path) -> set[str]:
    """The dotted names below torch that a file uses and that have a private part."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            owner, name = ast.unparse(node.args[0]), node.args[1]
            if isinstance(name, ast.Constant):
                found.add(f"{owner}.{name.value}")
            elif owner.startswith("torch"):  # the names are in the loop or comprehension around it
                found |= {f"{owner}.{text}" for text in loop_names(path, name)}
    return {name for name in found if re.fullmatch(r"torch(\.\w+)+", name) and is_private(name)}


def loop_names(path: Path, variable: ast.expr) -> set[str]:
    loops = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.For, ast.comprehension)) and ast.unparse(node.target) == ast.unparse(variable)
    )
    return {
        item.value
        for loop in loops
        for item in ast.walk(loop.iter)
        if isinstance(item, ast.Constant)  # type: ignore[misc]
    }


def is_private(name: str) -> bool:
    parts = name.split(".")
    is_special = parts[-1].startswith("__")  # torch.__version__
    return not is_special and name != "torch._C" and any(part.startswith("_") for part in parts)


def run_without(names: set[str], code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REMOVE + code, *sorted(names)],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_private_name_that_is_used_is_known_here() -> None:
    used = {name.removesuffix(".default") for path in SOURCES for name in private_names(path)}
    assert used == PRIVATE_NAMES | {DISPATCH_MODE}


def test_the_model_answers_without_any_of_them() -> None:
    printed = run_without(PRIVATE_NAMES, IMPORT_ALL + GENERATE.replace("BACKEND", "'recorded'"))
    assert printed.splitlines() == ["recorded 802", "recorded 802"]


def test_without_a_dispatch_mode_all_is_imported_and_steps_run_eagerly() -> None:
    printed = run_without({DISPATCH_MODE}, IMPORT_ALL + GENERATE.replace("BACKEND", "'eager'"))
    assert printed.splitlines() == ["eager 802", "eager 802"]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FOR_TESTS = ("test", "browser", "clients", "coverage", "docs")  # extras that the tests alone import
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
