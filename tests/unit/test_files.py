"""Sentences and progress that every listing shares; what `stat` says is tested with the folders and lists that ask."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from headrace.pipeline.files import Reporter, ending, notices, some, tally


@pytest.mark.parametrize(
    ("name", "end"),
    [(b"a.jpg", b"jpg"), (b"a.b.JPG", b"jpg"), (b"a", b""), (b"a.", b""), (b".jpg", b"jpg"), (b"a.\xff", b"\xff")],
)
def test_an_ending_follows_the_last_dot(name: bytes, end: bytes) -> None:
    assert ending(name) == end


def test_fifty_of_a_reason_are_named_and_the_others_counted() -> None:
    said = list(notices([("x", "gone"), *((f"{i}", "odd") for i in range(53)), ("y", "gone")]))
    assert said[:2] == ["left out x: gone", "left out 0: odd"] and said[51:] == [
        "left out y: gone",
        "left out 3 more: odd",
    ]


def test_a_tally_names_the_most_frequent_and_counts_the_others() -> None:
    assert tally(Counter({".txt": 2, "hidden": 3, ".md": 2})) == "3 hidden, 2 .md, 2 .txt"
    many = Counter({f".{i:02}": 100 - i for i in range(23)})
    assert tally(many).endswith(", 81 .19, 237 of 3 other kinds") and tally(Counter()) == ""


def test_ten_names_are_named_and_the_others_counted() -> None:
    assert some([b"a", b"b\n"]) == "a, b\\n"
    assert some([b"%d" % i for i in range(12)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_progress_is_told_now_and_then_and_at_the_end_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    seen: list[tuple[int, int]] = []
    report = Reporter(lambda done, total: seen.append((done, total)))
    for step, args in [
        (0, (0, 0)),
        (0.01, (1, 0)),
        (0.05, (2, 0)),
        (0.05, (2, 0)),
        (0, (3, 9)),
        (0, (9, 9)),
        (1, (9, 9)),
    ]:
        clock[0] += step
        report(*args)
    assert seen == [(0, 0), (2, 0), (9, 9)]
    Reporter(None)(1, 1)
