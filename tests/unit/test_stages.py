"""Measuring stages: counts, sums, buckets, and that laps leave no time out."""

from __future__ import annotations

import time

import pytest

from headrace.protocol import BUCKETS
from headrace.stages import Clock, Stages, bucket


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, 0), (0.9e-6, 0), (1.5e-6, 1), (3e-6, 2), (5e-6, 3), (1e-3, 10), (1.0, 20), (3000.0, 31), (1e9, 31)],
)
def test_bucket_i_is_from_two_to_the_i_minus_one_to_two_to_the_i_microseconds(seconds: float, expected: int) -> None:
    assert bucket(seconds) == expected
    assert expected == BUCKETS - 1 or seconds * 1e6 < 2**expected
    assert expected == 0 or seconds * 1e6 >= 2 ** (expected - 1)


def test_pieces_of_work_done_together_count_as_that_many_equal_ones() -> None:
    stages = Stages()
    stages.add("decode", 8e-3, 4, 100)
    stages.add("decode", 5e-6, nbytes=7)
    status = stages.status()["decode"]
    assert (status.count, status.seconds, status.nbytes) == (5, 8e-3 + 5e-6, 107)
    assert {i: n for i, n in enumerate(status.histogram) if n} == {3: 1, 11: 4}


def test_time_that_is_no_piece_of_work_is_in_the_sum_alone() -> None:
    stages = Stages()
    stages.add("plan", 0.5, 0)
    status = stages.status()["plan"]
    assert (status.count, status.seconds, sum(status.histogram)) == (0, 0.5, 0)


def test_stages_of_several_are_added_up_whether_measured_here_or_told() -> None:
    one, other, total = Stages(), Stages(), Stages()
    one.add("read", 1e-3, nbytes=10)
    other.add("read", 2e-3, nbytes=20)
    other.add("wait", 1.0)
    total.merge(one)
    total.merge(other.status())
    assert total.status()["read"].nbytes == 30
    assert total.status()["read"].count == sum(total.status()["read"].histogram) == 2
    assert total.status()["wait"] == other.status()["wait"]
    assert total.seconds("read") == pytest.approx(3e-3)
    assert total.seconds("never") == 0.0
    other.add("wait", 1.0)  # what was taken over does not change any more
    assert total.seconds("wait") == 1.0


def test_laps_leave_no_time_out() -> None:
    stages = Stages()
    before = time.perf_counter()
    clock = Clock(stages)
    for i in range(200):
        clock.lap(f"stage {i % 3}", i % 2)
    measured = sum(stages.seconds(f"stage {i}") for i in range(3))
    after = time.perf_counter()
    assert 0 < measured <= after - before
    clock.lap("last", 0)
    assert measured + stages.seconds("last") >= after - before - 1e-4
