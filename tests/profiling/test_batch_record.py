"""The record of batch sizes adds up over runs, and a file that is none is named before a run, and kept."""

from pathlib import Path

import pytest

from graphdecode.profiling.tuner import check_record, read_batch_sizes, record_batch_sizes


def test_records_of_several_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "batches.json"
    check_record(path)
    record_batch_sizes(path, {1: 3, 4: 1})
    check_record(path)
    record_batch_sizes(path, {4: 2, 7: 5})
    record_batch_sizes(path, {})
    assert read_batch_sizes(path) == {1: 3, 4: 3, 7: 5}
    assert [file.name for file in tmp_path.iterdir()] == ["batches.json"]


def test_a_run_without_steps_can_be_added_to_but_not_tuned_for(tmp_path: Path) -> None:
    path = tmp_path / "batches.json"
    record_batch_sizes(path, {})
    with pytest.raises(ValueError, match=r"batches\.json counts no decode step"):
        read_batch_sizes(path)
    record_batch_sizes(path, {2: 1})
    assert read_batch_sizes(path) == {2: 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"batch_sizes": []}',
        '{"batch_sizes": {"a": 1}}',
        '{"batch_sizes": {"0": 1}}',
        '{"batch_sizes": {"1": -1}}',
        '{"batch_sizes": {"1": 1.5}}',
        '{"batch_sizes": {"1": true}}',
        '{"batch_sizes": {"1": "2"}}',
    ],
)
def test_a_broken_record_is_named_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batches.json"
    path.write_text(text)
    for refuse in (check_record, read_batch_sizes, lambda file: record_batch_sizes(file, {1: 1})):
        with pytest.raises(ValueError, match=r"batches\.json is no record of batch sizes: (?!.*Error)"):
            refuse(path)
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "batches.json", tmp_path / "batches.json" / "batches.json"):
        with pytest.raises(ValueError, match="must be a file in a folder that exists"):
            check_record(path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.json is no record"):
        check_record(tmp_path / "bytes.json")
