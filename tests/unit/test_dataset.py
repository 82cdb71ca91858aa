"""A data set's index is the cached one for as long as that is right, and a sample's bytes are what was indexed."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import DatasetError
from headrace.pipeline import dataset as module
from headrace.pipeline.dataset import open_index, open_source
from headrace.pipeline.index import Index
from headrace.pipeline.probe import BadPicture
from headrace.pipeline.reading import FileSource
from headrace.pipeline.spec import Dataset, Decode

OLD = 1_600_000_000 * 10**9


@pytest.fixture
def root(home: Path) -> Path:
    """Three files in two classes, all last modified long ago."""
    made = home / "data"
    for name, data in (("a/1.jpg", b"one"), ("a/2.jpg", b"two two"), ("b/3.jpg", b"")):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(data)
    age(made)
    return made


def age(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        os.utime(path, ns=(OLD, OLD))


@pytest.fixture
def opened(root: Path, home: Path) -> Iterator[Callable[..., Index]]:
    """`opened(reindex=…, limit=…)`: the index of `root`, closed after the test."""
    indexes: list[Index] = []

    def make(cache: Path = home / "cache/headrace", reindex: bool = False, **options: Any) -> Index:
        indexes.append(open_index(Dataset(folder=root, **options), cache, reindex=reindex))
        return indexes[-1]

    yield make
    for index in indexes:
        index.close()


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Dataset]:
    """Grows by one with each walk through a data set."""
    made: list[Dataset] = []
    kind = module.SOURCES["folder"]

    def listing(dataset: Dataset, progress: Any) -> Any:
        made.append(dataset)
        return kind.listing(dataset, progress)

    monkeypatch.setitem(module.SOURCES, "folder", module.Kind(kind.root, listing, kind.reader))
    return made


# -- the cached index ---------------------------------------------------------------------------------------


def test_the_second_opening_maps_the_index_of_the_first(opened: Callable[..., Index], walks: list[Dataset]) -> None:
    first, second = opened(), opened()
    assert len(walks) == 1
    assert first.file == second.file and first.file is not None and first.file.exists()
    assert [second.shown(i) for i in range(len(second))] == ["a/1.jpg", "a/2.jpg", "b/3.jpg"]
    assert second.labels.tolist() == [0, 0, 1] and second.sizes.tolist() == [3, 7, 0]
    assert first.data_fingerprint == second.data_fingerprint


@pytest.mark.parametrize("change", ["add", "remove", "rename", "new class", "new folder"])
def test_a_name_that_came_or_went_makes_a_new_index(
    opened: Callable[..., Index], walks: list[Dataset], root: Path, change: str
) -> None:
    before = opened()
    match change:
        case "add":
            (root / "a/0.jpg").write_bytes(b"new")
        case "remove":
            (root / "a/1.jpg").unlink()
        case "rename":
            (root / "a/1.jpg").rename(root / "a/9.jpg")
        case "new class":
            shutil.copytree(root / "b", root / "c")
        case "new folder":
            shutil.copytree(root / "b", root / "a/sub")
    after = opened()
    assert len(walks) == 2 and after.data_fingerprint != before.data_fingerprint
    assert before.path(0) == b"a/1.jpg", "the older mapping stays as it was"


def test_a_folder_changed_while_it_was_indexed_is_indexed_again(
    opened: Callable[..., Index], walks: list[Dataset], root: Path
) -> None:
    now = time.time_ns()
    os.utime(root / "a", ns=(now, now))  # a change within the same tick would leave this mtime as it is
    opened()
    opened()
    assert len(walks) == 2


def test_a_change_within_a_file_is_not_looked_for_until_reindex(
    opened: Callable[..., Index], walks: list[Dataset], root: Path
) -> None:
    opened()
    with (root / "a/1.jpg").open("ab") as file:
        file.write(b" more")
    assert opened().sizes.tolist() == [3, 7, 0]
    assert len(walks) == 1
    assert opened(reindex=True).sizes.tolist() == [8, 7, 0]
    assert opened().sizes.tolist() == [8, 7, 0] and len(walks) == 2


@pytest.mark.parametrize(
    "options", [{"limit": 2}, {"classes": ["b", "a"]}, {"extensions": ["jpg"]}, {"allow_empty": True}]
)
def test_other_options_are_another_index(
    opened: Callable[..., Index], walks: list[Dataset], options: dict[str, Any]
) -> None:
    assert opened().file != opened(**options).file
    opened()
    opened(**options)
    assert len(walks) == 2


def test_another_way_to_the_same_root_is_the_same_index(
    root: Path, home: Path, walks: list[Dataset], opened: Callable[..., Index]
) -> None:
    opened()
    os.symlink(root, home / "link")
    index = open_index(Dataset(folder=home / "link"), home / "cache/headrace")
    assert len(walks) == 1 and index.root == os.fsencode(root)
    index.close()


def test_a_copy_elsewhere_has_the_same_data_fingerprint_and_its_own_index(
    root: Path, home: Path, opened: Callable[..., Index]
) -> None:
    shutil.copytree(root, home / "copy")
    copy = open_index(Dataset(folder=home / "copy"), home / "cache/headrace")
    assert copy.data_fingerprint == opened().data_fingerprint and copy.file != opened().file
    copy.close()


@pytest.mark.parametrize("source", ["folder", "list", "shards"])
def test_times_beyond_those_of_int64_are_compared_like_others(root: Path, home: Path, source: str) -> None:
    (home / "l.csv").write_text("path\ndata/a/1.jpg\n")
    tars.write(home / "t.tar", {"1.jpg": b"one"})
    late = 1 << 63
    for path in (root / "a", root / "a/1.jpg", home / "l.csv", home / "t.tar"):
        os.utime(path, ns=(late, late))
    if os.stat(root / "a").st_mtime_ns != late:
        pytest.skip("this disk knows no such times")
    place = {"folder": root, "list": home / "l.csv", "shards": str(home / "t.tar")}[source]
    dataset = Dataset(**{source: place})
    first, second = (open_index(dataset, home / "cache") for _ in range(2))
    assert first.file is not None and os.fstat(first.fd).st_ino == os.fstat(second.fd).st_ino
    assert open_source(dataset, first, Decode()).read(0) == b"one"
    changed = home / "t.tar" if source == "shards" else root / "a/1.jpg"
    os.utime(changed, ns=(late + 4 * 10**9, late + 4 * 10**9))
    with pytest.raises(DatasetError, match="changed since it was indexed"):
        open_source(dataset, first, Decode()).read(0)
    first.close()
    second.close()


def test_a_damaged_index_is_built_again(opened: Callable[..., Index], walks: list[Dataset]) -> None:
    file = opened().file
    assert file is not None
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)
    assert opened().sizes.tolist() == [3, 7, 0] and len(walks) == 2


def test_progress_is_told_while_an_index_is_built_and_only_then(root: Path, home: Path) -> None:
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        open_index(Dataset(folder=root), home / "cache", progress=lambda *report: seen.append(report)).close()
        assert seen[-1] == (3, 3)
        told = len(seen)
    assert len(seen) == told


# -- where no index can be kept -----------------------------------------------------------------------------


def test_an_index_that_cannot_be_written_lies_in_memory_with_a_notice(
    opened: Callable[..., Index], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    below_a_file = opened(home / "file/cache\udcff")
    with monkeypatch.context() as patch:

        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "rename", full)
        on_a_full_disk = opened(home / "full")
    assert not list((home / "full").iterdir())
    for index, reason in ((below_a_file, "Not a directory"), (on_a_full_disk, "No space left on device")):
        assert index.file is None and index.path(1) == b"a/2.jpg"
        (notice,) = index.notices
        assert notice.startswith("the index is kept in memory only") and notice.endswith(reason)
        notice.encode()
        elsewhere = Index.map(os.dup(index.fd))
        assert elsewhere.notices == [notice]
        elsewhere.close()


@pytest.mark.parametrize("below", ["cache", "a/deep/cache", "."])
def test_a_cache_within_the_data_set_is_not_written(opened: Callable[..., Index], root: Path, below: str) -> None:
    before = sorted(root.rglob("*"))
    index = opened(root / below)
    assert index.file is None and "it lies in the data set, which is never written to" in index.notices[0]
    assert sorted(root.rglob("*")) == before


def test_errors_of_the_listing_leave_no_index(home: Path) -> None:
    (home / "empty").mkdir()
    with pytest.raises(DatasetError, match="has no class folders"):
        open_index(Dataset(folder=home / "empty"), home / "cache")
    assert not (home / "cache/headrace").exists()


# -- reading samples ----------------------------------------------------------------------------------------


def reader(index: Index, **decode: Any) -> FileSource:
    source = open_source(Dataset(folder=os.fsdecode(index.root)), index, Decode(**decode))
    assert isinstance(source, FileSource)
    return source


def test_a_sample_is_its_files_bytes(opened: Callable[..., Index]) -> None:
    source = reader(opened())
    assert [source.read(i) for i in (2, 0, 1)] == [b"", b"one", b"two two"]


def test_a_read_that_comes_in_pieces_is_put_together(
    opened: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, real = opened(), os.read
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda fd, size: real(fd, min(size, 2)))
        assert reader(index).read(1) == b"two two"


def grow(file: Path) -> None:
    with file.open("ab") as out:
        out.write(b"more")


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"two TWO")
    other.rename(file)


def become_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def become_socket(file: Path) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(file))


def become_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def become_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def become_dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("gone")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (grow, "size 7 → 11"),
        (lambda file: os.truncate(file, 3), "size 7 → 3"),
        (replace, "modified 2020-09-13 12:26:40.000000000 → 20"),
        (lambda file: os.utime(file, ns=(OLD, OLD + 1)), "40.000000000 → 2020-09-13 12:26:40.000000001"),
        (Path.unlink, "it does not exist any more"),
        (become_dangling, "it does not exist any more"),
        (lambda file: shutil.rmtree(file.parent), "it does not exist any more"),
        (become_socket, "it is not a regular file any more"),
        (become_fifo, "it is not a regular file any more"),
        (become_loop, "it is a link to itself now"),
        (become_folder, "it is not a regular file any more"),
    ],
)
def test_a_file_that_is_not_what_was_indexed_is_an_error_by_name(
    opened: Callable[..., Index], root: Path, change: Callable[[Path], None], says: str
) -> None:
    source = reader(opened())
    change(root / "a/2.jpg")
    with pytest.raises(DatasetError) as caught:
        source.read(1)
    message = str(caught.value)
    shutil.rmtree(root)  # a socket file left behind would be taken for a leak
    assert message.startswith(f"{root}/a/2.jpg: changed since it was indexed: ") and says in message
    assert message.endswith("; run `headrace check --reindex`, then start the daemon again")


def test_a_file_rewritten_while_it_is_read_is_an_error_and_no_mix(
    opened: Callable[..., Index], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, real = opened(), os.read

    def rewritten(fd: int, size: int) -> bytes:
        data = real(fd, size)
        (root / "a/2.jpg").write_bytes(b"TWO two")
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", rewritten)
        with pytest.raises(DatasetError, match="a/2.jpg: changed since it was indexed: modified"):
            reader(index).read(1)


def test_a_file_over_the_limit_is_a_verdict_and_is_not_read(
    opened: Callable[..., Index], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(root / "a/2.jpg", 8 << 30)
    index = opened()
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda fd, size: pytest.fail("it was read"))
        with pytest.raises(BadPicture) as caught:
            reader(index).read(1)
    assert caught.value.stage == "read"
    assert caught.value.reason == f"a file of {8 << 30} bytes, but max_file_bytes is {256 << 20}"
    assert reader(index, max_file_bytes=3).read(0) == b"one"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "read"])
def test_an_io_error_passes_so_that_the_caller_may_try_again(
    opened: Callable[..., Index], monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    source = reader(opened())

    def broken(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(OSError) as caught:
            source.read(0)
    assert caught.value.errno == number
    assert source.read(0) == b"one"


def test_no_descriptor_is_left_open_by_failures(opened: Callable[..., Index], root: Path) -> None:
    source = reader(opened(), max_file_bytes=5)
    become_fifo(root / "a/1.jpg")
    before = os.listdir("/proc/self/fd")
    for _ in range(50):
        with pytest.raises(DatasetError):
            source.read(0)
        with pytest.raises(BadPicture):
            source.read(1)
    assert os.listdir("/proc/self/fd") == before


a_name = st.binary(min_size=1, max_size=30).filter(lambda name: not {0, 0x2F} & set(name) and not name.startswith(b"."))


@given(st.sets(a_name, min_size=1, max_size=8))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_of_any_name_is_indexed_and_read(home: Path, names: set[bytes]) -> None:
    root = home / "weird"
    (root / "class").mkdir(parents=True)
    try:
        for name in names:
            with open(os.fsencode(root) + b"/class/" + name + b".jpg", "wb") as file:
                file.write(name)
        index = open_index(Dataset(folder=root), home / "cache/headrace")
        source = reader(index)
        assert {source.read(i) for i in range(len(index))} == names
        assert all(index.path(i) == b"class/" + source.read(i) + b".jpg" for i in range(len(index)))
        index.close()
    finally:
        shutil.rmtree(root)
