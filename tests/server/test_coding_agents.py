"""Coding agents from a package registry drive a real server through a whole task of three calls.

The model plays a script. Each test is skipped without its agent: `npm install @openai/codex` and
`npm install @anthropic-ai/claude-code`, in a folder whose `node_modules/.bin` is in PATH.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chain_model import save_chain_model
from served import Served, serving

KEY = "secret"
PROGRAM = "print(6 * 7)"
TEMPLATE = """\
{% if tools %}{{ tools | tojson }} Call one so: <tool_call>...</tool_call>{% endif %}
{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}{% if not tools %}<|chat|>
{%- else %}<|step{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}|>{% endif %}{% endif %}"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def saved_script(folder: Path, calls: list[str]) -> Path:
    """Save a model that makes calls one after another, and then says that it is done."""
    steps = {f"<|step{number}|>": (f"Step {number}.\n", each) for number, each in enumerate(calls)}
    answers = {**steps, f"<|step{len(calls)}|>": ("It prints ", "42."), "<|chat|>": ("A ", "task")}
    return save_chain_model(folder, answers, TEMPLATE)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def served(work: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    model = saved_script(work.parent / "model", request.param(work))
    options = ["--served-model-name", "script", "--api-key", KEY, "--max-batch-size", "4", "--log-requests"]
    with serving(*options, model=str(model)) as server:
        yield server


def run(work: Path, command: list[str], environment: dict[str, str]) -> str:
    """Run an agent in a home of its own, and return what it prints."""
    home = work.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(home)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def calls_of_codex(work: Path) -> list[str]:
    written = f"echo '{PROGRAM}' > answer.py"
    commands = [written, "python3 answer.py > printed.txt", "cat answer.py printed.txt"]
    return [call("exec_command", cmd=command) for command in commands]


def calls_of_claude(work: Path) -> list[str]:
    file = str(work / "answer.py")
    return [
        call("Write", file_path=file, content=PROGRAM),
        call("Read", file_path=file),
        call("Bash", command="python3 answer.py > printed.txt", description="Runs it"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("served", [calls_of_codex], indirect=True)
def test_codex_does_a_task_by_responses(served: Served, work: Path) -> None:
    codex = shutil.which("codex")
    if codex is None:
        pytest.skip("codex is not installed")
    provider = f'{{name="local", base_url="{served.address}/v1", wire_api="responses", env_key="KEY"}}'
    settings = {"model": "script", "model_provider": "local", "web_search": "disabled"}
    settings["model_providers.local"] = provider
    options = [f"-c{name}={value}" for name, value in settings.items()]
    sandbox = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
    said = run(work, [codex, "exec", *sandbox, *options, "Write a program, and run it."], {"KEY": KEY})
    assert said.strip().endswith("It prints 42.")
    assert (work / "printed.txt").read_text() == "42\n"


@pytest.mark.slow
@pytest.mark.parametrize("served", [calls_of_claude], indirect=True)
def test_claude_code_does_a_task_by_messages(served: Served, work: Path) -> None:
    claude = shutil.which("claude")
    if claude is None:
        pytest.skip("claude is not installed")
    environment = {
        "ANTHROPIC_BASE_URL": served.address, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_MODEL": "script",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "script", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    allowed = ["--allowedTools", "Write,Read,Bash"]
    said = run(work, [claude, "-p", "Write a program, and run it.", *allowed], environment)
    assert said.strip().endswith("It prints 42.")
    assert (work / "printed.txt").read_text() == "42\n"
