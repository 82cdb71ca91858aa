"""A bound on what strangers can write into the daemon's log: each line may be right, a million of them fill a disk."""

from __future__ import annotations

import logging

#: `extra` of a line that whoever writes it bounds: such as what names a bad picture, which must not get lost.
BOUNDED = {"bounded": True}

#: Lines of one kind in so many seconds.
MOST, SECONDS = 100, 60.0


class Quiet(logging.Filter):
    """Lets through some lines of each kind, and says with the next one that goes through how many it has left out.

    A kind is the place in the code that a line comes from. What is `BOUNDED` always goes through.
    """

    def __init__(self, most: int = MOST, seconds: float = SECONDS) -> None:
        super().__init__()
        self._most = most
        self._seconds = seconds
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "bounded", False):
            return True
        kind = self._kinds.setdefault((record.pathname, record.lineno), _Kind(record.created))
        if not 0 <= record.created - kind.since < self._seconds:  # of a clock that was set back, too
            kind.since, kind.passed = record.created, 0
        if kind.passed >= self._most:
            kind.left_out += 1
            return False
        kind.passed += 1
        if kind.left_out:
            record.msg = f"{record.getMessage()} (and {kind.left_out} more lines like this one before it)"
            record.args = None
            kind.left_out = 0
        return True


class _Kind:
    __slots__ = ("left_out", "passed", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.passed = self.left_out = 0


def quiet() -> None:
    """From now on, whatever is logged by this process."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(Quiet())
