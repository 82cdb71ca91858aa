"""Files that are to be samples: what `stat` says of them, which cannot be one, and why. Nothing here opens a file."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import DatasetError
from headrace.pipeline.index import Ints, mtime_of, shown

#: Told about an index that is being built: (samples done, samples in all; 0 while that is unknown).
Progress = Callable[[int, int], None]

#: Files that are measured at once: on network disks each answer takes a round trip.
THREADS = 16
#: Files that one task measures.
BATCH = 512

_NAMED = 50  # left-out files named for each reason; the rest is counted
_KINDS = 20  # endings counted apart; the rest is counted together
_TICK = 0.05  # seconds between two reports of progress

_DANGLING = "what it links to does not exist"
#: What keeps a file from being a sample: a property of it, not a fault of the disk.
UNUSABLE = {
    errno.ENOENT: _DANGLING,
    errno.ENOTDIR: _DANGLING,
    errno.ENAMETOOLONG: "the name that it links to is too long",
    errno.ELOOP: "too many links, or a link to itself",
    errno.EACCES: "no permission to read it",
    errno.EPERM: "no permission to read it",
}
_IRREGULAR = {
    stat.S_IFIFO: "a FIFO, not a regular file",
    stat.S_IFSOCK: "a socket, not a regular file",
    stat.S_IFCHR: "a device, not a regular file",
    stat.S_IFBLK: "a device, not a regular file",
    stat.S_IFDIR: "a folder, not a regular file",
}
_EFFECTIVE = os.access in os.supports_effective_ids


@dataclass(slots=True)
class Measured:
    """What became of some files.

    Attributes:
        sizes, mtimes_ns: int64 [n]; zeros for those left out.
        left_out: number among them, and why it cannot be a sample.
    """

    sizes: Ints
    mtimes_ns: Ints
    left_out: list[tuple[int, str]]


def measure(root: bytes, paths: Sequence[bytes]) -> Measured:
    """Ask for size and mtime of each file.

    Raises:
        DatasetError: an I/O error; by name.
    """
    sizes, mtimes_ns, left_out = np.zeros(len(paths), np.int64), np.zeros(len(paths), np.int64), []
    for i, path in enumerate(paths):
        full = os.path.join(root, path)
        try:
            state = os.stat(full)
        except OSError as error:
            if error.errno not in UNUSABLE:
                raise DatasetError(f"{shown(full)}: cannot index this file: {reason_of(error)}") from error
            left_out.append((i, _why(full, error.errno)))
            continue
        if unusable := _unusable(full, state.st_mode):
            left_out.append((i, unusable))
        else:
            sizes[i], mtimes_ns[i] = state.st_size, mtime_of(state)
    return Measured(sizes, mtimes_ns, left_out)


def _why(full: bytes, number: int) -> str:
    linked = os.path.islink(full)
    if number in (errno.ENOENT, errno.ENOTDIR) and not linked:
        return "it does not exist"
    return "its name is too long" if number == errno.ENAMETOOLONG and not linked else UNUSABLE[number]


def _unusable(full: bytes, mode: int) -> str | None:
    if not stat.S_ISREG(mode):
        return _IRREGULAR.get(stat.S_IFMT(mode), "not a regular file")
    # Asked only where the mode leaves a doubt: on a network disk it is a round trip more.
    if mode & 0o444 != 0o444 and not os.access(full, os.R_OK, effective_ids=_EFFECTIVE):
        return UNUSABLE[errno.EACCES]
    return None


def ending(name: bytes) -> bytes:
    """What follows the last dot of a file's name, in lower case; empty where there is none."""
    return name.rpartition(b".")[2].lower() if b"." in name else b""


def ending_shown(ending: bytes) -> str:
    """The same as it is counted."""
    return f".{shown(ending)}"[:24] if ending else "without an ending"


def reason_of(error: OSError) -> str:
    """What the operating system says, as the end of a sentence."""
    return (error.strerror or str(error)).lower()


class Reporter:
    """Tells progress now and then, and nothing twice.

    Args:
        progress: called in the thread that calls this.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._last = (0.0, -1, 0)  # when, and what

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        due = now - self._last[0] >= _TICK or done == total
        if self._progress and due and (done, total) != self._last[1:]:
            self._last = now, done, total
            self._progress(done, total)


# -- sentences about what was left out ----------------------------------------------------------------------


def notices(left_out: Iterable[tuple[str, str]]) -> Iterator[str]:
    """
    Args:
        left_out: what, and why.
    """
    named: Counter[str] = Counter()
    for what, why in left_out:
        named[why] += 1
        if named[why] <= _NAMED:
            yield f"left out {what}: {why}"
    for why, count in named.items():
        if count > _NAMED:
            yield f"left out {count - _NAMED} more: {why}"


def tally(counts: Counter[str]) -> str:
    """`12 .txt, 3 hidden`, the most frequent first."""
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count} {kind}" for kind, count in common[:_KINDS]]
    if rest := sum(count for _, count in common[_KINDS:]):
        parts.append(f"{rest} of {len(common) - _KINDS} other kinds")
    return ", ".join(parts)


def some(names: Sequence[bytes]) -> str:
    """The first of these names, and how many more there are."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(shown(name) for name in names[:10]) + more
