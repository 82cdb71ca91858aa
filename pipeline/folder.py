"""The `folder` source: which files of a folder are samples, in which order, with which labels.

Order and labels are those of torchvision's ImageFolder: the folders in the root are the classes, numbered by name, and
files follow by folder and name, compared as text. What is a sample is decided by ending and by `stat`; nothing is
ever opened here, so a FIFO blocks nobody. Folders are listed, and files measured, by many threads at once, because on
network disks each answer takes a round trip; the result does not depend on who was first.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.pipeline import files
from headrace.pipeline.files import UNUSABLE, Progress, Reporter, ending, ending_shown, reason_of, some, tally
from headrace.pipeline.index import Ints, Labels, Listing, Paths, mtime_of, settled, shown
from headrace.pipeline.spec import Dataset

#: Endings of what may be a picture; its content decides everything else.
EXTENSIONS = frozenset(
    "jpg jpeg jpe jfif png apng gif bmp dib webp tif tiff ppm pgm pbm pnm avif avifs heic heif hif jp2 j2k jpx j2c jpc"
    " jxl mpo ico psd qoi tga".split()
)

_HIDDEN = "hidden"
#: What file managers, archivers and network disks leave behind.
_JUNK = {b"Thumbs.db": "Thumbs.db", b"__MACOSX": "__MACOSX", b"@eaDir": "@eaDir"}

_INWARD = "a link to the data set's root, or to a folder in it or around it"
_TWICE = "a folder that this class has already"
_NO_CLASS = "in the root folder, so without a class"


def list_folder(dataset: Dataset, progress: Progress | None = None) -> Listing:
    """Walk through the folder of a data set.

    Args:
        progress: called now and then with (files measured, files found; 0 while more may be found).

    Raises:
        DatasetError: a folder cannot be listed; a class is empty and that is not allowed; a class of `classes:` does
            not exist; there is no sample at all; an I/O error. By name.
    """
    root = real_root(dataset)
    endings = EXTENSIONS if dataset.extensions is None else frozenset(dataset.extensions)
    disk = _Disk(root, frozenset(_bytes(e) for e in endings))
    with _Walk(disk, progress) as walk:
        top = disk.list(b"")
        top.left_out += [(name, _NO_CLASS) for name in top.pictures]
        classes = _choose_classes(dataset, root, top)
        walk.run(sorted(classes, key=_text))
        return _Assembly(dataset, root, classes, top, walk).listing()


def real_root(dataset: Dataset) -> bytes:
    """The data set's folder, absolute and without links.

    Raises:
        DatasetError: there is no such folder.
    """
    assert dataset.folder is not None
    given = os.fsencode(dataset.folder)
    try:
        root = os.path.realpath(given, strict=True)
        is_folder = stat.S_ISDIR(os.stat(root).st_mode)
    except OSError as error:
        raise DatasetError(f"{shown(given)}: cannot list the data set: {reason_of(error)}") from error
    if not is_folder:
        raise DatasetError(f"{shown(given)}: cannot list the data set: it is not a folder")
    return root


def _choose_classes(dataset: Dataset, root: bytes, top: _Folder) -> list[bytes]:
    """Folder names of the classes, in the order of their numbers."""
    there = sorted(top.folders, key=_text)
    if not there:
        raise DatasetError(
            f"{shown(root)}: has no class folders ({tally(_left_out_of([top])) or 'it is empty'}); pictures are listed"
            " from ROOT/CLASS/..."
        )
    if dataset.classes is None:
        return there
    wanted = [_bytes(name) for name in dataset.classes]
    if absent := [name for name in wanted if name not in set(there)]:
        raise DatasetError(
            f"{shown(root)}: there is no class folder {some(absent)}, which `classes` names; there is {some(there)}"
        )
    return wanted


# -- what threads do ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Folder:
    """One folder, listed. Names stand in the order in which the disk told them.

    Attributes:
        path: relative to the root.
        identity: device and inode.
        left_out: (path, reason).
        counts: of what was left out by name or ending.
    """

    path: bytes
    identity: tuple[int, int] = (0, 0)
    mtime_ns: int = 0
    pictures: list[bytes] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    left_out: list[tuple[bytes, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Files:
    """Some files of one folder, measured, in the order of the listing; `left_out` as above."""

    paths: Paths
    sizes: Ints
    mtimes_ns: Ints
    left_out: list[tuple[bytes, str]]


@dataclass(frozen=True, slots=True)
class _Disk:
    """Asks the disk. Nothing here opens a file."""

    root: bytes
    endings: frozenset[bytes]

    def list(self, path: bytes) -> _Folder:
        folder = _Folder(path)
        full = os.path.join(self.root, path)
        try:
            now = time.time_ns()
            state = os.stat(full)  # before the listing: what comes later than this moves the mtime
            folder.identity = state.st_dev, state.st_ino
            folder.mtime_ns = settled(mtime_of(state), now)
            with os.scandir(full) as entries:
                for entry in entries:
                    self._sort(folder, entry)
        except OSError as error:
            raise DatasetError(f"{shown(full)}: cannot list this folder: {reason_of(error)}") from error
        return folder

    def _sort(self, folder: _Folder, entry: os.DirEntry[bytes]) -> None:
        if junk := _junk(entry.name):
            folder.counts[junk] += 1
        elif entry.is_symlink():
            self._sort_link(folder, entry.name)
        elif entry.is_dir(follow_symlinks=False):
            folder.folders.append(entry.name)
        else:
            self._sort_file(folder, entry.name)

    def _sort_file(self, folder: _Folder, name: bytes) -> None:
        if (end := ending(name)) in self.endings:
            folder.pictures.append(name)
        else:
            folder.counts[ending_shown(end)] += 1

    def _sort_link(self, folder: _Folder, name: bytes) -> None:
        path = os.path.join(folder.path, name)
        full = os.path.join(self.root, path)
        try:
            is_folder = stat.S_ISDIR(os.stat(full).st_mode)
        except OSError as error:
            if error.errno not in UNUSABLE:
                raise
            folder.left_out.append((path, UNUSABLE[error.errno]))
            return
        if not is_folder:
            self._sort_file(folder, name)
        elif self._leads_inward(full):
            folder.left_out.append((path, _INWARD))
        else:
            folder.folders.append(name)

    def _leads_inward(self, link: bytes) -> bool:
        target = os.path.realpath(link)
        inside, around = os.path.join(self.root, b""), os.path.join(target, b"")
        return target == self.root or target.startswith(inside) or self.root.startswith(around)

    def measure(self, folder: bytes, names: Sequence[bytes]) -> _Files:
        paths = [folder + b"/" + name for name in names]
        found = files.measure(self.root, paths)
        left_out = {i for i, _ in found.left_out}
        keep = [i for i in range(len(paths)) if i not in left_out]
        return _Files(
            Paths.of([paths[i] for i in keep]),
            found.sizes[keep],
            found.mtimes_ns[keep],
            [(paths[i], why) for i, why in found.left_out],
        )


def _junk(name: bytes) -> str | None:
    if name.startswith(b"._"):
        return "._*"
    return _HIDDEN if name.startswith(b".") else _JUNK.get(name)


# -- who asks what, and when --------------------------------------------------------------------------------


class _Walk:
    """Goes down level by level: which of two ways into a folder counts is settled by depth and name, not by timing.

    Attributes:
        folders: what was entered, by path.
    """

    def __init__(self, disk: _Disk, progress: Progress | None) -> None:
        self.folders: dict[bytes, _Folder] = {}
        self._disk = disk
        self._pool = ThreadPoolExecutor(files.THREADS, "headrace-index")
        self._tasks: dict[bytes, list[Future[_Files]]] = {}
        self._report = Reporter(progress)
        self._found = self._measured = 0
        self._lock = threading.Lock()

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, classes: Sequence[bytes]) -> None:
        """List every folder of the classes and begin to measure every file."""
        entered: dict[tuple[bytes, int, int], _Folder] = {}
        level = list(classes)
        while level:
            below: list[bytes] = []
            for folder in self._pool.map(self._disk.list, level):
                first = entered.setdefault((_class_of(folder.path), *folder.identity), folder)
                if first is not folder:
                    first.left_out.append((folder.path, _TWICE))
                    continue
                self.folders[folder.path] = folder
                self._begin(folder)
                below += [folder.path + b"/" + name for name in folder.folders]
                self._report(self._measured, 0)
            level = sorted(below, key=_text)

    def files(self, folder: bytes) -> Iterator[_Files]:
        """The files of a folder, once they are measured; a folder is asked for once."""
        for task in self._tasks.pop(folder):
            measured = task.result()
            self._report(self._measured, self._found)
            yield measured

    def _begin(self, folder: _Folder) -> None:
        names = sorted(folder.pictures, key=_text)
        folder.pictures = []
        self._found += len(names)
        batches = [names[i : i + files.BATCH] for i in range(0, len(names), files.BATCH)]
        self._tasks[folder.path] = [self._pool.submit(self._measure, folder.path, batch) for batch in batches]

    def _measure(self, folder: bytes, names: Sequence[bytes]) -> _Files:
        measured = self._disk.measure(folder, names)
        with self._lock:
            self._measured += len(names)
        return measured


# -- the listing --------------------------------------------------------------------------------------------


class _Assembly:
    """Puts everything in order, says what was left out, and refuses empty classes."""

    def __init__(self, dataset: Dataset, root: bytes, classes: list[bytes], top: _Folder, walk: _Walk) -> None:
        self._dataset = dataset
        self._root = root
        self._classes = classes
        self._top = top
        self._walk = walk

    def listing(self) -> Listing:
        order = sorted(self._walk.folders.values(), key=lambda f: (_text(_class_of(f.path)), _text(f.path)))
        number = {name: i for i, name in enumerate(self._classes)}
        measured: list[_Files] = []
        labels: list[Ints] = []
        for folder in order:
            for part in self._walk.files(folder.path):
                folder.left_out += part.left_out
                measured.append(part)
                labels.append(np.full(len(part.paths), number[_class_of(folder.path)], np.int64))
        empty = np.zeros(0, np.int64)
        label = np.concatenate([empty, *labels])
        self._refuse_empty(order, np.bincount(label, minlength=len(self._classes)))
        listed = slice(self._dataset.limit)
        return Listing(
            root=self._root,
            classes=[name.decode("utf-8", "backslashreplace") for name in self._classes],
            paths=Paths.joined([f.paths for f in measured]).first(self._dataset.limit),
            sizes=np.concatenate([empty, *(f.sizes for f in measured)])[listed],
            mtimes_ns=np.concatenate([empty, *(f.mtimes_ns for f in measured)])[listed],
            labels=Labels(label[listed]),
            watched=Paths.of([self._top.path, *(f.path for f in order)]),
            watched_mtimes_ns=np.array([self._top.mtime_ns, *(f.mtime_ns for f in order)], np.int64),
            watched_sizes=np.full(1 + len(order), -1, np.int64),
            counts=dict(_left_out_of([self._top, *order])),
            notices=list(self._notices(order, len(label))),
        )

    def _refuse_empty(self, order: list[_Folder], samples: NDArray[np.intp]) -> None:
        empty = [name for name, count in zip(self._classes, samples.tolist(), strict=True) if not count]
        if len(empty) == len(self._classes):
            left_out = tally(_left_out_of([self._top, *order]))
            raise DatasetError(
                f"{shown(self._root)}: no pictures in its class folders ({left_out or 'no file at all'})"
            )
        if not empty or self._dataset.allow_empty:
            return
        first = _left_out_of([f for f in order if _class_of(f.path) == empty[0]])
        noun = "class has" if len(empty) == 1 else "classes have"
        raise DatasetError(
            f"{shown(self._root)}: {len(empty)} {noun} no pictures: {some(empty)} (in {shown(empty[0])}:"
            f" {tally(first) or 'no file at all'}); `allow_empty: true` keeps such classes and their numbers"
        )

    def _notices(self, order: list[_Folder], samples: int) -> Iterator[str]:
        """Sentences for people about the same, with names."""
        folders = [self._top, *order]
        left_out = (item for folder in folders for item in sorted(folder.left_out))
        yield from files.notices((shown(path), why) for path, why in left_out)
        if counts := sum((f.counts for f in folders), Counter()):
            yield f"left out by name or ending: {tally(counts)}"
        if unnamed := sorted(set(self._top.folders) - set(self._classes), key=_text):
            yield f"left out, because `classes` does not name them: {some(unnamed)}"
        if self._dataset.limit is not None and self._dataset.limit < samples:
            yield f"limit: the first {self._dataset.limit} of {samples} samples"


def _left_out_of(folders: Iterable[_Folder]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for folder in folders:
        counts.update(folder.counts)
        counts.update(why for _, why in folder.left_out)
    return counts


def _class_of(path: bytes) -> bytes:
    return path.partition(b"/")[0]


def _text(name: bytes) -> str:
    """What names are sorted by: code points, as Python compares text, whatever the locale."""
    return name.decode("utf-8", "surrogateescape")


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
