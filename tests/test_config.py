"""The configuration file and its Python side: what they accept, and how they say what is wrong."""

import re
import tomllib
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from graphdecode import ArgumentError
from graphdecode.config import BucketConfig, ConfigError, EngineConfig
from graphdecode.config.key import keys_of, toml_value
from graphdecode.kernels.native.instructions import NAMES
from making.configuration import default_file, reference

ROOT = Path(__file__).parent.parent
EXAMPLE = """\
[capacity]
max_batch_size = 64            # rows
max_sequence_length = 4096     # prompt + generated, per sequence
page_size = 16
total_num_pages = "auto"       # or a number; auto fills memory_fraction of what is free
memory_fraction = 0.9
[buckets]
batch_sizes = "auto"           # or [1, 2, 4, 8, ...]; max_batch_size is added if missing
max_graphs = 16
[capture]
when = "startup"               # or "first-use"
backend = "auto"               # cuda | recorded | eager
warmup_steps = 2
[loop]
steps_per_launch = 1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "buckets.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [EXAMPLE, ""], ids=["documented", "empty"])
def test_the_documented_file_is_the_default_and_so_is_an_empty_one(tmp_path: Path, text: str) -> None:
    assert BucketConfig.load(write(tmp_path, text)) == BucketConfig()
    assert EngineConfig.load(write(tmp_path, text)) == EngineConfig()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = BucketConfig(max_batch_size=9, batch_sizes=[4, 1], total_num_pages=7, capture_when="first-use")
    assert BucketConfig.load(write(tmp_path, config.to_toml())) == config
    assert config.ladder.sizes == (1, 4, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[capacity]\nmax_batchsize = 3",
            r":2: \[capacity\] max_batchsize: unknown key; did you mean 'max_batch_size'",
        ),
        ("[capacities]\npage_size = 3", r":1: unknown section or key 'capacities'; did you mean 'capacity'\?"),
        ("page_size = 3", r":1: unknown section or key 'page_size'"),
        ("[capacity]\n\npage_size = 0", r":3: \[capacity\] page_size must be an integer in 1\.\.65536, got 0"),
        ("[capacity]\npage_size = 16.0", r"page_size must be an integer.*got 16\.0"),
        ("[capacity]\npage_size = true", r"page_size must be an integer.*got True"),
        ("[capacity]\nmax_batch_size = '8'", r"max_batch_size must be an integer.*got '8'"),
        ("[capacity]\ntotal_num_pages = 'all'", r"total_num_pages must be 'auto' or an integer.*got 'all'"),
        ("[capacity]\nmemory_fraction = 1.5", r"memory_fraction must be a number above 0 and at most 1, got 1\.5"),
        ("[buckets]\nbatch_sizes = []", r"batch_sizes must be 'auto' or a list of at least one integer"),
        ("[buckets]\nbatch_sizes = [0]", r"batch_sizes must be"),
        ("[capacity]\nmax_batch_size = 4\n[buckets]\nbatch_sizes = [8]", r":4: batch_sizes must be at most .*4, got"),
        ("[capture]\nbackend = 'metal'", r"backend must be one of 'auto', 'cuda', 'recorded', 'eager', got 'metal'"),
        ("[capture]\nwhen = 'later'", r"when must be one of 'startup', 'idle', 'first-use', got 'later'"),
        ("[loop]\nsteps_per_launch = 0", r"steps_per_launch must be an integer in 1\.\.4096, got 0"),
        ("[capacity]\npage_size = \n", r"buckets\.toml: .*line 2"),
        ("[model]\nseed = 1.5", r"buckets\.toml:2: \[model\] seed must be an integer in -2\^63\.\.2\^63-1, got 1\.5"),
        ("[model]\nseed = true", r"seed must be an integer.*got True"),
        ("[model]\nprefix_cache = 'no'", r":2: \[model\] prefix_cache must be true or false, got 'no'"),
        ("[model]\nbatch_invariant = 1", r"batch_invariant must be true or false, got 1"),
        ("[model]\ndtype = 'int4'", r"dtype must be auto, float32, bfloat16 or float16, got 'int4'"),
        ("[model]\ndevice = 'tpu'", r"device must be auto, cpu or cuda .*, got 'tpu'"),
        ("[model]\nquantize = '8 bits'", r"quantize must be None or a weight form's name, got '8 bits'"),
        ("[model]\nkv_cache_type = 'fp8'", r":2: \[model\] kv_cache_type: unknown key; did you mean 'kv_cache_dtype'"),
        ("[scheduling]\nmax_prefill_tokens = 0", r"max_prefill_tokens must be 'auto' or an integer in 1\.\..*, got 0"),
        ("[drafts]\nmethod = 'ngram'", r":1: unknown section or key 'drafts'; known: \[capacity\], .*\[model\]"),
        ("[speculation]\nmethod = 'luck'", r":2: \[speculation\] method must be one of .*'ngram'.*, got 'luck'"),
        ("[speculation]\nnum_tokens = 8", r"\[speculation\] num_tokens must be 'auto' or an integer in 1\.\.7, got 8"),
        ("[speculation]\nngram_min = 6", r":2: ngram_min must be at most ngram_max=5, got 6"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    for config in (EngineConfig, BucketConfig):
        with pytest.raises(ConfigError, match=message) as caught:
            config.load(write(tmp_path, text))
        assert "buckets.toml" in str(caught.value)


def test_a_missing_file_and_a_value_given_in_python_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.toml"):
        BucketConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="max_batch_size must be an integer"):
        BucketConfig(max_batch_size=0)


ALL = (
    EXAMPLE
    + """\
[scheduling]
max_prefill_tokens = 256
[model]
device = "cpu"
dtype = "bfloat16"
seed = 7
quantize = "int8"
batch_invariant = true
prefix_cache = false
"""
)
SETTINGS = EngineConfig(
    max_prefill_tokens=256,
    device="cpu",
    dtype="bfloat16",
    seed=7,
    quantize="int8",
    batch_invariant=True,
    prefix_cache=False,
)


def test_one_file_holds_all_settings_and_buckets_are_read_from_it_too(tmp_path: Path) -> None:
    path = write(tmp_path, ALL.replace("max_graphs = 16", "max_graphs = 3"))
    assert EngineConfig.load(path) == replace(SETTINGS, buckets=BucketConfig(max_graphs=3))
    assert BucketConfig.load(path) == BucketConfig(max_graphs=3)


QUOTED = "C:\\models\\new \"best\" 'é'.gguf"


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        SETTINGS,
        replace(SETTINGS, buckets=BucketConfig(max_graphs=2)),
        EngineConfig(speculation="model", draft_model=QUOTED),
    ],
)
def test_all_settings_that_are_written_are_read_back(tmp_path: Path, config: EngineConfig) -> None:
    assert EngineConfig.load(write(tmp_path, config.to_toml())) == config


@pytest.mark.parametrize("value", [QUOTED, "".join(map(chr, range(160))) + "\u2028\U0001f600", ('"', "\\", "#")])
def test_any_text_is_written_as_toml_reads_it(value: str | tuple[str, ...]) -> None:
    found = tomllib.loads(f"key = {toml_value(value)}")["key"]
    assert found == (list(value) if isinstance(value, tuple) else value)


def test_keywords_override_what_they_are_given_with(tmp_path: Path) -> None:
    path = write(tmp_path, ALL)
    assert EngineConfig.of(path) == EngineConfig.of(str(path)) == EngineConfig.of(SETTINGS) == SETTINGS
    assert EngineConfig.of(path, seed=3, quantize=None) == replace(SETTINGS, seed=3, quantize=None)
    assert EngineConfig.of(None) == EngineConfig()
    small = BucketConfig(max_batch_size=2)
    assert EngineConfig.of(small, dtype="float32") == EngineConfig(buckets=small, dtype="float32")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seed": 1.5}, "seed must be an integer in .*, got 1.5"),
        ({"seed": True}, "seed must be an integer in .*, got True"),
        ({"seed": 2**63}, "seed must be an integer in .*, got 9223372036854775808"),
        ({"prefix_cache": "no"}, "prefix_cache must be true or false, got 'no'"),
        ({"batch_invariant": None}, "batch_invariant must be true or false, got None"),
        ({"dtype": None}, "dtype must be auto, .*, got None"),
        ({"dtype": torch.int8}, "dtype must be auto, .*, got 'int8'"),
        ({"device": torch.device("meta")}, "device must be auto, .*, got 'meta'"),
        ({"quantize": 8}, "quantize must be None or a weight form's name, got 8"),
        ({"max_prefill_tokens": "many"}, "max_prefill_tokens must be 'auto' or an integer.*, got 'many'"),
    ],
)
def test_keywords_are_checked_like_a_file(keywords: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(None, **keywords)
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**keywords)


def test_numbers_of_numpy_and_fractions_become_pythons(tmp_path: Path) -> None:
    config = BucketConfig(max_batch_size=np.int64(4), batch_sizes=[np.int32(2), 4], memory_fraction=Fraction(1, 2))
    assert config == BucketConfig(max_batch_size=4, batch_sizes=[2, 4], memory_fraction=0.5)
    assert {type(number) for number in (*config.batch_sizes, config.max_batch_size)} == {int}
    assert type(config.memory_fraction) is float
    with pytest.raises(ConfigError, match="memory_fraction must be a number above 0"):
        BucketConfig(memory_fraction=Fraction(1, 10**400))
    assert BucketConfig.load(write(tmp_path, config.to_toml())) == config


def test_a_keyword_that_does_not_exist_and_a_config_that_is_none_are_named() -> None:
    with pytest.raises(
        TypeError,
        match="unexpected keyword argument 'prefixcache'; did you mean 'prefix_cache'[?]; known: .*prefix_cache",
    ):
        EngineConfig.of(None, prefixcache=True)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"config must be an EngineConfig, .*, got 3"):
        EngineConfig.of(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="buckets must be a BucketConfig, got 3"):
        EngineConfig(buckets=3)  # type: ignore[arg-type]


def test_torchs_own_objects_are_kept_by_their_names() -> None:
    config = EngineConfig.of(None, dtype=torch.bfloat16, device=torch.device("cuda", 1))
    assert (config.dtype, config.device) == ("bfloat16", "cuda:1")


def test_prompt_tokens_of_a_step_follow_the_device_unless_they_are_given() -> None:
    config = EngineConfig()
    assert (config.prefill_tokens("cuda"), config.prefill_tokens("cpu")) == (2048, 512)
    assert replace(config, max_prefill_tokens=64).prefill_tokens("cuda") == 64


def test_every_key_has_a_default_that_it_takes_and_a_meaning() -> None:
    for each in [*keys_of(BucketConfig), *keys_of(EngineConfig)]:
        each.check(each.default)
        assert each.meaning.endswith("."), each.name
    assert [field.name for field in fields(BucketConfig)] == [each.field for each in keys_of(BucketConfig)]


def test_the_committed_file_holds_the_defaults() -> None:
    assert EngineConfig.load(ROOT / "buckets.toml") == EngineConfig()
    for each in [*keys_of(BucketConfig), *keys_of(EngineConfig)]:
        assert f"{each.name} = " in (ROOT / "buckets.toml").read_text()


def test_the_reference_names_all_environment_variables_and_sets_of_instructions() -> None:
    sources = [file.read_text() for room in ("graphdecode", "kernels") for file in (ROOT / room).rglob("*.py")]
    table = reference().partition("## Environment variables")[2]
    assert {*re.findall(r"`(GRAPHDECODE_\w+)`", table)} == {*re.findall(r"\bGRAPHDECODE_[A-Z_]+\b", "".join(sources))}
    assert all(f"`{name}`" in table for name in NAMES)


def test_the_committed_reference_and_file_are_those_of_the_code() -> None:
    again = "run tools/make configuration"
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), again
    assert (ROOT / "buckets.toml").read_text() == default_file(), again
