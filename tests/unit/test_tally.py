"""What is judged, what is next, what was found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.server.tally import ERROR, Found, Tally


def taken(tally: Tally) -> list[tuple[int, tuple[int, ...] | None]]:
    tasks = []
    while (task := tally.take()) is not None:
        tasks.append(task)
    return tasks


def test_every_chunk_is_taken_once_in_order_and_the_last_may_be_short() -> None:
    tally = Tally(10, 4)
    assert taken(tally) == [(0, None), (1, None), (2, None)]
    assert [tally.rows(chunk) for chunk in range(3)] == [4, 4, 2]
    assert tally.judged == 0


def test_chunks_that_are_judged_already_are_not_taken() -> None:
    tally = Tally(10, 4)
    tally.settle(1, None, [(3, "probe", "why")])
    assert taken(tally) == [(0, None), (2, None)]
    assert (tally.judged, list(tally.found())) == (4, [(7, "probe", "why")])


def test_a_chunk_that_fails_is_judged_row_by_row_and_what_was_found_comes_with_the_last_row() -> None:
    tally = Tally(6, 3)
    assert tally.take() == (0, None)
    assert tally.fail(0, None, "cannot be read") is None
    assert taken(tally) == [(0, (0,)), (0, (1,)), (0, (2,)), (1, None)]
    assert tally.fail(0, (2,), "cannot be read") is None
    assert tally.settle(0, (0,), [(0, "decode", "cut")]) is None
    assert tally.settle(0, (1,), []) == [(0, "decode", "cut"), (2, ERROR, "cannot be read")]
    assert (tally.judged, dict(tally.stages)) == (3, {"decode": 1, ERROR: 1})


def test_a_chunk_of_one_row_that_fails_is_not_tried_again() -> None:
    tally = Tally(4, 3)
    assert tally.fail(1, None, "gone") == [(0, ERROR, "gone")]
    assert list(tally.found()) == [(3, ERROR, "gone")]


def test_what_is_overruled_is_found_once_with_the_new_verdict() -> None:
    tally = Tally(6, 3)
    tally.settle(0, None, [(1, "decode", "cut"), (2, "probe", "why")])
    tally.settle(1, None, [])
    tally.overrule(1, "worker", "kills")
    tally.overrule(5, "worker", "kills")
    assert list(tally.found()) == [(1, "worker", "kills"), (2, "probe", "why"), (5, "worker", "kills")]
    assert +tally.stages == {"probe": 1, "worker": 2}


def test_a_data_set_without_samples_is_judged() -> None:
    tally = Tally(0, 32)
    assert tally.take() is None
    assert (tally.chunks, tally.judged, list(tally.found())) == (0, 0, [])


@given(st.data(), st.integers(1, 40), st.integers(1, 8))
def test_each_sample_is_judged_once_whatever_fails_and_in_whatever_order_answers_come(
    data: st.DataObject, samples: int, chunk: int
) -> None:
    bad = data.draw(st.sets(st.integers(0, samples - 1)))
    unreadable = data.draw(st.sets(st.integers(0, samples - 1)))
    tally = Tally(samples, chunk)
    asked: list[tuple[int, tuple[int, ...] | None]] = []
    whole: dict[int, Found] = {}
    while tally.judged < samples:
        while len(asked) < 3 and (task := tally.take()) is not None:
            asked.append(task)
        number, only = asked.pop(data.draw(st.integers(0, len(asked) - 1)))
        rows = range(tally.rows(number)) if only is None else only
        lines = [number * chunk + row for row in rows]
        if unreadable.intersection(lines):
            found = tally.fail(number, only, "why")
        else:
            rejects = [(row, "probe", "why") for row, i in zip(rows, lines, strict=True) if i in bad]
            found = tally.settle(number, only, rejects)
        if found is not None:
            assert number not in whole
            whole[number] = found
    assert not asked and tally.take() is None
    expected = [(i, ERROR if i in unreadable else "probe", "why") for i in sorted(bad | unreadable)]
    assert list(tally.found()) == expected
    assert len(whole) == tally.chunks and sum(map(len, whole.values())) == len(expected)
