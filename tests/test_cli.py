"""The command line: where its output goes, and what it says and returns when something is wrong."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from command_line import ROOT, run_command, spawn_command
from command_line import run_command as run
from demo_copies import demo_copy

from graphdecode import LLM, ArgumentError, BucketConfig, EngineConfig, SamplingParams
from graphdecode.cli import main
from graphdecode.cli.checkpoint import fitted
from graphdecode.kernels.native.instructions import instructions
from graphdecode.models import resolve_model_path

COMMAND = [sys.executable, "-m", "graphdecode"]
MANY = 4000  # prompts that take seconds together
ABSENT = ("generate", "-p", "a", "--model", "no-such-model")


def interrupted(folder: Path, *options: str) -> tuple[str, str, str, int]:
    """Send Ctrl-C to a long run after two lines; return these, what follows, stderr and the exit code."""
    (folder / "prompts.txt").write_text("rev abcdefgh=\n" * MANY)
    with subprocess.Popen(
        [*COMMAND, "generate", "--prompts-file", "prompts.txt", "--max-tokens", "400", "--temperature", "9", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline() + process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = (
            process.stdout.read(),
            process.stderr.read(),
        )  # communicate() would miss what readline() read ahead
    return first, rest, errors, process.returncode


def test_one_answer_is_all_that_stdout_gets() -> None:
    result = spawn_command("generate", "--prompt", "12+30=")
    assert (result.returncode, result.stdout) == (0, "42\n")
    for part in ("tokens/s", "first token after", "ms per token p50", "buckets 1 x", "padding 0%", "backend on"):
        assert part in result.stderr
    (seconds,) = re.findall(r"ready after (\d+\.\d\d) s; \d+ tokens in", result.stderr)
    assert float(seconds) > 0


def test_several_answers_stand_under_their_prompts_in_order(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("rev abc=\nsort cab=\n")
    result = run(
        "generate", "--prompt", "12+30=", "--prompts-file", "prompts.txt", "-", stdin="1+1=\n", folder=tmp_path
    )
    assert result.stdout == ">>> 12+30=\n42\n>>> rev abc=\ncba\n>>> sort cab=\nabc\n>>> 1+1=\n2\n"


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_prints_json_for_all_prompts_and_marks_aborted_ones(tmp_path: Path) -> None:
    first, rest, errors, status = interrupted(tmp_path, "--json")
    answers = [json.loads(line) for line in (first + rest).split("\n")[:-1]]  # texts have other ends of lines in them
    assert status == 130, errors
    assert [answer["request_id"] for answer in answers] == list(range(MANY))
    complete = [answer for answer in answers if answer["error"] is None]
    assert 2 <= len(complete) < MANY
    assert all(answer["outputs"][0]["finish_reason"] in ("stop", "length") for answer in complete)
    cut = [answer for answer in answers if answer["error"] is not None]
    assert {answer["outputs"][0]["finish_reason"] for answer in cut} == {"abort"}
    assert {answer["error"] for answer in cut} == {"interrupted before the output was complete"}
    assert any(answer["outputs"][0]["text"] for answer in cut), "what was generated of them is kept"
    assert not any(answer["outputs"][0]["text"] for answer in answers[-10:])
    assert "Traceback" not in errors


def test_bytes_that_are_no_text_are_refused() -> None:
    given = b"12+30=\n\xff\xfe\n"
    result = subprocess.run([*COMMAND, "generate", "-"], input=given, capture_output=True, timeout=120, check=False)
    assert result.returncode == 2
    assert b"stdin: not UTF-8 (byte 0xff at position 7)" in result.stderr
    assert b"Traceback" not in result.stderr


def test_version_prints_the_versions() -> None:
    result = spawn_command("--version")
    assert result.returncode == 0
    assert re.fullmatch(r"graphdecode \S+, torch \S+, triton \S+\n", result.stdout)


def test_json_is_one_object_a_line() -> None:
    result = run("generate", "--json", "--prompt", "999+1=", "--prompt", "1+2=")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["outputs"][0]["text"] for record in records] == ["1000", "3"]
    assert records[0]["metrics"]["time_to_first_token"] > 0


def test_the_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(resolve_model_path("demo") / name, tmp_path / name)
    (tmp_path / "last.jinja").write_text("{{ messages[-1].content }}")
    model = ["--model", str(tmp_path), "--temperature", "0"]
    refused = run("generate", *model, "--prompt", "12+30=").stderr
    assert "has no tokenizer that can be read" in refused
    assert "--tokenizer" in refused
    assert "skip_tokenizer_init=True" in refused
    assert run("generate", *model, "--tokenizer", "demo", "--prompt", "12+30=").stdout == "42\n"
    template = ["--chat-template", str(tmp_path / "last.jinja")]
    assert run("chat", *model, *template, "--tokenizer", "demo", "12+30=").stdout == "42\n"


def test_a_refused_prompt_is_named_while_the_others_are_answered() -> None:
    result = run("generate", "--prompt", "1+2=", "--prompt", "a" * 600)
    assert result.returncode == 2
    assert "3\n" in result.stdout
    assert "600 tokens" in result.stderr
    assert "hint: the demo only continues prompts such as 417+385=" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "--prompt"),
        (["generate", "hello"], "--prompt"),
        (["generate", "-p", "a", "--prompts-file", "none.txt"], "none.txt"),
        (["generate", "-p", "a", "--model", "no-such-model"], "'no-such-model'"),
        (["generate", "-p", "a", "--model", "shape:llama-100m"], "shape:llama-100m"),
        (["generate", "-p", "a", "--config", "none.toml"], "none.toml"),
        (["generate", "-p", "a", "--max-tokens", "0"], "--max-tokens"),
        (["quantize", "demo", "out", "--group-size", "-1"], "--group-size must be an integer >= 1, got '-1'"),
        (["batch", "none.jsonl", "answers.jsonl"], "none.jsonl"),
        (["generate", "-p", "a", "--temperature", "-1"], "--temperature must be"),
        (["generate", "-p", "a", "--dtype", "int4"], "--dtype must be"),
        (["generate", "-p", "a", "--device", "tpu"], "--device must be"),
        (["generate", "-p", "a", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "-p", "a", "--record-batches", "none/b.json"], "none/b.json must be"),
        (["generate", "-p", "a", "--record-batches", "."], ". must be"),
        (["generate", "-p", "a", "--record-batches", "other.json"], "other.json"),
        (["buckets", "none.toml"], "none.toml"),
        (["buckets", "tune", "--record", "none.json", "--out", "o.toml"], "none.json"),
        (["profile", "--contexts", "100000", "--steps", "2", "--out", "p"], "context"),
        (["nonsense"], "nonsense"),
        (["quantize", "demo"], "graphdecode quantize --help"),
        (["serve", "demo"], "--model"),
        (["inspect", "--dot", "x"], "--dot must be an integer, got 'x'"),
        (["generate", "-p", "a", "--temperature", "warm"], "--temperature must be a number, got 'warm'"),
        (["generate", "-p", "a", "--max-batch-size", "0"], "--max-batch-size must be"),
        (["generate", "-p", "a", "--max-sequence-length", "0"], "--max-sequence-length must be"),
        (["generate", "-p", "a", "--max-sequence-length", "513"], "at most 512"),
        # said before a model is loaded
        ([*ABSENT, "--logit-bias", "a=1"], "'a=1'"),
        ([*ABSENT, "--logit-bias", "7"], "--logit-bias must be"),
        ([*ABSENT, "--logprobs", "3"], "--json"),
        ([*ABSENT, "--min-p", "2"], "--min-p must be"),
        ([*ABSENT, "-n", "0"], "n must be"),
        ([*ABSENT, "--truncate-prompt-tokens", "0"], "--truncate-prompt-tokens must be"),
        # with the option that was typed
        (["chat", "--max-tokens", "0", "hi"], "--max-tokens must be"),
        (["chat", "--speculate", "on", "hi"], "--speculate must be"),
        (["serve", "--speculate=on"], "--speculate must be"),
        (["chat", "--model", "./none", "hi"], "--model './none'"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "other.json").write_text("[1]")
    result = run(*arguments, folder=tmp_path)
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert "error: " in last
    assert message in last
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["-h"], 0), (["models", "-h"], 0)])
def test_help_is_shown_where_nothing_is_asked_for(arguments: list[str], status: int) -> None:
    result = run(*arguments)
    assert result.returncode == status
    shown = result.stdout if status == 0 else result.stderr  # of no command, not where its output would be
    assert shown.startswith("Usage: ")
    assert "\nCommands:\n" in shown
    assert result.stdout + result.stderr == shown


def test_ctrl_c_while_the_commands_are_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("others", [(), ("--model", "other")], ids=["one model", "two"])
def test_a_port_in_use_is_said_before_anything_is_loaded(
    others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").symlink_to(resolve_model_path("demo"))
    for name in ("start_engine_process", "_run_loop"):
        monkeypatch.setattr(f"graphdecode.cli.serve.{name}", lambda *_: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--model", "demo", *others, "--port", port, folder=tmp_path)
    assert result.returncode == 2
    assert "--port 0" in result.stderr


def test_batch_sizes_of_several_runs_are_added_up(tmp_path: Path) -> None:
    prompts = ["-p", "12+30=", "-p", "rev abc="]
    for arguments in (prompts, prompts[:2]):
        result = run("generate", *arguments, "--record-batches", "b.json", "--max-tokens", "2", folder=tmp_path)
        assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "b.json").read_text()) == {"batch_sizes": {"1": 2, "2": 2}}


def test_debug_shows_the_traceback() -> None:
    result = spawn_command("--debug", "generate", "-p", "a", "--model", "no-such-model")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_ends_with_130_no_traceback_and_a_record_of_what_ran(tmp_path: Path) -> None:
    _, _, errors, status = interrupted(tmp_path, "--record-batches", "b.json")
    assert status == 130, errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "b.json").read_text())["batch_sizes"]


def test_an_error_that_a_library_made_of_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def drops_it(*_arguments: object, **_options: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ImportError

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    from graphdecode.cli import app as commands

    monkeypatch.setattr(commands, "app", drops_it)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_buckets_shows_ladder_padding_and_memory(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text("[capacity]\nmax_batch_size = 9\n[buckets]\nbatch_sizes = [1, 4]\n")
    result = run("buckets", "b.toml", folder=tmp_path)
    assert result.returncode == 0
    assert "5-9" in result.stdout
    assert "worst padding: batch size 2 wastes 50%" in result.stdout
    assert "key-value cache" in result.stdout


SMALL = "[capacity]\nmax_batch_size = 1\nmax_sequence_length = 64\n"


def said_of(folder: Path, **environment: str) -> list[str]:
    """Answer one prompt in a process of its own, and return the lines of standard error."""
    (folder / "small.toml").write_text(SMALL)
    result = spawn_command(
        "generate", "--prompt", "12+30=", "--config", "small.toml", "--device", "cpu", folder=folder, **environment
    )
    assert (result.returncode, result.stdout) == (0, "42\n"), result.stderr
    return result.stderr.splitlines()


def test_missing_compiled_kernels_are_one_warning_with_a_remedy(tmp_path: Path) -> None:
    said = said_of(tmp_path, CC="no-such-compiler", GRAPHDECODE_CACHE_DIR=str(tmp_path / "new"))
    (told,) = [line for line in said if "no compiled kernels" in line]
    for line in (told, said[-1]):
        assert "the C compiler 'no-such-compiler' cannot be run" in line
        assert "install it, or name one in CC" in line
    assert "backend on cpu; torch's operators (" in said[-1]


def test_kernels_disabled_on_purpose_are_no_warning(tmp_path: Path) -> None:
    said = said_of(tmp_path, GRAPHDECODE_NATIVE="0")
    assert not [line for line in said if "no compiled kernels" in line]
    assert said[-1].endswith("backend on cpu; torch's operators (GRAPHDECODE_NATIVE is 0)")


def test_a_cache_folder_that_is_a_file_costs_a_line_and_not_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # in a second
    compiler.chmod(0o755)
    said = said_of(tmp_path, GRAPHDECODE_CACHE_DIR=str(tmp_path / "file"), CC=str(compiler))
    (told,) = [line for line in said if "compiled kernels are kept in" in line]
    assert "GRAPHDECODE_CACHE_DIR names a better folder" in told
    assert said[-1].endswith(f"backend on cpu; compiled kernels ({instructions().name})")


def test_a_log_file_gets_lines_and_no_bars(tmp_path: Path) -> None:
    said = said_of(tmp_path)
    assert len(said) == 1
    assert said[0].endswith(f"compiled kernels ({instructions().name})")
    assert "\r" not in said[0]


SMALL_TOML = "[capacity]\nmax_batch_size = 4\nmax_sequence_length = 64\n"
PROMPT = "rev oceanic="


def model_in(folder: Path, generation: dict[str, object] | None) -> Path:
    """The demo with another generation_config.json, or with none."""
    copy = demo_copy(folder / "model")
    (copy / "generation_config.json").unlink()
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, **generation}))
    (folder / "small.toml").write_text(SMALL_TOML)
    return copy


def answers(folder: Path, *options: str) -> list[dict]:
    arguments = ["--model", "model", "--config", "small.toml", "--device", "cpu", "--dtype", "float32", "--json"]
    result = run_command("generate", "-p", PROMPT, *arguments, *options, folder=folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["outputs"]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, SamplingParams()),
        ({}, SamplingParams(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingParams(temperature=0.0)),
        ({"repetition_penalty": 1.1}, SamplingParams(temperature=0.0, repetition_penalty=1.1)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05),
        ),
        ({"do_sample": True, "top_k": None}, SamplingParams()),
    ],
)
def test_sampling_defaults_come_from_generation_config(tmp_path, generation, expected):
    folder = model_in(tmp_path, generation)
    with LLM(folder, max_batch_size=1, max_sequence_length=32, backend="eager", device="cpu") as llm:
        assert llm.get_default_sampling_params() == expected


def test_what_a_checkpoint_cannot_ask_for_is_named(tmp_path: Path) -> None:
    folder = model_in(tmp_path, {"do_sample": True, "top_p": 7})
    with (
        LLM(folder, max_batch_size=1, max_sequence_length=32, backend="eager", device="cpu") as llm,
        pytest.raises(ArgumentError, match="top_p must be a number"),
    ):
        llm.get_default_sampling_params()


def test_options_override_the_checkpoints_sampling_defaults(tmp_path: Path) -> None:
    model_in(tmp_path, {"do_sample": True, "temperature": 50.0})
    assert answers(tmp_path)[0]["text"] != "cinaeco"
    assert answers(tmp_path, "--temperature", "0")[0]["text"] == "cinaeco"
    assert answers(tmp_path, "--top-k", "1")[0]["text"] == "cinaeco"
    assert answers(tmp_path, "--min-p", "1")[0]["text"] == "cinaeco"


def test_every_sampling_option_reaches_the_answer(tmp_path: Path) -> None:
    model_in(tmp_path, {})
    forced = answers(tmp_path, "--logit-bias", "122=1000", "--logit-bias", "257=-1000", "--max-tokens", "5")[0]
    assert forced["text"] == "zzzzz"
    assert answers(tmp_path, "--logit-bias", "122=100", "--frequency-penalty", "2", "--presence-penalty", "2",
                   "--repetition-penalty", "9", "--max-tokens", "5")[0]["text"] != "zzzzz"  # fmt: skip
    longer = answers(tmp_path, "--min-tokens", "12", "--max-tokens", "12")[0]
    assert len(longer["token_ids"]) == 12
    assert answers(tmp_path, "--bad-word", "nae", "--bad-word", "x")[0]["text"] == "cinauco"
    allowed = [option for token in b"cinaeo" for option in ("--allowed-token-id", str(token))]
    assert answers(tmp_path, *allowed, "--max-tokens", "9")[0]["text"] == "cinaecooo"
    assert answers(tmp_path, "--stop-token-id", "110", "--include-stop-str-in-output")[0]["text"] == "cin"
    assert answers(tmp_path, "--ignore-eos", "--max-tokens", "9")[0]["finish_reason"] == "length"
    several = answers(tmp_path, "-n", "3", "--temperature", "9", "--logprobs", "2")
    assert [answer["index"] for answer in several] == [0, 1, 2]
    assert len({tuple(answer["token_ids"]) for answer in several}) == 3
    assert all(len(place) in (2, 3) for answer in several for place in answer["logprobs"])


def test_a_prompt_is_cut_and_scored_and_nothing_generated(tmp_path: Path) -> None:
    model_in(tmp_path, {})
    arguments = ["--model", "model", "--config", "small.toml", "--json", "--max-tokens", "0", "--prompt-logprobs", "1"]
    result = run_command("generate", "-p", PROMPT, *arguments, "--truncate-prompt-tokens", "5", folder=tmp_path)
    record = json.loads(result.stdout)
    assert record["prompt_token_ids"] == list(PROMPT.encode())[-5:]
    first, *others = record["prompt_logprobs"]
    assert first is None
    assert all(str(token) in place for token, place in zip(PROMPT.encode()[-4:], others, strict=True))
    assert record["outputs"][0]["token_ids"] == []


def test_several_answers_stand_under_their_numbers(tmp_path: Path) -> None:
    result = run_command("generate", "-p", "12+30=", "-n", "2", folder=tmp_path)
    assert result.stdout == ">>> 12+30= (1 of 2)\n42\n>>> 12+30= (2 of 2)\n42\n"


def test_help_of_a_setting_shows_its_values_range_and_default() -> None:
    shown = " ".join(run_command("generate", "--help").stdout.replace("│", " ").split())
    assert "auto|fp8|fp8_e4m3|int8" in shown
    assert "1 to 65536. [default: (64)]" in shown
    assert "2147483647" not in shown


@pytest.mark.parametrize(
    ("command", "model"), [("chat", "smollm2"), ("serve", "smollm2"), ("batch", "smollm2"), ("generate", "demo")]
)
def test_what_talks_takes_a_model_that_can_where_none_is_named(command: str, model: str) -> None:
    assert f"[default: {model}]" in run_command(command, "--help").stdout


@pytest.mark.parametrize(
    "command", ["chat", "generate", "serve", "batch", "inspect", "profile", "quantize", "models", "buckets show"]
)
def test_what_comes_from_outside_is_loaded_by_every_command_that_reads_a_model(command: str) -> None:
    assert "--load-module" in run_command(*command.split(), "--help").stdout


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch", "buckets show"])
def test_help_shows_names_of_options_whole_in_a_narrow_terminal(command: str) -> None:
    shown = run_command(*command.split(), "--help", COLUMNS="60").stdout
    assert "--max-sequence-length " in shown or command == "buckets show"
    assert "…" not in shown
    assert ("--batch-invariant " in shown) == (command != "buckets show")
    assert "<list[" not in shown.partition("Options:")[2]
    assert "[default: ()]" not in shown


@pytest.mark.parametrize(("text", "expected"), [('[capture]\nwhen = "startup"\n', "startup"), ("", "idle")])
@pytest.mark.parametrize("command", [("generate", "-p"), ("chat", "--chat-template", "template")])
def test_a_file_says_when_graphs_are_captured(command, text, expected, tmp_path, monkeypatch):
    (tmp_path / "settings.toml").write_text(text)
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    seen: list[EngineConfig] = []

    def watched(self: LLM, *_: object, config: EngineConfig, **__: object) -> None:
        seen.append(config)
        raise ArgumentError("seen")

    monkeypatch.setattr(LLM, "__init__", watched)
    run(*command, "1+1=", "--model", str(model_in(tmp_path, {})), "--config", "settings.toml", folder=tmp_path)
    assert [config.buckets.capture_when for config in seen] == [expected]


def test_the_time_per_token_leaves_out_the_step_of_the_prompt() -> None:
    shown = run("generate", "-p", "12+30=", "--max-tokens", "1").stderr
    assert ("first token after" in shown, "per token" in shown) == (True, False)
    with LLM("demo", max_batch_size=1) as llm:
        llm.generate("12+30=", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert len(llm.stats.decode_seconds) == len(llm.stats.step_seconds) - 1 == 3


def test_an_empty_answer_of_a_chat_model_to_a_raw_prompt_gets_a_hint(tmp_path: Path) -> None:
    folder = model_in(tmp_path, {})
    silent = ["--logit-bias", "257=1000"]  # the end of the sequence, at once
    arguments = ["generate", "-p", PROMPT, "--model", "model", "--config", "small.toml"]
    assert "chat template" not in run_command(*arguments, *silent, folder=tmp_path).stderr
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    hinted = run_command(*arguments, *silent, folder=tmp_path)
    assert hinted.returncode == 0
    assert "hint: an output is empty. This model has a chat template" in hinted.stderr.splitlines()[-1]
    assert "graphdecode chat" in hinted.stderr.splitlines()[-1]
    assert "chat template" not in run_command(*arguments, folder=tmp_path).stderr


DEFAULT = EngineConfig()
TRAINED = 8192
SCRIPT = r"""
import re, runpy, sys, torch
torch.set_num_threads(1)
memory = lambda name: 1024 * int(re.search(name + r":\s+(\d+)", open("/proc/self/status").read())[1])
before = memory("VmRSS")
sys.argv = ["graphdecode", *sys.argv[1:]]
try:
    runpy.run_module("graphdecode", run_name="__main__")
finally:
    heavy = [name for name in ("triton", "torch._dynamo", "sympy") if name in sys.modules]
    print(memory("VmHWM") - before, heavy, file=sys.stderr)
"""


def capacity(settings: EngineConfig) -> tuple[int, int, tuple[int, ...]]:
    return settings.buckets.max_batch_size, settings.buckets.max_sequence_length, settings.buckets.ladder.sizes


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "answers", "expected"),
    [
        ([5], 32, 1, (1, 37, (1,))),
        ([5, 900, 7], 100, 3, (3, 1000, (1, 2, 3))),
        ([5] * 100, 10, 100, (64, 15, BucketConfig().ladder.sizes)),
        ([5000], 100, 1, (1, 4096, (1,))),
        ([5], None, 2, (2, 4096, (1, 2))),
        ([0], 0, 1, (1, 1, (1,))),
    ],
)
def test_capacity_follows_from_the_prompts(lengths, max_tokens, answers, expected):
    settings = fitted(DEFAULT, lengths, max_tokens, outputs=answers, trained_length=TRAINED)
    assert capacity(settings) == expected
    assert capacity(fitted(DEFAULT, [500], 128, outputs=1, trained_length=512))[1] == 512


@pytest.mark.parametrize(
    "command", [("generate", "-p", "1+1="), ("chat", "--chat-template", "template", "a"), ("serve", "--port", "0")]
)
def test_fewer_pages_than_one_sequence_needs_are_refused_with_their_number(command, tmp_path):
    (tmp_path / "few.toml").write_text("[capacity]\ntotal_num_pages = 1\nmax_sequence_length = 256\npage_size = 32\n")
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    refused = run(*command, "--model", "demo", "--config", "few.toml", folder=tmp_path)
    assert refused.returncode == 2
    needed = 5 if command[0] == "generate" else 8  # 4 tokens of the prompt and 128 of the output
    assert f"total_num_pages must be at least {needed}" in refused.stderr
    settings = EngineConfig(buckets=BucketConfig(total_num_pages=2, page_size=32))
    assert fitted(settings, [4], 60, outputs=1, trained_length=TRAINED).buckets.total_num_pages == 2


@pytest.mark.parametrize(("answers", "sizes"), [(1, (4,)), (4, (4,)), (5, (4, 8)), (9, (4, 8, 16)), (99, (4, 8, 16))])
def test_buckets_that_were_chosen_stay_those_that_run(answers: int, sizes: tuple[int, ...]) -> None:
    chosen = EngineConfig(buckets=BucketConfig(max_batch_size=16, batch_sizes=[4, 8]))
    settings = fitted(chosen, [5], 10, outputs=answers, trained_length=TRAINED)
    assert settings.buckets.ladder.sizes == sizes


def test_the_options_set_rows_and_lengths_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LLM] = []
    made = LLM.__init__

    def watched(self: LLM, *arguments: object, **keywords: object) -> None:
        made(self, *arguments, **keywords)  # type: ignore[arg-type]
        seen.append(self)

    monkeypatch.setattr(LLM, "__init__", watched)
    prompts = ["-p", "12+30=", "-p", "rev abc=", "-p", "1+1="]
    result = run("generate", *prompts, "--max-tokens", "9", "--max-batch-size", "2", "--max-sequence-length", "64")
    assert (result.returncode, result.stdout) == (0, ">>> 12+30=\n42\n>>> rev abc=\ncba\n>>> 1+1=\n2\n")
    run("generate", *prompts[:2], "--max-tokens", "9", "--max-sequence-length", "12")
    longest = max(len(seen[0].tokenizer(text).input_ids) for text in prompts[1::2])
    assert [llm.config.max_batch_size for llm in seen] == [2, 1]
    assert [llm.config.max_sequence_length for llm in seen] == [longest + 9, 12]
    assert [llm.cache.total_num_pages for llm in seen] == [2 * -(-(longest + 9) // 16), 1]


def test_a_length_beyond_the_models_is_a_warning_and_reduced() -> None:
    with pytest.warns(UserWarning, match="^max_sequence_length is 512,.* 600"):
        llm = LLM("demo", config=BucketConfig(max_batch_size=1, max_sequence_length=600))
    assert llm.config.max_sequence_length == llm.capacity.max_sequence_length == 512
    llm.close()
    with warnings.catch_warnings(), LLM("demo", config=BucketConfig(max_batch_size=1)) as by_default:
        warnings.simplefilter("error")
        assert by_default.config.max_sequence_length == 512


def test_a_cache_that_holds_less_than_one_sequence_is_warned_of() -> None:
    limits = {"max_batch_size": 1, "max_sequence_length": 64, "backend": "eager"}
    with pytest.warns(UserWarning, match="total_num_pages=3 .*48 tokens.*max_sequence_length=64 needs 4"):
        LLM("demo", total_num_pages=3, **limits).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM("demo", total_num_pages=4, **limits).close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_one_prompt_takes_the_memory_of_weights_and_cache_and_little_more(tmp_path: Path) -> None:
    """Of a fresh process, over what it has after `import torch`: at its peak, and without packages of no use here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, "generate", "--json", "-p", "12+30="],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout)["outputs"][0]["text"] == "42"
    peak, heavy = ran.stderr.splitlines()[-1].split(" ", 1)
    assert int(peak) < 150 * 2**20, f"{int(peak) / 2**20:.0f} MiB"
    import torch

    if not torch.backends.cuda.is_built():
        assert heavy == "[]"


def test_prompts_that_fill_their_room_still_run_side_by_side(tmp_path: Path) -> None:
    prompts = ["-p", "12+30=", "-p", "rev abc=", "-p", "sort cab="]
    result = run("generate", *prompts, "--max-tokens", "2", "--record-batches", "b.json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "b.json").read_text()) == {"batch_sizes": {"3": 2}}
