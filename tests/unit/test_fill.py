"""Who is to blame when workers die over a chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol import RowReject
from headrace.workers.fill import UNEXPLAINED, Fill, GaveUp, Part


def test_a_chunk_that_nobody_dies_over_is_one_part() -> None:
    fill = Fill(range(4))
    assert fill.part().rows == (0, 1, 2, 3)
    fill.rendered(fill.part().rows, [], "a")
    assert fill.done


def test_after_a_death_the_suspect_is_rendered_last_and_alone() -> None:
    fill = Fill(range(4))
    assert fill.died(fill.part().rows, [1]) is None
    assert fill.part().rows == (0, 2, 3)
    fill.rendered((0, 2, 3), [], "a")
    assert fill.part().rows == (1,)
    fill.rendered((1,), [], "a")
    assert fill.done


def test_a_row_is_convicted_only_by_two_deaths_while_it_is_rendered_alone() -> None:
    fill = Fill(range(3))
    assert fill.died((0, 1, 2), [2]) is None
    fill.rendered((0, 1), [], "a")
    assert fill.died((2,), [2]) is None
    assert fill.died((2,), [2]) == 2
    # It is given once more, for the renderer to reject it unseen.
    assert fill.part().rows == (2,)
    reject = RowReject(2, 7, "/x", "worker", "kills")
    fill.rendered((2,), [reject], "a")
    assert fill.done and fill.rejects == [reject]


def test_every_row_begun_by_a_backend_that_renders_several_at_once_is_a_suspect() -> None:
    fill = Fill(range(4))
    fill.died((0, 1, 2, 3), [0, 1, 2, 3])
    assert fill.suspects == {0, 1, 2, 3}
    parts = []
    while not fill.done:
        parts.append(fill.part())
        fill.rendered(parts[-1].rows, [], "a")
    assert parts == [Part((row,), alone=True) for row in range(4)]


def test_rows_finished_before_a_death_are_rendered_again() -> None:
    # A row counts as done only when its worker has answered for it.
    fill = Fill(range(4))
    fill.died((0, 1, 2, 3), [3])
    assert fill.part().rows == (0, 1, 2)


def test_a_stale_mark_outside_the_part_convicts_nobody() -> None:
    fill = Fill(range(3))
    fill.died((0, 1, 2), [0])
    assert fill.part().rows == (1, 2)
    assert fill.died((1, 2), [0]) is None
    assert fill.died((1, 2), [0]) is None
    assert fill.part().rows == (1, 2)


def test_deaths_that_no_row_explains_end_the_chunk() -> None:
    fill = Fill(range(2))
    for _ in range(UNEXPLAINED - 1):
        fill.died(fill.part().rows, [])
    with pytest.raises(GaveUp, match=f"{UNEXPLAINED} workers"):
        fill.died(fill.part().rows, [])


@given(st.data(), st.integers(1, 12))
def test_no_row_is_lost_or_done_twice_and_a_good_row_needs_two_deaths_alone(data: st.DataObject, rows: int) -> None:
    fill = Fill(range(rows))
    answered: list[int] = []
    alone: dict[int, int] = {}
    for _ in range(60):
        if fill.done:
            break
        part = fill.part()
        assert part.rows and set(part.rows).isdisjoint(answered)
        # The fallback is asked exactly for what has killed a worker alone, and a suspect never has company.
        assert part.fallback == (part.alone and alone[part.rows[0]] == 1)
        assert not part.alone or len(part.rows) == 1
        if data.draw(st.booleans()):
            fill.rendered(part.rows, [], "fallback" if part.fallback else "first")
            answered += part.rows
            continue
        begun = data.draw(st.sets(st.sampled_from(part.rows), min_size=1))
        company = not part.alone and data.draw(st.booleans())
        convicted = fill.died(part.rows, begun, alone=not company)
        for row in begun:
            alone[row] = alone.get(row, 0) + (len(part.rows) == 1 and not company)
        if convicted is not None:
            assert begun == {convicted} and alone[convicted] == 2
            alone[convicted] = 0
            # Under the fallback the second time, unless it was all the chunk had and so alone from the start.
            assert part.fallback
    if fill.done:
        assert sorted(answered) == list(range(rows))


def test_a_row_that_kills_alone_is_rendered_by_the_fallback_before_it_is_convicted() -> None:
    fill = Fill(range(2))
    fill.died((0, 1), [1])
    fill.rendered((0,), [], "dali")
    assert fill.part() == Part((1,), alone=True)
    assert fill.died((1,), [1]) is None
    assert fill.part() == Part((1,), alone=True, fallback=True)
    fill.rendered((1,), [], "pillow")
    assert fill.done and fill.render_id == "dali + pillow"


def test_what_is_known_to_kill_goes_to_the_fallback_at_once_and_is_convicted_by_two_deaths_there() -> None:
    fill = Fill(range(3))
    fill.leave_to_fallback([1, 9])
    assert fill.part() == Part((0, 2))
    fill.rendered((0, 2), [], "dali")
    assert fill.part() == Part((1,), alone=True, fallback=True)
    assert fill.died((1,), [1]) is None and fill.died((1,), [1]) == 1
    assert fill.part() == Part((1,))
    fill.rendered((1,), [], "dali")
    assert fill.done


def test_a_death_beside_other_work_is_no_strike() -> None:
    fill = Fill(range(1))
    for _ in range(3):
        assert fill.died((0,), [0], alone=False) is None
        assert fill.part() == Part((0,), alone=True)
    for _ in range(2 * UNEXPLAINED):
        fill.died((0,), [], alone=False)


def test_a_chunk_is_of_those_who_have_rendered_pictures_of_it() -> None:
    reject = RowReject(2, 7, "/x", "worker", "kills")
    fill = Fill(range(3))
    fill.rendered((0,), [], "b")
    fill.rendered((1,), [], "a")
    fill.rendered((2,), [reject], "c")
    assert fill.render_id == "a + b"
    bad = Fill([2])
    bad.rendered((2,), [reject], "c")
    assert bad.render_id == "c"


def test_only_the_rows_that_are_wanted_are_given() -> None:
    fill = Fill((5, 2))
    assert fill.part().rows == (2, 5)
    assert fill.died((2, 5), [5, 7]) is None
    assert fill.part().rows == (2,)
    fill.rendered((2,), [], "a")
    fill.rendered(fill.part().rows, [], "a")
    assert fill.done
