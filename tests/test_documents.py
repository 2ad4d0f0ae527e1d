"""Every command and example of the README and of docs/ runs as it stands, and what they name is there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from command_line import run_command
from served import Served, serving
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.graphs.errors import HAZARDS
from graphdecode.hub.model_path import installable
from graphdecode.linear.forms import FORMS
from graphdecode.models.family import FAMILIES
from graphdecode.models.source import SOURCES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = {"python", "bash", "toml", "console"}  # console: what takes long, or needs what is not everywhere
OWN_TEST_COMMAND = "tools/test"  # what runs this
NEEDS_SMOLLM2 = ("smollm2", "graphdecode chat", "tools/quickstart")
MAX_README_LINES = 150
MAX_WALK_FILES = 15
OPERATORS = "kernels"  # where an operator is entered: its function may be compiled


class Block(NamedTuple):
    """A fenced block: of which document, of which kind, behind how many lines, and what it says."""

    document: Path
    kind: str
    lines_before: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.name}:{self.lines_before + 1}"


def blocks_of(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(document, found[1], text.count("\n", 0, found.start(2)), found[2])


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
SERVER = "http://127.0.0.1:8000"
SERVED = [block for block in BLOCKS if SERVER in block.text and block.kind in ("python", "bash")]
EXAMPLES = [block for block in BLOCKS if block.kind == "python" and block not in SERVED]
COMMANDS = [
    (block.document, line)
    for block in BLOCKS
    if block.kind == "bash" and block not in SERVED
    for line in block.text.splitlines()
    if line.strip() and not line.startswith("#")
]


def environment() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return inherited | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_each_block_is_of_a_kind_that_is_known() -> None:
    assert [block.place for block in BLOCKS if block.kind not in KINDS] == []
    assert {document.name for document in DOCUMENTS} >= {"README.md", "state.md", "graphs.md", "profiling.md"}


@pytest.fixture
def registries() -> Iterator[None]:
    """Take away again what examples register."""
    families, forms, sources = dict(FAMILIES), list(FORMS), list(SOURCES)
    yield
    FAMILIES.clear()
    FAMILIES.update(families)
    FORMS[:] = forms
    SOURCES[:] = sources


def skip_without_smollm2(text: str) -> None:
    if any(part in text for part in NEEDS_SMOLLM2) and installable("smollm2").installed_file() is None:
        pytest.skip("needs smollm2: tools/quickstart, or graphdecode models install smollm2")


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.place)
def test_examples_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if 'LLM("smollm2")  # or' not in block.text:
        skip_without_smollm2(block.text)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    source = "\n" * block.lines_before + block.text  # so that a traceback names the document's line
    exec(compile(source, str(block.document), "exec"), {"__name__": "example"})


def test_the_first_example_runs_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-c", EXAMPLES[0].text]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Where a document's commands run, one after another: some read what earlier ones wrote.

    Blocks whose first line is a comment with a file's name are there as files.
    """
    folders: dict[Path, Path] = {}

    def made(document: Path) -> Path:
        if document not in folders:
            folders[document] = tmp_path_factory.mktemp(document.stem)
            for block in blocks_of(document):
                named = re.match(r"# ([\w/-]+\.\w+)\n", block.text)
                if named:
                    file = folders[document] / named[1]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(block.text)
        return folders[document]

    return made


@pytest.mark.parametrize(
    ("document", "command"),
    [(document, command) for document, command in COMMANDS if not command.startswith(OWN_TEST_COMMAND)],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_commands_run(document: Path, command: str, folder_of: Callable[[Path], Path]) -> None:
    skip_without_smollm2(command)
    if command.startswith("tools/") and not (ROOT / ".venv").exists():
        pytest.skip("would install an environment: run it by hand, or with .ci/run")
    program, *arguments = shlex.split(command, comments=True)
    if program == "graphdecode":
        result = run_command(*arguments, folder=folder_of(document))
    else:
        result = run_in_bash(command, ROOT if program.startswith("tools/") else folder_of(document))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.fixture(scope="module")
def smollm2_served() -> Iterator[Served]:
    skip_without_smollm2("smollm2")
    with serving("--max-batch-size", "2", "--max-sequence-length", "512", model="smollm2") as server:
        yield server


@pytest.mark.parametrize("block", SERVED, ids=lambda block: block.place)
def test_what_asks_a_server_is_answered(block: Block, smollm2_served: Served, tmp_path: Path) -> None:
    text = block.text.replace(SERVER, smollm2_served.address)
    if block.kind == "python":
        pytest.importorskip("openai")
        (tmp_path / "asks.py").write_text(text)
        text = f"{shlex.quote(sys.executable)} asks.py"
    elif shutil.which("curl") is None:
        pytest.skip("no curl")
    result = run_in_bash(text, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "error" not in result.stdout
    expected = next(
        (word for word in ("Paris", "sky") if word in block.text), "score" if "grows" in text else "embedding"
    )
    assert expected in result.stdout
    assert ("data: [DONE]" in result.stdout) == ("-sSN" in block.text)


def run_in_bash(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("graphdecode", path=environment()["PATH"]) is None:
        command = command.replace("graphdecode ", f"{sys.executable} -m graphdecode ", 1)
    return subprocess.run(
        ["bash", "-c", command], env=environment(), cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_readme_names_both_commands() -> None:
    named = {command.split()[0] for document, command in COMMANDS if document == README}
    assert named >= {"tools/quickstart", "tools/test", "graphdecode"}


def test_the_two_commands_say_what_they_take_before_they_take_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=lambda _, names: {*names} - {"quickstart", "test"})
    (tmp_path / "tools/environment.sh").write_text("environment() { echo made >&2; exit 3; }\n")
    for command, status, said in (
        ("tools/quickstart --help", 0, r"usage: tools/quickstart\n.*Python 3\.11.* GB of disk.*"),
        ("tools/quickstart smollm2", 2, r"error: tools/quickstart takes no arguments, got smollm2.*--help.*\n"),
        ("tools/quickstart", 3, "made\n"),
        ("tools/test", 3, r"the whole suite takes about \d+ minutes.*tools/test PATH runs a part\nmade\n"),
        ("tools/test tests/text", 3, "made\n"),
    ):
        ran = subprocess.run(["bash", *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (ran.returncode, bool(re.fullmatch(said, ran.stdout + ran.stderr, re.DOTALL))) == (status, True), ran


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


def test_the_performance_table_is_the_committed_results() -> None:
    command = [sys.executable, "tools/bench", "results"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() in README.read_text()


def test_quantized_products_on_a_gpu_are_documented_as_they_were_timed() -> None:
    path = ROOT / "tools/results/gpu-h200/figures.jsonl"
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    least = {each["key"]: min(each["ms"].values()) for each in figures if each["key"].startswith("gate_up")}
    quantized = {key: ms for key, ms in least.items() if ":" in key}
    text = " ".join((ROOT / "docs/quantization.md").read_text().split("## On a GPU")[1].split())
    assert quantized
    for key, ms in quantized.items():
        plain = least[re.sub(r":\w+", "", key)]
        assert all(f"{figure:.2f}" in text[:600] for figure in (ms, plain, plain / ms)), key


def test_a_tool_that_is_run_outside_of_the_environment_says_how_to_enter_it() -> None:
    command = [sys.executable, "-S", "tools/bench", "results"]  # -S: without installed packages
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert re.fullmatch(r"error: .*\.venv/bin/activate.*\n", ran.stderr)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_file_and_test_that_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`((?:graphdecode|kernels|tests|tools|docs)/[\w./-]*)(?:::(\w+))?[^`\n]*`", text)
    missing = [
        f"{path} {name}".strip()
        for path, name in named
        if not (ROOT / path).exists() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", text):
        linked = document.parent / target if target else document
        titles = (
            re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            if linked.suffix == ".md" and linked.exists()
            else []
        )
        anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        if not linked.exists() or (heading and heading not in anchors):
            missing.append(f"{target}#{heading}")
    assert missing == []


def test_the_map_of_the_house_names_every_package() -> None:
    floors = set(re.findall(r"^ {4}([\w/]+)/ ", README.read_text(), re.MULTILINE))
    packages = {str(file.parent.relative_to(ROOT)) for file in (ROOT / "graphdecode").glob("*/*.py")}
    assert floors - {"tools", "kernels"} == packages - {"graphdecode/kernels"}


def rows_below(heading: str, document: Path) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    _, _, below = f"\n{document.read_text()}".partition(f"\n{heading}\n")
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_the_table_of_hazards_is_complete() -> None:
    rows = rows_below("## What cannot be captured", ROOT / "docs" / "graphs.md")
    assert [row[0].strip("`") for row in rows] == list(HAZARDS)


class Entered(TorchDispatchMode):
    """Notes each function of the house that is entered, and each of its operators that is run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[tuple[str, str], None] = {}

    def call(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            self.names[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "graphdecode":
            self.names[OPERATORS, name] = None
        return func(*args, **(kwargs or {}))


def test_the_walk_enters_the_files_in_the_order_of_the_code() -> None:
    """Eagerly, so that the step itself is entered, too: a replay repeats what it did."""
    file_of: dict[str, str] = {}
    walk: list[tuple[str, str]] = []
    for file, function, *_ in rows_below("# A newcomer's walk", ROOT / "docs" / "design" / "walk.md"):
        name = function.strip("`")
        owner = name.partition(".")[0]
        file_of[owner] = file.strip("`") or file_of[owner]
        walk.append((OPERATORS if file.startswith("`kernels/") else file_of[owner], name))
    assert len(set(file_of.values())) <= MAX_WALK_FILES
    assert all(f"def {owner}(" in (ROOT / file_of[owner]).read_text() for place, owner in walk if place == OPERATORS)

    entered = Entered()
    config = BucketConfig(max_batch_size=1, max_sequence_length=64, backend="eager")
    with LLM("demo", config=config) as llm:
        outer = sys.getprofile()
        sys.setprofile(entered.call)
        try:
            with entered:
                output = llm.generate("417+385=", SamplingParams(temperature=0.0, max_tokens=8))[0]
        finally:
            sys.setprofile(outer)
    assert output.outputs[0].text == "802"
    assert [name for name in entered.names if name in walk] == walk
