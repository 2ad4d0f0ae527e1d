"""How `graphdecode generate` samples: what options say, else the checkpoint's `generation_config.json`."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import run_command

from graphdecode import LLM, ArgumentError, SamplingParams
from graphdecode.models import resolve_model_path

SMALL = "[capacity]\nmax_batch_size = 4\nmax_sequence_length = 64\n"
PROMPT = "rev oceanic="


def model_in(folder: Path, generation: dict[str, object] | None) -> Path:
    """The demo with another generation_config.json, or with none."""
    copy = folder / "model"
    shutil.copytree(resolve_model_path("demo"), copy)
    (copy / "generation_config.json").unlink()
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, **generation}))
    (folder / "small.toml").write_text(SMALL)
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
def test_a_checkpoint_says_how_it_wants_to_be_sampled(tmp_path, generation, expected):
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


def test_the_shell_follows_the_checkpoint_until_an_option_says_otherwise(tmp_path: Path) -> None:
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


def test_help_says_whose_the_defaults_are() -> None:
    shown = " ".join(run_command("generate", "--help").stdout.split())
    assert "the checkpoint's generation_config.json" in shown
    assert "Without that file it is the library's default" in shown


def test_help_of_a_setting_names_what_it_takes_and_what_stands_where_it_is_left_out() -> None:
    shown = " ".join(run_command("generate", "--help").stdout.replace("│", " ").split())
    assert "auto|fp8|fp8_e4m3|int8" in shown
    assert "none expands all. Left out: as the checkpoint has them" in shown
    assert "at the same time. 1 to 65536. [default: (64)]" in shown
    assert "2147483647" not in shown


@pytest.mark.parametrize(
    "command", ["chat", "generate", "serve", "batch", "inspect", "profile", "quantize", "models", "buckets show"]
)
def test_what_comes_from_outside_is_loaded_by_every_command_that_reads_a_model(command: str) -> None:
    assert "--load-module" in run_command(*command.split(), "--help").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "a=1"], "--logit-bias must be a token id and a number, such as 42=-5, got 'a=1'"),
        (["--logit-bias", "7"], "--logit-bias must be a token id and a number"),
        (["--logprobs", "3"], "--logprobs and --prompt-logprobs are printed with --json alone"),
        (["--min-p", "2"], "--min-p must be a number in [0, 1], got 2.0"),
        (["-n", "0"], "n must be an integer in 1..1024"),
        (["--truncate-prompt-tokens", "0"], "--truncate-prompt-tokens must be None, -1 or an integer >= 1"),
    ],
)
def test_what_cannot_be_is_said_before_a_model_is_loaded(options: list[str], message: str) -> None:
    result = run_command("generate", "-p", "a", "--model", "no-such-model", *options)
    assert result.returncode == 2
    assert message in result.stderr


def test_an_empty_answer_of_a_chat_model_to_a_raw_prompt_gets_a_hint(tmp_path: Path) -> None:
    folder = model_in(tmp_path, {})
    silent = ["--logit-bias", "257=1000"]  # the end of the sequence, at once
    arguments = ["generate", "-p", PROMPT, "--model", "model", "--config", "small.toml"]
    assert "chat template" not in run_command(*arguments, *silent, folder=tmp_path).stderr
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    hinted = run_command(*arguments, *silent, folder=tmp_path)
    assert hinted.returncode == 0
    assert "hint: an answer is empty. This model has a chat template" in hinted.stderr.splitlines()[-1]
    assert "graphdecode chat" in hinted.stderr.splitlines()[-1]
    assert "chat template" not in run_command(*arguments, folder=tmp_path).stderr


def test_a_misspelt_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'; did you mean 'temperature'\\?"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'; known: n, "):
        SamplingParams(zzz=1)  # type: ignore[call-arg]
