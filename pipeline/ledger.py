"""The ledger: samples convicted of killing the workers that rendered them, with the reason, beside the index.

A conviction is part of what a picture is (a reject, always), so it must outlive the daemon. It holds for a file of
that path, size and mtime; a file that was replaced since is innocent.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.pipeline.index import Index

log = logging.getLogger(__name__)


class Ledger:
    """
    Args:
        index: whose samples it judges. One that lies only in memory has a ledger only in memory.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._file: Path | None = index.file.with_suffix(".ledger") if index.file else None
        self.convicted: dict[int, str] = dict(self._read())

    def convict(self, index: int, reason: str) -> None:
        """Add a sample, and all that are the same file. A ledger that cannot be written is logged; the conviction then
        holds for this process."""
        self.convicted.update(dict.fromkeys(self._index.repeats(index), reason))
        if self._file is None:
            return
        entry = {"index": index, **self._identity(index), "reason": reason}
        try:
            with self._file.open("ab+") as file:
                # Behind a line that a full disk has cut, this would be a part of it.
                cut = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
                file.write(b"\n" * bool(cut) + json.dumps(entry).encode("ascii") + b"\n")
        except OSError as error:
            log.warning("the ledger %s cannot be written: %s", self._file, error)

    def _read(self) -> Iterator[tuple[int, str]]:
        if self._file is None or not self._file.exists():
            return
        try:
            text = self._file.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            log.warning("the ledger %s cannot be read: %s", self._file, error)
            return
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                path, size, mtime_ns, reason = (entry[key] for key in ("path", "size", "mtime_ns", "reason"))
                now = self._index.find(str(path), int(size), int(mtime_ns))
            except (ValueError, KeyError, TypeError, OverflowError):
                log.warning("the ledger %s has a line that is none: %.80s", self._file, line)
                continue
            yield from ((number, str(reason)) for number in now)

    def _identity(self, index: int) -> dict[str, int | str]:
        return {
            "path": self._index.shown(index),
            "size": int(self._index.sizes[index]),
            "mtime_ns": int(self._index.mtimes_ns[index]),
        }
