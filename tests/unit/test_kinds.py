"""How uniform numbers become choices and rectangles, the same on every CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.geometry import Flags, Floats
from headrace.pipeline.kinds import GRID, grid, pick, rectangle

BELOW_ONE = np.array([1.0 - 2.0**-53])


@given(st.integers(1, 2**53))
def test_the_largest_number_picks_the_last_choice_and_the_least_the_first(choices: int) -> None:
    assert pick(BELOW_ONE, choices) == choices - 1
    assert pick(np.zeros(1), np.array([choices])) == 0


def test_every_choice_is_picked_as_often() -> None:
    middles = (np.arange(7000) + 0.5) / 7000
    np.testing.assert_array_equal(np.bincount(pick(middles, 7)), np.full(7, 1000))


@given(st.floats(1e-3, 1e6))
def test_the_grid_hides_the_last_place(value: float) -> None:
    near = np.array([value, np.nextafter(value, 0), np.nextafter(value, np.inf)])
    assert np.abs(grid(near) - value).max() <= GRID / 2
    # But where they lie on the two sides of a middle, of which there is one for each multiple.
    assert np.ptp(grid(near)) == 0 or abs(value / GRID % 1 - 0.5) < 1e-4


def any_that_is_not_empty(one: Floats, other: Floats) -> Flags:
    return (one > 0) & (other > 0)


def test_a_rectangle_has_its_share_of_the_area_and_its_ratio() -> None:
    # The middle of a share from 0.2 to 0.3, and of a ratio from 1/2 to 8 on a logarithmic scale.
    one, other = rectangle(3200.0, (0.2, 0.3), (0.5, 8), np.array([[0.5, 0.5]]), any_that_is_not_empty)
    assert (one, other) == (40, 20)


def test_the_first_try_that_fits_counts_and_without_one_there_is_none() -> None:
    shares = np.array([[0.9, 0.0, 0.25, 0.0, 0.04, 0.0]])  # of 10000: 95, 50, 20 pixels a side
    for most, expected in ((99, 95), (94, 50), (49, 20), (19, 0)):
        sides = rectangle(1e4, (0, 1), (1, 1), shares, lambda one, other: (one <= most) & (other <= most))  # noqa: B023
        assert sides == ([expected], [expected])


@pytest.mark.parametrize("ratio", [(1e40, 1e40), (1e300, 1e300), (1e-300, 1e-300)])
def test_sides_beyond_all_integers_do_not_fit(ratio: tuple[float, float]) -> None:
    one, other = rectangle(1e4, (0.5, 1), ratio, np.zeros((1, 20)), lambda one, other: (one < 100) & (other < 100))
    assert (one, other) == (0, 0)
