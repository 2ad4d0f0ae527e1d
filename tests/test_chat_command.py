"""`graphdecode chat`: a session in a terminal, one line, and a pipe; on the demo model, whose template is a file."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import ROOT, run_command
from demo_copies import demo_copy
from rich.cells import cell_len

from graphdecode import LLM, SamplingParams, StructuredOutputsParams
from graphdecode.cli.chat import ChatSession, answer, history_file, make_prompt_session, print_figures
from graphdecode.cli.terminal import WrappedText, prompt_progress, repeats_at_the_end
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
    assert run_command("chat", *options, "rev", "oceanic=").stdout == "cinaeco\n"  # words are one message
    assert run_command("chat", *options, stdin="12+30=\n").stdout == "42\n"


def test_several_messages_are_one_conversation(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "last.jinja").write_text("{{ messages[0].content if messages | length == 3 else 'rev abc=' }}")
    result = run_command("chat", *options, "12+30=", "--then", "and?")
    assert result.stdout == ">>> 12+30=\ncba\n>>> and?\n42\n", "the second turn was given the first one, too"


def test_the_systems_message_comes_first(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "last.jinja").write_text("{{ messages[0].content }}")
    assert run_command("chat", *options, "--system", "1+2=", "hello").stdout == "3\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--then", "x"], "--then"),
        (["--model", "demo", "hello"], "chat_template"),
        (["--model", "demo", "--chat-template", "none.jinja", "hello"], "none.jinja"),
        (["--model", "demo", ""], "message"),
        (["--model", "demo"], "message"),
        (["--model", "no-such-model", "hello"], "no-such-model"),
        (["--temperature", "-1", "--model", "no-such-model", "hello"], "--temperature must be"),
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
    assert "of 256 tokens used" in captured.err


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
    assert "the conversation starts over" in captured.err
    assert "unknown command /nonsense" in captured.err
    assert all(f"/{command}" in captured.err for command in ("system", "reset", "save", "help"))
    assert typed(llm, "/system x\r/system\r").system is None


def test_a_conversation_is_saved_and_nothing_is_overwritten(llm, tmp_path, capsys):
    text, document = tmp_path / "chat.md", tmp_path / "chat.json"
    conversation = typed(llm, f"/system Grüße\r12+30=\r/save {text}\r/save {document}\r/save {text}\r/save\r")
    assert json.loads(document.read_text("utf-8")) == conversation.all_messages()
    assert text.read_text("utf-8") == "## system\n\nGrüße\n\n## user\n\n12+30=\n\n## assistant\n\n42\n"
    assert f"error: file exists: {text}" in (told := capsys.readouterr().err)
    assert "/save needs the name of a file" in told


def test_a_message_that_cannot_be_answered_does_not_end_the_session(llm, capsys):
    conversation = typed(llm, "x" * 300 + "\r12+30=\r")
    assert "the message takes 300 tokens, and there is room for 256" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["12+30=", "42"]


def test_a_conversation_beyond_the_context_prints_a_message(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    typed(llm, f"{'x' * 60}\r" * 5, "{% for m in messages %}{{ m.content }}{% endfor %}")
    told = capsys.readouterr().err
    assert "the conversation has more than 256 tokens: the oldest" in told
    assert "/reset starts over" in told


def test_the_history_persists_between_sessions(llm: LLM, tmp_path: Path) -> None:
    assert typed(llm, "12+30=\r").messages[0]["content"] == "12+30="
    assert history_file().is_relative_to(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in (history_file(), history_file().parent)] == [0o600, 0o700]
    assert typed(llm, "\x1b[A\r").messages[0]["content"] == "12+30=", "Up brings it back"


@pytest.mark.parametrize("word", ["/quit", "/exit", "quit", "Exit"])
def test_words_leave_the_session(llm: LLM, word: str) -> None:
    assert typed(llm, f"12+30=\r{word}\rrev abc=\r").messages[-1]["content"] == "42"


def test_a_word_that_reaches_the_edge_moves_to_the_next_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    text = WrappedText()
    for piece in ("one two th", "ree ", "4567890123456789", " ", "日本語日本語 \x1b[2J", "\n", "a\tb"):
        text.write(piece)
    lines = screen(capsys.readouterr().out, 12)
    assert lines == ["one two", "three", "45678901234", "56789", "日本語日本", "語 \\x1b[2J", "a       b"]


def test_spaces_and_joiners_of_all_scripts_are_shown_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    plain = "5\u202f€\xa0! 日本\u3000語 👩\u200d💻 \u0645\u06cc\u200c\u062e"
    WrappedText().write(f"{plain}\u202e\x07\ud800")
    assert capsys.readouterr().out == f"{plain}\\u202e\\x07\\ud800"


@pytest.mark.parametrize(
    ("is_terminal", "shown"),
    [(True, "\x1b[2mLet me see.\x1b[0m\n\nIt is 2.\n"), (False, "It is 2.\n")],
)
def test_thoughts_are_dimmed_in_a_terminal_and_not_in_a_pipe(capsys, monkeypatch, is_terminal, shown):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    text = WrappedText()
    for piece, is_thought in (("Let me ", True), ("see.", True), ("It is ", False), ("2.", False)):
        text.write(piece, is_thought=is_thought)
    text.close()
    assert capsys.readouterr().out == shown


def test_a_thought_that_is_stopped_leaves_no_dimmed_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    text = WrappedText()
    text.write("Let me", is_thought=True)
    text.close()
    assert capsys.readouterr().out == "\x1b[2mLet me\x1b[0m\n"


def screen(text: str, width: int) -> list[str]:
    """What a terminal shows that knows line feeds, and how to go back and clear to the end of a line."""
    lines: list[list[str]] = [[]]
    column = 0
    for back, sign in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", text, re.DOTALL):
        if back:
            column -= int(back)
            assert column >= 0
            del lines[-1][column:]
        elif sign == "\n":
            lines.append([])
            column = 0
        else:
            lines[-1] += [sign] + [""] * (cell_len(sign) - 1)
            column = len(lines[-1])
            assert column < width, "the last column is left free: what comes behind it is another line's"
    return ["".join(line).rstrip() for line in lines]


def test_ctrl_c_before_the_first_token_drops_the_message(llm, monkeypatch, capsys):
    step = llm.engine.step

    def interrupted() -> None:
        monkeypatch.setattr(llm.engine, "step", step)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    conversation = typed(llm, "12+30=\rrev abc=\r")
    assert [message["content"] for message in conversation.messages] == ["rev abc=", "cba"]
    assert "stopped before the first token; the message is dropped" in capsys.readouterr().err
    assert llm.cache.pool.used == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_prompt_shows_how_much_of_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stats = Terminal(), SimpleNamespace(prefilled_tokens=5)
    last = SimpleNamespace(prompt_token_ids=range(100), metrics=SimpleNamespace(num_cached_tokens=20))
    monkeypatch.setattr(sys, "stderr", terminal)
    with prompt_progress(SimpleNamespace(llm=SimpleNamespace(stats=stats), last=last)):  # type: ignore[arg-type]
        stats.prefilled_tokens += 40
        end = time.monotonic() + 60
        while "reading the prompt: 40 of 80 tokens" not in terminal.getvalue():
            assert time.monotonic() < end
            time.sleep(0.01)
    assert terminal.getvalue().endswith("\r\x1b[K"), "the line is taken away for the answer"


def test_a_repeating_output_prints_a_message(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    loop = StructuredOutputsParams(regex="(ab){30}")
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=loop)
    conversation = Conversation(llm, sampling_params=params, chat_template=LAST)
    answer(conversation, "1+1=")
    print_figures(conversation)
    assert "the output repeats itself 30 times" in capsys.readouterr().err


def test_what_repeats_itself() -> None:
    assert repeats_at_the_end([5, 6, *[1, 2, 3] * 30]) == 30
    assert repeats_at_the_end([7] * 48) == 48
    assert repeats_at_the_end([7] * 47) == 0
    assert repeats_at_the_end([*range(20)] * 3) == 0, "three times is no loop yet"
    assert repeats_at_the_end([]) == repeats_at_the_end(list(range(500))) == 0


@pytest.mark.parametrize(
    ("max_tokens", "why"),
    [
        (1, "cut after 1 token: --max-tokens"),
        (None, "the limit of 256 tokens is reached (--max-sequence-length"),
    ],
)
def test_a_truncated_output_names_the_limit(llm, max_tokens, why, capsys):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answer(Conversation(llm, sampling_params=params, chat_template=LAST), "1+1=")
    assert why in capsys.readouterr().err


@pytest.fixture
def talkative(tmp_path: Path) -> Path:
    """The demo as a checkpoint that knows no end of sequence, and has room for seconds of answer."""
    changes = {"eos_token_id": None, "max_position_embeddings": 65536}
    folder = demo_copy(tmp_path / "talkative", config=changes, tokenizer_config={"eos_token": None})
    (folder / "generation_config.json").unlink()
    return folder


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of its own")
def test_ctrl_c_stops_an_answer_and_not_the_program(talkative: Path, options: list[str]) -> None:
    termios = pytest.importorskip("termios")
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

        def await_(text: str, without: str | None = None) -> None:
            nonlocal seen
            deadline = time.monotonic() + 60
            while text not in seen:
                assert time.monotonic() < deadline, seen
                if select.select([terminal], [], [], 0.1)[0]:
                    seen += os.read(terminal, 65536).decode(errors="replace")
            assert without is None or without not in seen.partition(text)[0]
            seen = seen.partition(text)[2]

        try:
            deadline = time.monotonic() + 60
            while termios.tcgetattr(terminal)[3] & termios.ECHO:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert not select.select([terminal], [], [], 0)[0], "the model is there"
            os.write(terminal, b"12+")  # kept for the first prompt, and not shown in what is told of loading
            await_("Ctrl-D leaves", without="12+")
            await_(">")
            os.write(terminal, b"30=\r")
            await_("42")  # the answer has begun
            os.write(terminal, b"/syst")  # kept for the next line, and not shown in the answer
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            await_("stopped; the output so far stays in the conversation", without="/syst")
            await_(">")
            os.write(terminal, b"em 1+1=\r")
            await_("system message: 1+1=")
            await_(">")
            os.write(terminal, b"/reset\r")
            await_("the conversation starts over")
            await_(">")
            os.write(terminal, b"\x04")
            assert process.wait(timeout=60) == 0, seen
        finally:
            process.kill()
            os.close(terminal)
