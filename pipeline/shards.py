"""The `shards` source: WebDataset tar files, their samples read at offsets, without unpacking.

A sample is a run of members of one tar that share a key. The key is WebDataset's: the name up to the first dot behind
the last slash; the rest, in lower case, is the ending. One member is the picture, by its ending; `.cls`, `.json` and
`.txt` hold the label and further values; what else there is, is not used. Where WebDataset would merge, repeat or pass
over something, this is an error that names the member.

Tars are listed by many threads at once, because on network disks each answer takes a round trip; the result does not
depend on who was first: tars follow as they were given, samples as they lie in the tar.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import stat
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.pipeline.files import THREADS, Progress, Reporter, ending_shown, reason_of, some, tally
from headrace.pipeline.folder import EXTENSIONS
from headrace.pipeline.index import Index, Ints, Labels, Listing, Paths, mtime_of, settled, shown
from headrace.pipeline.labels import LABEL, LabelColumn, Texts, unlabelled
from headrace.pipeline.problems import show
from headrace.pipeline.reading import changed, check_size, compare, open_indexed
from headrace.pipeline.rows import decode_json
from headrace.pipeline.spec import Dataset, Decode
from headrace.pipeline.tar import Tar, TarError, pread

MAX_TARS = 1_000_000
MAX_TARGET = 1 << 20  # bytes of a .cls, .json or .txt

_AHEAD = 32  # tars that are listed, or wait for it, beyond the one whose turn it is
_NAMED = 10  # names in an error or a notice; the rest is counted
_TICK = 0.05  # seconds between two looks at what the threads have found
_OPEN = 64  # tars that a reader keeps open
_COUNTED = 256  # samples of a tar between two words about them

_SOURCES = ("cls", "json", "txt")  # of labels, the first one first
_TARGETS = {source.encode(): place for place, source in enumerate(_SOURCES)}

#: What file managers, archivers and network disks leave behind, and hidden members. A name may begin with "./".
_JUNK = re.compile(rb"(?:^|/)(?:(\._)|(\.)(?!\.?/)|(__MACOSX|@eaDir)(?:/|\Z)|(Thumbs\.db)\Z)")
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}|\{([^{}]*,[^{}]*)\}")


# -- which tars ---------------------------------------------------------------------------------------------


def expand(pattern: str) -> Iterator[str]:
    """The names that a pattern stands for, the last brace running fastest.

    `{000..120}` is a run of numbers, with leading zeros where one of the two ends has them; `{a,b}` one of these texts.
    Any other brace is a brace.

    Raises:
        DatasetError: there are more than `MAX_TARS`.
    """
    pieces: list[Sequence[str]] = []
    end = 0
    for match in _RANGE.finditer(pattern):
        pieces += [[pattern[end : match.start()]], _choices(pattern, match)]
        end = match.end()
    pieces.append([pattern[end:]])
    count = 1
    for piece in pieces:
        count *= len(piece)
    if count > MAX_TARS:
        raise _too_many(pattern, count)
    return map("".join, itertools.product(*pieces))


def _choices(pattern: str, match: re.Match[str]) -> Sequence[str]:
    first, last, texts = match.groups()
    if texts is not None:
        return texts.split(",")
    a, b = int(first), int(last)
    if abs(b - a) >= MAX_TARS:
        raise _too_many(pattern, abs(b - a) + 1)
    padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{n:0{width}d}" for n in range(a, b + (1 if a <= b else -1), 1 if a <= b else -1)]


def _too_many(pattern: str, count: int) -> DatasetError:
    return DatasetError(f"{shown(os.fsencode(pattern))}: stands for {count} tar files, over the limit of {MAX_TARS}")


def _tars(dataset: Dataset) -> list[str]:
    """The tars' absolute paths, in the order given."""
    tars: dict[str, None] = {}
    for pattern in dataset.shards or []:
        for tar in expand(pattern):
            tar = re.sub("/+", "/", tar)
            if tar in tars:
                raise DatasetError(
                    f"{shown(os.fsencode(tar))}: given twice, the second time by {shown(os.fsencode(pattern))}"
                )
            tars[tar] = None
        if len(tars) > MAX_TARS:
            raise DatasetError(f"`shards` stands for more than {MAX_TARS} tar files")
    return list(tars)


def shards_root(dataset: Dataset) -> bytes:
    """The deepest folder that all tars lie in, absolute and without links."""
    return os.path.realpath(os.fsencode(_common_folder(_tars(dataset))))


def _common_folder(tars: list[str]) -> str:
    return os.path.commonpath(list(dict.fromkeys(map(os.path.dirname, tars))))


def list_shards(dataset: Dataset, progress: Progress | None = None) -> Listing:
    """Read the headers of all tars, and the targets in them.

    Args:
        progress: called now and then with (samples found, 0); at the end with (samples, samples).

    Raises:
        DatasetError: what is wrong, by TAR/member, the first ten and how many more; or an I/O error.
    """
    tars = _tars(dataset)
    folder = _common_folder(tars)
    root = os.path.realpath(os.fsencode(folder))
    endings = EXTENSIONS if dataset.extensions is None else frozenset(dataset.extensions)
    # What is left of a path as it was given: behind a link "x/.." is not "".
    names = [os.fsencode(tar.removeprefix(folder).lstrip("/")) for tar in tars]
    assembly = _Assembly(dataset, root)
    with closing(_in_turn(root, names, frozenset(map(os.fsencode, endings)), progress)) as shards:
        for shard in shards:
            assembly.add(shard)
    listing = assembly.listing()
    if progress:
        progress(len(listing.paths), len(listing.paths))
    return listing


_ITS_TAR = "its tar: "


class ShardSource:
    """Samples that are members of tars. Keeps the tars open that it read from last. Good for several threads at once.

    A tar that was replaced, while it is open here, stays what was indexed; one that was written to is an error.
    """

    def __init__(self, index: Index, decode: Decode) -> None:
        self._open: dict[int, _Descriptor] = {}  # by number of a tar, the latest last
        self._lock = threading.Lock()  # of what is open; whoever reads holds what it reads from
        self._index = index
        self._limit = decode.max_file_bytes

    def read(self, i: int) -> bytes:
        index = self._index
        assert index.container is not None and index.positions is not None
        name, tar = index.shown_full(i), int(index.container[i])
        state = int(index.watched_sizes[tar]), int(index.mtimes_ns[i])
        position, size = int(index.positions[i]), int(index.sizes[i])
        try:
            file = self._opened(tar, name)
            compare(name, os.fstat(file.fd), *state, _ITS_TAR)
            check_size(size, self._limit)
            data = pread(file.fd, size, position)
            # A tar rewritten under our hands would give a mix of two pictures.
            compare(name, os.fstat(file.fd), *state, _ITS_TAR)
        except (OSError, DatasetError):
            self._drop(tar)  # whoever tries again shall open it again: a stale handle stays stale
            raise
        if len(data) != size:
            self._drop(tar)
            raise changed(name, f"of its {size} bytes {len(data)} are there")
        return data

    def close(self) -> None:
        """Close the tars; those that are needed again are opened again."""
        with self._lock:
            self._open.clear()

    def _opened(self, tar: int, name: str) -> _Descriptor:
        with self._lock:
            file = self._open.pop(tar, None)
            if file is not None:
                self._open[tar] = file
                return file
            while len(self._open) >= _OPEN:
                del self._open[next(iter(self._open))]
        try:
            file = _Descriptor(open_indexed(self._index.watched_path(tar), name, _ITS_TAR))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.close()
            raise
        with self._lock:
            self._open[tar] = file
        return file

    def _drop(self, tar: int) -> None:
        with self._lock:
            self._open.pop(tar, None)


class _Descriptor:
    """Closed with the last one who holds it. A number that is closed while another thread still reads from it may be
    another tar's by then, and of the same size and age.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


# -- what threads do ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Problems:
    """The first of many sentences, and how many there are."""

    texts: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.texts) < _NAMED:
            self.texts.append(text)

    def join(self, other: _Problems) -> None:
        self.count += other.count
        self.texts += other.texts[: _NAMED - len(self.texts)]


#: What stands beside a picture: the contents of `.cls`, `.json` and `.txt`, None where there is none.
_Targets = tuple[str | None, str | None, str | None]


@dataclass(slots=True)
class _Shard:
    """One tar, listed.

    Attributes:
        name: relative to the root.
        identity: device and inode.
        mtime_ns: as it is; `settled_ns`: as it may be compared later.
        names: of its pictures.
        places: offset and size of each, one after the other.
        targets: of each.
        unused: members of samples, by ending.
        left_out: what is no member of a sample: kind → number.
    """

    name: bytes
    identity: tuple[int, int] | None = None
    size: int = 0
    mtime_ns: int = 0
    settled_ns: int = 0
    names: list[bytes] = field(default_factory=list)
    places: array[int] = field(default_factory=lambda: array("q"))
    targets: list[_Targets] = field(default_factory=list)
    unused: Counter[bytes] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    problems: _Problems = field(default_factory=_Problems)


def _list(root: bytes, name: bytes, endings: frozenset[bytes], count: Callable[[int], None]) -> _Shard:
    shard = _Shard(name)
    full = os.path.join(root, name)
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        fd = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise DatasetError(f"{shown(full)}: cannot open this tar: {reason_of(error)}") from error
        hint = "; `shards` knows braces, such as {000000..000099}, and no *" if b"*" in name else ""
        shard.problems.add(f"{shown(name)}: {_UNUSABLE[error.errno]}{hint}")
        return shard
    try:
        now = time.time_ns()
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            shard.problems.add(f"{shown(name)}: {_NOT_REGULAR}")
            return shard
        shard.identity = before.st_dev, before.st_ino
        shard.size, shard.mtime_ns = before.st_size, mtime_of(before)
        shard.settled_ns = settled(shard.mtime_ns, now)
        _Grouping(shard, endings, count).run(Tar(fd, before.st_size))
        after = os.fstat(fd)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            shard.problems.add(f"{shown(name)}: changed while it was indexed")
    except TarError as error:
        shard.problems.add(f"{shown(name)}: {error}")
    except OSError as error:
        raise DatasetError(f"{shown(full)}: cannot read this tar: {reason_of(error)}") from error
    finally:
        os.close(fd)
    return shard


_NOT_REGULAR = "it is no regular file"
_UNUSABLE = {
    errno.ENOENT: "there is no such file",
    errno.ENOTDIR: "there is no such file",
    errno.ENAMETOOLONG: "there is no such file, its name is too long",
    errno.ELOOP: "too many links, or a link to itself",
    errno.EACCES: "no permission to read it",
    errno.EPERM: "no permission to read it",
    errno.ENXIO: _NOT_REGULAR,  # a socket
}


class _Grouping:
    """Puts the members of one tar together to samples."""

    def __init__(self, shard: _Shard, endings: frozenset[bytes], count: Callable[[int], None]) -> None:
        self._shard = shard
        self._endings = endings
        self._count = count
        # of the sample that is being put together:
        self._members: dict[bytes, bytes] = {}  # ending → name
        self._pictures: list[tuple[bytes, int, int]] = []
        self._targets: list[str | None] = [None, None, None]

    def run(self, tar: Tar) -> None:
        keys: set[bytes] = set()
        current: bytes | None = None
        repeated = False
        for name, offset, size in tar.members():
            if junk := _JUNK.search(name):
                self._shard.left_out[_junk_kind(junk)] += 1
                continue
            dot = name.find(b".", name.rfind(b"/") + 1)
            if dot < 0 or dot == len(name) - 1:
                self._shard.left_out["without an ending"] += 1
                continue
            key = name[:dot]
            if key != current:
                self._close()
                current = key
                key = key.removeprefix(b"./")
                if repeated := key in keys:
                    self._problem(name, _REPEATED)
                keys.add(key)
            if not repeated:
                self._take(tar, name, name[dot + 1 :].lower(), offset, size)
        self._close()
        self._count(len(self._shard.names) % _COUNTED)
        self._shard.left_out += tar.left_out

    def _problem(self, name: bytes, text: str) -> None:
        self._shard.problems.add(f"{shown(self._shard.name + b'/' + name)}: {text}")

    def _take(self, tar: Tar, name: bytes, ending: bytes, offset: int, size: int) -> None:
        if ending in self._members:
            self._problem(name, f"the sample has another member .{shown(ending)}")
            return
        self._members[ending] = name
        if ending in self._endings:
            self._pictures.append((name, offset, size))
        elif ending not in _TARGETS:
            self._shard.unused[ending] += 1
        elif size > MAX_TARGET:
            self._problem(name, f"has {size} bytes; a label, or further values, may have {MAX_TARGET}")
        else:
            data = tar.read(offset, size)
            try:
                self._targets[_TARGETS[ending]] = str(data, "utf-8-sig")
            except UnicodeDecodeError as error:
                self._problem(name, f"is no UTF-8, at its byte {error.start}")

    def _close(self) -> None:
        """All members of the sample are there."""
        if not self._members:
            return
        if len(self._pictures) == 1:
            name, offset, size = self._pictures[0]
            self._shard.names.append(name)
            self._shard.places.extend((offset, size))
            cls, text, txt = self._targets
            self._shard.targets.append((cls, text, txt))
            if len(self._shard.names) % _COUNTED == 0:
                self._count(_COUNTED)
        else:
            self._refuse(list(self._members))
        self._members.clear()
        self._pictures.clear()
        self._targets[:] = None, None, None

    def _refuse(self, endings: list[bytes]) -> None:
        if self._pictures:
            there = _listed([ending for ending in endings if ending in self._endings])
            hint = "; `extensions` says which it is"
            self._problem(self._pictures[1][0], f"the sample has {len(self._pictures)} pictures, {there}{hint}")
            return
        dotted = any(ending.rpartition(b".")[2] in self._endings for ending in endings)
        why = "; an ending is all that follows the first dot of a name, `extensions` may name it" if dotted else ""
        self._problem(self._members[endings[0]], f"the sample has no picture, only {_listed(endings)}{why}")


_REPEATED = "its key was there before: two samples have the same one, or the members of one do not lie side by side"


def _junk_kind(match: re.Match[bytes]) -> str:
    appledouble, hidden, folder, file = match.groups()
    return "._*" if appledouble else "hidden" if hidden else str(folder or file, "ascii")


def _listed(endings: list[bytes]) -> str:
    more = f" and {len(endings) - _NAMED} more" if len(endings) > _NAMED else ""
    return ", ".join(f".{shown(e)}" for e in endings[:_NAMED]) + more


# -- who lists what, and when -------------------------------------------------------------------------------


def _in_turn(
    root: bytes, tars: Sequence[bytes], endings: frozenset[bytes], progress: Progress | None
) -> Generator[_Shard, None, None]:
    """The tars, listed by many threads, a bounded number of them ahead; in their order."""
    lock = threading.Lock()
    report = Reporter(progress)
    seen = 0
    stopped = False

    def count(samples: int) -> None:
        nonlocal seen
        if stopped:  # a tar may take minutes
            raise _Stopped
        with lock:
            seen += samples

    pool = ThreadPoolExecutor(THREADS, "headrace-index")
    try:
        waiting: list[Future[_Shard]] = []
        left = iter(tars)
        while True:
            more = itertools.islice(left, _AHEAD - len(waiting))
            waiting += [pool.submit(_list, root, tar, endings, count) for tar in more]
            if not waiting:
                return
            while not wait(waiting[:1], _TICK).done:
                report(seen, 0)
            report(seen, 0)
            yield waiting.pop(0).result()
    finally:
        stopped = True
        pool.shutdown(cancel_futures=True)


class _Stopped(Exception):
    """Nobody waits for this tar any more."""


# -- labels and further values ------------------------------------------------------------------------------


class _Values:
    """What stands beside pictures, one after the other.

    Where labels are is settled by the first tar that has samples: in `.cls`, else in the JSON, else in `.txt`. Every
    sample must have its label there.
    """

    def __init__(self, dataset: Dataset) -> None:
        asked = dataset.columns.label
        self._kind = dataset.labels
        self._classes = dataset.classes
        self._vector = not isinstance(asked, str | None)
        self._keys: list[str] = [LABEL] if asked is None else [asked] if isinstance(asked, str) else list(asked)
        self._asked = asked is not None
        self._source: str | None = None  # one of `_SOURCES`; empty: there are no labels; None: not settled
        self._labels: LabelColumn
        self._texts: Texts
        if asked is not None:
            self._settle(asked if asked in ("cls", "txt") else "json")

    def begin(self, targets: Sequence[_Targets]) -> None:
        """Those of one tar come next."""
        if self._source is None and targets:
            found = set()
            for target in targets:
                with suppress(ValueError):  # it will be told when its turn comes
                    found.add(self._find(_values(target))[0])
            self._settle(next((source for source in _SOURCES if source in found), ""))

    def add(self, targets: _Targets, where: str) -> None:
        """Take what stands beside one more picture.

        Args:
            where: it stands, for people.

        Raises:
            ValueError: what is wrong.
        """
        values = _values(targets)
        label = self._label(values, where)
        further = self._further(values)
        places = [self._texts.column(name) for name in further]
        row: list[object] = [None] * len(self._texts.columns)
        for place, value in zip(places, further.values(), strict=True):
            row[place] = value
        self._texts.add(row if label is None else [label, *row])

    def finish(self) -> tuple[Labels | None, list[str], NDArray[np.bool_] | None]:
        """`(labels, classes, keep)`: labels are None where there are none.

        Raises:
            DatasetError: `classes` or `labels` ask for what is not there. Where, the caller has to add.
        """
        if self._source:
            return self._labels.finish(self._classes)
        if self._kind != "auto" or self._classes is not None:
            raise DatasetError(f'there are no labels: no .cls, no .json with "{LABEL}", no .txt')
        return None, [], None

    @property
    def labelled(self) -> bool:
        return bool(self._source)

    def texts(self) -> tuple[list[str], Paths | None]:
        """`(columns, texts of all samples)`."""
        return self._texts.columns, self._texts.finish()

    def _settle(self, source: str) -> None:
        self._source = source
        if source == "txt" and self._kind == "auto":
            self._kind = "text"  # a caption is no class
        self._labels = LabelColumn(self._kind, cells=source != "json")
        self._texts = Texts(labels=self._kind == "text")

    def _label(self, values: Sequence[object], where: str) -> str | None:
        """Take the label; returned if it is a text."""
        source, value = self._find(values)
        if source != self._source:
            raise ValueError(self._misplaced(source))
        if not source:
            return None
        if isinstance(value, str) and (source == "cls" or (source == "txt" and self._kind != "text")):
            value = value.strip()
        self._labels.add(value, where)
        return value if self._kind == "text" and isinstance(value, str) else None

    def _misplaced(self, source: str) -> str:
        if not self._source or (source and _SOURCES.index(source) < _SOURCES.index(self._source)):
            return f"the sample has a label in .{source}, and samples before it have none there"
        keys = f" with {' and '.join(map(show, self._keys))}" if self._source == "json" else ""
        return f"the sample has no label: there is no .{self._source}{keys}"

    def _find(self, values: Sequence[object]) -> tuple[str, object]:
        """Where the label is, and the label; an empty text where there is none."""
        for source, value in zip(_SOURCES, values, strict=True):
            if value is None or (self._asked and source != self._source):
                continue
            if source == "json" and (value := self._of_json(value)) is None:
                continue
            return source, value
        return "", None

    def _of_json(self, value: object) -> object:
        if not isinstance(value, dict):
            return None if self._asked else value
        found = [value.get(key) for key in self._keys]
        return found[0] if not self._vector else None if None in found else found

    def _further(self, values: Sequence[object]) -> dict[str, object]:
        """What is not the label, by column."""
        further: dict[str, object] = {}
        if self._source != "json" and values.count(None) == len(values) - bool(self._source):
            return further  # quickly, because nearly always
        for source, value in zip(_SOURCES, values, strict=True):
            if isinstance(value, dict):
                columns = {key: v for key, v in value.items() if self._source != "json" or key not in self._keys}
            elif value is None or source == self._source:
                continue
            else:
                columns = {source: value}
            if both := further.keys() & columns.keys():
                raise ValueError(f"{show(min(both))} is a key of its .json, and the ending of another member")
            further |= columns
        return further


def _values(targets: _Targets) -> tuple[str | None, object, str | None]:
    """With the JSON decoded.

    Raises:
        ValueError: it is none.
    """
    cls, text, txt = targets
    if text is None:
        return targets
    try:
        return cls, decode_json(text), txt
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"its .json is no JSON: {error.msg.lower()} at {where}") from None
    except RecursionError:
        raise ValueError("its .json is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its .json: {error}") from None


# -- the listing --------------------------------------------------------------------------------------------


class _Assembly:
    """Puts everything in order, and says what was left out and what is wrong."""

    def __init__(self, dataset: Dataset, root: bytes) -> None:
        self._dataset = dataset
        self._root = root
        self._values = _Values(dataset)
        self._problems = _Problems()
        self._shards: list[_Shard] = []  # without their samples
        self._known: dict[tuple[int, int], bytes] = {}
        self._paths: list[Paths] = []
        self._places: list[Ints] = []  # offsets and sizes, [2, n]
        self._counts: Counter[str] = Counter()
        self._unused: Counter[str] = Counter()

    def add(self, shard: _Shard) -> None:
        """The next tar."""
        if shard.identity is not None:
            other = self._known.setdefault(shard.identity, shard.name)
            if other is not shard.name:
                shard.problems.add(f"{shown(shard.name)}: is the same file as {shown(other)}; give it once")
        self._paths.append(Paths.of([shard.name + b"/" + name for name in shard.names]))
        self._places.append(np.array(shard.places, np.int64).reshape(-1, 2).T)
        self._take_values(shard)
        self._problems.join(shard.problems)
        self._counts += shard.left_out
        self._unused.update({ending_shown(ending): count for ending, count in shard.unused.items()})
        self._shards.append(shard)

    def _take_values(self, shard: _Shard) -> None:
        names, targets = shard.names, shard.targets
        shard.names, shard.targets, shard.places = [], [], array("q")
        self._values.begin(targets)
        for name, target in zip(names, targets, strict=True):
            where = shown(shard.name + b"/" + name)
            try:
                self._values.add(target, where)
            except ValueError as error:
                shard.problems.add(f"{where}: {error}")

    def listing(self) -> Listing:
        if self._problems.count:
            raise DatasetError(self._trouble())
        counts = [len(paths) for paths in self._paths]
        if not sum(counts):
            left_out = tally(self._counts) or "no member at all"
            raise DatasetError(f"{self._dataset.place}: no samples in {len(counts)} tar files ({left_out})")
        try:
            labels, classes, keep = self._values.finish()
        except DatasetError as error:
            raise DatasetError(f"{self._dataset.place}: {error}") from error
        columns, texts = self._values.texts()
        number = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        positions, sizes = np.concatenate(self._places, axis=1)
        paths = Paths.joined(self._paths)
        if labels is None:
            labels = Labels(np.full(len(paths), -1, np.int64))
        if keep is not None:
            number, positions, sizes, paths = number[keep], positions[keep], sizes[keep], paths.kept(keep)
            texts = texts and texts.kept(keep)
        limit = self._dataset.limit
        mtimes_ns = np.array([shard.mtime_ns for shard in self._shards], np.int64)
        return Listing(
            root=self._root,
            classes=classes,
            paths=paths.first(limit),
            sizes=sizes[:limit],
            mtimes_ns=mtimes_ns[number[:limit]],
            labels=labels.first(limit),
            watched=Paths.of([shard.name for shard in self._shards]),
            watched_mtimes_ns=np.array([shard.settled_ns for shard in self._shards], np.int64),
            watched_sizes=np.array([shard.size for shard in self._shards], np.int64),
            columns=columns,
            texts=texts and texts.first(limit),
            container=number[:limit],
            positions=positions[:limit],
            counts=dict(self._counts + self._unused),
            notices=list(self._notices(counts, len(paths), columns)),
        )

    def _trouble(self) -> str:
        count = self._problems.count
        head = f"{shown(self._root)}: {count} problem{'s' if count > 1 else ''} in its tar files:"
        more = [f"and {count - len(self._problems.texts)} more"] if count > len(self._problems.texts) else []
        return "\n  ".join([head, *self._problems.texts, *more])

    def _notices(self, counts: list[int], kept: int, columns: list[str]) -> Iterator[str]:
        if self._counts:
            yield f"left out: {tally(self._counts)}"
        yield from unlabelled(columns if not self._values.labelled else [])
        if self._unused:
            yield f"members of samples that are not used: {tally(self._unused)}"
        if empty := [shard.name for shard, count in zip(self._shards, counts, strict=True) if not count]:
            yield f"without samples: {some(empty)}"
        if kept < sum(counts):
            yield f"left out, because `classes` does not name them: {sum(counts) - kept} of {sum(counts)} samples"
        if self._dataset.limit is not None and self._dataset.limit < kept:
            yield f"limit: the first {self._dataset.limit} of {kept} samples"
