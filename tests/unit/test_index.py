"""The index file: what is written is what every process maps, and nothing else is ever taken for it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.index import RACY_NS, VERSION, Index, Labels, Listing, Paths, settled, shown

KEY = "k" * 64
NAMES = [b"a/1.jpg", b"a/\xff\xfe.jpg", b"b/tab\t, new line\n, \\.jpg", b"b/deep/\xc3\xa9.jpg"]


def listing(root: bytes = b"/data", names: list[bytes] | None = None) -> Listing:
    paths = NAMES if names is None else names
    return Listing(
        root=root,
        classes=["a", "b"],
        paths=Paths.of(paths),
        sizes=np.arange(10, 10 + len(paths)),
        mtimes_ns=np.arange(len(paths)) + 10**18,
        labels=Labels(np.arange(len(paths)) % 2),
        watched=Paths.of([b"", b"a", b"b"]),
        watched_mtimes_ns=np.array([1, 2, 3]),
        watched_sizes=np.full(3, -1),
        counts={".txt": 3},
        notices=["left out 3 .txt"],
    )


@pytest.fixture(params=["file", "memory"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Index]:
    if request.param == "file":
        made = Index.write(listing(), tmp_path / "cache/x.index", KEY)
    else:
        made = Index.in_memory(listing(), KEY)
    yield made
    made.close()


def check(index: Index) -> None:
    assert len(index) == 4 and index.root == b"/data" and index.classes == ["a", "b"]
    assert [index.path(i) for i in range(4)] == NAMES
    assert index.sizes.tolist() == [10, 11, 12, 13]
    assert index.mtimes_ns.tolist() == [10**18 + i for i in range(4)]
    assert index.labels.tolist() == [0, 1, 0, 1] and index.labels.dtype == np.int64
    assert index.notices == ["left out 3 .txt"] and index.counts == {".txt": 3}
    assert index.data_fingerprint == listing().fingerprint()


def test_what_was_written_is_what_is_read(index: Index) -> None:
    check(index)


def test_paths_are_shown_on_one_line_as_ls_prints_them(index: Index) -> None:
    shown_paths = ["a/1.jpg", r"a/\xff\xfe.jpg", r"b/tab\t, new line\n, \\.jpg", "b/deep/é.jpg"]
    assert [index.shown(i) for i in range(4)] == shown_paths
    assert [index.shown_full(i) for i in range(4)] == ["/data/" + path for path in shown_paths]
    assert index.full_path(1) == b"/data/a/\xff\xfe.jpg"


@pytest.mark.parametrize("i", [-1, 4])
def test_a_line_that_is_not_in_the_listing_is_an_error(index: Index, i: int) -> None:
    with pytest.raises(IndexError):
        index.path(i)


def test_another_process_maps_the_descriptor(index: Index) -> None:
    code = (
        "import sys; from headrace.pipeline.index import Index; index = Index.map(int(sys.argv[1]));"
        "print(len(index), index.path(1), index.labels.tolist())"
    )
    command = [sys.executable, "-c", code, str(index.fd)]
    done = subprocess.run(command, pass_fds=[index.fd], stdout=subprocess.PIPE, timeout=60, check=True, text=True)
    assert done.stdout == f"4 {NAMES[1]!r} [0, 1, 0, 1]\n"


def test_nobody_can_write_through_the_descriptor_or_the_arrays(index: Index) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(index.fd, b"x")
    with pytest.raises(ValueError, match="read-only"):
        index.labels[0] = 7


def test_an_index_in_memory_is_sealed() -> None:
    index = Index.in_memory(listing(), KEY)
    seals = fcntl.fcntl(index.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert index.file is None
    index.close()


def test_an_array_outlives_close_which_may_be_called_twice() -> None:
    index = Index.in_memory(listing(), KEY)
    labels = index.labels
    index.close()
    index.close()
    assert labels.tolist() == [0, 1, 0, 1]


def test_the_folder_and_the_file_are_the_users_alone(tmp_path: Path) -> None:
    index = Index.write(listing(), tmp_path / "new/x.index", KEY)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new/x.index").stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.index"]
    index.close()


def test_a_newer_index_leaves_the_mapping_of_the_older_one_alone(tmp_path: Path) -> None:
    file = tmp_path / "x.index"
    old = Index.write(listing(), file, KEY)
    new = Index.write(listing(names=[b"other/1.jpg"]), file, KEY)
    check(old)
    assert new.path(0) == b"other/1.jpg"
    old.close()
    new.close()


def test_a_write_that_fails_leaves_the_older_index_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.index"
    Index.write(listing(), file, KEY).close()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        Index.write(listing(names=[b"other/1.jpg"]), file, KEY)
    assert [p.name for p in tmp_path.glob("*.index*")] == ["x.index"] and not list(tmp_path.glob(".*"))
    kept = Index.open(file, KEY)
    assert kept is not None
    check(kept)
    kept.close()


def test_what_a_killed_writer_left_is_removed_and_what_another_one_writes_is_not(tmp_path: Path) -> None:
    left, busy, other = (tmp_path / name for name in (".x.1.partial", ".x.2.partial", ".y.1.partial"))
    for file in (left, busy, other):
        file.touch()
    os.utime(left, (1, 1))
    os.utime(other, (1, 1))
    Index.write(listing(), tmp_path / "x.index", KEY).close()
    assert not left.exists() and busy.exists() and other.exists()


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:20], id="cut in the head"),
        pytest.param(lambda data: data[:100], id="cut in the meta"),
        pytest.param(lambda data: data[:-64], id="cut in the arrays"),
        pytest.param(lambda data: data + bytes(64), id="longer"),
        pytest.param(lambda data: b"x" * len(data), id="something else"),
        pytest.param(lambda data: bytes(len(data)), id="zeros after a power failure"),
        pytest.param(lambda data: data[:8] + (99).to_bytes(4, "little") + data[12:], id="another version"),
        pytest.param(lambda data: data[:12] + b"\xff\xff\xff\xff" + data[16:], id="a meta of 4 GiB"),
        pytest.param(flip(20), id="a bit of the checksum"),
        pytest.param(flip(60), id="a bit of the meta"),
        pytest.param(flip(-10), id="a bit of the arrays"),
    ],
)
def test_a_damaged_file_is_not_trusted(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "x.index"
    Index.write(listing(), file, KEY).close()
    file.write_bytes(damage(file.read_bytes()))
    assert Index.open(file, KEY) is None


def test_what_belongs_to_another_listing_or_is_no_file_is_not_trusted(tmp_path: Path) -> None:
    Index.write(listing(), tmp_path / "x.index", KEY).close()
    assert Index.open(tmp_path / "x.index", "another") is None
    assert Index.open(tmp_path / "absent.index", KEY) is None
    assert Index.open(tmp_path, KEY) is None
    os.mkfifo(tmp_path / "fifo.index")
    assert Index.open(tmp_path / "fifo.index", KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "x.index"
    Index.write(listing(), file, KEY).close()
    os.chown(file, 12345, 12345)
    assert Index.open(file, KEY) is None
    meta = b"{}"
    head = b"headrace" + VERSION.to_bytes(4, "little") + len(meta).to_bytes(4, "little") + sha256(meta).digest() + meta
    file.write_bytes(head)  # made by hand, to be stumbled over
    assert Index.open(file, KEY) is None


def test_a_descriptor_that_is_no_index_is_refused_and_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing of the kind")
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    with pytest.raises(ValueError, match="not an index"):
        Index.map(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -- staleness ----------------------------------------------------------------------------------------------


def watched(root: Path) -> Index:
    made = listing(os.fsencode(root))
    made.watched_mtimes_ns = np.array([p.stat().st_mtime_ns for p in (root, root / "a", root / "b")])
    return Index.in_memory(made, KEY)


def test_a_folder_that_was_touched_or_is_gone_is_found_by_its_mtime(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    index = watched(tmp_path)
    assert index.changed() is None
    os.utime(tmp_path / "b", ns=(1, 1))
    assert index.changed() == os.fsencode(tmp_path / "b")
    index.close()
    index = watched(tmp_path)
    (tmp_path / "a").rmdir()
    assert index.changed() in (os.fsencode(tmp_path) + b"/", os.fsencode(tmp_path / "a"))
    index.close()


@pytest.mark.parametrize("at", [0, 63, 64, 129])
def test_of_many_folders_each_is_looked_at(tmp_path: Path, at: int) -> None:
    folders = [tmp_path / f"{i:03}" for i in range(130)]
    for folder in folders:
        folder.mkdir()
    states = [os.stat(folder) for folder in folders]
    with made(
        watched=Paths.of([os.fsencode(folder) for folder in folders]),
        watched_mtimes_ns=np.array([state.st_mtime_ns for state in states]),
        watched_sizes=np.full(130, -1, np.int64),
    ) as index:
        assert index.changed() is None
        os.utime(folders[at], ns=(1, 1))
        assert index.changed() == os.fsencode(folders[at])


def test_a_folder_that_may_still_be_changing_proves_nothing() -> None:
    now = 10**18
    assert settled(now - RACY_NS - 1, now) == now - RACY_NS - 1
    assert settled(now + RACY_NS + 1, now) == now + RACY_NS + 1
    for fresh in (now, now - RACY_NS, now + RACY_NS):
        assert settled(fresh, now) == -1


# -- the fingerprint of the data ----------------------------------------------------------------------------


def test_the_data_fingerprint_never_changes_by_accident() -> None:
    assert listing().fingerprint() == "db96daf18a6ab69516fce881637ebf30b1f10a9bf7f1b126c3aa1c5467f25206"


def test_root_and_times_are_not_in_the_data_fingerprint() -> None:
    other = listing(b"/elsewhere")
    other.mtimes_ns = other.mtimes_ns + 1
    other.watched_mtimes_ns = other.watched_mtimes_ns + 1
    other.notices, other.counts = [], {}
    assert other.fingerprint() == listing().fingerprint()


def test_paths_sizes_labels_and_class_names_are() -> None:
    renamed, resized, relabelled, reclassed, moved = (listing() for _ in range(5))
    renamed.paths = Paths.of([b"a/2.jpg", *NAMES[1:]])
    resized.sizes = resized.sizes + 1
    relabelled.labels = Labels(1 - relabelled.labels.values)
    reclassed.classes = ["a", "c"]
    moved.paths = Paths.of([NAMES[0] + b"a", NAMES[1].removeprefix(b"a"), *NAMES[2:]])  # the same bytes in all
    prints = {m.fingerprint() for m in (listing(), renamed, resized, relabelled, reclassed, moved)}
    assert len(prints) == 6


# -- paths --------------------------------------------------------------------------------------------------

a_path = st.binary(max_size=40)


@given(st.lists(st.lists(a_path, max_size=4), max_size=4), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_joined_paths_are_the_paths_one_after_the_other(parts: list[list[bytes]], count: int) -> None:
    joined = Paths.joined([Paths.of(part) for part in parts])
    flat = [path for part in parts for path in part]
    assert (joined.blob, joined.offsets.tolist()) == (Paths.of(flat).blob, Paths.of(flat).offsets.tolist())
    first, few = joined.first(count), Paths.of(flat[:count])
    assert (first.blob, first.offsets.tolist()) == (few.blob, few.offsets.tolist())


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_shown_path_is_one_line_of_text_from_which_the_bytes_can_be_had_again(path: bytes) -> None:
    text = shown(path)
    # Terminals obey control characters, and some programs take more of them than "\n" for the end of a line.
    assert not any(ord(character) < 0x20 or ord(character) == 0x7F for character in text)
    text.encode("utf-8")
    assert unescaped(text) == path


def test_what_a_terminal_would_obey_is_shown_in_hex() -> None:
    assert shown("\x9b2J\u00a0é".encode()) == "\\xc2\\x9b2J\u00a0é"
    assert shown(b"a\x1b[31m\r\x00\x7f\t\\x1b") == r"a\x1b[31m\x0d\x00\x7f\t\\x1b"


def unescaped(text: str) -> bytes:
    plain, at = bytearray(), 0
    while at < len(text):
        if text[at] != "\\":
            plain += text[at].encode()
            at += 1
        elif text[at + 1] == "x":
            plain.append(int(text[at + 2 : at + 4], 16))
            at += 4
        else:
            plain += {"t": b"\t", "n": b"\n", "\\": b"\\"}[text[at + 1]]
            at += 2
    return bytes(plain)


# -- labels, texts, containers ------------------------------------------------------------------------------


@contextlib.contextmanager
def made(**fields: object) -> Iterator[Index]:
    """A mapped index of a listing with these fields."""
    changed = listing()
    for name, value in fields.items():
        setattr(changed, name, value)
    index = Index.in_memory(changed, KEY)
    assert index.data_fingerprint == changed.fingerprint()
    yield index
    index.close()


SETS = Labels(np.array([1, 0, 1, 1]), np.array([0, 1, 3, 3, 4]))


@pytest.mark.parametrize(
    ("labels", "classes", "form", "filled", "shown_labels", "said"),
    [
        (
            Labels(np.array([3, -1, 1 << 62, 0])),
            0,
            ("int64", 0),
            [0, 3, -1],
            ["3", "-1", str(1 << 62), "0"],
            "int64 labels",
        ),
        (
            Labels(np.array([0.5, 0.1, -2, 3e38], np.float32)),
            0,
            ("float32", 0),
            [3e38, 0.5, 0.1],
            ["0.5", "0.1", "-2.0", "3e+38"],
            "float32 labels",
        ),
        (
            Labels(np.array([[1, 2], [3, 4], [5, 6], [7, 8]])),
            0,
            ("int64", 2),
            [[7, 8], [1, 2], [3, 4]],
            ["1,2", "3,4", "5,6", "7,8"],
            "int64 labels of 2 numbers",
        ),
        (
            Labels(np.full((4, 1), 0.25, np.float32)),
            0,
            ("float32", 1),
            [[0.25]] * 3,
            ["0.25"] * 4,
            "float32 labels of 1 numbers",
        ),
        (SETS, 2, ("float32", 2), [[0, 1], [0, 1], [1, 1]], ["1", "0,1", "", "1"], "2 classes, several a sample"),
        (Labels(np.array([0, 1, 1, 0])), 2, ("int64", 0), [0, 0, 1], ["0", "1", "1", "0"], "2 classes"),
    ],
)
def test_labels_of_every_form_are_filled_in_and_shown(
    labels: Labels, classes: int, form: tuple[str, int], filled: list[object], shown_labels: list[str], said: str
) -> None:
    with made(labels=labels, classes=["a", "b"][:classes]) as index:
        assert index.label_form() == form and not index.labels_text and index.labels_shown() == said
        out = np.full((3, form[1]) if form[1] else 3, 77, form[0])
        index.fill_labels(np.array([3, 0, 1]), out)
        np.testing.assert_array_equal(out, np.array(filled, form[0]))
        assert [index.label_shown(i) for i in range(4)] == shown_labels


def test_texts_are_kept_as_they_are_with_room_for_the_worst_chunk() -> None:
    rows = [msgspec.msgpack.encode([label, None]) for label in ("a\tb\n\\", "é" * 30, "", "x" * 9)]
    with made(labels=Labels(np.zeros(4, np.int64), None, True), columns=["note"], texts=Paths.of(rows)) as index:
        assert index.labels_text and index.labels_shown() == "texts as labels" and index.columns == ["note"]
        assert index.label_form() == ("int64", 0)
        assert [index.text_row(i) for i in range(4)] == rows
        assert [index.label_shown(i) for i in range(4)] == ["a\\tb\\n\\\\", "é" * 30, "", "x" * 9]
        sizes = sorted(map(len, rows), reverse=True)
        for _ in range(2):
            assert [index.text_room(chunk) for chunk in (1, 2, 4, 32)] == [sum(sizes[:n]) for n in (1, 2, 4, 4)]
    with made() as index:
        assert index.text_row(0) == b"" and index.text_room(32) == 0 and index.columns == []


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 50), st.randoms())
@settings(max_examples=50, deadline=None)
def test_no_chunk_in_any_order_needs_more_room_than_there_is(lengths: list[int], chunk: int, random: Random) -> None:
    flat = np.zeros(len(lengths), np.int64)
    texts = Paths.of([b"x" * n for n in lengths])
    plain = Listing(b"/", [], texts, flat, flat, Labels(flat), Paths.of([]), flat[:0], flat[:0], ["c"], texts)
    with contextlib.closing(Index.in_memory(plain, KEY)) as index:
        room = index.text_room(chunk)
        random.shuffle(lengths)
        assert max(sum(lengths[i : i + chunk]) for i in range(0, len(lengths), chunk)) <= room <= sum(lengths)


def test_containers_and_positions_are_kept_and_what_is_watched_has_a_path() -> None:
    watched = Paths.of([b"x.tar", b"/elsewhere/y.tar"])
    ones = np.array([1, 1])
    with made(
        container=np.array([0, 1, 1, 0]),
        positions=np.array([512, 0, 1 << 40, 5]),
        watched=watched,
        watched_mtimes_ns=ones,
        watched_sizes=ones,
    ) as index:
        assert index.container is not None and index.container.tolist() == [0, 1, 1, 0]
        assert index.positions is not None and index.positions.tolist() == [512, 0, 1 << 40, 5]
        assert [index.watched_path(k) for k in range(2)] == [b"/data/x.tar", b"/elsewhere/y.tar"]
    with made() as index:
        assert index.container is None and index.positions is None


def test_a_watched_file_of_another_size_is_found(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"12345")
    state = (tmp_path / "list.csv").stat()
    watched = Paths.of([os.fsencode(tmp_path / "list.csv")])
    fields = {"watched": watched, "watched_mtimes_ns": np.array([state.st_mtime_ns])}
    for size, found in ((5, None), (-1, None), (4, os.fsencode(tmp_path / "list.csv"))):
        with made(**fields, watched_sizes=np.array([size])) as index:
            assert index.changed() == found


def test_samples_that_are_one_file_are_found() -> None:
    names = [b"a", b"b", b"a", b"a"]
    with made(paths=Paths.of(names), sizes=np.array([1, 1, 1, 2]), mtimes_ns=np.array([5, 5, 5, 5])) as index:
        assert [index.repeats(i) for i in range(4)] == [[0, 2], [1], [0, 2], [3]]
        assert index.find("a", 2, 5) == [3] and index.find("a", 2, 6) == [] and index.find("z", 1, 5) == []


def test_every_part_of_labels_and_texts_is_in_the_data_fingerprint() -> None:
    flat = np.array([0, 1, 0, 1])
    texts = Paths.of([b"\x91\x01"] * 4)
    variants: list[dict[str, object]] = [
        {},
        {"labels": Labels(flat.astype(np.float32))},
        {"labels": Labels(flat[:, None])},
        {"labels": Labels(flat, np.arange(5))},
        {"labels": Labels(flat, np.array([0, 2, 2, 3, 4]))},
        {"labels": Labels(flat, None, True)},
        {"columns": ["a"], "texts": texts},
        {"columns": ["b"], "texts": texts},
        {"columns": ["a"], "texts": Paths.of([b"\x91\x02", *[b"\x91\x01"] * 3])},
        {"labels": Labels(flat, None, True), "texts": texts},
    ]
    prints = set()
    for fields in variants:
        with made(**fields) as index:
            prints.add(index.data_fingerprint)
    assert len(prints) == len(variants) and listing().fingerprint() in prints


@given(st.lists(a_path, min_size=1, max_size=8), st.data())
@settings(max_examples=100, deadline=None)
def test_kept_and_first_are_what_lists_would_give(paths: list[bytes], data: st.DataObject) -> None:
    keep = data.draw(st.lists(st.booleans(), min_size=len(paths), max_size=len(paths)))
    sets = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=len(paths), max_size=len(paths)))
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in sets])]).astype(np.int64)
    labels = Labels(np.array([v for s in sets for v in s], np.int64), offsets)
    mask, count = np.array(keep), data.draw(st.integers(0, 9))

    def plain(some: Labels) -> list[list[int]]:
        assert some.offsets is not None
        return [some.values[a:b].tolist() for a, b in itertools.pairwise(some.offsets.tolist())]

    kept = Paths.of(paths).kept(mask)
    few = Paths.of([path for path, k in zip(paths, keep, strict=True) if k])
    assert (kept.blob, kept.offsets.tolist()) == (few.blob, few.offsets.tolist())
    assert plain(labels.kept(mask)) == [s for s, k in zip(sets, keep, strict=True) if k]
    assert plain(labels.first(count)) == sets[:count] and plain(labels.first(None)) == sets
    assert Labels(np.arange(len(paths))).kept(mask).values.tolist() == np.flatnonzero(mask).tolist()
