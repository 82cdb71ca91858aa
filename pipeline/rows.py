"""The rows of a list: what the lines of a CSV file or of JSON Lines say, and which of them are no good."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, NoReturn, TextIO

from headrace.errors import DatasetError
from headrace.pipeline.files import ending
from headrace.pipeline.index import shown
from headrace.pipeline.labels import LABEL, TEXT_LIMIT, Texts, check_text
from headrace.pipeline.problems import show
from headrace.pipeline.spec import Dataset

_JSON_ENDINGS = frozenset([b"jsonl", b"ndjson", b"json"])
_NAMED = 10  # bad lines that an error names; the rest is counted
_LINE_LIMIT = 16 << 20  # characters: a text of 1 MiB, every character of it escaped, has room
_INT64 = range(-(1 << 63), 1 << 63)

#: Beginnings of files that are not what they are taken for.
_FOREIGN = {
    b"\x1f\x8b": "is compressed; unpack it",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"PAR1": "is a Parquet file; write it as CSV or JSON Lines",
    b"PK\x03\x04": "is a spreadsheet or a ZIP file; save it as CSV",
}


class Row(NamedTuple):
    """What a line says, not yet looked at.

    Attributes:
        label: `NONE` where the list has no labels.
        values: of the columns of texts that there are by now.
    """

    line: int
    path: str
    label: Any
    values: list[Any]


NONE = object()


class BadLines:
    """Lines of a list that are no good: the first of them with the reason, and how many there are.

    Args:
        name: of the list.
    """

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._first: list[str] = []
        self._count = 0

    def add(self, line: int, reason: str) -> None:
        self._count += 1
        if len(self._first) < _NAMED:
            self._first.append(f"line {line}: {reason}")

    def check(self, hint: str = "") -> None:
        """
        Raises:
            DatasetError: there are any.
        """
        if self._count:
            lines = "line is" if self._count == 1 else "lines are"
            more = [f"and {self._count - _NAMED} more"] if self._count > _NAMED else []
            self.refuse("\n  ".join([f"{self._count} {lines} no good{hint}:", *self._first, *more]))

    def refuse(self, reason: str) -> NoReturn:
        """
        Raises:
            DatasetError: the whole list is no good.
        """
        raise DatasetError(f"{shown(self._name)}: {reason}")


class CsvRows:
    """Rows of a CSV file. A row may take several lines; its number is that of the first.

    Raises:
        DatasetError: there is no header, or not what it must hold.
    """

    cells: ClassVar[bool] = True
    newline: ClassVar[str] = ""  # a line's end within quotes stays what it is

    def __init__(self, dataset: Dataset, lines: Iterator[str], texts: Texts, bad: BadLines) -> None:
        self._bad = bad
        csv.field_size_limit(max(csv.field_size_limit(), TEXT_LIMIT))
        self._reader = csv.reader(lines, strict=True)
        self._line = 1
        header = self._next() or []
        bad.check()
        self._check(header)
        self._width = len(header)
        self._path = self._place(header, dataset.columns.path, "path")
        label = dataset.columns.label
        self._label: int | list[int] | None = None
        if isinstance(label, list):
            self._label = [self._place(header, name, "label") for name in label]
        elif label is not None or dataset.labels != "auto" or LABEL in header:
            self._label = self._place(header, label or LABEL, "label")
        used = [self._path, *(self._label if isinstance(self._label, list) else [self._label])]
        self._further = [i for i in range(self._width) if i not in used]
        try:
            for i in self._further:
                texts.column(header[i])
        except ValueError as error:
            bad.refuse(f"the header has too many columns: {error}")

    def __iter__(self) -> Iterator[Row]:
        while (cells := self._next()) is not None:
            if len(cells) != self._width:
                fields = "field" if len(cells) == 1 else "fields"
                self._bad.add(self._line, f"has {len(cells)} {fields}, but the header has {self._width}")
                continue
            label: Any = NONE
            if self._label is not None:
                label = [cells[i] for i in self._label] if isinstance(self._label, list) else cells[self._label]
            yield Row(self._line, cells[self._path], label, [cells[i] for i in self._further])

    def _next(self) -> list[str] | None:
        """The next row that is not blank; None at the end, or where rows cannot be told apart any more."""
        while True:
            self._line = self._reader.line_num + 1
            try:
                cells = next(self._reader)
            except StopIteration:
                return None
            except csv.Error as error:
                self._bad.add(self._line, _CSV_ERRORS.get(str(error), str(error)))
                return None
            if cells:
                return cells

    def _check(self, header: list[str]) -> None:
        if not header:
            self._bad.refuse("has no header: the first line names the columns, among them that of the paths")
        for name, count in Counter(header).items():
            if count > 1:
                self._bad.refuse(f"the header has the column {show(name)} {count} times")
            try:
                check_text(name, "the name of the column")
            except ValueError as error:
                self._bad.refuse(str(error))

    def _place(self, header: list[str], name: str, what: str) -> int:
        if name not in header:
            have = ", ".join(map(show, header[:50]))
            self._bad.refuse(
                f"has no column {show(name)}; there is {have}. `columns: {{{what}: NAME}}` says which it is; fields are"
                " separated by commas"
            )
        return header.index(name)


_CSV_ERRORS = {
    "unexpected end of data": "a quote opens here and is not closed; a quote within quotes is written twice",
    "',' expected after '\"'": "something follows a closing quote; a quote within quotes is written twice",
    f"field larger than field limit ({TEXT_LIMIT})": (
        f"a field is larger than {TEXT_LIMIT} characters, or a quote is not closed"
    ),
}


class JsonRows:
    """Rows of JSON Lines: an object on each line."""

    cells: ClassVar[bool] = False
    newline: ClassVar[str] = "\n"

    def __init__(self, dataset: Dataset, lines: Iterator[str], texts: Texts, bad: BadLines) -> None:
        self._bad = bad
        self._lines = lines
        self._texts = texts
        self._path = dataset.columns.path
        label = dataset.columns.label
        self._label: str | list[str] = LABEL if label is None else label
        #: Whether lines have a label; None: the first line will tell.
        self._labelled = None if label is None and dataset.labels == "auto" else True

    def __iter__(self) -> Iterator[Row]:
        for line, text in enumerate(self._lines, start=1):
            if not (text := text.strip()):
                continue
            try:
                row = self._row(line, text)
            except json.JSONDecodeError as error:
                self._bad.add(line, f"is no JSON: {error.msg.lower()} at column {error.colno}")
            except ValueError as error:
                self._bad.add(line, str(error))
            except RecursionError:
                self._bad.add(line, "is nested too deeply")
            else:
                yield row

    def _row(self, line: int, text: str) -> Row:
        row = decode_json(text)
        if not isinstance(row, dict):
            raise ValueError(f'is {show(row)}, and not an object such as {{"path": "a.jpg", "label": 3}}')
        path = _pop(row, self._path)
        if not isinstance(path, str):
            raise ValueError(f"{show(path)} is no path, but {show(self._path)} says so")
        label = self._take_label(row)
        values = [None] * len(self._texts.columns)
        for key, value in row.items():
            place = self._texts.column(key)
            if place == len(values):
                values.append(value)
            else:
                values[place] = value
        return Row(line, path, label, values)

    def _take_label(self, row: dict[str, Any]) -> Any:
        if isinstance(self._label, list):
            return [_pop(row, key) for key in self._label]
        if self._labelled is None:
            self._labelled = self._label in row
        if self._labelled:
            return _pop(row, self._label)
        if self._label in row:
            raise ValueError(f"has {show(self._label)}, but the lines before it have none")
        return NONE


def _pop(row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise ValueError(f"has no {show(key)}, only {', '.join(map(show, row))}" if row else f"has no {show(key)}")
    return row.pop(key)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"has the key {show(twice)} more than once")
    return made


def _int(text: str) -> int:
    number = int(text) if len(text) < 30 else 1 << 64
    if number not in _INT64:
        raise ValueError(f"the number {text[:40]} does not fit into 64 bits")
    return number


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant)


def decode_json(text: str) -> Any:
    """What the text says, if it says one thing only: no key twice, no NaN, no number beyond 64 bits.

    Raises:
        ValueError: it is none; a `json.JSONDecodeError` where it breaks off.
        RecursionError: it is nested too deeply.
    """
    return _DECODER.decode(text)


def form_of(name: bytes, head: bytes, bad: BadLines) -> type[CsvRows] | type[JsonRows]:
    """Which of the two a list is.

    Args:
        head: its first bytes.

    Raises:
        DatasetError: it is neither, as far as can be seen.
    """
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            bad.refuse(what)
    end = ending(os.path.basename(name))
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if end in _JSON_ENDINGS and begins == b"[":
        bad.refuse("is one JSON array; JSON Lines have an object on each line")
    return JsonRows if end in _JSON_ENDINGS or (end != b"csv" and begins == b"{") else CsvRows


def lines_of(file: TextIO, bad: BadLines) -> Iterator[str]:
    """
    Raises:
        DatasetError: a line is longer than any that a sample needs.
    """
    number = 0
    while line := file.readline(_LINE_LIMIT + 1):
        number += 1
        if len(line) > _LINE_LIMIT:
            bad.refuse(f"line {number} is longer than {_LINE_LIMIT} characters")
        yield line
