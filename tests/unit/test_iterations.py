from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import DatasetError
from headrace.pipeline.render import Part, Rendered
from headrace.protocol import RowReject
from headrace.workers.iterations import Chunk, Iterations
from headrace.workers.messages import Render

STREAM: Any = object()
OTHER: Any = object()
VIEW: Any = None


def part(pictures: int = 4, pixels: int = 40, of: Any = STREAM) -> Part:
    return Part(of, VIEW, rows=list(range(pictures)), pixels=pixels)


def chunk(iterations: Iterations, job: int = 0) -> Chunk:
    return iterations.begin(Render(job=job, stream=0, epoch=0, chunk=job, slot=0, rows=(0,)))


@pytest.fixture
def iterations() -> Iterations:
    return Iterations(pictures=10, pixels=100)


def test_nothing_ready_is_no_iteration(iterations: Iterations) -> None:
    assert iterations.take() is None
    assert iterations.idle


def test_an_iteration_takes_whatever_parts_are_ready_the_oldest_first(iterations: Iterations) -> None:
    first, second = chunk(iterations, 1), chunk(iterations, 2)
    parts = [part(), part()]
    iterations.add(second, parts[0])
    iterations.add(first, parts[1])
    taken = iterations.take()
    assert taken is not None
    assert (taken.parts, taken.chunks) == (parts, [second, first])
    assert iterations.take() is None


@pytest.mark.parametrize("size", [{"pictures": 4}, {"pixels": 40}])
def test_an_iteration_is_bounded_in_pictures_and_in_pixels(iterations: Iterations, size: dict[str, int]) -> None:
    parts = [part(**{"pictures": 1, "pixels": 1} | size) for _ in range(3)]
    for one in parts:
        iterations.add(chunk(iterations), one)
    taken, rest = iterations.take(), iterations.take()
    assert taken is not None and rest is not None
    assert (taken.parts, rest.parts) == (parts[:2], parts[2:])


def test_a_part_over_the_bounds_goes_alone(iterations: Iterations) -> None:
    large, small = part(pictures=20, pixels=1000), part()
    iterations.add(chunk(iterations), large)
    iterations.add(chunk(iterations), small)
    taken = iterations.take()
    assert taken is not None and taken.parts == [large]


def test_parts_of_two_streams_are_not_mixed(iterations: Iterations) -> None:
    parts = [part(), part(of=OTHER), part()]
    for one in parts:
        iterations.add(chunk(iterations), one)
    taken, rest = iterations.take(), iterations.take()
    assert taken is not None and rest is not None
    assert (taken.parts, rest.parts) == ([parts[0], parts[2]], [parts[1]])


def test_a_chunk_is_done_when_it_was_read_and_all_its_parts_were_rendered(iterations: Iterations) -> None:
    one = chunk(iterations)
    iterations.add(one, part())
    taken = iterations.take()
    assert taken is not None
    assert not iterations.rendered(taken)  # more of it may come
    iterations.add(one, part())
    assert not iterations.end(one)
    assert not one.done and not iterations.idle
    taken = iterations.take()
    assert taken is not None
    assert iterations.rendered(taken) == [one]
    assert iterations.idle


def test_a_chunk_whose_parts_were_all_rendered_is_done_when_no_more_come(iterations: Iterations) -> None:
    one = chunk(iterations)
    iterations.add(one, part())
    taken = iterations.take()
    assert taken is not None
    iterations.rendered(taken)
    iterations.end(one)
    assert one.done and iterations.idle


def test_a_chunk_of_two_parts_in_one_iteration_is_done_once(iterations: Iterations) -> None:
    one = chunk(iterations)
    for _ in range(2):
        iterations.add(one, part())
    iterations.end(one)
    taken = iterations.take()
    assert taken is not None
    assert iterations.rendered(taken) == [one]
    assert iterations.idle


def test_what_came_of_the_parts_is_put_together(iterations: Iterations) -> None:
    one = chunk(iterations)
    for row in range(2):
        result = Rendered([RowReject(row, row, "x", "decode", "bad")])
        result.stages.add("read", 0.5, nbytes=100)
        iterations.add(one, Part(STREAM, VIEW, result=result))
    taken = iterations.take()
    assert taken is not None
    iterations.rendered(taken)
    assert [reject.row for reject in one.result.rejects] == [0, 1]
    read = one.result.stages.status()["read"]
    assert (read.count, read.seconds, read.nbytes) == (2, 1.0, 200)


def test_a_chunk_that_cannot_be_read_is_not_done_while_a_backend_writes_to_its_slot(iterations: Iterations) -> None:
    one, error = chunk(iterations), DatasetError("gone")
    iterations.add(one, part())
    taken = iterations.take()
    iterations.add(one, part())
    assert iterations.end(one, error) == 1  # what was read of it and not begun is given up
    assert not one.done
    assert iterations.take() is None
    assert taken is not None
    assert iterations.rendered(taken) == [one]
    assert one.error is error


def test_a_chunk_of_which_nothing_can_be_read_is_done_at_once(iterations: Iterations) -> None:
    one = chunk(iterations)
    assert not iterations.end(one, DatasetError("gone"))
    assert one.done and iterations.idle
