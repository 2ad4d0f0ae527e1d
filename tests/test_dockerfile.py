"""The Dockerfile without Docker: it is well formed, and what it copies, runs and starts is there."""

import fnmatch
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from command_line import run_command

ROOT = Path(__file__).parents[1]
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
PROGRAMS = {"apt-get", "graphdecode", "pip", "rm", "sed", "useradd"}  # of the image, and what pip puts there
SHELL = {"if", "then", "fi", "!", "["}


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def all_of(name: str) -> list[str]:
    return [rest for each, rest in instructions() if each == name]


def test_instructions_are_known_and_begin_with_a_base() -> None:
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM"
    assert set(names) <= INSTRUCTIONS
    assert names.count("ENTRYPOINT") == names.count("CMD") == 1


def test_what_is_copied_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for copied in all_of("COPY"):
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists()
            assert source in allowed
    assert (ROOT / ".dockerignore").read_text().startswith("*\n")
    assert not any(fnmatch.fnmatch(name, ".venv*") for name in allowed)


@pytest.mark.parametrize("command", all_of("RUN"))
def test_a_command_is_a_program_in_the_shells_grammar(command: str) -> None:
    subprocess.run(["sh", "-n", "-c", command], check=True)
    calls = re.split(r"&&|\|\||;|\$\(|\bthen\b|!", re.sub(r'^torch="|\)"', " ", command))
    programs = {words[0] for call in calls if (words := call.split()) and words[0] not in SHELL}
    assert programs <= PROGRAMS


def test_the_version_of_torch_and_the_extras_are_this_projects() -> None:
    found = subprocess.run(["sed", "-n", "s/^torch==//p", ROOT / "constraints.txt"], capture_output=True, text=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", found.stdout)
    text = (ROOT / "pyproject.toml").read_text()
    extras = {name for run in all_of("RUN") for name in re.findall(r'"\.\[(\w+)\]"', run)}
    assert extras
    assert all(re.search(rf"^{name} = \[", text, re.MULTILINE) for name in extras)
    assert "readme = " not in text or (ROOT / re.findall(r'readme = "(.*?)"', text)[0]).exists()


def test_what_it_starts_takes_its_options(tmp_path: Path) -> None:
    (entry,), (start,) = all_of("ENTRYPOINT"), all_of("CMD")
    program, arguments = json.loads(entry), json.loads(start)
    assert program == ["graphdecode"]
    absent = [str(tmp_path / "absent") if each == "smollm2" else each for each in arguments]
    ran = run_command(*absent, folder=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: --model")
    (port,) = all_of("EXPOSE")
    assert arguments[arguments.index("--port") + 1] == port
    _, _, probe = all_of("HEALTHCHECK")[0].partition(" CMD ")
    assert f"127.0.0.1:{port}/health" in shlex.split(probe)[-1]
