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
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.pipeline.files import THREADS, Progress, Reporter, ending_shown, reason_of, some, tally
from headrace.pipeline.folder import EXTENSIONS
from headrace.pipeline.index import Index, Ints, Labels, Listing, Paths, settled, shown
from headrace.pipeline.labels import LabelColumn, Texts
from headrace.pipeline.probe import BadPicture
from headrace.pipeline.problems import show
from headrace.pipeline.reading import changed, compare, open_indexed
from headrace.pipeline.spec import Dataset, Decode
from headrace.pipeline.tar import Tar, TarError, pread

MAX_TARS = 1_000_000
MAX_TARGET = 1 << 20  # bytes of a .cls, .json or .txt

_AHEAD = 32  # tars that are listed, or wait for it, beyond the one whose turn it is
_NAMED = 10  # names in an error or a notice; the rest is counted
_TICK = 0.05  # seconds between two looks at what the threads have found
_OPEN = 64  # tars that a reader keeps open
_COUNTED = 256  # samples of a tar between two words about them

_TARGETS = (b"cls", b"json", b"txt")
_LABEL = "label"  # the key of the JSON that is the label, unless `columns` names another

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
        raise DatasetError(f"{pattern}: stands for {count} tar files, over the limit of {MAX_TARS}")
    return map("".join, itertools.product(*pieces))


def _choices(pattern: str, match: re.Match[str]) -> Sequence[str]:
    first, last, texts = match.groups()
    if texts is not None:
        return texts.split(",")
    a, b = int(first), int(last)
    if abs(b - a) >= MAX_TARS:
        raise DatasetError(f"{pattern}: {match[0]} stands for {abs(b - a) + 1} tar files, over the limit of {MAX_TARS}")
    padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{n:0{width}d}" for n in range(a, b + (1 if a <= b else -1), 1 if a <= b else -1)]


def _tars(dataset: Dataset) -> list[str]:
    """The tars' absolute paths, in the order given."""
    tars: dict[str, None] = {}
    for pattern in dataset.shards or []:
        for tar in expand(pattern):
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
    for shard in _in_turn(root, names, frozenset(map(os.fsencode, endings)), progress):
        assembly.add(shard)
    listing = assembly.listing()
    if progress:
        progress(len(listing.paths), len(listing.paths))
    return listing


_ITS_TAR = "its tar: "


class ShardSource:
    """Samples that are members of tars. Keeps the tars open that it read from last. Not for several threads at once.

    A tar that was replaced, while it is open here, stays what was indexed; one that was written to is an error.
    """

    def __init__(self, index: Index, decode: Decode) -> None:
        self._open: dict[int, int] = {}  # number of a tar → descriptor, the latest last
        assert index.container is not None and index.positions is not None
        self._index = index
        self._container, self._positions = index.container, index.positions
        self._limit = decode.max_file_bytes

    def read(self, i: int) -> bytes:
        name = self._index.shown_full(i)
        tar = int(self._container[i])
        state = int(self._index.watched_sizes[tar]), int(self._index.mtimes_ns[i])
        position, size = int(self._positions[i]), int(self._index.sizes[i])
        try:
            fd = self._descriptor(tar, name)
            compare(name, os.fstat(fd), *state, _ITS_TAR)
            if size > self._limit:
                raise BadPicture("read", f"a member of {size} bytes, but max_file_bytes is {self._limit}")
            data = pread(fd, size, position)
            # A tar rewritten under our hands would give a mix of two pictures.
            compare(name, os.fstat(fd), *state, _ITS_TAR)
        except (OSError, DatasetError):
            self._drop(tar)  # whoever tries again shall open it again: a stale handle stays stale
            raise
        if len(data) != size:
            self._drop(tar)
            raise changed(name, f"of its {size} bytes {len(data)} are there")
        return data

    def close(self) -> None:
        """Close the tars; those that are needed again are opened again."""
        for tar in list(self._open):
            self._drop(tar)

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, tar: int, name: str) -> int:
        fd = self._open.pop(tar, None)
        if fd is None:
            while len(self._open) >= _OPEN:
                self._drop(next(iter(self._open)))
            try:
                fd = open_indexed(self._index.watched_path(tar), name, _ITS_TAR)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self.close()
                raise
        self._open[tar] = fd
        return fd

    def _drop(self, tar: int) -> None:
        if (fd := self._open.pop(tar, None)) is not None:
            os.close(fd)


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


@dataclass(slots=True)
class _Sample:
    """A picture in a tar, and what stands beside it.

    Attributes:
        name: of the picture's member.
        offset, size: of its bytes.
        targets: of each of `_TARGETS` that is there, name and content.
    """

    name: bytes
    offset: int
    size: int
    targets: dict[bytes, tuple[bytes, bytes]]


@dataclass(slots=True)
class _Shard:
    """One tar, listed.

    Attributes:
        name: relative to the root.
        identity: device and inode.
        mtime_ns: as it is; `settled_ns`: as it may be compared later.
        unused: members of samples, by ending.
        left_out: what is no member of a sample: kind → number.
    """

    name: bytes
    identity: tuple[int, int] | None = None
    size: int = 0
    mtime_ns: int = 0
    settled_ns: int = 0
    samples: list[_Sample] = field(default_factory=list)
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
        shard.size, shard.mtime_ns = before.st_size, before.st_mtime_ns
        shard.settled_ns = settled(before.st_mtime_ns, now)
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
        self._group: dict[bytes, tuple[bytes, int, int]] = {}  # ending → name, offset, size
        self._targets: dict[bytes, tuple[bytes, bytes]] = {}

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
            if name[:dot] != current:
                self._close()
                current = name[:dot]
                key = current.removeprefix(b"./")
                if repeated := key in keys:
                    self._problem(name, _REPEATED)
                keys.add(key)
            if not repeated:
                self._take(tar, name, name[dot + 1 :].lower(), offset, size)
        self._close()
        self._count(len(self._shard.samples) % _COUNTED)
        self._shard.left_out += tar.left_out

    def _problem(self, name: bytes, text: str) -> None:
        self._shard.problems.add(f"{shown(self._shard.name + b'/' + name)}: {text}")

    def _take(self, tar: Tar, name: bytes, ending: bytes, offset: int, size: int) -> None:
        if ending in self._group:
            self._problem(name, f"the sample has another member .{shown(ending)}")
            return
        self._group[ending] = name, offset, size
        if ending not in _TARGETS:
            return
        if size > MAX_TARGET:
            self._problem(name, f"has {size} bytes; a label, or further values, may have {MAX_TARGET}")
        else:
            self._targets[ending] = name, tar.read(offset, size)

    def _close(self) -> None:
        """All members of the sample are there."""
        if not self._group:
            return
        group, self._group = self._group, {}
        targets, self._targets = self._targets, {}
        pictures = [ending for ending in group if ending in self._endings]
        if len(pictures) == 1:
            self._shard.samples.append(_Sample(*group[pictures[0]], targets))
            if len(self._shard.samples) % _COUNTED == 0:
                self._count(_COUNTED)
        elif pictures:
            self._problem(group[pictures[1]][0], f"the sample has {len(pictures)} pictures, {_listed(pictures)}")
        else:
            name = next(iter(group.values()))[0]
            dotted = any(ending.rpartition(b".")[2] in self._endings for ending in group)
            why = "; an ending is all that follows the first dot of a name" if dotted else ""
            self._problem(name, f"the sample has no picture, only {_listed(list(group))}{why}")
        if len(group) > 1 + len(targets):
            self._shard.unused.update(group.keys() - targets.keys() - set(pictures))


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
) -> Iterator[_Shard]:
    """The tars, listed by many threads, a bounded number of them ahead; in their order."""
    lock = threading.Lock()
    report = Reporter(progress)
    seen = 0

    def count(samples: int) -> None:
        nonlocal seen
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
        pool.shutdown(cancel_futures=True)


# -- labels and further values ------------------------------------------------------------------------------


class _Values:
    """What the targets of samples say, one sample after the other.

    Which target has the label is settled by the first tar that has samples: `.cls`, before a JSON with a label, before
    `.txt`. Every sample must have it there.
    """

    def __init__(self, dataset: Dataset) -> None:
        asked = dataset.columns.label
        self._kind = dataset.labels
        self._classes = dataset.classes
        self._vector = not isinstance(asked, str | None)
        self._keys: list[str] = [_LABEL] if asked is None else [asked] if isinstance(asked, str) else list(asked)
        self._any_json = asked is None  # also one that is no object may be the label
        self._source: bytes | None = None  # empty: there are no labels
        if asked is not None:
            self._settle(asked.encode() if asked in ("cls", "txt") else b"json")

    def begin(self, samples: Sequence[_Sample]) -> None:
        """These samples, of one tar, come next."""
        if self._source is None and samples:
            found = {self._label_of(_decoded(sample, lambda *_: None))[0] for sample in samples}
            self._settle(next(source for source in (*_TARGETS, b"") if source in found))

    def _settle(self, source: bytes) -> None:
        self._source = source
        if source == b"txt" and self._kind == "auto":
            self._kind = "text"  # a caption is no class
        self._labels = LabelColumn(self._kind, cells=source != b"json")
        self._texts = Texts(labels=self._kind == "text")

    def add(self, sample: _Sample, where: str, problem: Callable[[bytes, str], None]) -> None:
        """Take what stands beside one more picture.

        Args:
            where: it stands, for people.
            problem: is told member and what is wrong.
        """
        values = _decoded(sample, problem)
        try:
            label = self._label(sample, values, where)
            further = self._further(values)
            places = [self._texts.column(name) for name in further]
            row: list[object] = [None] * len(self._texts.columns)
            for place, value in zip(places, further.values(), strict=True):
                row[place] = value
            self._texts.add(row if label is None else [label, *row])
        except ValueError as error:
            problem(sample.name, str(error))

    def finish(self) -> tuple[Labels | None, list[str], NDArray[np.bool_] | None, list[str], Paths | None]:
        """`(labels, classes, keep, columns, texts)`: labels None where there are none, texts those of all samples."""
        texts = self._texts.finish()
        if self._source:
            return *self._labels.finish(self._classes), self._texts.columns, texts
        if self._kind != "auto" or self._classes is not None:
            raise ValueError(f'there are no labels: no .cls, no .json with "{_LABEL}", no .txt')
        return None, [], None, self._texts.columns, texts

    def _label(self, sample: _Sample, values: dict[bytes, object], where: str) -> str | None:
        """Take the label; returned if it is a text."""
        source, value = self._label_of(values)
        if source != self._source:
            asked = self._source
            if source and (not asked or _TARGETS.index(source) < _TARGETS.index(asked)):
                raise ValueError(f"has a label in .{source.decode()}, and samples before it have none there")
            if asked:
                raise ValueError(f"the sample has no label, no {self._place()}")
            return None
        if not source:
            return None
        if source == b"txt" and self._kind != "text" and isinstance(value, str):
            value = value.strip()
        self._labels.add(value, where)
        return value if self._kind == "text" and isinstance(value, str) else None

    def _place(self) -> str:
        source = (self._source or b"").decode()
        return f".{source}" if source != "json" else f".json with {' and '.join(map(show, self._keys))}"

    def _label_of(self, values: dict[bytes, object]) -> tuple[bytes, object]:
        """Which target has the label, and the label; an empty name where there is none."""
        for source in _TARGETS if self._source is None or self._any_json else (self._source,):
            value = values.get(source)
            if source == b"json":
                value = self._of_json(value)
            if value is not None:
                return source, value
        return b"", None

    def _of_json(self, value: object) -> object:
        if not isinstance(value, dict):
            return value if self._any_json else None
        found = [value.get(key) for key in self._keys]
        return found[0] if not self._vector else None if None in found else found

    def _further(self, values: dict[bytes, object]) -> dict[str, object]:
        """What is not the label, by column."""
        further: dict[str, object] = {}
        for target, value in values.items():
            if isinstance(value, dict):
                columns = {key: v for key, v in value.items() if self._source != b"json" or key not in self._keys}
            elif target == self._source:
                continue
            else:
                columns = {target.decode(): value}
            if both := further.keys() & columns.keys():
                raise ValueError(f"{show(min(both))} is a key of its .json, and a target beside it")
            further |= columns
        return further


def _decoded(sample: _Sample, problem: Callable[[bytes, str], None]) -> dict[bytes, object]:
    values: dict[bytes, object] = {}
    for target in _TARGETS:
        if target in sample.targets:
            name, data = sample.targets[target]
            try:
                values[target] = _DECODE[target](data)
            except UnicodeDecodeError as error:
                problem(name, f"is no UTF-8, at its byte {error.start}")
            except (ValueError, RecursionError) as error:
                problem(name, f"is no JSON: {error}")
    return values


_DECODE: dict[bytes, Callable[[bytes], object]] = {
    b"cls": lambda data: data.decode("utf-8").strip(),
    b"json": msgspec.json.decode,
    b"txt": lambda data: data.decode("utf-8"),
}


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
        self._numbers: list[Ints] = []  # offsets and sizes, [2, n]
        self._counts: Counter[str] = Counter()
        self._unused: Counter[str] = Counter()

    def add(self, shard: _Shard) -> None:
        """The next tar."""
        if shard.identity is not None:
            other = self._known.setdefault(shard.identity, shard.name)
            if other is not shard.name:
                shard.problems.add(f"{shown(shard.name)}: is the same file as {shown(other)}; give it once")
        prefix = shard.name + b"/"
        self._paths.append(Paths.of([prefix + sample.name for sample in shard.samples]))
        numbers = [(sample.offset, sample.size) for sample in shard.samples]
        self._numbers.append(np.array(numbers, np.int64).reshape(-1, 2).T)

        def problem(member: bytes, text: str) -> None:
            shard.problems.add(f"{shown(prefix + member)}: {text}")

        self._values.begin(shard.samples)
        for sample in shard.samples:
            self._values.add(sample, shown(prefix + sample.name), problem)
        shard.samples = []
        self._problems.join(shard.problems)
        self._counts += shard.left_out
        self._unused.update({ending_shown(ending): count for ending, count in shard.unused.items()})
        self._shards.append(shard)

    def listing(self) -> Listing:
        if self._problems.count:
            raise DatasetError(self._trouble())
        counts = [len(paths) for paths in self._paths]
        if not sum(counts):
            left_out = tally(self._counts) or "no member at all"
            raise DatasetError(f"{self._dataset.place}: no samples in {len(counts)} tar files ({left_out})")
        try:
            labels, classes, keep, columns, texts = self._values.finish()
        except ValueError as error:
            raise DatasetError(f"{self._dataset.place}: {error}") from error
        number = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        positions, sizes = np.concatenate(self._numbers, axis=1)
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
            notices=list(self._notices(counts, len(paths))),
        )

    def _trouble(self) -> str:
        count = self._problems.count
        head = f"{shown(self._root)}: {count} problem{'s' if count > 1 else ''} in its tar files:"
        more = [f"and {count - len(self._problems.texts)} more"] if count > len(self._problems.texts) else []
        return "\n  ".join([head, *self._problems.texts, *more])

    def _notices(self, counts: list[int], kept: int) -> Iterator[str]:
        if self._counts:
            yield f"left out: {tally(self._counts)}"
        if self._unused:
            yield f"members of samples that are not used: {tally(self._unused)}"
        if empty := [shard.name for shard, count in zip(self._shards, counts, strict=True) if not count]:
            yield f"without samples: {some(empty)}"
        if kept < sum(counts):
            yield f"left out, because `classes` does not name them: {sum(counts) - kept} of {sum(counts)} samples"
        if self._dataset.limit is not None and self._dataset.limit < kept:
            yield f"limit: the first {self._dataset.limit} of {kept} samples"
