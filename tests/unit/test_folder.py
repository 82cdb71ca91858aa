"""What a folder lists: ImageFolder's order and labels, and a word about everything that is left out."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchvision_shim import torchvision

from headrace.errors import DatasetError
from headrace.pipeline import files
from headrace.pipeline.folder import EXTENSIONS, list_folder
from headrace.pipeline.index import Listing, shown
from headrace.pipeline.spec import Dataset


@pytest.fixture
def root(home: Path) -> Path:
    made = home / "data"
    made.mkdir()
    return made


def put(root: Path, *names: str, data: bytes = b"x") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def listed(root: Path, **options: Any) -> Listing:
    return list_folder(Dataset(folder=root, **options))


def paths(listing: Listing) -> list[str]:
    offsets = listing.paths.offsets.tolist()
    return [shown(listing.paths.blob[a:b]) for a, b in zip(offsets, offsets[1:], strict=False)]


def lines(root: Path, **options: Any) -> list[tuple[int, str]]:
    listing = listed(root, **options)
    return list(zip(listing.labels.values.tolist(), paths(listing), strict=True))


def refusal(root: Path, **options: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        listed(root, **options)
    return str(caught.value)


# -- order and labels ---------------------------------------------------------------------------------------


def test_classes_are_numbered_by_name_as_text(root: Path) -> None:
    put(root, *(f"{i}/1.jpg" for i in range(12)))
    names = ["0", "1", "10", "11", "2", "3", "4", "5", "6", "7", "8", "9"]
    assert listed(root).classes == names
    assert lines(root) == [(i, f"{name}/1.jpg") for i, name in enumerate(names)]


def test_files_follow_by_folder_and_then_by_name(root: Path) -> None:
    put(root, "a/z.jpg", "a/b/1.jpg", "a/b-c/1.jpg", "a/b/c/1.jpg", "a/B/1.jpg", "a/10.jpg", "a/9.jpg", "A/1.jpg")
    assert lines(root) == [
        (0, "A/1.jpg"),
        (1, "a/10.jpg"),
        (1, "a/9.jpg"),
        (1, "a/z.jpg"),
        (1, "a/B/1.jpg"),
        (1, "a/b/1.jpg"),
        (1, "a/b-c/1.jpg"),
        (1, "a/b/c/1.jpg"),
    ]


def test_sizes_and_times_are_those_of_the_files(root: Path) -> None:
    put(root, "a/1.jpg", data=b"12345")
    put(root, "b/1.jpg", data=b"")
    os.utime(root / "a/1.jpg", ns=(5, 1_234_567_890_123_456_789))
    listing = listed(root)
    assert listing.sizes.tolist() == [5, 0]
    assert listing.mtimes_ns.tolist()[0] == 1_234_567_890_123_456_789


def test_a_folder_named_like_a_picture_is_a_folder(root: Path) -> None:
    put(root, "a/1.jpg", "a/dir.jpg/2.jpg")
    assert lines(root) == [(0, "a/1.jpg"), (0, "a/dir.jpg/2.jpg")]


def test_a_chain_of_200_folders_is_walked(root: Path) -> None:
    put(root, "a/" + "d/" * 200 + "1.jpg")
    assert lines(root) == [(0, "a/" + "d/" * 200 + "1.jpg")]


def test_folder_purity_of_the_listing_whoever_was_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BATCH", 7)
    names = [f"{c}/{sub}{i:04d}.jpg" for c in "abc" for sub in ("", "x/", "y/") for i in range(200)]
    put(root, names[0])
    for name in names[1:]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(root / names[0], root / name)
    assert paths(listed(root)) == names


def test_folder_parity_with_torchvision_of_order_labels_and_classes(root: Path) -> None:
    put(root, "b/1.jpg", "b/sub/2.JPG", "b/sub-1/2.png", "b/su/2.bmp", "a b/[x]*.jpeg", "é/ü.jpg", "B/x.txt", "B/9.png")
    put(root, "a b/10.jpg", "a b/9.jpg", "a b/a.b.jpg.webp", "a b/z/z/z/1.tiff", "a b/z/z.ppm", "\udcff/\udcfe.pgm")
    theirs = torchvision("datasets").ImageFolder(str(root))
    assert lines(root) == [(label, shown(os.fsencode(os.path.relpath(p, root)))) for p, label in theirs.samples]
    assert [os.fsencode(name).decode("utf-8", "backslashreplace") for name in theirs.classes] == listed(root).classes


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", sorted(EXTENSIONS))
def test_every_picture_ending_is_listed_in_any_case(root: Path, ending: str) -> None:
    put(root, f"a/1.{ending}", f"a/2.{ending.upper()}", f"a/3.{ending.title()}", f"a/4.x.{ending}", f"a/5.{ending}.x")
    assert [path[2] for path in paths(listed(root))] == list("1234")


def test_other_endings_are_left_out_and_counted(root: Path) -> None:
    put(root, "a/1.jpg", "a/x.txt", "a/y.TXT", "b/1.jpg", "b/z.npy", "b/jpg", "b/no-ending", "b/ends.")
    listing = listed(root)
    assert paths(listing) == ["a/1.jpg", "b/1.jpg"]
    assert listing.counts == {".txt": 2, ".npy": 1, "without an ending": 3}
    assert listing.notices == ["left out by name or ending: 3 without an ending, 2 .txt, 1 .npy"]


def test_only_the_most_frequent_of_many_endings_are_named(root: Path) -> None:
    put(root, "a/1.jpg", *(f"a/f.{i:03d}" for i in range(100)))
    (notice,) = listed(root).notices
    assert notice.endswith("1 .019, 80 of 80 other kinds")


def test_hidden_and_system_names_are_left_out_and_counted_by_kind(root: Path) -> None:
    put(root, "a/1.jpg", "a/.hidden.jpg", "a/._1.jpg", "a/Thumbs.db", "a/@eaDir/1.jpg", "a/.git/1.jpg", ".cache/1.jpg")
    put(root, "__MACOSX/a/1.jpg", "@eaDir/1.jpg", "a/__MACOSX/2.jpg", "._a")
    listing = listed(root)
    assert paths(listing) == ["a/1.jpg"] and listing.classes == ["a"]
    assert listing.counts == {"hidden": 3, "._*": 2, "Thumbs.db": 1, "@eaDir": 2, "__MACOSX": 2}


def test_files_in_the_root_have_no_class_and_are_named(root: Path) -> None:
    put(root, "x.jpg", "readme.txt", "a/1.jpg")
    listing = listed(root)
    assert paths(listing) == ["a/1.jpg"]
    assert listing.notices[0] == "left out x.jpg: in the root folder, so without a class"
    assert listing.counts == {"in the root folder, so without a class": 1, ".txt": 1}


JUNK = (b"Thumbs.db", b"__MACOSX", b"@eaDir")
a_name = st.binary(min_size=1, max_size=30).filter(
    lambda name: not {0, 0x2F} & set(name) and not name.startswith(b".") and name not in JUNK
)


@given(st.dictionaries(a_name, st.sets(a_name, min_size=1, max_size=4), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_names_of_any_bytes_are_listed(names: dict[bytes, set[bytes]]) -> None:
    names = {c: files for c, files in names.items() if c not in (b"Thumbs.db", b"__MACOSX", b"@eaDir")} or {
        b"a": {b"b"}
    }
    top = os.fsencode(tempfile.mkdtemp(dir="/tmp", prefix="hr-"))
    try:
        for name, files in names.items():
            os.mkdir(top + b"/" + name)
            for file in files:
                with open(top + b"/" + name + b"/" + file + b".jpg", "wb"):
                    pass
        listing = list_folder(Dataset(folder=top))
    finally:
        shutil.rmtree(top)

    def text(raw: bytes) -> str:
        return raw.decode("utf-8", "surrogateescape")

    expected = [
        c + b"/" + f for c in sorted(names, key=text) for f in sorted((f + b".jpg" for f in names[c]), key=text)
    ]
    assert paths(listing) == [shown(path) for path in expected]
    assert listing.classes == [c.decode("utf-8", "backslashreplace") for c in sorted(names, key=text)]


# -- links --------------------------------------------------------------------------------------------------


def test_links_to_files_are_followed(root: Path, home: Path) -> None:
    put(home, "store/1.jpg", data=b"12345")
    put(root, "a/0.jpg")
    os.symlink(home / "store/1.jpg", root / "a/1.jpg")
    os.symlink("0.jpg", root / "a/2.jpg")
    os.symlink("0.jpg", root / "a/3.txt")
    listing = listed(root)
    assert paths(listing) == ["a/0.jpg", "a/1.jpg", "a/2.jpg"] and listing.sizes.tolist() == [1, 5, 1]
    assert listing.counts == {".txt": 1}


def test_links_to_folders_elsewhere_are_followed_also_as_classes(root: Path, home: Path) -> None:
    put(home, "store/1.jpg", "store/sub/2.jpg")
    put(root, "a/1.jpg")
    os.symlink(home / "store", root / "b")
    os.symlink(home / "store/sub", root / "a/sub")
    assert lines(root) == [(0, "a/1.jpg"), (0, "a/sub/2.jpg"), (1, "b/1.jpg"), (1, "b/sub/2.jpg")]


def test_a_hard_link_is_a_sample_of_its_own(root: Path) -> None:
    put(root, "a/1.jpg")
    os.link(root / "a/1.jpg", root / "a/2.jpg")
    assert paths(listed(root)) == ["a/1.jpg", "a/2.jpg"]


@pytest.mark.parametrize("target", ["..", "../..", "/", ".", "../b", "../../data/b"])
def test_a_link_to_the_root_or_into_it_or_around_it_is_not_entered_and_is_named(root: Path, target: str) -> None:
    put(root, "a/1.jpg", "b/2.jpg")
    os.symlink(target, root / "a/link")
    listing = listed(root)
    assert paths(listing) == ["a/1.jpg", "b/2.jpg"]
    assert listing.notices == ["left out a/link: a link to the data set's root, or to a folder in it or around it"]


def test_a_neighbour_whose_name_begins_like_the_root_is_not_in_it(root: Path, home: Path) -> None:
    put(home, "data-2/1.jpg")
    put(root, "a/1.jpg")
    os.symlink(home / "data-2", root / "b")
    assert len(paths(listed(root))) == 2


def test_two_links_in_a_cycle_end(root: Path) -> None:
    put(root, "a/1.jpg", "b/2.jpg")
    os.symlink("../b", root / "a/b")
    os.symlink("../a", root / "b/a")
    assert paths(listed(root)) == ["a/1.jpg", "b/2.jpg"]


def test_a_cycle_outside_the_root_ends(root: Path, home: Path) -> None:
    put(home, "store/1.jpg")
    os.symlink(".", home / "store/loop")
    os.symlink(home / "store", root / "a")
    listing = listed(root)
    assert paths(listing) == ["a/1.jpg"]
    assert listing.notices == ["left out a/loop: a folder that this class has already"]


def test_a_folder_is_entered_once_per_class_by_the_shortest_way_and_first_name(root: Path, home: Path) -> None:
    put(home, "store/1.jpg")
    put(root, "a/deep/x.jpg", "b/x.jpg")
    for link in ("a/deep/0", "b/l", *(f"a/{name}" for name in "qnolmrspt")):
        os.symlink(home / "store", root / link)
    listing = listed(root)
    assert paths(listing) == ["a/deep/x.jpg", "a/l/1.jpg", "b/x.jpg", "b/l/1.jpg"]
    assert listing.counts == {"a folder that this class has already": 9}


def test_a_root_that_is_a_link_is_its_target(root: Path, home: Path) -> None:
    put(root, "a/1.jpg")
    os.symlink(root, home / "link")
    assert listed(home / "link").root == os.fsencode(root)


# -- what cannot be a sample --------------------------------------------------------------------------------


def test_broken_links_are_named_with_the_reason(root: Path) -> None:
    put(root, "a/1.jpg")
    os.symlink("/nonexistent/gone.jpg", root / "a/gone.jpg")
    os.symlink("self.jpg", root / "a/self.jpg")
    os.symlink("1.jpg/x.jpg", root / "a/through.jpg")
    os.symlink("/nonexistent", root / "class")
    listing = listed(root)
    assert paths(listing) == ["a/1.jpg"]
    assert sorted(listing.notices) == [
        "left out a/gone.jpg: what it links to does not exist",
        "left out a/self.jpg: too many links, or a link to itself",
        "left out a/through.jpg: what it links to does not exist",
        "left out class: what it links to does not exist",
    ]


def test_what_is_no_regular_file_is_named_and_never_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a/1.jpg")
    os.mkfifo(root / "a/pipe.jpg")
    os.symlink("/dev/zero", root / "a/device.jpg")
    os.symlink("pipe.jpg", root / "a/linked.jpg")
    monkeypatch.chdir(root / "a")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock.jpg")
    listing = listed(root)
    os.unlink("sock.jpg")
    assert paths(listing) == ["a/1.jpg"]
    assert listing.notices == [
        "left out a/device.jpg: a device, not a regular file",
        "left out a/linked.jpg: a FIFO, not a regular file",
        "left out a/pipe.jpg: a FIFO, not a regular file",
        "left out a/sock.jpg: a socket, not a regular file",
    ]


def test_of_many_left_out_files_the_first_are_named_and_the_rest_is_counted(root: Path) -> None:
    put(root, "a/1.jpg")
    for i in range(60):
        os.symlink("gone", root / f"a/{i:02d}.jpg")
    listing = listed(root)
    assert len(listing.notices) == 51
    assert listing.notices[-1] == "left out 10 more: what it links to does not exist"
    assert listing.counts == {"what it links to does not exist": 60}


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to do without its powers")
def test_without_permission_files_are_left_out_and_folders_are_an_error(root: Path) -> None:
    put(root, "a/1.jpg", "a/secret.jpg", "a/mine.jpg")
    (root / "a/secret.jpg").chmod(0)
    (root / "a/mine.jpg").chmod(0o600)
    assert as_ordinary_user(root) == "left out a/secret.jpg: no permission to read it\na/1.jpg\na/mine.jpg\n"
    put(root, "b/1.jpg")
    (root / "b").chmod(0)
    assert as_ordinary_user(root) == f"{root}/b: cannot list this folder: permission denied\n"


def as_ordinary_user(root: Path) -> str:
    """What a listing says to somebody who is bound by permissions."""
    code = (
        "import sys; from headrace.errors import DatasetError; from headrace.pipeline.folder import list_folder;"
        "from headrace.pipeline.spec import Dataset; from headrace.pipeline.index import Index\n"
        "try: index = Index.in_memory(list_folder(Dataset(folder=sys.argv[1])), '')\n"
        "except DatasetError as error: print(error)\n"
        "else: print(*index.notices, *(index.shown(i) for i in range(len(index))), sep='\\n')"
    )
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-c", code, str(root)]
    return subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True, text=True).stdout


def test_an_io_error_is_an_error_and_nothing_is_left_out_silently(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a/1.jpg", "a/2.jpg")
    real = os.stat

    def broken(path: Any, **options: Any) -> os.stat_result:
        if os.fsencode(path).endswith(b"2.jpg"):
            raise OSError(5, "Input/output error")
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", broken)
        message = refusal(root)
    assert message == f"{root}/a/2.jpg: cannot index this file: input/output error"


# -- empty --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "no file at all"),
        ((".DS_Store", "notes.txt"), "1 .txt, 1 hidden"),
    ],
)
def test_folder_bad_input_of_an_empty_class_is_an_error_that_names_it_and_what_is_there(
    root: Path, names: tuple[str, ...], says: str
) -> None:
    put(root, "a/1.jpg", "c/1.jpg", *(f"b/{name}" for name in names))
    (root / "b").mkdir(exist_ok=True)
    assert refusal(root) == (
        f"{root}: 1 class has no pictures: b (in b: {says}); `allow_empty: true` keeps such classes and their numbers"
    )


def test_an_allowed_empty_class_keeps_its_number(root: Path) -> None:
    put(root, "a/1.jpg", "c/1.jpg")
    (root / "b").mkdir()
    assert listed(root, allow_empty=True).classes == ["a", "b", "c"]
    assert lines(root, allow_empty=True) == [(0, "a/1.jpg"), (2, "c/1.jpg")]


def test_a_class_without_usable_files_is_empty(root: Path) -> None:
    put(root, "a/1.jpg")
    (root / "b").mkdir()
    os.symlink("gone", root / "b/1.jpg")
    assert "no pictures: b (in b: 1 what it links to does not exist)" in refusal(root)


@pytest.mark.parametrize("allow_empty", [False, True])
def test_a_data_set_without_any_picture_is_an_error(root: Path, allow_empty: bool) -> None:
    assert "has no class folders (it is empty)" in refusal(root, allow_empty=allow_empty)
    (root / "a").mkdir()
    (root / "b").mkdir()
    assert "no pictures in its class folders (no file at all)" in refusal(root, allow_empty=allow_empty)


def test_a_root_with_pictures_but_no_class_folders_says_what_is_expected(root: Path) -> None:
    put(root, "1.jpg", "2.jpg")
    assert refusal(root) == (
        f"{root}: has no class folders (2 in the root folder, so without a class); pictures are listed from"
        " ROOT/CLASS/..."
    )


@pytest.mark.parametrize(("make", "says"), [(None, "no such file or directory"), (Path.touch, "it is not a folder")])
def test_a_root_that_is_no_folder_is_an_error_by_name(
    home: Path, make: Callable[[Path], None] | None, says: str
) -> None:
    if make:
        make(home / "x")
    assert refusal(home / "x") == f"{home}/x: cannot list the data set: {says}"


# -- options ------------------------------------------------------------------------------------------------


def test_classes_number_and_choose(root: Path) -> None:
    put(root, "a/1.jpg", "b/1.jpg", "c/1.jpg", "d/1.jpg")
    listing = listed(root, classes=["d", "b"])
    assert listing.classes == ["d", "b"]
    assert lines(root, classes=["d", "b"]) == [(1, "b/1.jpg"), (0, "d/1.jpg")]
    assert listing.notices == ["left out, because `classes` does not name them: a, c"]


def test_a_class_that_is_not_there_is_an_error_even_where_empty_ones_are_allowed(root: Path) -> None:
    put(root, "a/1.jpg")
    message = refusal(root, classes=["b", "a"], allow_empty=True)
    assert message == f"{root}: there is no class folder b, which `classes` names; there is a"


def test_classes_may_be_named_by_any_bytes(root: Path) -> None:
    put(root, "\udcff/1.jpg", "b/1.jpg")
    assert lines(root, classes=["\udcff"]) == [(0, r"\xff/1.jpg")]
    assert listed(root, classes=["\udcff"]).classes == [r"\xff"]


def test_a_limit_takes_the_first_of_the_listing_and_keeps_the_classes(root: Path) -> None:
    put(root, "a/1.jpg", "a/2.jpg", "b/1.jpg", "c/1.jpg")
    assert paths(listed(root, limit=3)) == ["a/1.jpg", "a/2.jpg", "b/1.jpg"]
    assert listed(root, limit=3).classes == ["a", "b", "c"]
    assert listed(root, limit=3).notices == ["limit: the first 3 of 4 samples"]
    assert listed(root, limit=4).notices == [] and len(paths(listed(root, limit=9))) == 4


def test_extensions_replace_the_built_in_list(root: Path) -> None:
    put(root, "a/1.jpg", "a/2.DAT", "a/3.png")
    listing = listed(root, extensions=[".dat", "PNG"])
    assert paths(listing) == ["a/2.DAT", "a/3.png"] and listing.counts == {".jpg": 1}


# -- progress -----------------------------------------------------------------------------------------------


def test_progress_grows_and_ends_with_all_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BATCH", 10)
    monkeypatch.setattr(files, "_TICK", 0.0)
    put(root, *(f"{c}/{i}.jpg" for c in "ab" for i in range(50)))
    seen: list[tuple[int, int]] = []
    list_folder(Dataset(folder=root), lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen, key=lambda report: report[0])
    assert {total for _, total in seen} <= {0, 100} and seen[-1] == (100, 100)


def test_a_listing_can_be_stopped_from_its_progress(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_TICK", 0.0)
    put(root, *(f"a/{i}.jpg" for i in range(2000)))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list_folder(Dataset(folder=root), stop)


def test_the_data_set_is_left_as_it_was(root: Path) -> None:
    put(root, "a/1.jpg", "a/x.txt", "b/1.jpg")
    before = {p: p.lstat() for p in (root, *root.rglob("*"))}
    listed(root)
    assert {p: (s.st_mtime_ns, s.st_ctime_ns) for p, s in before.items()} == {
        p: (p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in (root, *root.rglob("*"))
    }
