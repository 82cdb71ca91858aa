"""When something that failed is tried again."""

from __future__ import annotations

from headrace.workers.backoff import STEADY, Backoff


def test_each_failure_in_a_row_is_followed_by_a_longer_pause_up_to_the_last() -> None:
    backoff = Backoff((1.0, 5.0))
    assert backoff.due(0.0)
    assert [backoff.failed(now) for now in (10.0, 20.0, 30.0)] == [1.0, 5.0, 5.0]
    assert not backoff.due(34.9) and backoff.due(35.0)


def test_what_has_worked_for_a_while_begins_anew_and_what_has_not_does_not() -> None:
    backoff = Backoff((1.0, 5.0))
    assert backoff.failed(0.0) == 1.0
    assert backoff.failed(0.0, worked=STEADY - 1) == 5.0
    assert backoff.failed(0.0, worked=STEADY) == 1.0
