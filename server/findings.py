"""The list that `headrace verify` gives: CSV, with a line for each file that is no good."""

from __future__ import annotations

import csv
import io
import itertools
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.errors import ConfigError, HeadraceError

COLUMNS = ("stream", "index", "path", "stage", "reason")

#: A value for each of `COLUMNS`.
Finding = tuple[str, int, str, str, str]


def table(findings: Iterable[Finding]) -> Iterator[str]:
    """The list as lines of CSV, the first one naming the columns."""
    for row in itertools.chain([COLUMNS], findings):
        line = io.StringIO(newline="")
        csv.writer(line, lineterminator="\r\n").writerow(row)  # by which it knows what to quote
        yield line.getvalue()[:-2]


class Target:
    """The file that the list is to be in: replaced at once, or not at all.

    Args:
        data: folders and files that are never written to, without links.

    Raises:
        ConfigError: it cannot be written, or is something else than such a list.
    """

    def __init__(self, file: Path, data: Iterable[Path]) -> None:
        self._file = Path(os.path.realpath(file))
        folder = self._file.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{file}: {folder} is no folder that may be written to")
        for place in data:
            if self._file.is_relative_to(place):
                raise ConfigError(f"{file}: it belongs to the data set {place}, which is never written to")
        if self._file.exists() and not self._is_list():
            raise ConfigError(f"{file}: it exists and is no list of `headrace verify`, so it is not replaced")

    def _is_list(self) -> bool:
        head = (",".join(COLUMNS) + "\n").encode()
        try:
            if not self._file.is_file():
                return False
            with self._file.open("rb") as file:
                return file.read(len(head)) in (head, b"")
        except OSError:
            return False

    def write(self, lines: Iterable[str]) -> None:
        """
        Raises:
            HeadraceError: it cannot be written.
        """
        partial = self._file.with_name(f".headrace-{secrets.token_hex(8)}.partial")
        try:
            with open(partial, "x", encoding="utf-8", newline="") as file:
                try:
                    file.writelines(f"{line}\n" for line in lines)
                    file.flush()
                    os.fsync(file.fileno())
                    os.rename(partial, self._file)
                except BaseException:
                    partial.unlink()
                    raise
        except OSError as error:
            raise HeadraceError(f"{self._file}: cannot be written: {error.strerror}") from error
