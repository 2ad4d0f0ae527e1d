"""At the shell a run takes the room that its prompts and answers can fill, and starts without what it needs not."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from command_line import run_command as run

from graphdecode import LLM, BucketConfig, EngineConfig
from graphdecode.cli.checkpoint import fitted

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
    settings = fitted(DEFAULT, lengths, max_tokens, answers=answers, trained_length=TRAINED)
    assert capacity(settings) == expected


def test_capacity_is_never_above_what_the_model_was_trained_for() -> None:
    settings = fitted(DEFAULT, [500], 128, answers=1, trained_length=512)
    assert settings.buckets.max_sequence_length == 512


@pytest.mark.parametrize(("answers", "sizes"), [(1, (4,)), (4, (4,)), (5, (4, 8)), (9, (4, 8, 16)), (99, (4, 8, 16))])
def test_buckets_that_were_chosen_stay_those_that_run(answers: int, sizes: tuple[int, ...]) -> None:
    chosen = EngineConfig(buckets=BucketConfig(max_batch_size=16, batch_sizes=[4, 8]))
    settings = fitted(chosen, [5], 10, answers=answers, trained_length=TRAINED)
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


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-batch-size", "0", "--max-batch-size must be an integer in 1..65536, got 0"),
        ("--max-sequence-length", "0", "--max-sequence-length must be an integer"),
        ("--max-sequence-length", "513", "--max-sequence-length must be at most 512, for which the model was trained"),
    ],
)
def test_limits_that_cannot_be_are_refused(option: str, value: str, message: str) -> None:
    result = run("generate", "-p", "1+1=", option, value)
    assert result.returncode == 2
    assert message in result.stderr


def test_the_figures_say_how_long_loading_took() -> None:
    result = run("generate", "-p", "1+1=")
    (seconds,) = re.findall(r"ready after (\d+\.\d\d) s; \d+ tokens in", result.stderr)
    assert float(seconds) > 0


def test_a_length_beyond_the_models_is_warned_about_and_the_config_says_what_holds() -> None:
    with pytest.warns(UserWarning, match="max_sequence_length is 512, for which the model was trained, and not 600"):
        llm = LLM("demo", config=BucketConfig(max_batch_size=1, max_sequence_length=600))
    assert llm.config.max_sequence_length == llm.capacity.max_sequence_length == 512
    llm.close()
    with warnings.catch_warnings(), LLM("demo", config=BucketConfig(max_batch_size=1)) as by_default:
        warnings.simplefilter("error")
        assert by_default.config.max_sequence_length == 512


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
