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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[capacity]\nmax_batchsize = 3", ":2: .*max_batchsize: .*'max_batch_size'"),
        ("[capacities]\npage_size = 3", ":1: .*'capacities'.*'capacity'"),
        ("page_size = 3", ":1: .*'page_size'"),
        ("[capacity]\n\npage_size = 0", r":3: \[capacity\] page_size must be .*got 0"),
        ("[capacity]\npage_size = 16.0", r"page_size must be .*got 16\.0"),
        ("[capacity]\npage_size = true", "page_size must be .*got True"),
        ("[capacity]\nmax_batch_size = '8'", "max_batch_size must be .*got '8'"),
        ("[capacity]\ntotal_num_pages = 'all'", "total_num_pages must be .*got 'all'"),
        ("[capacity]\nmemory_fraction = 1.5", r"memory_fraction must be .*got 1\.5"),
        ("[buckets]\nbatch_sizes = []", "batch_sizes must be"),
        ("[buckets]\nbatch_sizes = [0]", "batch_sizes must be"),
        ("[capacity]\nmax_batch_size = 4\n[buckets]\nbatch_sizes = [8]", r":4: batch_sizes must be .*got \[8\]"),
        ("[capture]\nbackend = 'metal'", "backend must be .*got 'metal'"),
        ("[loop]\nsteps_per_launch = 0", "steps_per_launch must be .*got 0"),
        ("[capacity]\npage_size = \n", "line 2"),
        ("[model]\nseed = 1.5", r":2: \[model\] seed must be .*got 1\.5"),
        ("[model]\nprefix_cache = 'no'", r":2: \[model\] prefix_cache must be .*got 'no'"),
        ("[model]\nbatch_invariant = 1", "batch_invariant must be .*got 1"),
        ("[model]\ndtype = 'int4'", "dtype must be .*got 'int4'"),
        ("[model]\ndevice = 'tpu'", "device must be .*got 'tpu'"),
        ("[model]\nquantize = '8 bits'", "quantize must be .*got '8 bits'"),
        ("[scheduling]\nmax_prefill_tokens = 0", "max_prefill_tokens must be .*got 0"),
        ("[speculation]\nmethod = 'luck'", r":2: \[speculation\] method must be .*got 'luck'"),
        ("[speculation]\nnum_tokens = 8", "num_tokens must be .*got 8"),
        ("[speculation]\nngram_min = 6", ":2: ngram_min must be .*ngram_max=5, got 6"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    for config in (EngineConfig, BucketConfig):
        with pytest.raises(ConfigError, match=f"buckets.toml.*{message}"):
            config.load(write(tmp_path, text))


def test_a_missing_file_and_a_value_given_in_python_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.toml"):
        BucketConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="^max_batch_size "):
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
        EngineConfig(BucketConfig(9, batch_sizes=[4, 1], total_num_pages=7, capture_when="first-use")),
    ],
)
def test_all_settings_that_are_written_are_read_back(tmp_path: Path, config: EngineConfig) -> None:
    assert EngineConfig.load(write(tmp_path, config.to_toml())) == config
    assert BucketConfig.load(write(tmp_path, config.buckets.to_toml())) == config.buckets


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
        ({"seed": 2**63}, "^seed .*got 9223372036854775808"),
        ({"batch_invariant": None}, "^batch_invariant .*got None"),
        ({"dtype": torch.int8}, "^dtype .*got 'int8'"),
        ({"device": torch.device("meta")}, "^device .*got 'meta'"),
        ({"quantize": 8}, "^quantize .*got 8"),
        ({"max_prefill_tokens": "many"}, "^max_prefill_tokens .*got 'many'"),
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
    with pytest.raises(ConfigError, match="^memory_fraction "):
        BucketConfig(memory_fraction=Fraction(1, 10**400))
    assert BucketConfig.load(write(tmp_path, config.to_toml())) == config


def test_a_keyword_that_does_not_exist_and_a_config_that_is_none_are_named() -> None:
    with pytest.raises(TypeError, match="'prefixcache'.*'prefix_cache'"):
        EngineConfig.of(None, prefixcache=True)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="^config must be .*got 3"):
        EngineConfig.of(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^buckets must be .*got 3"):
        EngineConfig(buckets=3)  # type: ignore[arg-type]


def test_torch_objects_become_their_names() -> None:
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
