"""Who is to blame when workers die over a chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol import RowReject
from headrace.workers.fill import UNEXPLAINED, Fill, GaveUp


def test_a_chunk_that_nobody_dies_over_is_one_part() -> None:
    fill = Fill(range(4))
    assert fill.part() == (0, 1, 2, 3)
    fill.rendered(fill.part(), [])
    assert fill.done


def test_after_a_death_the_suspect_is_rendered_last_and_alone() -> None:
    fill = Fill(range(4))
    assert fill.died(fill.part(), [1]) is None
    assert fill.part() == (0, 2, 3)
    fill.rendered((0, 2, 3), [])
    assert fill.part() == (1,)
    fill.rendered((1,), [])
    assert fill.done


def test_a_row_is_convicted_only_by_two_deaths_while_it_is_rendered_alone() -> None:
    fill = Fill(range(3))
    assert fill.died((0, 1, 2), [2]) is None
    fill.rendered((0, 1), [])
    assert fill.died((2,), [2]) is None
    assert fill.died((2,), [2]) == 2
    # It is given once more, for the renderer to reject it unseen.
    assert fill.part() == (2,)
    reject = RowReject(2, 7, "/x", "worker", "kills")
    fill.rendered((2,), [reject])
    assert fill.done and fill.rejects == [reject]


def test_every_row_begun_by_a_backend_that_renders_several_at_once_is_a_suspect() -> None:
    fill = Fill(range(4))
    fill.died((0, 1, 2, 3), [0, 1, 2, 3])
    assert fill.suspects == {0, 1, 2, 3}
    parts = []
    while not fill.done:
        parts.append(fill.part())
        fill.rendered(parts[-1], [])
    assert parts == [(0,), (1,), (2,), (3,)]


def test_rows_finished_before_a_death_are_rendered_again() -> None:
    # A row counts as done only when its worker has answered for it.
    fill = Fill(range(4))
    fill.died((0, 1, 2, 3), [3])
    assert fill.part() == (0, 1, 2)


def test_a_stale_mark_outside_the_part_convicts_nobody() -> None:
    fill = Fill(range(3))
    fill.died((0, 1, 2), [0])
    assert fill.part() == (1, 2)
    assert fill.died((1, 2), [0]) is None
    assert fill.died((1, 2), [0]) is None
    assert fill.part() == (1, 2)


def test_deaths_that_no_row_explains_end_the_chunk() -> None:
    fill = Fill(range(2))
    for _ in range(UNEXPLAINED - 1):
        fill.died(fill.part(), [])
    with pytest.raises(GaveUp, match=f"{UNEXPLAINED} workers"):
        fill.died(fill.part(), [])


@given(st.data(), st.integers(1, 12))
def test_no_row_is_lost_or_done_twice_and_a_good_row_needs_two_deaths_alone(data: st.DataObject, rows: int) -> None:
    fill = Fill(range(rows))
    answered: list[int] = []
    alone: dict[int, int] = {}
    for _ in range(60):
        if fill.done:
            break
        part = fill.part()
        assert part and set(part).isdisjoint(answered)
        if data.draw(st.booleans()):
            fill.rendered(part, [])
            answered += part
            continue
        begun = data.draw(st.sampled_from(part))
        convicted = fill.died(part, [begun])
        alone[begun] = alone.get(begun, 0) + (len(part) == 1)
        if convicted is not None:
            assert convicted == begun and alone[begun] >= 2
            alone[begun] = 0
    if fill.done:
        assert sorted(answered) == list(range(rows))


def test_only_the_rows_that_are_wanted_are_given() -> None:
    fill = Fill((5, 2))
    assert fill.part() == (2, 5)
    assert fill.died((2, 5), [5, 7]) is None
    assert fill.part() == (2,)
    fill.rendered((2,), [])
    fill.rendered(fill.part(), [])
    assert fill.done
