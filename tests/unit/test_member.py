"""A worker as its supervisor sees it: what it can have, and since when it is silent."""

from __future__ import annotations

from typing import Any, cast

from headrace.workers.fill import Part
from headrace.workers.member import PROMPT, Given, Job, Member
from headrace.workers.messages import Leaving

ROWS, SUSPECT = Part((0, 1)), Part((2,), alone=True)


def member(**more: Any) -> Member:
    return Member(cast(Any, None), (), 0, room=2, moved=0.0, **({"render_id": "a"} | more))


def given(part: Part = ROWS, moved: float = 0.0) -> Given:
    return Given(Job(0, 0, 0, 0, 4), part, b"", moved)


def test_it_takes_as_many_parts_as_it_has_room_for() -> None:
    at = member()
    assert at.takes(ROWS) and at.give(given()) == 1
    assert at.takes(ROWS) and at.give(given()) == 2
    assert not at.takes(ROWS)
    del at.given[1]
    assert at.takes(ROWS) and at.give(given()) == 3  # no number comes twice


def test_nobody_waits_for_room_at_one_that_may_hang() -> None:
    """Whoever is at home there would get nothing for as long as others ask, until it is killed."""
    at = member()
    at.give(given(moved=10.0))
    assert not at.full(11.0)
    at.give(given(moved=10.0))
    assert at.full(11.0) and not at.full(10.0 + PROMPT)
    at.moved = 10.0 + PROMPT  # it has answered
    assert at.full(11.0 + PROMPT)
    at.leaving = Leaving(text="no memory", failed=True)
    assert not at.full(11.0 + PROMPT)


def test_a_suspect_has_it_alone() -> None:
    at = member()
    number = at.give(given())
    assert not at.takes(SUSPECT)
    del at.given[number]
    assert at.takes(SUSPECT)
    at.give(given(SUSPECT))
    assert not at.takes(ROWS)


def test_one_that_is_not_ready_or_is_going_takes_nothing() -> None:
    assert not member(render_id=None).takes(ROWS)
    assert not member(deaf=1.0).takes(ROWS)
    assert not member(leaving=Leaving(text="no memory", failed=True)).takes(ROWS)
    assert not member(hung="it hung for 9 s").takes(ROWS)


def test_it_is_silent_when_nothing_of_all_it_has_moves() -> None:
    at = member()
    assert at.silent(100.0) == at.behind(100.0) == 0.0  # it has nothing to say
    first = at.give(given(moved=100.0))
    at.give(given(moved=150.0))
    assert at.silent(160.0) == 10.0 and at.behind(160.0) == 60.0
    at.given[first].moved = 155.0
    assert at.silent(160.0) == 5.0 and at.behind(160.0) == 10.0
    at.moved = 159.0  # it has answered for another one
    assert at.silent(160.0) == 1.0 and at.behind(160.0) == 10.0
