"""`graphdecode chat`: a session in a terminal, one line, and a pipe; on the demo model, whose template is a file."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ROOT, run_command

from graphdecode import LLM, SamplingParams
from graphdecode.cli.chat_session import ChatSession, history_file, make_prompt_session
from graphdecode.models import resolve_model_path
from graphdecode.text import Conversation

LAST = "{{ messages[-1].content }}"
GREEDY = ["--temperature", "0", "--max-tokens", "8"]


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    (tmp_path / "last.jinja").write_text(LAST)
    return ["--model", "demo", "--chat-template", str(tmp_path / "last.jinja"), *GREEDY]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_batch_size=1, max_sequence_length=256) as made:
        yield made


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_one_message_is_answered_and_stdout_gets_the_answer_alone(options: list[str]) -> None:
    result = run_command("chat", *options, "417+385=")
    assert (result.returncode, result.stdout) == (0, "802\n")
    for part in ("ready after", "tokens/s", "first token after", "recorded backend on cpu"):
        assert part in result.stderr


def test_words_without_quotes_are_one_message(options: list[str]) -> None:
    assert run_command("chat", *options, "rev", "oceanic=").stdout == "cinaeco\n"


def test_several_turns_are_one_conversation_each_under_what_was_said(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "last.jinja").write_text("{{ messages[0].content if messages | length == 3 else 'rev abc=' }}")
    result = run_command("chat", *options, "12+30=", "--then", "and?")
    assert result.stdout == ">>> 12+30=\ncba\n>>> and?\n42\n", "the second turn was given the first one, too"


def test_what_is_piped_in_is_one_message(options: list[str]) -> None:
    assert run_command("chat", *options, stdin="12+30=\n").stdout == "42\n"


def test_the_systems_message_comes_first(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "last.jinja").write_text("{{ messages[0].content }}")
    assert run_command("chat", *options, "--system", "1+2=", "hello").stdout == "3\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "demo", "hello"], "this model has no chat template: give one as chat_template"),
        (["--model", "demo", "--chat-template", "none.jinja", "hello"], "none.jinja"),
        (["--model", "demo", ""], "there is no message"),
        (["--model", "demo"], "there is no message"),
        (["--model", "no-such-model", "hello"], "no-such-model"),
        (["--temperature", "-1", "--model", "no-such-model", "hello"], "'--temperature': Input should be greater"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run_command("chat", *arguments)
    assert result.returncode == 2
    assert message in result.stderr.strip().splitlines()[-1]
    assert result.stdout == ""


def typed(llm: LLM, keys: str, template: str = LAST) -> Conversation:
    """Let somebody type into a session until they leave."""
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    params = SamplingParams(temperature=0.0, max_tokens=8)
    conversation = Conversation(llm, sampling_params=params, chat_template=template)
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys + "\x04")
        ChatSession(conversation, make_prompt_session(input=keyboard, output=DummyOutput())).run()
    return conversation


def test_a_session_answers_line_by_line_with_figures(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = typed(llm, "12+30=\rrev abc=\r")
    captured = capsys.readouterr()
    assert captured.out == "42\ncba\n"
    assert [message["content"] for message in conversation.messages] == ["12+30=", "42", "rev abc=", "cba"]
    assert captured.err.count("tokens/s; first token after") == 2
    assert "of 256 tokens of room" in captured.err


def test_escape_and_enter_begin_another_line(llm: LLM) -> None:
    assert typed(llm, "one\x1b\rtwo\r").messages[0]["content"] == "one\ntwo"


def test_ctrl_c_at_the_prompt_drops_the_line_and_not_the_session(llm: LLM) -> None:
    conversation = typed(llm, "never sent\x0312+30=\r")
    assert [message["content"] for message in conversation.messages] == ["12+30=", "42"]


def test_commands_change_the_conversation(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = typed(
        llm, "12+30=\r/reset\r/system 1+1=\r/help\r/nonsense\r/etc/hosts=\r", "{{ messages[0].content }}"
    )
    captured = capsys.readouterr()
    assert conversation.all_messages() == [
        {"role": "system", "content": "1+1="},
        {"role": "user", "content": "/etc/hosts="},
        {"role": "assistant", "content": "2"},
    ]
    assert "what was said is forgotten" in captured.err
    assert "there is no command /nonsense" in captured.err
    assert all(f"/{command}" in captured.err for command in ("system", "reset", "save", "help"))
    assert typed(llm, "/system x\r/system\r").system is None


def test_a_conversation_is_saved_and_nothing_is_overwritten(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, document = tmp_path / "chat.md", tmp_path / "chat.json"
    conversation = typed(llm, f"/system Grüße\r12+30=\r/save {text}\r/save {document}\r/save {text}\r/save\r")
    assert json.loads(document.read_text("utf-8")) == conversation.all_messages()
    assert text.read_text("utf-8") == "## system\n\nGrüße\n\n## user\n\n12+30=\n\n## assistant\n\n42\n"
    assert "File exists" in (told := capsys.readouterr().err)
    assert "/save needs the name of a file" in told


def test_a_message_that_cannot_be_answered_does_not_end_the_session(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = typed(llm, "x" * 300 + "\r12+30=\r")
    assert "the message takes 300 tokens, and there is room for 256" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["12+30=", "42"]


def test_a_conversation_that_outgrows_its_room_says_so(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    typed(llm, f"{'x' * 60}\r" * 5, "{% for m in messages %}{{ m.content }}{% endfor %}")
    told = capsys.readouterr().err
    assert "the conversation has outgrown 256 tokens: the model is no longer given its oldest" in told
    assert "/reset begins anew" in told


def test_what_was_typed_is_kept_for_the_next_session(llm: LLM, tmp_path: Path) -> None:
    assert typed(llm, "12+30=\r").messages[0]["content"] == "12+30="
    assert history_file().is_relative_to(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in (history_file(), history_file().parent)] == [0o600, 0o700]
    assert typed(llm, "\x1b[A\r").messages[0]["content"] == "12+30=", "Up brings it back"


@pytest.fixture
def talkative(tmp_path: Path) -> Path:
    """The demo as a checkpoint that knows no end of sequence, and has room for seconds of answer."""
    folder = shutil.copytree(resolve_model_path("demo"), tmp_path / "talkative")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = folder / "config.json"
    changes = {"eos_token_id": None, "max_position_embeddings": 65536}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of its own")
def test_ctrl_c_stops_an_answer_and_not_the_program(talkative: Path, options: list[str]) -> None:
    terminal, its_end = os.openpty()
    endless = ["--model", str(talkative), "--max-tokens", "60000", "--max-sequence-length", "65536"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "graphdecode", "chat", *options, *endless],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env=os.environ | environment,
        start_new_session=True,
    ) as process:
        os.close(its_end)
        seen = ""

        def await_(text: str) -> None:
            nonlocal seen
            deadline = time.monotonic() + 60
            while text not in seen:
                assert time.monotonic() < deadline, seen
                if select.select([terminal], [], [], 0.1)[0]:
                    seen += os.read(terminal, 65536).decode(errors="replace")
            seen = seen.partition(text)[2]

        try:
            await_("Ctrl-D leaves")
            await_(">")
            os.write(terminal, b"12+30=\r")
            await_("42")  # the answer has begun
            process.send_signal(signal.SIGINT)
            await_("stopped; what came of the answer stays in the conversation")
            await_(">")
            os.write(terminal, b"/reset\r")
            await_("what was said is forgotten")
            await_(">")
            os.write(terminal, b"\x04")
            assert process.wait(timeout=60) == 0, seen
        finally:
            process.kill()
            os.close(terminal)
