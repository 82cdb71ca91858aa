"""How much faster a Loader could be fed, when it reports, and what it says at the end of an epoch."""

from __future__ import annotations

import pytest

from headrace.pace import Pace, Work, summary


def fed(pace: Pace, *steps: tuple[int, float]) -> float:
    """So many chunks are asked for, each time for so many seconds; how long the workers count as busy."""
    now = 100.0
    before = pace.work
    for outstanding, seconds in steps:
        pace.asked(outstanding, now)
        now += seconds
    pace.asked(0, now)
    return pace.work.since(before).workers


@pytest.fixture
def pace() -> Pace:
    made = Pace()
    made.serves(4)
    fed(made, (8, 0.0))  # it has asked for more than the workers are at at once
    return made


def test_workers_that_have_no_more_to_do_than_they_can_are_busy_in_part(pace: Pace) -> None:
    assert fed(pace, (4, 2.0)) == 2.0
    assert fed(pace, (8, 2.0)) == 2.0
    assert fed(pace, (1, 2.0), (0, 6.0)) == 0.5


def test_a_loader_that_never_asks_for_more_than_two_chunks_cannot_be_fed_by_four_workers() -> None:
    pace = Pace()
    pace.serves(4)
    fed(pace, (2, 1.0))
    assert fed(pace, (2, 3.0)) == 3.0
    assert fed(pace, (1, 3.0)) == 1.5


def test_headroom_is_what_the_busiest_leaves() -> None:
    assert Work(2.0, 1.0).headroom(10.0) == 5.0
    assert Work(2.0, 8.0).headroom(10.0) == 1.25
    assert Work(20.0, 8.0).headroom(10.0) == 1.0  # more work than time is none
    assert Work().headroom(10.0) is None
    assert Work(1.0, 1.0).headroom(0.0) is None


def test_a_report_is_due_at_most_once_a_second_when_something_was_taken_and_at_the_end_of_an_epoch(pace: Pace) -> None:
    assert not pace.due(0.0)  # nothing was taken
    pace.took(3, 0.1, 0.2)
    assert pace.due(0.0)
    pace.took(3, 0.1, 0.2)
    assert not pace.due(0.9)
    assert pace.due(1.1)
    assert not pace.due(9.0)  # nothing has changed
    pace.epoch_over()
    assert pace.due(9.1)
    assert not pace.due(9.2)
    pace.anew()  # another daemon knows nothing of it
    assert pace.due(9.3)
    assert (pace.batches, pace.images, pace.waited, pace.spent) == (2, 6, 0.2, 0.4)


@pytest.mark.parametrize(
    ("waited", "headroom", "expected"),
    [
        (3.0, 1.61, "waited 3 % of the time; the loader could feed 1.6 times as fast"),
        (0.0, 31.0, "waited 0 % of the time; the loader could feed more than 10 times as fast"),
        (4.9, 1.04, "waited 5 % of the time; the loader could feed no faster"),
        (0.0, None, "waited 0 % of the time"),
        (40.0, 1.0, "waited 40 % of the time; without that the trainer would be 1.7 times as fast"),
        (100.0, 1.0, "waited 100 % of the time; without that the trainer would be more than 10 times as fast"),
    ],
)
def test_an_epoch_in_one_line(waited: float, headroom: float | None, expected: str) -> None:
    assert summary(3, 1281167, waited, 100.0, headroom) == f"epoch 3: 1281167 images, {expected}"
