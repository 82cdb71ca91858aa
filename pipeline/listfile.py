"""The `list` source: a CSV file with a header, or JSON Lines, whose lines name samples.

A line is a path, a label and further values. Lines are samples in their order; the same line twice is two samples. A
line that cannot be one is an error that names it. The list is read once; what is kept of a line are its bytes in a few
long arrays. Then the files are measured, as those of a folder, by many threads.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.pipeline import files
from headrace.pipeline.files import Measured, Progress, Reporter, ending, ending_shown, reason_of, tally
from headrace.pipeline.index import Ints, Labels, Listing, Paths, mtime_of, settled, shown
from headrace.pipeline.labels import LabelColumn, Texts, unlabelled
from headrace.pipeline.problems import show
from headrace.pipeline.rows import NONE, BadLines, Row, form_of, lines_of
from headrace.pipeline.spec import Dataset

_SNIFF = 4096
_TICK = 1000  # lines between two looks at the clock


def list_file(dataset: Dataset, progress: Progress | None = None) -> Listing:
    """Read the list and measure its files.

    Args:
        progress: called now and then with (lines read, 0), then (files measured, files in all).

    Raises:
        DatasetError: the list, or a line of it, is no good; by name, with the numbers of the first lines and how many
            more there are; a file cannot be a sample and `allow_missing` is not set; there is no sample at all.
    """
    assert dataset.list is not None
    name = os.fsencode(dataset.list)
    root = list_root(dataset)
    report = Reporter(progress)
    now = time.time_ns()
    bad = BadLines(name)
    with _opened(name) as (fd, before):
        form = form_of(name, os.pread(fd, _SNIFF, 0), bad)
        taken = _Taken(dataset, root, bad, cells=form.cells)
        with open(fd, encoding="utf-8-sig", errors="surrogateescape", newline=form.newline, closefd=False) as file:
            for number, row in enumerate(form(dataset, lines_of(file, bad), taken.texts, bad)):
                taken.take(row)
                if number % _TICK == 0:
                    report(number, 0)
        after = os.fstat(fd)
        whole = os.pread(fd, 1, max(0, after.st_size - 1)) in (b"\n", b"\r")
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        bad.refuse("was changed while it was read; try again")
    bad.check()
    chosen = taken.chosen()
    left_out = _settle(dataset, root, chosen, bad, report)
    return Listing(
        root=root,
        classes=chosen.classes,
        paths=chosen.paths,
        sizes=chosen.sizes,
        mtimes_ns=chosen.mtimes_ns,
        labels=chosen.labels,
        watched=Paths.of([name]),
        watched_mtimes_ns=np.array([settled(mtime_of(before), now)], np.int64),
        watched_sizes=np.array([before.st_size], np.int64),
        columns=taken.texts.columns,
        texts=chosen.texts,
        counts=dict(taken.counts + Counter(why for _, why in left_out)),
        notices=list(_notices(dataset, taken, chosen, left_out, whole=whole)),
    )


def list_root(dataset: Dataset) -> bytes:
    """What the paths of the list are relative to, absolute and without links.

    Raises:
        DatasetError: there is no such folder.
    """
    assert dataset.list is not None
    given = os.fsencode(dataset.root or dataset.list.parent)
    try:
        root = os.path.realpath(given, strict=True)
        is_folder = stat.S_ISDIR(os.stat(root).st_mode)
    except OSError as error:
        raise DatasetError(f"{shown(given)}: cannot read the data set: {reason_of(error)}") from error
    if not is_folder:
        raise DatasetError(f"{shown(given)}: cannot read the data set: it is not a folder")
    return root


# -- the file -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(name: bytes) -> Iterator[tuple[int, os.stat_result]]:
    """The descriptor of the list, and its state before anything was read."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise DatasetError(f"{shown(name)}: cannot read the list: {reason_of(error)}") from error
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise DatasetError(f"{shown(name)}: cannot read the list: it is not a regular file")
        yield fd, state
    except OSError as error:
        raise DatasetError(f"{shown(name)}: cannot read the list: {reason_of(error)}") from error
    finally:
        os.close(fd)


# -- what its rows say --------------------------------------------------------------------------------------


class _Taken:
    """Takes what rows say into arrays.

    Attributes:
        texts: further values.
        counts: lines that were left out by ending.
    """

    def __init__(self, dataset: Dataset, root: bytes, bad: BadLines, *, cells: bool) -> None:
        assert dataset.list is not None
        self._dataset = dataset
        self._root = root
        self._roots = [_components(path) for path in (root, os.fsencode(dataset.root or dataset.list.parent))]
        self._bad = bad
        self._endings = (
            None if dataset.extensions is None else {e.encode("utf-8", "surrogateescape") for e in dataset.extensions}
        )
        self._text_labels = dataset.labels == "text"
        self._labels: LabelColumn | None = LabelColumn(dataset.labels, cells=cells)
        self.texts = Texts(labels=self._text_labels)
        self.counts: Counter[str] = Counter()
        self._blob = bytearray()
        self._ends: array[int] = array("q")
        self._lines: array[int] = array("q")

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def labelled(self) -> bool:
        return self._labels is not None

    def take(self, row: Row) -> None:
        try:
            path = self._relative(row.path)
            if self._endings is not None and (end := ending(os.path.basename(path))) not in self._endings:
                self.counts[ending_shown(end)] += 1
                return
            if row.label is NONE:
                self._labels = None
            elif self._labels is not None:
                self._labels.add(row.label, f"line {row.line}")
            self.texts.add([row.label, *row.values] if self._text_labels else row.values)
        except ValueError as error:
            self._bad.add(row.line, str(error))
            return
        self._blob += path
        self._ends.append(len(self._blob))
        self._lines.append(row.line)

    def _relative(self, path: str) -> bytes:
        """A path as it stands in the listing: relative to the root, without empty and `.` components. `..` stays: what
        it leads to behind a link only the disk knows."""
        if not path:
            raise ValueError("the path is empty")
        try:
            name = path.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ValueError(f"{show(path)} is no path") from None
        if b"\0" in name:
            raise ValueError(f"{show(path)} is no path: it holds a NUL byte")
        absolute = name.startswith(b"/")
        if not (absolute or b"//" in name or b"./" in name or name.endswith((b"/", b"."))):
            return name
        parts = _components(name)
        if absolute:
            inside = [parts[len(above) :] for above in self._roots if parts[: len(above)] == above]
            if not inside:
                raise self._outside(name)
            parts = inside[0]
        depth = 0
        for part in parts:
            depth += -1 if part == b".." else 1
            if depth < 0:
                raise self._outside(name)
        return b"/".join(parts) or b"."

    def _outside(self, path: bytes) -> ValueError:
        return ValueError(
            f"{shown(path)} lies outside {shown(self._root)}; `root` says below which folder files may be read"
        )

    def chosen(self) -> _Chosen:
        """
        Raises:
            DatasetError: `classes` names what is not there, or there is nothing.
        """
        count = len(self._lines)
        if not count:
            self._bad.refuse(f"has no samples ({tally(self.counts) or 'no lines but the header'})")
        try:
            labels, classes, keep = self._finish_labels(count)
        except DatasetError as error:
            self._bad.refuse(str(error))
        offsets = np.concatenate([[0], np.frombuffer(self._ends, np.int64)]).astype(np.int64)
        lines, paths, texts = (
            np.frombuffer(self._lines, np.int64),
            Paths(bytes(self._blob), offsets),
            self.texts.finish(),
        )
        if keep is not None:
            lines, paths, texts = lines[keep], paths.kept(keep), texts and texts.kept(keep)
        return _Chosen(lines, paths, labels, classes, texts, count - len(lines))

    def _finish_labels(self, count: int) -> tuple[Labels, list[str], NDArray[np.bool_] | None]:
        if self._labels is not None:
            return self._labels.finish(self._dataset.classes)
        if self._dataset.classes is not None:
            raise DatasetError("classes: chooses by the names of classes, but this list has no labels")
        return Labels(np.full(count, -1, np.int64)), [], None


def _components(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


# -- samples ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Chosen:
    """The lines that are to be samples.

    Attributes:
        unnamed: how many lines `classes` does not name.
        found: how many there were before `limit`.
    """

    lines: Ints
    paths: Paths
    labels: Labels
    classes: list[str]
    texts: Paths | None
    unnamed: int = 0
    found: int = 0
    sizes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    mtimes_ns: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def path(self, i: int) -> bytes:
        return self.paths.blob[int(self.paths.offsets[i]) : int(self.paths.offsets[i + 1])]

    def measure(self, root: bytes, report: Reporter) -> list[tuple[int, str]]:
        """Ask for size and mtime of every file.

        Returns:
            Numbers of those that cannot be a sample, and why.
        """
        sizes, mtimes_ns, left_out = [], [], []
        firsts = range(0, len(self.lines), files.BATCH)

        def measured(first: int) -> Measured:
            stop = min(first + files.BATCH, len(self.lines))
            return files.measure(root, [self.path(i) for i in range(first, stop)])

        pool = ThreadPoolExecutor(files.THREADS, "headrace-index")
        try:
            for first, part in zip(firsts, pool.map(measured, firsts), strict=True):
                sizes.append(part.sizes)
                mtimes_ns.append(part.mtimes_ns)
                left_out += [(first + i, why) for i, why in part.left_out]
                report(first + len(part.sizes), len(self.lines))
        finally:
            pool.shutdown(cancel_futures=True)
        self.sizes, self.mtimes_ns = np.concatenate(sizes), np.concatenate(mtimes_ns)
        return left_out

    def leave_out(self, numbers: list[int]) -> None:
        if not numbers:
            return
        keep = np.ones(len(self.lines), bool)
        keep[numbers] = False
        self.lines, self.sizes, self.mtimes_ns = self.lines[keep], self.sizes[keep], self.mtimes_ns[keep]
        self.paths, self.labels = self.paths.kept(keep), self.labels.kept(keep)
        self.texts = self.texts and self.texts.kept(keep)

    def limit(self, count: int | None) -> None:
        self.found = len(self.lines)
        self.lines, self.sizes, self.mtimes_ns = self.lines[:count], self.sizes[:count], self.mtimes_ns[:count]
        self.paths, self.labels = self.paths.first(count), self.labels.first(count)
        self.texts = self.texts and self.texts.first(count)


def _settle(dataset: Dataset, root: bytes, chosen: _Chosen, bad: BadLines, report: Reporter) -> list[tuple[str, str]]:
    """Measure the files, and hold to `allow_missing` and `limit`.

    Returns:
        What was left out, and why.

    Raises:
        DatasetError: a file cannot be a sample and that is not allowed, or none can.
    """
    if not dataset.allow_missing:
        chosen.limit(dataset.limit)
        for i, why in chosen.measure(root, report):
            bad.add(int(chosen.lines[i]), f"{shown(chosen.path(i))}: {why}")
        bad.check(", for what they name cannot be a sample (`allow_missing: true` leaves such lines out)")
        return []
    left_out = chosen.measure(root, report)
    named = [(f"line {chosen.lines[i]}, {shown(chosen.path(i))}", why) for i, why in left_out]
    if len(named) == len(chosen.lines):
        bad.refuse(f"none of the files that it names can be a sample; {': '.join(named[0])}")
    chosen.leave_out([i for i, _ in left_out])
    chosen.limit(dataset.limit)
    return named


def _notices(
    dataset: Dataset, taken: _Taken, chosen: _Chosen, left_out: list[tuple[str, str]], *, whole: bool
) -> Iterator[str]:
    if not whole:  # "a.jpg,1" may be the beginning of "a.jpg,12"
        yield "its last line has no end: is the list cut, or still being written?"
    yield from files.notices(left_out)
    if counted := tally(taken.counts):
        yield f"left out by ending: {counted}"
    yield from unlabelled(taken.texts.columns if not taken.labelled else [])
    if chosen.unnamed:
        yield f"left out, because `classes` does not name them: {chosen.unnamed} of {len(taken)} samples"
    by_name = Counter(name.strip() for name in chosen.classes)
    if alike := [show(name) for name, count in by_name.items() if count > 1]:
        yield f"classes that differ only in blanks around their names: {', '.join(alike[:10])}"
    if dataset.limit is not None and dataset.limit < chosen.found:
        yield f"limit: the first {dataset.limit} of {chosen.found} samples"
