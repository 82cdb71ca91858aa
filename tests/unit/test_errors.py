"""The tree of errors, and how one crosses a process border."""

from __future__ import annotations

import inspect
import re

import pytest

from headrace import errors
from headrace.errors import HeadraceError, from_wire, to_wire

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, HeadraceError)]
LEAVES = [c for c in CLASSES if c is not HeadraceError]


def test_the_drawing_shows_every_class() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert sorted(drawn) == sorted(c.__name__ for c in LEAVES)
    assert all(c.__bases__[0] is HeadraceError for c in LEAVES)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_crosses_the_wire_as_kind_and_text(kind: type[HeadraceError]) -> None:
    error = from_wire(*to_wire(kind("what is wrong: ä, 3 of 4")))
    assert type(error) is kind
    assert str(error) == "what is wrong: ä, 3 of 4"


def test_an_error_of_another_kind_arrives_as_a_plain_one_that_names_it() -> None:
    error = from_wire(*to_wire(ZeroDivisionError("division by zero")))
    assert type(error) is HeadraceError
    assert str(error) == "ZeroDivisionError: division by zero"


def test_an_unknown_kind_is_a_plain_error() -> None:
    assert type(from_wire("__import__", "text")) is HeadraceError


def test_errors_are_what_callers_of_the_standard_library_catch() -> None:
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.ConnectionLost, ConnectionError)
