"""Files that change, vanish or cannot be read during an epoch: an error by name, never a reject or a wrong picture."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from broken_disk import Orders, site
from layouts import ALL_POWERFUL, POWERLESS
from pictures import encode, noise
from service import Daemon, Truth

from headrace import Batch, Loader
from headrace.errors import DatasetError

SAMPLES = 60
BATCH = 4
#: A line of the listing so far on that nobody has asked for it when the first batch is there.
FAR = 53
Rows = list[tuple[int, int, str]]


def stream(**dataset: Path) -> dict[str, Any]:
    return {
        "dataset": {key: str(value) for key, value in dataset.items()},
        "transforms": [{"resize": {"size": 24}}, {"center_crop": {"size": 24}}],
        "chunk": 2,
    }


def make(folder: Path) -> Path:
    for i in range(SAMPLES):
        file = folder / ("a" if i < FAR else "b" if i == FAR else "c") / f"{i:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode(noise(24, 24, seed=i), "JPEG", quality=90))
    return folder


def tar(files: list[Path], file: Path) -> Path:
    """A shard of the files with the numbers of their classes."""
    with tarfile.open(file, "w") as out:
        for picture in files:
            out.add(picture, picture.name)
            label = tarfile.TarInfo(f"{picture.stem}.cls")
            label.size = 1
            out.addfile(label, io.BytesIO(b"%d" % "abc".index(picture.parent.name)))
    return file


class Scene:
    """A data set, also as list and shards; one worker that modes bind and whose disk fails on demand; and what an epoch
    must be."""

    def __init__(self, folder: Path) -> None:
        self.folder = make(folder / "data")
        self.files = sorted(self.folder.glob("*/*"))
        self.orders = Orders(site(folder / "site"))
        self.list = folder / "samples.csv"
        lines = (f"{file.relative_to(folder)},{file.parent.name}\n" for file in self.files)
        self.list.write_text("path,label\n" + "".join(lines))
        self.tars = [
            tar(self.files[: SAMPLES // 2], folder / "0.tar"),
            tar(self.files[SAMPLES // 2 :], folder / "1.tar"),
        ]
        streams = {
            "folder": stream(folder=self.folder),
            "list": stream(list=self.list),
            "shards": stream(shards=folder / "{0,1}.tar"),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
            self.daemon = Daemon(folder, streams, workers=1, slots=2)
            self.daemon.start(prefix=["setpriv", POWERLESS] if ALL_POWERFUL else [])
        self.truth = Truth(self.daemon.config, folder / "truth", "folder").rows(0)
        self._epochs = itertools.count()

    def epoch(self, stream: str = "folder", **more: Any) -> Epoch:
        return Epoch(self, stream, next(self._epochs), more)

    def at(self, source: str) -> tuple[int, Path, str]:
        """Some line of the listing, far on; the file that holds it; and how the sample is called."""
        if source != "shards":
            return FAR, self.files[FAR], str(self.files[FAR])
        return SAMPLES // 2, self.tars[1], f"{self.tars[1]}/{SAMPLES // 2}.jpg"


class Epoch:
    """An epoch that nobody has rendered yet."""

    def __init__(self, scene: Scene, stream: str, number: int, options: dict[str, Any]) -> None:
        self.loader = Loader(
            scene.daemon.address,
            stream=stream,
            output="numpy",
            dtype="uint8",
            layout="NHWC",
            **({"batch_size": BATCH, "prefetch": 1, "timeout": 30} | options),
        )
        self.loader.set_epoch(number)
        self.batches: Iterator[Batch] = iter(self.loader)
        self.rows: Rows = []

    def take(self, batches: int | None = None) -> None:
        """So many, or all that there are."""
        for batch in itertools.islice(self.batches, batches):
            assert not batch.rejects and batch.valid.all()
            images, labels = batch
            digests = [hashlib.sha256(image).hexdigest()[:16] for image in images]
            self.rows += zip(batch.indices.tolist(), labels.tolist(), digests, strict=True)

    def recover(self) -> None:
        """All that is left, of a disk that was healed. What had been looked ahead for may have failed before that,
        which is still told when it is due."""
        for _ in range(3):
            with contextlib.suppress(DatasetError):
                return self.take()
        self.take()

    def __enter__(self) -> Epoch:
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.close()


@pytest.fixture(scope="module")
def scene(session_home: Path) -> Iterator[Scene]:
    made = Scene(Path(tempfile.mkdtemp(dir=session_home)))
    try:
        for source in ("folder", "list", "shards"):
            with made.epoch(source) as epoch:
                epoch.take()
            assert epoch.rows == made.truth
        yield made
    finally:
        made.daemon.stop()


# -- changes under a running epoch ----------------------------------------------------------------------------


def grow(file: Path) -> None:
    with file.open("ab") as out:
        out.write(b"more")


def rewrite(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-3] + b"\0" + data[-2:])


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(encode(noise(24, 24, seed=1000), "JPEG"))
    other.rename(file)


def become_a_link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("nothing")


def become_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def heal(file: Path, kept: Path) -> None:
    """At once, so that nobody meets something in between."""
    if not file.parent.exists():
        kept.rename(file.parent)
        return
    file.parent.chmod(0o755)
    (kept / file.name).replace(file)
    shutil.rmtree(kept)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Path.unlink, "it does not exist any more"),
        (lambda file: shutil.rmtree(file.parent), "it does not exist any more"),
        (become_a_link_to_nothing, "it does not exist any more"),
        (become_a_fifo, "it is not a regular file any more"),
        (lambda file: os.truncate(file, 200), " → 200"),
        (lambda file: os.truncate(file, 0), " → 0"),
        (grow, "changed since it was indexed: size"),
        (rewrite, "changed since it was indexed: modified"),
        (replace, "changed since it was indexed: size"),
        (lambda file: file.chmod(0), "Permission denied"),
        (lambda file: file.parent.chmod(0), "Permission denied"),
    ],
    ids="vanishes class-vanishes dangles fifo shrinks empty grows rewritten replaced closed class-closed".split(),
)
def test_a_file_that_is_not_what_was_indexed_fails_by_name_and_nothing_is_lost_when_it_is_again(
    scene: Scene, change: Callable[[Path], None], says: str
) -> None:
    victim = scene.files[FAR]
    kept = shutil.copytree(victim.parent, scene.folder.with_name("kept"))  # with its times
    with scene.epoch() as epoch:
        epoch.take(1)
        change(victim)
        try:
            for _ in range(2):
                with pytest.raises(DatasetError) as caught:
                    epoch.take()
                assert f"sample {FAR}, {victim}: " in str(caught.value) and says in str(caught.value)
            assert epoch.rows == scene.truth[: len(epoch.rows)]
            assert FAR - BATCH < len(epoch.rows) <= FAR
        finally:
            heal(victim, kept)
        epoch.recover()
        assert epoch.rows == scene.truth


def test_a_file_that_changes_after_it_was_read_changes_no_picture_of_the_epoch(scene: Scene) -> None:
    first = scene.files[0]
    state = first.stat()
    with scene.epoch() as epoch:
        epoch.take(1)
        data = first.read_bytes()
        replace(first)
        epoch.take()
    assert epoch.rows == scene.truth
    first.write_bytes(data)
    os.utime(first, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_a_list_that_changes_is_still_the_list_that_the_daemon_began_with(scene: Scene) -> None:
    text = scene.list.read_text()
    with scene.epoch("list") as epoch:
        epoch.take(1)
        scene.list.write_text("path,label\ndata/a/00.jpg,other\n")
        epoch.take(5)
        scene.list.unlink()
        epoch.take()
    assert epoch.rows == scene.truth
    scene.list.write_text(text)


def append(file: Path) -> None:
    with file.open("ab") as out:
        out.write(bytes(1024))


def spoil(file: Path) -> None:
    with file.open("r+b") as out:
        out.seek(700)  # within the first picture
        out.write(b"\0\1\2\3")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (append, "its tar: size"),
        (lambda file: os.truncate(file, 20000), "its tar: size"),
        (spoil, "its tar: modified"),
    ],
    ids=["grows", "shrinks", "rewritten"],
)
def test_a_tar_that_is_written_to_fails_by_name_and_nothing_is_lost_when_it_is_again(
    scene: Scene, change: Callable[[Path], None], says: str
) -> None:
    index, file, name = scene.at("shards")
    kept = shutil.copy2(file, file.with_suffix(".kept"))
    with scene.epoch("shards") as epoch:
        epoch.take(1)
        change(file)
        try:
            with pytest.raises(DatasetError) as caught:
                epoch.take()
        finally:
            kept.replace(file)
        assert f"sample {index}, {name}: changed since it was indexed: {says}" in str(caught.value)
        epoch.recover()
    assert epoch.rows == scene.truth


def test_a_tar_that_is_replaced_or_gone_gives_what_was_indexed_or_an_error(scene: Scene) -> None:
    index, file, name = scene.at("shards")
    kept = file.rename(file.with_suffix(".kept"))
    try:
        tar(scene.files[:30], file)  # as many pictures, but others
        with scene.epoch("shards") as epoch:
            epoch.take()  # from the one that the worker has open
        assert epoch.rows == scene.truth
        scene.orders.fail(file, "read", errno.EIO, times=1)  # so that it is opened again
        scene.orders.fail(kept, "read", errno.EIO, times=1)
        with scene.epoch("shards") as epoch:
            with pytest.raises(DatasetError) as caught:
                epoch.take()
            assert f"sample {index}, {name}: changed since it was indexed: its tar: " in str(caught.value)
            assert epoch.rows == scene.truth[: len(epoch.rows)]
            file.unlink()
            with pytest.raises(DatasetError, match=r"1\.tar/.*: changed since it was indexed: its tar: "):
                epoch.take()
            kept.replace(file)
            epoch.recover()
        assert epoch.rows == scene.truth
    finally:
        scene.orders.clear()
        if kept.exists():
            kept.replace(file)


# -- errors of the disk ---------------------------------------------------------------------------------------


IO_ERRORS = pytest.mark.parametrize(
    ("source", "call", "number"),
    [
        ("folder", "open", errno.EIO),
        ("folder", "open", errno.ESTALE),
        ("folder", "read", errno.EIO),
        ("folder", "read", errno.ESTALE),
        ("list", "read", errno.EIO),
        ("shards", "read", errno.EIO),
        ("shards", "read", errno.ESTALE),
    ],
)


@IO_ERRORS
def test_an_error_that_passes_is_tried_again_and_changes_nothing(
    scene: Scene, source: str, call: str, number: int
) -> None:
    _, file, _ = scene.at(source)
    with scene.epoch(source) as epoch:
        epoch.take(1)
        scene.orders.fail(file, call, number, times=2)
        epoch.take()
        assert scene.orders.left() == 0, "the disk did fail"
    assert epoch.rows == scene.truth


@IO_ERRORS
def test_an_error_that_stays_fails_by_name_until_the_disk_heals(
    scene: Scene, source: str, call: str, number: int
) -> None:
    index, file, name = scene.at(source)
    with scene.epoch(source) as epoch:
        epoch.take(1)
        scene.orders.fail(file, call, number)
        try:
            with pytest.raises(DatasetError) as caught:
                epoch.take()
        finally:
            scene.orders.clear()
        said = str(caught.value)
        assert f"sample {index}, {name}: cannot be read" in said and os.strerror(number) in said
        epoch.recover()
    assert epoch.rows == scene.truth
    assert name in scene.daemon.log.read_text()


def test_a_worker_without_descriptors_fails_by_name_until_it_has_some(scene: Scene) -> None:
    [worker] = scene.daemon.ping().workers
    soft, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    with scene.epoch() as epoch:
        epoch.take(1)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(DatasetError) as caught:
                epoch.take()
        finally:
            resource.prlimit(worker, resource.RLIMIT_NOFILE, (soft, hard))
        assert "sample " in str(caught.value) and os.strerror(errno.EMFILE) in str(caught.value)
        epoch.recover()
    assert epoch.rows == scene.truth
    assert scene.daemon.ping().workers == [worker]


def test_an_error_that_stays_is_not_hidden_by_any_policy_for_bad_pictures(scene: Scene) -> None:
    scene.orders.fail(scene.files[FAR], "read", errno.EIO)
    try:
        for policy in ("replace", "mask"):
            with scene.epoch(on_bad_sample=policy) as epoch, pytest.raises(DatasetError, match=f"sample {FAR}, "):
                epoch.take()
    finally:
        scene.orders.clear()


# -- a cache that cannot be written, a data set that must not be ----------------------------------------------


def mounting(*mounts: str) -> list[str]:
    """What to put before a command so that it sees these mounts and nobody else does."""
    unshare = ["unshare", "--mount"] if ALL_POWERFUL else ["unshare", "--map-root-user", "--mount"]
    script = " && ".join([*mounts, 'exec "$@"'])
    attempt = [*unshare, "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
    tried = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"mounts of one's own are not allowed here: {tried.stderr.strip()}")
    return [*unshare, "sh", "-c", script, "sh"]


EPOCHS = """
import hashlib, json, logging, sys, headrace
logging.basicConfig(level=logging.INFO, format="%(message)s")
with headrace.Loader(sys.argv[1], batch_size=7, output="numpy", dtype="uint8", layout="NHWC") as loader:
    rows = []
    for batch in loader:
        digests = [hashlib.sha256(image).hexdigest()[:16] for image in batch.images]
        rows += zip(batch.indices.tolist(), batch.labels.tolist(), digests)
print(json.dumps(rows))
"""


def run(prefix: list[str], *command: object) -> subprocess.CompletedProcess[str]:
    line = [*prefix, sys.executable, *map(str, command)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)


def configuration(folder: Path, home: Path, cache: Path) -> Path:
    file = home / "headrace.yaml"
    document = {"cache_dir": str(cache), "workers": {"processes": 1}, "streams": {"train": stream(folder=folder)}}
    file.write_text(yaml.safe_dump(document))
    return file


def evidence(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Of everything in a folder: its bytes, and every time but that of reading."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        state = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = digest, state.st_mode, state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns
    return found


@pytest.mark.parametrize(
    ("mounts", "reason"),
    [
        (["mount -t tmpfs -o size=64k none {0}", "head -c 1M /dev/zero >{0}/fill 2>/dev/null; true"], "No space left"),
        (["mount -t tmpfs -o ro none {0}"], "Read-only file system"),
        ([], "it lies in the data set, which is never written to"),
    ],
    ids=["full", "read-only", "in the data set"],
)
def test_without_a_cache_the_index_lies_in_memory_and_an_epoch_is_the_same(
    scene: Scene, home: Path, mounts: list[str], reason: str
) -> None:
    cache = home / "no-cache" if mounts else scene.folder / "cache"
    if mounts:
        cache.mkdir()
    prefix = mounting(*(mount.format(cache) for mount in mounts)) if mounts else []
    config, before = configuration(scene.folder, home, cache), evidence(scene.folder)
    epoch = run(prefix, "-c", EPOCHS, config)
    assert epoch.returncode == 0, epoch.stderr
    assert "the index is kept in memory only" in epoch.stderr and reason in epoch.stderr
    assert [tuple(row) for row in json.loads(epoch.stdout)] == scene.truth
    assert evidence(scene.folder) == before


def test_a_data_set_is_never_written_to(scene: Scene, home: Path) -> None:
    for name, damage in (("cut.jpg", slice(0, 300)), ("cut-late.jpg", slice(0, -2)), ("empty.jpg", slice(0, 0))):
        (scene.folder / "c" / name).write_bytes(scene.files[0].read_bytes()[damage])
    try:
        config, before = configuration(scene.folder, home, home / "cache"), evidence(scene.folder)
        read_only = mounting(f"mount --bind -o ro {scene.folder} {scene.folder}")
        verify = run([], "-m", "headrace.server", "verify", config)
        assert verify.returncode == 1 and len(verify.stdout.splitlines()) == 1 + 3, verify.stderr
        epoch = run(read_only, "-c", EPOCHS, config)
        assert epoch.returncode == 0 and len(json.loads(epoch.stdout)) == SAMPLES, epoch.stderr
        assert evidence(scene.folder) == before
    finally:
        for name in ("cut.jpg", "cut-late.jpg", "empty.jpg"):
            (scene.folder / "c" / name).unlink()
