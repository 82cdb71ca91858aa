"""A chunk from its address: a pure function, with verdicts per row and I/O errors by name."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from headrace.errors import DatasetError
from headrace.pipeline import render
from headrace.pipeline.backend import make
from headrace.pipeline.dataset import open_index
from headrace.pipeline.index import Index
from headrace.pipeline.probe import BadPicture
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config
from headrace.slots import Ring, Status

SIZE = 24
RENDERERS = ["pillow", "dali-cpu"]


class Bench:
    def __init__(
        self,
        folder: Path,
        cache: Path,
        *,
        chunk: int = 5,
        shuffle: bool = True,
        transforms: object = None,
        dataset: dict[str, str] | None = None,
        backend: str = "pillow",
    ) -> None:
        transforms = transforms or [{"random_resized_crop": {"size": SIZE}}, "random_horizontal_flip"]
        source = dataset or {"folder": str(folder)}
        stream = {"dataset": source, "shuffle": shuffle, "chunk": chunk, "transforms": transforms}
        self.stream = Config.load({"streams": {"s": stream}}).streams["s"]
        self.index: Index = open_index(self.stream.dataset, cache)
        self.backend = make(backend)
        self.ring = Ring.create(self.stream.layout(self.index), 2)
        self.renderer = ChunkRenderer(self.stream, self.index, self.backend)

    def pixels(self, epoch: int, chunk: int, slot: int = 0) -> bytes:
        self.renderer.render(epoch, chunk, self.ring.views[slot])
        rows = self.renderer.rows(chunk)
        return bytes(self.ring.views[slot].images[:rows].tobytes())

    def close(self) -> None:
        self.ring.close()
        self.backend.close()
        self.index.close()


@pytest.fixture
def bench(home: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(folder: Path, **options: object) -> Bench:
        made.append(Bench(folder, home / "cache", **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize("name", RENDERERS)
def test_a_chunk_depends_on_its_address_alone(bench: Callable[..., Bench], photos: Path, name: str) -> None:
    at = bench(photos, backend=name)
    first = at.pixels(3, 2)
    at.pixels(0, 0), at.pixels(3, 1)
    assert at.pixels(3, 2, slot=1) == first != at.pixels(4, 2)


@pytest.mark.parametrize("name", RENDERERS)
def test_rows_alone_give_the_same_pixels_as_the_whole_chunk(
    bench: Callable[..., Bench], photos: Path, name: str
) -> None:
    at = bench(photos, backend=name)
    whole, single = at.ring.views
    at.renderer.render(1, 3, whole)
    for rows in ((4,), (0, 2), (1, 3)):
        at.renderer.render(1, 3, single, rows)
    np.testing.assert_array_equal(whole.images, single.images)
    np.testing.assert_array_equal(whole.status, single.status)


@pytest.mark.parametrize("name", RENDERERS)
def test_the_chunk_size_changes_no_picture(bench: Callable[..., Bench], photos: Path, name: str) -> None:
    small, large = bench(photos, chunk=5, backend=name), bench(photos, chunk=48, backend=name)
    together = large.pixels(0, 0)
    assert b"".join(small.pixels(0, chunk) for chunk in range(small.renderer.chunks)) == together


def test_the_last_chunk_of_an_epoch_is_short(bench: Callable[..., Bench], photos: Path) -> None:
    at = bench(photos, chunk=32)
    assert (at.renderer.chunks, at.renderer.rows(0), at.renderer.rows(1)) == (2, 32, 16)


def test_an_epoch_shows_each_sample_once_with_its_label(bench: Callable[..., Bench], photos: Path) -> None:
    at = bench(photos)
    seen = {}
    for chunk in range(at.renderer.chunks):
        view = at.ring.views[0]
        at.renderer.render(0, chunk, view)
        rows = at.renderer.rows(chunk)
        seen |= dict(zip(view.indices[:rows].tolist(), view.labels[:rows].tolist(), strict=True))
    assert seen == dict(enumerate(at.index.labels.tolist()))


@pytest.mark.parametrize(
    ("kind", "label", "shape", "dtype"),
    [
        ("auto", lambda i: i * 0.5, (), "float32"),
        ("auto", lambda i: [i, -i, 7], (3,), "int64"),
        ("auto", lambda i: [f"c{i % 3}", f"c{i % 4}"][: i % 3], (4,), "float32"),
        ("text", lambda i: "word " * (i % 7), (), "int64"),
    ],
)
def test_labels_and_texts_of_any_kind_stand_in_the_row_of_their_picture(
    bench: Callable[..., Bench], photos: Path, home: Path, kind: str, label: Any, shape: tuple[int, ...], dtype: str
) -> None:
    files = sorted(photos.glob("*/*"))[:23]
    rows = [{"path": str(file), "label": label(i), "n": i, "note": "x" * (i * 3)} for i, file in enumerate(files)]
    (home / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    at = bench(photos, dataset={"list": str(home / "l.jsonl"), "root": str(photos), "labels": kind})
    view, seen = at.ring.views[0], []
    for chunk in reversed(range(at.renderer.chunks)):
        count = at.renderer.rows(chunk)
        view.ends[:], view.text[:] = -1, 0xC1  # what is left of another chunk
        at.renderer.render(2, chunk, view, (0,))
        assert view.labels.shape == (5, *shape) and view.labels.dtype == dtype
        ends = [0, *view.ends.tolist()]
        assert set(ends[count:]) == {ends[count]}
        for row, index in enumerate(view.indices[:count].tolist()):
            texts = [label(index)] if kind == "text" else []
            values = msgspec.msgpack.decode(view.text[ends[row] : ends[row + 1]].tobytes())
            assert values == [*texts, index, "x" * (index * 3)]
            assert view.labels[row].tolist() == (0 if kind == "text" else numbers(label(index)))
            seen.append(index)
    assert sorted(seen) == list(range(23))


def numbers(label: Any) -> Any:
    """As they are delivered: several of four classes as ones."""
    if isinstance(label, list) and not (label and isinstance(label[0], int)):
        return [float(f"c{k}" in label) for k in range(4)]
    return label


def test_without_texts_all_of_them_end_at_nothing(bench: Callable[..., Bench], photos: Path) -> None:
    at = bench(photos)
    view = at.ring.views[0]
    view.ends[:] = 7
    at.renderer.render(0, 0, view, (0,))
    assert not view.ends.any() and not view.text.size


@pytest.mark.parametrize("name", RENDERERS)
def test_a_bad_picture_is_black_named_and_alone(
    bench: Callable[..., Bench], many: Callable[[int], Path], name: str
) -> None:
    folder = many(10)
    victim = sorted(folder.glob("*/*"))[3]
    data = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(data[: len(data) // 2])
    at = bench(folder, chunk=10, shuffle=False, backend=name)
    view = at.ring.views[0]
    view.images[:] = 77
    result = at.renderer.render(0, 0, view)
    [reject] = result.rejects
    assert (reject.row, reject.index, reject.path, reject.stage) == (3, 3, str(victim), "decode")
    assert not view.images[3].any() and view.status.tolist() == [Status.OK] * 3 + [Status.REJECTED] + [Status.OK] * 6


def test_a_picture_too_small_for_the_transforms_is_a_reject_that_says_so(
    bench: Callable[..., Bench], photos: Path
) -> None:
    smallest = min(picture_size(path)[0] for path in photos.glob("*/*"))
    at = bench(photos, chunk=48, shuffle=False, transforms=[{"random_crop": {"size": [smallest + 1, 8], "fill": 9}}])
    view = at.ring.views[0]
    rejects = {reject.row: reject for reject in at.renderer.render(0, 0, view).rejects}
    paths = [Path(os.fsdecode(at.index.full_path(row))) for row in range(48)]
    assert set(rejects) == {row for row, path in enumerate(paths) if picture_size(path)[0] == smallest}
    for row, reject in rejects.items():
        assert reject.stage == "probe" and f"a picture of {smallest}x" in reject.reason
        assert "pad_if_needed" in reject.reason
        assert not view.images[row].any() and view.status[row] == Status.REJECTED


def picture_size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.height, picture.width


def test_a_convicted_sample_is_rejected_unseen(bench: Callable[..., Bench], photos: Path) -> None:
    at = bench(photos, shuffle=False)
    [reject] = at.renderer.render(0, 0, at.ring.views[0], None, {2: "it kills"}).rejects
    assert (reject.index, reject.stage, reject.reason) == (2, "worker", "it kills")


class Flaky:
    """A source that fails a number of times before it gives the bytes."""

    def __init__(self, good: Callable[[int], bytes], failures: int, error: Callable[[], Exception]) -> None:
        self.good, self.left, self.error, self.reads = good, failures, error, 0

    def read(self, i: int) -> bytes:
        self.reads += 1
        if self.left:
            self.left -= 1
            raise self.error()
        return self.good(i)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_RETRIES", (0.0, 0.0))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_read_that_fails_is_tried_again(bench: Callable[..., Bench], photos: Path, number: int) -> None:
    at = bench(photos)
    want = at.pixels(0, 0)
    source = Flaky(at.renderer._source.read, 2, lambda: OSError(number, os.strerror(number)))
    at.renderer = ChunkRenderer(at.stream, at.index, at.backend, source)
    assert at.pixels(0, 0) == want and source.reads == 7


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "read", "fstat"])
def test_each_try_opens_the_file_anew(
    bench: Callable[..., Bench], photos: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    at = bench(photos, shuffle=False)
    want, path, real = at.pixels(0, 0), at.index.full_path(1), {name: getattr(os, name) for name in ("open", call)}
    opened: list[int] = []
    failures = 2

    def open_(name: Any, *args: Any, **options: Any) -> int:
        fd: int = real["open"](name, *args, **options)
        if name == path:
            opened.append(fd)
        return fd

    def flaky(what: Any, *args: Any, **options: Any) -> Any:
        nonlocal failures
        if failures and (what == path or [what] == opened[-1:]):
            failures -= 1
            raise OSError(number, os.strerror(number))
        return (open_ if call == "open" else real[call])(what, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, call, flaky)
        assert at.pixels(0, 0) == want
    assert failures == 0 and len(opened) == (1 if call == "open" else 3)


@pytest.mark.usefixtures("impatient")
def test_a_read_that_goes_on_failing_is_an_error_by_name_and_no_reject(
    bench: Callable[..., Bench], photos: Path
) -> None:
    at = bench(photos, shuffle=False)
    source = Flaky(at.renderer._source.read, 3, lambda: OSError(errno.EIO, os.strerror(errno.EIO)))
    at.renderer = ChunkRenderer(at.stream, at.index, at.backend, source)
    with pytest.raises(DatasetError, match=r"sample 0, .*meadow/000.jpg: cannot be read, 3 times tried: .*errno 5"):
        at.renderer.render(0, 0, at.ring.views[0])


def test_a_file_over_the_limit_is_a_reject_of_the_read_stage(bench: Callable[..., Bench], photos: Path) -> None:
    at = bench(photos, shuffle=False)
    source = Flaky(at.renderer._source.read, 1, lambda: BadPicture("read", "a file of 9 bytes"))
    at.renderer = ChunkRenderer(at.stream, at.index, at.backend, source)
    [reject] = at.renderer.render(0, 0, at.ring.views[0]).rejects
    assert (reject.row, reject.stage) == (0, "read")


def test_while_a_row_is_worked_on_its_status_says_so(bench: Callable[..., Bench], photos: Path) -> None:
    at = bench(photos)
    view = at.ring.views[0]
    seen = []

    class Spy:
        render_id = "spy"

        def render(self, pictures, params, out, begin, lap):  # type: ignore[no-untyped-def]
            for i in range(len(pictures)):
                begin([i])
                seen.append(view.status.tolist())
            return [None] * len(pictures)

        def close(self) -> None: ...

    ChunkRenderer(at.stream, at.index, Spy()).render(0, 0, view)
    assert [statuses.index(Status.RENDERING) for statuses in seen] == [0, 1, 2, 3, 4]
    assert all(statuses.count(Status.RENDERING) == 1 for statuses in seen)
    assert view.status.tolist() == [Status.OK] * 5
