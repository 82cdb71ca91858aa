from __future__ import annotations

import numpy as np
import pytest

from headrace.draws import uniforms


def test_the_numbers_never_change() -> None:
    # Expected values: pictures of finished trainings depend on them. If this fails, the code is wrong, not the test.
    assert uniforms(0, 0, "random_resized_crop", 0, 2, 3).tolist() == FIRST
    assert uniforms(2**64 - 1, 7, "replace", 10**12, 1, 5).tolist() == FAR


def test_a_row_is_the_same_however_it_is_asked_for() -> None:
    whole = uniforms(1, 2, "a", 0, 100, 7)
    assert whole.shape == (100, 7) and whole.dtype == np.float64
    for first, count in ((0, 1), (99, 1), (17, 40), (50, 50)):
        np.testing.assert_array_equal(uniforms(1, 2, "a", first, count, 7), whole[first : first + count])


@pytest.mark.parametrize("width", [1, 3, 4, 5, 8, 22])
def test_rows_of_any_width_do_not_overlap(width: int) -> None:
    rows = uniforms(3, 0, "a", 0, 500, width)
    assert len(np.unique(rows)) == rows.size


def test_any_row_is_reached_without_the_ones_before_it() -> None:
    far = 10**12
    rows = uniforms(5, 0, "a", far, 3, 22)
    np.testing.assert_array_equal(uniforms(5, 0, "a", far + 2, 1, 22), rows[2:])


@pytest.mark.parametrize("other", [(1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (0, 0, "a.2")])
def test_another_seed_epoch_or_name_is_another_table(other: tuple[int, int, str]) -> None:
    base, rows = uniforms(0, 0, "a", 0, 1000, 4), uniforms(*other, 0, 1000, 4)
    assert not np.any(base == rows)
    # Independent: |r| of 4000 pairs stays below 5 / sqrt(4000) but for one key in two million.
    assert abs(np.corrcoef(base.ravel(), rows.ravel())[0, 1]) < 0.08


def test_numbers_are_uniform() -> None:
    rows = uniforms(11, 3, "a", 0, 100_000, 2)
    assert rows.min() >= 0 and rows.max() < 1
    for column in rows.T:
        counts = np.histogram(column, bins=100, range=(0, 1))[0]
        # Chi-square of 99 degrees of freedom: mean 99, standard deviation 14; the key is fixed.
        assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * 14
    pairs = np.histogram2d(rows[:, 0], rows[:, 1], bins=10, range=((0, 1), (0, 1)))[0]
    assert ((pairs - 1000) ** 2 / 1000).sum() < 99 + 5 * 14


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    np.random.seed(1)
    first = uniforms(0, 0, "a", 0, 1, 1)
    state = np.random.random()
    np.random.seed(1)
    assert np.random.random() == state
    assert uniforms(0, 0, "a", 0, 1, 1) == first


def test_no_rows_and_no_numbers_are_empty() -> None:
    assert uniforms(0, 0, "a", 5, 0, 3).shape == (0, 3)
    assert uniforms(0, 0, "a", 5, 3, 0).shape == (3, 0)


@pytest.mark.parametrize("seed, epoch, first", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 2**64, 0), (0, 0, -1)])
def test_arguments_out_of_range_are_refused(seed: int, epoch: int, first: int) -> None:
    with pytest.raises(ValueError, match=r"is not in 0 to 2\*\*64 - 1"):
        uniforms(seed, epoch, "a", first, 1, 1)


FIRST = [
    [0.21952356720793775, 0.25333404019779426, 0.4931975692636682],
    [0.9864626672837024, 0.7120426863636279, 0.3040361171794881],
]
FAR = [[0.886439611130677, 0.14890173202770673, 0.3793002443662794, 0.7477490393465156, 0.7337611417459114]]
