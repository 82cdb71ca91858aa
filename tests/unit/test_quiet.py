"""The log of a daemon stays readable, whatever strangers do."""

from __future__ import annotations

import logging

from headrace.server.quiet import BOUNDED, Quiet


def record(created: float, line: int = 1, message: str = "client %d left") -> logging.LogRecord:
    made = logging.LogRecord("headrace", logging.INFO, "service.py", line, message, (7,), None)
    made.created = created
    return made


def test_of_many_lines_of_a_kind_some_go_through_and_the_next_says_how_many_did_not() -> None:
    quiet = Quiet(most=3, seconds=60)
    passed = [quiet.filter(record(1000 + i / 100)) for i in range(10)]
    assert passed == [True] * 3 + [False] * 7
    later = record(1061)
    assert quiet.filter(later)
    assert later.getMessage() == "client 7 left (and 7 more lines like this one before it)"
    after = record(1061)
    assert quiet.filter(after) and after.getMessage() == "client 7 left"


def test_other_lines_go_through_meanwhile() -> None:
    quiet = Quiet(most=1, seconds=60)
    assert quiet.filter(record(1000, line=1)) and not quiet.filter(record(1001, line=1))
    assert quiet.filter(record(1001, line=2))


def test_what_has_a_bound_of_its_own_always_goes_through() -> None:
    quiet = Quiet(most=1, seconds=60)
    for _ in range(3):
        bounded = record(1000)
        vars(bounded).update(BOUNDED)
        assert quiet.filter(bounded)
    assert quiet.filter(record(1000)) and not quiet.filter(record(1000))


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    quiet = Quiet(most=1, seconds=60)
    assert quiet.filter(record(5000)) and quiet.filter(record(10))
    assert not quiet.filter(record(11))
