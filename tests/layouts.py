"""Data sets as people have them: trees of folders, files and links, and files of every kind, made on the spot."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pictures import encode, quadrants

#: Root is bound by no mode.
ALL_POWERFUL = os.geteuid() == 0
#: Who is, and owns nothing: nobody.
SOMEBODY = 65534
SPARSE = 8 << 30


@dataclass(frozen=True)
class Layout:
    """A tree, and what a data set with this root must be.

    Attributes:
        samples: (label, path) of each line of the listing.
        says: what stands in the notices about what is left out.
        rejects: sample index → what its reject says.
        refused: what stands in the error where it is no data set.
        closed: holds something of mode 000; all of this is then about somebody who is bound by it.
    """

    build: Callable[[Path], None]
    samples: list[tuple[int, str]] = field(default_factory=list)
    says: tuple[str, ...] = ()
    rejects: dict[int, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    closed: bool = False


def picture(path: Path) -> Path:
    """A small good JPEG, in a folder that is made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PICTURE)
    return path


PICTURE = encode(quadrants(), "JPEG", quality=95, subsampling=0)


def _pictures(*names: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        for name in names:
            picture(root / name)

    return build


def _empty_class(root: Path) -> None:
    _pictures("a/1.jpg", "a/2.jpg", "c/1.jpg")(root)
    (root / "b").mkdir()


def _class_with_only_junk(root: Path) -> None:
    picture(root / "a/1.jpg")
    (root / "b").mkdir()
    (root / "b/.DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (root / "b/notes.txt").write_text("x")


def _linked(link: str, target: str, *names: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        _pictures(*names)(root)
        (root / link).symlink_to(target)

    return build


def _two_link_cycle(root: Path) -> None:
    _pictures("a/1.jpg", "b/2.jpg")(root)
    (root / "a/b").symlink_to("../b")
    (root / "b/a").symlink_to("../a")


def _store(root: Path) -> Path:
    """Three pictures outside the root."""
    for i in range(3):
        picture(root.parent / f"_store/{i}.jpg")
    return root.parent / "_store"


def _linked_files(root: Path) -> None:
    (root / "a").mkdir()
    for file in _store(root).iterdir():
        (root / "a" / file.name).symlink_to(file)


def _linked_class(root: Path) -> None:
    picture(root / "a/1.jpg")
    (root / "b").symlink_to(_store(root))


def _hard_link(root: Path) -> None:
    os.link(picture(root / "a/1.jpg"), root / "a/2.jpg")


def _fifo(root: Path) -> None:
    picture(root / "a/1.jpg")
    os.mkfifo(root / "a/pipe.jpg")


def _socket(root: Path) -> None:
    picture(root / "a/1.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "a/sock.jpg"))


def _closed(path: str, *names: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        _pictures(*names)(root)
        (root / path).chmod(0)

    return build


def _sparse(root: Path) -> None:
    picture(root / "a/1.jpg")
    os.truncate(picture(root / "a/big.jpg"), SPARSE)


def _many_small(root: Path) -> None:
    for name in "abc":
        first = picture(root / name / "0000.jpg")
        for i in range(1, 700):
            os.link(first, root / name / f"{i:04}.jpg")


#: By the number that the name gets when numbers are sorted as text.
_TWELVE = ["0", "1", "10", "11", "2", "3", "4", "5", "6", "7", "8", "9"]
_INWARD = "a link to the data set's root, or to a folder in it or around it"
_DEEP = "a/" + "d/" * 200 + "1.jpg"

LAYOUTS: dict[str, Layout] = {
    "empty_class": Layout(_empty_class, refused=("b", "allow_empty")),
    "class_with_only_junk": Layout(_class_with_only_junk, refused=("b", "allow_empty", "1 .txt", "1 hidden")),
    "empty_root": Layout(lambda root: None, refused=("has no class folders", "it is empty")),
    "loop_to_parent": Layout(
        _linked("a/loop", "..", "a/1.jpg"), [(0, "a/1.jpg")], says=(f"left out a/loop: {_INWARD}",)
    ),
    "loop_to_self": Layout(
        _linked("a/x.jpg", "x.jpg", "a/1.jpg"),
        [(0, "a/1.jpg")],
        says=("left out a/x.jpg: too many links, or a link to itself",),
    ),
    "two_link_cycle": Layout(
        _two_link_cycle,
        [(0, "a/1.jpg"), (1, "b/2.jpg")],
        says=(f"left out a/b: {_INWARD}", f"left out b/a: {_INWARD}"),
    ),
    "dangling_link": Layout(
        _linked("a/gone.jpg", "/nonexistent/gone.jpg", "a/1.jpg"),
        [(0, "a/1.jpg")],
        says=("left out a/gone.jpg: what it links to does not exist",),
    ),
    "linked_files": Layout(_linked_files, [(0, "a/0.jpg"), (0, "a/1.jpg"), (0, "a/2.jpg")]),
    "linked_class": Layout(_linked_class, [(0, "a/1.jpg"), (1, "b/0.jpg"), (1, "b/1.jpg"), (1, "b/2.jpg")]),
    "hard_link": Layout(_hard_link, [(0, "a/1.jpg"), (0, "a/2.jpg")]),
    "fifo": Layout(_fifo, [(0, "a/1.jpg")], says=("left out a/pipe.jpg: a FIFO, not a regular file",)),
    "socket": Layout(_socket, [(0, "a/1.jpg")], says=("left out a/sock.jpg: a socket, not a regular file",)),
    "dir_named_jpg": Layout(_pictures("a/1.jpg", "a/dir.jpg/2.jpg"), [(0, "a/1.jpg"), (0, "a/dir.jpg/2.jpg")]),
    "unreadable_file": Layout(
        _closed("a/secret.jpg", "a/1.jpg", "a/secret.jpg"),
        [(0, "a/1.jpg")],
        says=("left out a/secret.jpg: no permission to read it",),
        closed=True,
    ),
    "unreadable_dir": Layout(
        _closed("b", "a/1.jpg", "b/1.jpg"),
        refused=("/unreadable_dir/b: cannot list this folder: permission denied",),
        closed=True,
    ),
    "sparse_8GiB": Layout(
        _sparse,
        [(0, "a/1.jpg"), (0, "a/big.jpg")],
        rejects={1: f"a file of {SPARSE} bytes, but max_file_bytes is {256 << 20}"},
    ),
    "file_in_root": Layout(
        _pictures("x.jpg", "a/1.jpg"),
        [(0, "a/1.jpg")],
        says=("left out x.jpg: in the root folder, so without a class",),
    ),
    "nested": Layout(
        _pictures("a/deep/er/1.jpg", "a/2.jpg", "b/3.jpg"), [(0, "a/2.jpg"), (0, "a/deep/er/1.jpg"), (1, "b/3.jpg")]
    ),
    "deep_200": Layout(_pictures(_DEEP), [(0, _DEEP)]),
    "one_class": Layout(_pictures("a/1.jpg"), [(0, "a/1.jpg")]),
    "many_small": Layout(
        _many_small, [(label, f"{name}/{i:04}.jpg") for label, name in enumerate("abc") for i in range(700)]
    ),
    "numeric_classes": Layout(
        _pictures(*(f"{i}/1.jpg" for i in range(12))), [(i, f"{name}/1.jpg") for i, name in enumerate(_TWELVE)]
    ),
}


def build_all(folder: Path) -> Path:
    """Every one of `LAYOUTS` in a folder of its name."""
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir(parents=True)
        layout.build(folder / name)
    return folder


def remove(folder: Path) -> None:
    """Also what nobody may enter, and paths that are too long to be named at once."""
    for name, layout in LAYOUTS.items():
        if layout.closed and (folder / name / "b").is_dir():
            (folder / name / "b").chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def ordinary_user(home: Path) -> tuple[list[str], dict[str, str]]:
    """What to put before a command, and its environment, so that modes bind it; for root, becoming somebody else.
    Folders of that somebody's own are made in `home`.
    """
    if not ALL_POWERFUL:
        return [], dict(os.environ)
    prefix = _become_somebody()
    if prefix is None:
        pytest.skip("root cannot do without its powers here")
    home.chmod(0o755)
    environment = dict(os.environ)
    for variable in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        folder = home / "theirs" / variable.lower()
        folder.mkdir(mode=0o700, parents=True)
        if POWERLESS not in prefix:
            os.chown(folder, SOMEBODY, SOMEBODY)
        environment[variable] = str(folder)
    return prefix, environment


POWERLESS = "--bounding-set=-dac_override,-dac_read_search"
# Where the interpreter lies in a folder that only root may enter: in a mount namespace of its own that folder holds the
# interpreter alone, and everybody may enter it.
_SHOW_INTERPRETER = """
exec 9<"$1" || exit
mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$1" || exit
mount --no-canonicalize --bind /proc/self/fd/9 "$1" || exit
exec 9<&-
shift 2
exec "$@"
"""


@functools.cache
def _become_somebody() -> list[str] | None:
    """The first that works of: another user; likewise, once shown the interpreter; root without its powers."""
    another = ["setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups", "--inh-caps=-all"]
    candidates = [another, ["setpriv", POWERLESS]]
    prefix = Path(sys.base_prefix).resolve()
    for ancestor in reversed(prefix.parents):
        if not ancestor.stat().st_mode & 0o001:
            show = ["unshare", "--mount", "sh", "-c", _SHOW_INTERPRETER, "sh", str(prefix), str(ancestor)]
            candidates.insert(1, [*show, *another])
            break
    # A child too: the first program is still found with the powers of who starts it.
    twice = "import subprocess, sys; import headrace; subprocess.run([sys.executable, '-c', ''], check=True)"
    for candidate in candidates:
        with contextlib.suppress(OSError):
            command = [*candidate, sys.executable, "-c", twice]
            if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0:
                return candidate
    return None
