"""Law 3: every batch size 1..max_batch_size has a bucket, whatever the configuration says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdecode.buckets import BucketLadder


def assert_no_hole(ladder: BucketLadder, max_batch_size: int) -> None:
    sizes = list(ladder)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_batch_size
    for batch_size in range(1, max_batch_size + 1):
        assert ladder.bucket_for(batch_size) == min(size for size in sizes if size >= batch_size)


@pytest.mark.parametrize("max_graphs", [1, 2, 3, 8, 16, 600])
def test_auto_ladders_have_no_hole_for_any_capacity(max_graphs: int) -> None:
    for max_batch_size in range(1, 601):
        ladder = BucketLadder.auto(max_batch_size, max_graphs)
        assert len(ladder) <= max_graphs
        assert_no_hole(ladder, max_batch_size)


@given(st.integers(1, 200).flatmap(lambda top: st.tuples(st.just(top), st.lists(st.integers(1, top)))))
def test_any_list_has_no_hole(case: tuple[int, list[int]]) -> None:
    max_batch_size, sizes = case
    assert_no_hole(BucketLadder(sizes, max_batch_size), max_batch_size)


def test_auto_ladder_is_dense_where_a_padded_row_weighs_most() -> None:
    assert BucketLadder.auto(64, 16).sizes == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 48, 64)
    assert BucketLadder.auto(8, 8).sizes == (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("batch_size", [0, -1, 9])
def test_a_batch_outside_the_capacity_is_named_in_the_error(batch_size: int) -> None:
    with pytest.raises(ValueError, match=rf"1\.\.max_batch_size=8.* {batch_size}"):
        BucketLadder([1, 4], 8).bucket_for(batch_size)


@pytest.mark.parametrize("sizes", [[0], [9], [1.5], [True], ["4"]])
def test_impossible_sizes_are_refused(sizes: list) -> None:
    with pytest.raises(ValueError, match="batch_sizes"):
        BucketLadder(sizes, 8)


def test_worst_padding_names_the_batch_size_that_wastes_most() -> None:
    assert BucketLadder([1, 8], 8).worst_padding() == (2, 0.75)
    assert BucketLadder(range(1, 9), 8).worst_padding()[1] == 0.0
