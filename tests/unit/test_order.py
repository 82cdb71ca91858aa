from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.pipeline.order import order


def whole(samples: int, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    return order(seed, epoch, samples, 0, samples, shuffle=True)


def chi_square(counts: NDArray[np.int64]) -> float:
    """In standard deviations from its mean, for counts that should all be equal."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_the_order_never_changes() -> None:
    # Expected values: saved states of trainings depend on them. If this fails, the code is wrong, not the test.
    assert whole(10).tolist() == TEN
    assert order(7, 3, 10**9, 5 * 10**8, 4, shuffle=True).tolist() == MIDDLE


def test_each_line_once_for_every_number_of_samples_up_to_2000() -> None:
    for samples in range(1, 2001):
        assert (np.bincount(whole(samples, seed=3, epoch=samples), minlength=samples) == 1).all(), samples


@pytest.mark.parametrize("samples", [10**9, 2**40 - 1, 2**40, 2**40 + 1])
def test_lines_of_a_huge_listing_are_all_different_and_in_range(samples: int) -> None:
    firsts = np.linspace(0, samples - 1000, 50, dtype=np.int64)
    lines = np.concatenate([order(1, 2, samples, int(first), 1000, shuffle=True) for first in firsts])
    assert lines.min() >= 0 and lines.max() < samples
    assert len(np.unique(lines)) == len(lines)
    # Spread over the whole range: 50,000 lines in 100 equal parts.
    assert abs(chi_square(np.histogram(lines, bins=100, range=(0, samples))[0])) < 5


def test_positions_do_not_depend_on_how_they_are_asked_for() -> None:
    lines = whole(1000)
    for first, count in ((0, 1), (999, 1), (123, 456)):
        np.testing.assert_array_equal(order(0, 0, 1000, first, count, shuffle=True), lines[first : first + count])


def test_without_shuffle_it_is_the_identity() -> None:
    np.testing.assert_array_equal(order(5, 6, 100, 40, 10, shuffle=False), np.arange(40, 50))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [whole(1000, seed, epoch) for seed in range(3) for epoch in range(3)]
    for a, b in itertools.combinations(orders, 2):
        # Two random orders agree in one place on average; in 20 in one pair of 10**18.
        assert (a == b).sum() < 20


@pytest.mark.parametrize("samples", range(2, 7))
def test_all_orders_of_a_few_samples_are_equally_likely(samples: int) -> None:
    # The strongest claim there is; it includes single positions, pairs and the parity of the permutation.
    # A network with too few rounds, or with turns of odd length only, is off by tens of standard deviations here.
    keys = max(1500, 5 * math.factorial(samples))
    place = {p: i for i, p in enumerate(itertools.permutations(range(samples)))}
    counts = np.zeros(len(place), np.int64)
    for epoch in range(keys):
        counts[place[tuple(whole(samples, seed=1, epoch=epoch).tolist())]] += 1
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("samples", [8, 9, 16, 25, 31])
def test_even_and_odd_permutations_are_equally_likely(samples: int) -> None:
    # The usual network on pairs of bits makes even permutations only, and so do two odd sides.
    keys = 1000
    odd = 0
    for epoch in range(keys):
        seen, cycles = set[int](), 0
        lines = whole(samples, seed=2, epoch=epoch)
        for start in range(samples):
            cycles += start not in seen
            while start not in seen:
                seen.add(start)
                start = int(lines[start])
        odd += (samples - cycles) % 2
    # Binomial: standard deviation sqrt(1000) / 2 = 16.
    assert abs(odd - keys / 2) < 5 * 16


@pytest.mark.parametrize("samples", [10, 33, 100])
def test_pairs_of_positions_show_each_pair_of_lines_equally_often(samples: int) -> None:
    keys = 3000
    orders = np.stack([whole(samples, seed=4, epoch=epoch) for epoch in range(keys)])
    for a, b in ((0, 1), (0, samples - 1), (samples // 2, samples // 2 + 1)):
        pairs = np.zeros((samples, samples), np.int64)
        np.add.at(pairs, (orders[:, a], orders[:, b]), 1)
        assert pairs.trace() == 0
        # Coarser for the larger ones, so that at least 5 are expected in each cell of the chi-square.
        cell = max(1, samples // 20)
        sums = np.add.reduceat(np.add.reduceat(pairs, range(0, samples, cell)), range(0, samples, cell), axis=1)
        sizes = np.diff([*range(0, samples, cell), samples])
        expected = np.outer(sizes, sizes).astype(float)
        expected[np.diag_indices(len(sizes))] = sizes * (sizes - 1)
        expected *= keys / (samples * (samples - 1))
        used = expected > 0
        statistic = ((sums - expected)[used] ** 2 / expected[used]).sum()
        freedom = used.sum() - 1
        assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)
    single = np.bincount(orders[:, 0], minlength=samples)
    assert abs(chi_square(single)) < 5


def test_neighbours_do_not_stay_together() -> None:
    # Of 100,000 lines, how far the next position's line is: as often up as down, and seldom near.
    steps = np.diff(whole(100_000))
    assert abs((steps > 0).mean() - 0.5) < 0.01
    # P(|step| < 1000) is 2 %, standard deviation 0.04 %.
    assert abs((abs(steps) < 1000).mean() - 0.02) < 0.0025


def test_the_middle_of_a_billion_is_planned_without_the_rest() -> None:
    # Building the permutation would take seconds and gigabytes; the bound is generous.
    begin = time.perf_counter()
    for epoch in range(20):
        order(0, epoch, 10**9, 5 * 10**8, 32, shuffle=True)
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize("first, count", [(-1, 1), (0, 11), (10, 1), (0, -1)])
def test_positions_outside_the_epoch_are_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="not all in an epoch of 10 samples"):
        order(0, 0, 10, first, count, shuffle=True)


TEN = [0, 8, 1, 9, 2, 7, 4, 3, 6, 5]
MIDDLE = [454804132, 454168923, 914529722, 697141471]
