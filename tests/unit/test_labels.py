"""Labels of one kind, from CSV cells or JSON values; what does not fit is refused, never bent."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DatasetError
from headrace.pipeline import labels as module
from headrace.pipeline.index import Labels
from headrace.pipeline.labels import NAMES_LIMIT, TEXT_LIMIT, WIDTH_LIMIT, Kind, LabelColumn, Texts
from headrace.protocol import DAEMON_LIMIT


def column(kind: Kind, values: list[Any], *, cells: bool = False) -> LabelColumn:
    made = LabelColumn(kind, cells=cells)
    for line, value in enumerate(values, start=2):
        made.add(value, f"line {line}")
    assert len(made) == len(values)
    return made


def plain(labels: Labels) -> Any:
    """Values as lists: of classes, where samples have several."""
    if labels.offsets is None:
        return labels.values.tolist()
    return [labels.values[a:b].tolist() for a, b in itertools.pairwise(labels.offsets.tolist())]


def refusal(kind: Kind, values: list[Any], *, cells: bool = False) -> str:
    """Why the last of the values is refused."""
    made = column(kind, values[:-1], cells=cells)
    with pytest.raises(ValueError) as caught:
        made.add(values[-1], "line 99")
    assert len(made) == len(values) - 1
    return str(caught.value)


# -- what labels are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cells", "values", "dtype", "expected", "classes"),
    [
        ("auto", True, ["3", " -4", "+5", "007"], "int64", [3, -4, 5, 7], []),
        ("auto", True, ["3", "4.5", "1e3", ".5", "6."], "float32", [3, 4.5, 1000, 0.5, 6], []),
        ("auto", True, ["dog", "cat", "dog"], "int64", [1, 0, 1], ["cat", "dog"]),
        ("auto", True, ["nan", "inf"], "int64", [1, 0], ["inf", "nan"]),
        ("auto", True, [["1", "2"], ["3", "4"]], "int64", [[1, 2], [3, 4]], []),
        ("auto", True, [["1", "2"], ["3", "4.5"]], "float32", [[1, 2], [3, 4.5]], []),
        ("class", True, ["3", "20", "3", " 3"], "int64", [2, 1, 2, 0], [" 3", "20", "3"]),
        ("classes", True, ["b|a", "", "c", "a|a"], "int64", [[0, 1], [], [2], [0]], ["a", "b", "c"]),
        ("int", True, ["3", "-9223372036854775808"], "int64", [3, -(1 << 63)], []),
        ("int", True, ["3.0", "2"], "int64", [3, 2], []),
        ("float", True, ["3", "0.1"], "float32", [3, float(np.float32(0.1))], []),
        ("float", True, [["3", "4"]], "float32", [[3, 4]], []),
        ("text", True, ["3", "", "a\tb"], "int64", [0, 0, 0], []),
        ("auto", False, [3, True, False, 1 << 62], "int64", [3, 1, 0, 1 << 62], []),
        ("auto", False, [3, 4.0], "float32", [3, 4], []),
        ("auto", False, ["10", "9"], "int64", [0, 1], ["10", "9"]),
        ("auto", False, [[1, 2], [3, 4.5]], "float32", [[1, 2], [3, 4.5]], []),
        ("auto", False, [[], ["b", "a"], ["a"], []], "int64", [[], [0, 1], [0], []], ["a", "b"]),
        ("class", False, ["b", 7, "7"], "int64", [1, 0, 0], ["7", "b"]),
        ("classes", False, [["b", 7], []], "int64", [[0, 1], []], ["7", "b"]),
        ("int", False, [[1, 2], [3.0, 4]], "int64", [[1, 2], [3, 4]], []),
        ("float", False, [1, 2.5], "float32", [1, 2.5], []),
        ("text", False, ["a", "é"], "int64", [0, 0], []),
    ],
)
def test_labels_are_what_their_kind_says(
    kind: Kind, cells: bool, values: list[Any], dtype: str, expected: Any, classes: list[str]
) -> None:
    labels, names, keep = column(kind, values, cells=cells).finish(None)
    assert (plain(labels), names, keep) == (expected, classes, None)
    assert labels.values.dtype == dtype and labels.text == (kind == "text")


def test_names_are_sorted_by_code_points_whatever_the_locale() -> None:
    _, names, _ = column("auto", ["b", "ä", "B", "a", "𝒳", "\ufb01"]).finish(None)
    assert names == ["B", "a", "b", "ä", "\ufb01", "𝒳"]


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cells", "values", "says"),
    [
        (
            "auto",
            True,
            ["3", "cat"],
            'label "cat" is the name of a class, but that of line 2, "3", is a number; `labels: class`',
        ),
        ("auto", True, ["cat", "3"], 'label "3" is a number, but that of line 2, "cat", is the name of a class'),
        ("auto", True, [""], "the label is empty"),
        ("auto", True, ["9" * 19], f'label "{"9" * 19}" does not fit into 64 bits'),
        ("auto", True, ["9" * 5000], "is too large for float32"),
        ("auto", True, ["1e39"], "is too large for float32"),
        ("auto", True, [["1", "x"]], 'label "x" is no number'),
        ("auto", True, [["1", ""]], 'label "" is no number'),
        ("class", True, [""], "the name of a class is empty"),
        ("classes", True, ["a||b"], "the name of a class is empty"),
        ("int", True, ["2.5"], 'label "2.5" is no whole number'),
        ("int", True, ["1e999"], "is no whole number"),
        ("int", True, ["x"], 'label "x" is no number'),
        ("float", True, ["nan"], 'label "nan" is no number'),
        ("float", True, ["1_0"], "is no number"),
        ("float", True, ["٣"], "is no number"),
        ("class", True, ["caf\udce9"], r"is not UTF-8: it holds the byte 0xe9"),
        ("text", False, ["\ud800"], r"is not UTF-8: it holds the code \ud800"),
        ("auto", False, [None], "the label is null"),
        ("auto", False, [{"a": 1}], "is neither a number nor a text nor a list of them"),
        ("auto", False, [1, "1"], 'label "1" is the name of a class, but that of line 2, 1, is a number'),
        ("auto", False, [[1, 2], [1]], "label [1] has 1 numbers, but that of line 2 has 2"),
        ("auto", False, [[1], []], "the label is an empty list"),
        ("auto", False, [[], [1]], "is a list of numbers, and others before it are an empty list"),
        (
            "auto",
            False,
            [["a"], "a"],
            'label "a" is the name of a class, but that of line 2, ["a"], is a list of classes',
        ),
        ("auto", False, [["a", 1.5]], "label 1.5 is no name of a class"),
        ("auto", False, [[1, "a"]], 'label "a" is no number'),
        ("auto", False, [float("inf")], "is too large for float32"),
        ("auto", False, [float("nan")], "is no number"),
        ("auto", False, [1 << 63], "does not fit into 64 bits"),
        ("class", False, [True], "label true is no name of a class"),
        ("class", False, [1.0], "is no name of a class"),
        ("classes", False, ["a"], 'label "a" is no list of classes'),
        ("int", False, ["3"], 'label "3" is no number'),
        ("text", False, [3], "label 3 is no text"),
        ("text", False, [None], "the label is null"),
        ("float", False, [[1] * (WIDTH_LIMIT + 1)], f"over the limit of {WIDTH_LIMIT}"),
    ],
)
def test_what_is_no_label_or_of_another_kind_is_refused_with_the_reason(
    kind: Kind, cells: bool, values: list[Any], says: str
) -> None:
    assert says in refusal(kind, values, cells=cells)


def test_a_refused_label_leaves_no_trace() -> None:
    made = column("auto", ["3"], cells=True)
    for bad in ("cat", "", "1e99"):
        with pytest.raises(ValueError):
            made.add(bad, "line 3")
    made.add("4", "line 4")
    assert plain(made.finish(None)[0]) == [3, 4]


def test_largest_and_smallest_numbers_stay_what_they_are() -> None:
    largest = float(np.finfo(np.float32).max)
    labels, _, _ = column("float", [largest, -largest, 1e-45, 0.1]).finish(None)
    assert labels.values.tolist() == [largest, -largest, float(np.float32(1e-45)), float(np.float32(0.1))]


@pytest.mark.parametrize("kind", ["class", "classes"])
def test_captions_taken_for_classes_are_refused_before_no_message_can_hold_them(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMES_LIMIT", 8)
    made = column(kind, ["éé", "abcd", "éé"], cells=True)
    with pytest.raises(
        ValueError, match=r"2 classes and this one, \"x\", take more than 8 bytes; are these texts\? \("
    ):
        made.add("x", "line 4")
    assert NAMES_LIMIT < DAEMON_LIMIT // 2 + 1


def test_no_class_at_all_is_an_error() -> None:
    with pytest.raises(DatasetError, match="no sample has any class"):
        column("auto", [[], []]).finish(None)


# -- a choice of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "chosen", "expected", "keep"),
    [
        ("auto", ["b", "a", "c", "b"], ["c", "b"], [1, 0, 1], [True, False, True, True]),
        ("auto", [7, -1, 7, 12], ["12", "7"], [1, 1, 0], [True, False, True, True]),
        ("auto", [["b", "a"], ["c"], [], ["a", "d", "b"]], ["b", "c"], [[0], [1], [0]], [True, True, False, True]),
    ],
)
def test_chosen_classes_are_numbered_in_their_order_and_the_others_left_out(
    kind: Kind, values: list[Any], chosen: list[str], expected: Any, keep: list[bool]
) -> None:
    labels, names, kept = column(kind, values).finish(chosen)
    assert kept is not None
    assert (plain(labels), names, kept.tolist()) == (expected, chosen, keep)


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("auto", ["b", "a"], 'classes: no label is "x"; there is "a", "b"'),
        ("auto", [1, 2], 'classes: no label is "x"; there is "1", "2"'),
        ("auto", [f"c{i:02}" for i in range(12)], '"c09" and 2 more'),
        ("float", [1, 2], "chooses by the names of classes, but each label is a number"),
        ("auto", [[1, 2]], "but each label is a list of numbers"),
        ("text", ["x"], "but each label is a text"),
    ],
)
def test_a_choice_of_what_is_not_there_or_has_no_names_is_an_error(kind: Kind, values: list[Any], says: str) -> None:
    with pytest.raises(DatasetError) as caught:
        column(kind, values).finish(["x"])
    assert says in str(caught.value)


a_name = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3)


@given(st.lists(a_name, min_size=1, max_size=30), st.data())
def test_any_names_are_numbered_as_a_sorted_set_is(names: list[str], data: st.DataObject) -> None:
    order = sorted(set(names))
    labels, classes, _ = column("class", list(names)).finish(None)
    assert classes == order and [order[v] for v in labels.values.tolist()] == names
    chosen = data.draw(st.permutations(order))[: data.draw(st.integers(1, len(order)))]
    labels, classes, keep = column("class", list(names)).finish(chosen)
    assert keep is not None and keep.tolist() == [name in chosen for name in names]
    assert [chosen[v] for v in labels.values.tolist()] == [name for name in names if name in chosen]


@given(st.lists(st.lists(a_name, max_size=4), min_size=1, max_size=20).filter(any))
def test_any_sets_of_classes_come_back_sorted_and_without_repeats(sets: list[list[str]]) -> None:
    order = sorted(set(itertools.chain(*sets)))
    labels, classes, _ = column("classes", [list(s) for s in sets]).finish(None)
    assert classes == order
    assert plain(labels) == [sorted({order.index(name) for name in s}) for s in sets]


# -- texts ----------------------------------------------------------------------------------------------------


def rows(texts: Texts) -> list[Any]:
    paths = texts.finish()
    assert paths is not None
    pieces = [paths.blob[a:b] for a, b in itertools.pairwise(paths.offsets.tolist())]
    return [msgspec.msgpack.decode(piece) for piece in pieces]


def test_values_come_back_as_they_were() -> None:
    texts = Texts(labels=True)
    assert [texts.column(name) for name in ("b", "a", "b")] == [0, 1, 0] and texts.columns == ["b", "a"]
    values: list[list[Any]] = [["x", None, -(1 << 63)], ["é", [1, {"k": True}], 0.1]]
    for value in values:
        texts.add(value)
    assert rows(texts) == values


@pytest.mark.parametrize("labels", [False, True])
def test_samples_before_a_column_was_known_have_null_in_it(labels: bool) -> None:
    texts, head = Texts(labels=labels), ["label"] * labels
    texts.add([*head])
    texts.column("a")
    texts.add([*head, 1])
    texts.column("b")
    texts.column("c")
    texts.add([*head, 2, 3, 4])
    assert rows(texts) == [[*head, None, None, None], [*head, 1, None, None], [*head, 2, 3, 4]]


def test_without_columns_and_texts_there_is_nothing() -> None:
    texts = Texts()
    texts.add([])
    assert texts.finish() is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("x" * TEXT_LIMIT, f"over the limit of {TEXT_LIMIT}"),
        ("\udce9", "is not UTF-8"),
        ({"\udce9": 1}, "is not UTF-8"),
        (1 << 64, "cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_leaves_no_trace(value: Any, says: str) -> None:
    texts = Texts()
    texts.column("a")
    texts.add([1])
    with pytest.raises(ValueError, match=says):
        texts.add([value])
    texts.add([2])
    assert rows(texts) == [[1], [2]]


def test_columns_without_end_are_refused() -> None:
    texts = Texts()
    for i in range(1024):
        texts.column(f"c{i}")
    with pytest.raises(ValueError, match="more than 1024"):
        texts.column("one more")
    with pytest.raises(ValueError, match="not UTF-8"):
        Texts().column("\udce9")
