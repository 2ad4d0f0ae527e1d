"""The bucket configuration file: what it accepts, and how it says what is wrong."""

from pathlib import Path

import pytest

from graphdecode.config import BucketConfig, ConfigError

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


def test_the_documented_file_is_the_default(tmp_path: Path) -> None:
    assert BucketConfig.load(write(tmp_path, EXAMPLE)) == BucketConfig()


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert BucketConfig.load(write(tmp_path, "")) == BucketConfig()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = BucketConfig(max_batch_size=9, batch_sizes=[4, 1], total_num_pages=7, capture_when="first-use")
    assert BucketConfig.load(write(tmp_path, config.to_toml())) == config
    assert config.ladder.sizes == (1, 4, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[capacity]\nmax_batchsize = 3", r":2: \[capacity\] max_batchsize: unknown key; known: max_batch_size"),
        ("[capacities]\npage_size = 3", r":1: unknown section or key 'capacities'"),
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
        ("[capture]\nwhen = 'later'", r"when must be one of 'startup', 'first-use', got 'later'"),
        ("[loop]\nsteps_per_launch = 0", r"steps_per_launch must be an integer in 1\.\.4096, got 0"),
        ("[capacity]\npage_size = \n", r"buckets\.toml: .*line 2"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        BucketConfig.load(write(tmp_path, text))
    assert "buckets.toml" in str(caught.value)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.toml"):
        BucketConfig.load(tmp_path / "none.toml")


def test_values_given_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="max_batch_size must be an integer"):
        BucketConfig(max_batch_size=0)
