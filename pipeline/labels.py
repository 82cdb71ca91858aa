"""Labels and further values of samples: from what stands in a list, a .cls or a .json to arrays.

Labels of a data set are of one kind: numbers, vectors of numbers, names of classes, several classes each, or texts.
What does not fit to those before it is refused, never bent: 7 and "seven" are no two labels of one kind. What is kept
of a sample are a few bytes, whatever its source, so that millions of them fit into memory.
"""

from __future__ import annotations

import enum
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.pipeline.index import Labels, Paths
from headrace.pipeline.problems import show

Kind = Literal["auto", "class", "classes", "int", "float", "text"]

#: What the column, or key, of labels is called unless `columns` says otherwise.
LABEL = "label"

#: Bytes of a sample's text, as MessagePack.
TEXT_LIMIT = 1 << 20

#: Numbers of a vector, or classes of a data set whose samples have several.
WIDTH_LIMIT = 1 << 20

#: Bytes of the names of all classes: every client is told them, in one message.
NAMES_LIMIT = 32 << 20

#: Between the classes of a sample in a CSV cell.
SEPARATOR = "|"

_COLUMNS_LIMIT = 1024
_INT64 = range(-(1 << 63), 1 << 63)
_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103  # from here on it is rounded to infinity
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class _Form(enum.Enum):
    """What labels of a data set are; the values name one of them."""

    NUMBER = "a number"
    VECTOR = "a list of numbers"
    NAME = "the name of a class"
    NAMES = "a list of classes"
    TEXT = "a text"


_FORMS = {"class": _Form.NAME, "classes": _Form.NAMES, "text": _Form.TEXT}


class LabelColumn:
    """The labels of a data set, taken one after the other.

    Args:
        kind: `labels:` of the configuration.
        cells: values are the texts of CSV cells (several for a vector), in which numbers are to be recognised; else
            they are JSON values.
    """

    def __init__(self, kind: Kind, *, cells: bool) -> None:
        self.kind = kind
        self._cells = cells
        self._form = _FORMS.get(kind)
        self._first = ("", "")  # where the form was settled, and by what
        self._count = 0
        self._undecided = False  # whether there were empty lists before the form was settled
        self._numbers: array[Any] = array("f" if kind == "float" else "q")
        self._width = 0
        self._names: dict[str, int] = {}  # in the order of their first mention
        self._names_bytes = 0
        self._ends: array[int] = array("q")

    def __len__(self) -> int:
        return self._count

    def add(self, value: object, where: str) -> None:
        """Take the label of one more sample; one that is refused leaves no trace.

        Args:
            where: it stands, for the messages about those that come later: "line 7", "TAR/member".

        Raises:
            ValueError: it is no label, or of another kind than those before it.
        """
        if self._form is _Form.NAME and isinstance(value, str) and value in self._names:  # as nearly all are
            self._numbers.append(self._names[value])
            self._count += 1
            return
        match self._form_of(value):
            case _Form.NUMBER:
                self._add_numbers(_Form.NUMBER, [value], value, where)
            case _Form.VECTOR:
                assert isinstance(value, list)
                self._add_numbers(_Form.VECTOR, value, value, where)
            case _Form.NAME:
                name = _name(value)
                self._settle(_Form.NAME, value, where)
                self._numbers.append(self._number(name))
            case _Form.NAMES:
                names = [_name(v) for v in self._listed(value)]
                if self._form is None and not names:
                    self._undecided = True  # of names or of numbers: those that follow will tell
                else:
                    self._settle(_Form.NAMES, value, where)
                self._numbers.extend([self._number(name) for name in names])
                self._ends.append(len(self._numbers))
            case _Form.TEXT:
                if not isinstance(value, str):
                    raise ValueError(f"label {show(value)} is no text")
                check_text(value, "label")
        self._count += 1

    def finish(self, chosen: Sequence[str] | None) -> tuple[Labels, list[str], NDArray[np.bool_] | None]:
        """All labels.

        Args:
            chosen: `classes:` of the configuration: only these, numbered in this order.

        Returns:
            Labels of the samples that stay; names of the classes by number; and which samples stay, bool [N] or None
            for all.

        Raises:
            DatasetError: `chosen` names what is not there, or labels have no names. Where, the caller has to add.
        """
        match self._form:
            case _Form.NAME:
                return self._finish_names(chosen)
            case _Form.NAMES | None:
                return self._finish_sets(chosen)
            case _Form.NUMBER if chosen is not None and self._whole:
                return self._choose_numbers(chosen)
        if chosen is not None:
            raise DatasetError(f"classes: chooses by the names of classes, but each label is {self._form.value}")
        if self._form is _Form.TEXT:
            return Labels(np.zeros(self._count, np.int64), None, True), [], None
        values = self._array()
        return Labels(values.reshape(-1, self._width) if self._form is _Form.VECTOR else values), [], None

    # -- one value ----------------------------------------------------------------------------------------------

    def _form_of(self, value: object) -> _Form:
        """What the value is, or is to be taken for."""
        if self._cells and isinstance(value, list):
            return _Form.VECTOR
        if self._cells and isinstance(value, str):
            if self.kind == "auto":
                if not value:
                    raise ValueError("the label is empty")
                return _Form.NUMBER if _DECIMAL.fullmatch(value.strip()) else _Form.NAME
            return self._form if self.kind in _FORMS and self._form else _Form.NUMBER
        if value is None:
            raise ValueError("the label is null")
        if self.kind in _FORMS and self._form:
            return self._form
        if isinstance(value, list):
            if self.kind != "auto" or (value and not isinstance(value[0], str)):
                return _Form.VECTOR
            return self._form if not value and self._form is _Form.VECTOR else _Form.NAMES
        if not isinstance(value, str | int | float):
            raise ValueError(f"label {show(value)} is neither a number nor a text nor a list of them")
        return _Form.NAME if isinstance(value, str) and self.kind == "auto" else _Form.NUMBER

    def _listed(self, value: object) -> list[Any]:
        if self._cells and isinstance(value, str):
            return value.split(SEPARATOR) if value else []
        if not isinstance(value, list):
            raise ValueError(f"label {show(value)} is no list of classes")
        return value

    def _settle(self, form: _Form, value: object, where: str) -> None:
        if self._form is None:
            if form is not _Form.NAMES and self._undecided:
                raise ValueError(f"label {show(value)} is {form.value}, and others before it are an empty list")
            self._form = form
        if form is not self._form:
            first, it = self._first
            hint = "; `labels: class` takes every label as a name" if {form, self._form} == _NUMBERS_AND_NAMES else ""
            raise ValueError(
                f"label {show(value)} is {form.value}, but that of {first}, {it}, is {self._form.value}{hint}"
            )
        if not self._first[0]:
            self._first = where, show(value)

    def _number(self, name: str) -> int:
        if name not in self._names:
            self._names_bytes += len(name.encode())
            if self._names_bytes > NAMES_LIMIT:
                raise ValueError(
                    f"the names of {len(self._names)} classes and this one, {show(name)}, take more than {NAMES_LIMIT}"
                    " bytes; are these texts? (`labels: text`)"
                )
            self._names[name] = len(self._names)
        return self._names[name]

    def _add_numbers(self, form: _Form, values: list[Any], value: object, where: str) -> None:
        numbers = [self._parsed(v) for v in values]
        if form is _Form.VECTOR:
            if not numbers:
                raise ValueError("the label is an empty list")
            if len(numbers) > WIDTH_LIMIT:
                raise ValueError(f"the label has {len(numbers)} numbers, over the limit of {WIDTH_LIMIT}")
            if self._width and self._width != len(numbers):
                raise ValueError(
                    f"label {show(value)} has {len(numbers)} numbers, but that of {self._first[0]} has {self._width}"
                )
        if not self._whole or not all(isinstance(v, int) for v in numbers):
            for v in numbers:
                if abs(v) >= _FLOAT32_OVERFLOW:
                    raise ValueError(f"label {show(value)} is too large for float32")
            self._settle(form, value, where)
            if self._whole:
                self._numbers = array("f", self._numbers)
        else:
            self._settle(form, value, where)
        self._width = len(numbers)
        self._numbers.extend(numbers)

    @property
    def _whole(self) -> bool:
        return self._numbers.typecode == "q"

    def _parsed(self, value: object) -> int | float:
        """A number, as an int where it is a whole one."""
        number: int | float
        if isinstance(value, str) and self._cells:
            text = value.strip()
            if _WHOLE.fullmatch(text) and len(text) <= 400:
                number = int(text)
            elif _DECIMAL.fullmatch(text):
                number = float(text)
            else:
                raise ValueError(f"label {show(value)} is no number")
        elif isinstance(value, int | float):
            number = int(value) if isinstance(value, bool) else value
        else:
            raise ValueError(f"label {show(value)} is no number")
        if isinstance(number, float) and math.isnan(number):
            raise ValueError(f"label {show(value)} is no number")
        if self.kind == "int" and isinstance(number, float):
            if not (math.isfinite(number) and number.is_integer()):
                raise ValueError(f"label {show(value)} is no whole number")
            number = int(number)
        if isinstance(number, int) and number not in _INT64:
            raise ValueError(f"label {show(value)} does not fit into 64 bits")
        return number

    # -- all of them --------------------------------------------------------------------------------------------

    def _array(self) -> NDArray[Any]:
        return np.frombuffer(self._numbers, np.int64 if self._whole else np.float32)

    def _ranks(self, chosen: Sequence[str] | None) -> tuple[NDArray[np.int64], list[str]]:
        """The number of each name, -1 for none, in the order in which they were mentioned; and names by number."""
        classes = sorted(self._names) if chosen is None else list(chosen)
        _refuse_absent([name for name in classes if name not in self._names], self._names)
        ranks = np.full(max(1, len(self._names)), -1, np.int64)
        for rank, name in enumerate(classes):
            ranks[self._names[name]] = rank
        return ranks, classes

    def _finish_names(self, chosen: Sequence[str] | None) -> tuple[Labels, list[str], NDArray[np.bool_] | None]:
        ranks, classes = self._ranks(chosen)
        values = ranks[self._array()]
        return _kept(values, classes, chosen)

    def _finish_sets(self, chosen: Sequence[str] | None) -> tuple[Labels, list[str], NDArray[np.bool_] | None]:
        if not self._names:
            raise DatasetError("no sample has any class: each label is an empty list")
        ranks, classes = self._ranks(chosen)
        if len(classes) > WIDTH_LIMIT:
            raise DatasetError(f"there are {len(classes)} classes, over the limit of {WIDTH_LIMIT}")
        ends = np.frombuffer(self._ends, np.int64)
        rows = np.repeat(np.arange(self._count), np.diff(ends, prepend=0))
        values = ranks[self._array()]
        # Each class once, in the order of their numbers: what was written twice, or the other way round, is the same.
        pairs = np.unique(rows[values >= 0] * len(classes) + values[values >= 0])
        counts = np.bincount(pairs // len(classes), minlength=self._count)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        labels = Labels(pairs % len(classes), offsets)
        if chosen is None:
            return labels, classes, None
        keep = counts > 0
        return labels.kept(keep), classes, keep

    def _choose_numbers(self, chosen: Sequence[str]) -> tuple[Labels, list[str], NDArray[np.bool_] | None]:
        there, places = np.unique(self._array(), return_inverse=True)
        known = {str(number): place for place, number in enumerate(there.tolist())}
        _refuse_absent([name for name in chosen if name not in known], known)
        ranks = np.full(len(there), -1, np.int64)
        for rank, name in enumerate(chosen):
            ranks[known[name]] = rank
        return _kept(ranks[places], list(chosen), chosen)


_NUMBERS_AND_NAMES = {_Form.NUMBER, _Form.NAME}


def _kept(
    values: NDArray[np.int64], classes: list[str], chosen: Sequence[str] | None
) -> tuple[Labels, list[str], NDArray[np.bool_] | None]:
    if chosen is None:
        return Labels(values), classes, None
    keep = values >= 0
    return Labels(values[keep]), classes, keep


def _refuse_absent(absent: list[str], there: dict[str, int]) -> None:
    if absent:
        have = sorted(there)
        some = ", ".join(map(show, have[:10])) + (f" and {len(have) - 10} more" if len(have) > 10 else "")
        raise DatasetError(f"classes: no label is {', '.join(map(show, absent[:10]))}; there is {some}")


def _name(value: object) -> str:
    """Of a class. A whole number in JSON, among names, is its digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"label {show(value)} is no name of a class")
    if not value:
        raise ValueError("the name of a class is empty")
    check_text(value, "label")
    return value


def check_text(text: str, what: str) -> None:
    """
    Raises:
        ValueError: it cannot be written as UTF-8.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = ord(text[error.start])
            shown = f"the byte 0x{bad & 0xFF:02x}" if 0xDC80 <= bad <= 0xDCFF else f"the code \\u{bad:04x}"
            raise ValueError(f"{what} {show(text)} is not UTF-8: it holds {shown}") from None


def unlabelled(columns: Sequence[str]) -> Iterator[str]:
    """Sentences about samples without labels that have further values: one of these may be meant, as in `path, label`,
    where a blank belongs to the name."""
    if others := [name for name in columns if name != LABEL]:
        some = ", ".join(map(show, others[:10]))
        yield f"each label is -1, for there is no {show(LABEL)}; `columns: {{label: NAME}}` takes another: {some}"


class Texts:
    """What travels as text: for each sample a MessagePack array, of the label if it is text and of further values.

    Args:
        labels: whether labels are texts.
    """

    def __init__(self, *, labels: bool = False) -> None:
        self._labels = labels
        self.columns: list[str] = []
        self._places: dict[str, int] = {}
        self._blob = bytearray()
        self._ends: array[int] = array("q")
        self._short = 0  # samples that came before the last of the columns
        self._encode = msgspec.msgpack.Encoder().encode

    def column(self, name: str) -> int:
        """The place of a column, which is a new one if nobody asked for it before; samples before it have null there.

        Raises:
            ValueError: it cannot be, or there are too many.
        """
        if name not in self._places:
            check_text(name, "the name of a column")
            if len(self.columns) == _COLUMNS_LIMIT:
                raise ValueError(f"{show(name)} would be a column more than {_COLUMNS_LIMIT}")
            self._places[name] = len(self.columns)
            self.columns.append(name)
            self._short = len(self._ends)
        return self._places[name]

    def add(self, values: list[Any]) -> None:
        """Take the values of one more sample; what is refused leaves no trace.

        Args:
            values: JSON values: the label if labels are texts, then those of the columns that there are by now.

        Raises:
            ValueError: they cannot be sent: too long, not UTF-8, a number beyond 64 bits.
        """
        try:
            text = self._encode(values) if values else b""
        except UnicodeEncodeError as error:
            raise ValueError(f"a value is not UTF-8: {show(error.object)}") from None
        except (OverflowError, RecursionError, TypeError) as error:
            raise ValueError(f"a value cannot be sent: {error}") from None
        if len(text) > TEXT_LIMIT:
            raise ValueError(f"label and further values take {len(text)} bytes, over the limit of {TEXT_LIMIT}")
        self._blob += text
        self._ends.append(len(self._blob))

    def finish(self) -> Paths | None:
        """All of them; None where there are no columns and labels are no texts."""
        if not self.columns and not self._labels:
            return None
        offsets = np.concatenate([[0], np.frombuffer(self._ends, np.int64)]).astype(np.int64)
        if not self._short:
            return Paths(bytes(self._blob), offsets)
        begin = int(offsets[self._short])
        whole = Paths(bytes(self._blob[begin:]), offsets[self._short :] - begin)
        return Paths.joined([self._filled(offsets), whole])

    def _filled(self, offsets: NDArray[np.int64]) -> Paths:
        """Those that came before the last of the columns, with null in the columns that they lack."""
        width = len(self.columns) + self._labels
        rows = []
        for begin, end in zip(offsets[: self._short].tolist(), offsets[1 : self._short + 1].tolist(), strict=True):
            row = msgspec.msgpack.decode(self._blob[begin:end]) if end > begin else []
            rows.append(self._encode(row + [None] * (width - len(row))))
        return Paths.of(rows)
