"""Accounting over files of every kind: each delivered as it should be, or rejected by name, from wherever it comes."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kinds
import numpy as np
import pytest
from numpy.typing import NDArray
from pictures import BLUE, GREEN, RED, YELLOW, corners
from service import Daemon

from headrace import Loader
from headrace.pipeline import heif
from headrace.pipeline.backend import Backend, make
from headrace.pipeline.probe import BadPicture, Picture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import CenterCrop, Params, plan

SOURCES = ["folder", "list", "shards"]
Pixels = NDArray[np.uint8]
#: Says what is wrong with what was delivered (None: nothing may be), or with the reason of a reject.
Judge = Callable[[Pixels | None, str], str | None]


@dataclass
class Collection:
    """Files in class folders, as a data set.

    Attributes:
        judges: by path relative to the root, in the order of the listing.
    """

    root: Path
    judges: dict[str, Judge]

    def labels(self) -> list[int]:
        classes = sorted({path.partition("/")[0] for path in self.judges})
        return [classes.index(path.partition("/")[0]) for path in self.judges]

    def dataset(self, source: str, folder: Path) -> dict[str, Any]:
        """The description of the same samples from another source."""
        if source == "folder":
            return {"folder": str(self.root)}
        if source == "list":
            with (folder / "samples.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["path", "label"])
                rows.writerows([path, path.partition("/")[0]] for path in self.judges)
            return {"list": str(folder / "samples.csv"), "root": str(self.root)}
        shards = [folder / f"{n}.tar" for n in range(3)]
        tars = [tarfile.open(shard, "w") for shard in shards]
        share = -(-len(self.judges) // len(shards))
        for i, (path, label) in enumerate(zip(self.judges, self.labels(), strict=True)):
            ending = path.rpartition(".")[2]
            for name, data in ((ending, (self.root / path).read_bytes()), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{i:04}.{name}")
                member.size = len(data)
                tars[i // share].addfile(member, io.BytesIO(data))
        for tar in tars:
            tar.close()
        return {"shards": str(folder / "{0..2}.tar")}


# -- the files that are made here -----------------------------------------------------------------------------

MARGIN = (72, 104)  # what every made picture is cut or padded to


def made(folder: Path) -> Collection:
    judges: dict[str, Judge] = {}
    for path, kind in sorted(kinds.make().items()):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(kind.data)
        judges[path] = _judge_kind(kind)
    return Collection(folder, dict(sorted(judges.items(), key=lambda item: item[0].split("/"))))


def _judge_kind(kind: kinds.Kind) -> Judge:
    def judge(pixels: Pixels | None, reason: str) -> str | None:
        if pixels is None:
            return "rejected" if kind.colours is not None else None if kind.reason in reason else reason
        if kind.colours is None:
            return "delivered"
        inside, around = apart(pixels, kind.size)
        if around.any():
            return f"something outside of {kind.size}"
        off = np.abs(np.array(corners(inside)) - kind.colours).max()
        return f"colours are {off} levels off" if off > kind.tolerance else None

    return judge


def apart(pixels: Pixels, size: tuple[int, int]) -> tuple[Pixels, Pixels]:
    """What shows of a picture of this size that was padded or cut by CenterCrop, and what is around it."""
    spans = []
    for whole, length in zip(pixels.shape, size, strict=False):
        begin = max(0, (whole - length) // 2)
        spans.append(slice(begin, begin + min(length, whole)))
    around = pixels.copy()
    around[tuple(spans)] = 0
    return pixels[tuple(spans)], around


# -- the extra samples ----------------------------------------------------------------------------------------

LARGE = (1024, 1024)  # no picture of them that is to be decoded is higher, and one is wider
UNKNOWABLE = "jpeg_cmyk/ycck_marker_removed.jpg"

#: What was decided where both answers would do: nothing for decoded, or what the reject says.
DECIDED = {
    "jpeg_truncated/second_half_zero_bytes.jpg": "truncated",
    "misnamed/heic_named.jpg": "HEIC",
    "jpeg_12bit/monkey12.jpg": "12-bit",
    "jpeg_restart/dog_one_segment_missing.jpg": "restart markers",
    "jpeg_restart/dog_wrong_marker_number.jpg": "restart markers out of order",
    "jpeg_extra/leading_newline.jpg": "begins with 0a ff d8",
    "jpeg_corrupt/derive-huffman-codes-overflow.jpg": "broken data stream",
    "jpeg_corrupt/invalid-prediction-shift.jpg": "broken data stream",
    "jpeg_corrupt/progressive-missing-dc.jpg": "last scans are missing",
    "bomb/17000x17000.avif": "AVIF",
    "webp/riff_size_too_big.webp": "WEBP with a damaged or unsupported header",
    "heic/hopper.heif": "HEIC",
    "heic/rainbow-451x461.heic": "HEIC",
    "jpeg2000/00r1_graya_la.jp2": "JPEG2000: broken data stream",
    "jpeg2000/balloon_eciRGBv2_aware.jp2": "JPEG2000: broken data stream",
    "jpegxl/quadrants.jxl": "JPEG XL",
    "jpegxl/cropped_traffic_light.jxl": "JPEG XL",
    "bmp/rgb32bf.bmp": "BMP with a damaged or unsupported header",
    "tiff/rgb32f_color.tiff": "TIFF with a damaged or unsupported header",
}


if heif.version() is not None:
    DECIDED = {path: why for path, why in DECIDED.items() if "HEIC" not in why}


def given(hard: Path) -> Collection:
    with open(hard / "INDEX.tsv", encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        judges = {row["path"]: _judge_row(row) for row in rows if row["verdict"] != "skip"}
    return Collection(hard, dict(sorted(judges.items(), key=lambda item: item[0].split("/"))))


def _judge_row(row: dict[str, str]) -> Judge:
    verdict, path = row["verdict"], row["path"]
    if verdict == "either":
        verdict = "reject" if path in DECIDED else "decode"
    mean = np.array([float(level) for level in row["ref_mean_rgb"].split(",")]) if row["ref_mean_rgb"] else None
    tolerance = 12 if row["kind"] in ("jpeg_cmyk", "avif") else 3

    def judge(pixels: Pixels | None, reason: str) -> str | None:
        if pixels is None:
            expected = DECIDED.get(path, "")
            return "rejected" if verdict == "decode" else None if reason and expected in reason else reason
        if verdict == "reject":
            return "delivered"
        if not row["expect_hw"] or path == UNKNOWABLE:
            return None
        height, width = map(int, row["expect_hw"].split("x"))
        inside, around = apart(pixels, (height, width))
        if around.any():
            return f"something outside of {height}x{width}"
        if mean is not None and np.abs(inside.reshape(-1, 3).mean(axis=0) - mean).max() > tolerance:
            return f"mean {inside.reshape(-1, 3).mean(axis=0).round(1)}"
        if "quadrants TL red" in row["expect"]:
            off = np.abs(np.array(corners(inside)) - [RED, GREEN, BLUE, YELLOW]).max()
            if off > 12 and "hidden" not in path:
                return f"quadrants are {off} levels off"
        return None

    return judge


# -- the epochs -----------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """An epoch: by index, the label, a digest and what the judge says of a picture, or stage and reason of a reject."""

    delivered: dict[int, tuple[int, str, str | None]]
    rejected: dict[int, tuple[str, str, str]]
    counts: dict[str, int]


@dataclass
class Scene:
    collection: Collection
    daemon: Daemon

    def epoch(self, source: str, number: int = 0, transport: str = "shm") -> Seen:
        judges = list(self.collection.judges.values())
        seen = Seen({}, {}, {})
        options: dict[str, Any] = {"output": "numpy", "dtype": "uint8", "layout": "NHWC", "max_bad": 1.0}
        with Loader(self.daemon.address, stream=source, batch_size=8, transport=transport, **options) as loader:
            loader.set_epoch(number)
            for batch in loader:
                for index, label, valid, image in zip(
                    batch.indices.tolist(), batch.labels.tolist(), batch.valid, batch.images, strict=True
                ):
                    if valid:
                        assert index not in seen.delivered
                        digest = hashlib.sha256(image).hexdigest()
                        seen.delivered[index] = label, digest, judges[index](image, "")
                for reject in batch.rejects:
                    assert reject.index not in seen.rejected
                    seen.rejected[reject.index] = reject.path, reject.stage, reject.reason
            seen.counts = dict(loader.stats()["epochs"][number])
        return seen


@pytest.fixture(scope="module", params=["made", "given"])
def scene(request: pytest.FixtureRequest, session_home: Path) -> Iterator[Scene]:
    folder = Path(tempfile.mkdtemp(dir=session_home))
    if request.param == "made":
        (folder / "data").mkdir()
        collection, size = made(folder / "data"), MARGIN
    else:
        collection, size = given(request.getfixturevalue("hard_samples")), LARGE
    streams = {
        source: {
            "dataset": collection.dataset(source, folder),
            "transforms": [{"center_crop": {"size": list(size)}}],
            "chunk": 4,
        }
        for source in SOURCES
    }
    with Daemon(folder, streams, workers=2, slots=4) as daemon:
        made_scene = Scene(collection, daemon)
        with Loader(daemon.address, stream="folder", batch_size=4, output="numpy", max_bad=1.0) as loader:
            next(iter(loader))  # so that its workers are no test's
        yield made_scene


@pytest.fixture(scope="module")
def from_folder(scene: Scene) -> Seen:
    return scene.epoch("folder")


def test_every_file_is_delivered_as_it_should_be_or_rejected_for_its_reason(scene: Scene, from_folder: Seen) -> None:
    wrong = {}
    for i, (path, judge) in enumerate(scene.collection.judges.items()):
        assert (i in from_folder.delivered) != (i in from_folder.rejected), path
        if i in from_folder.delivered:
            complaint = from_folder.delivered[i][2]
        else:
            where, stage, reason = from_folder.rejected[i]
            assert where == f"{scene.collection.root}/{path}" and stage in ("read", "probe", "decode")
            complaint = judge(None, reason)
        if complaint is not None:
            wrong[path] = complaint
    assert not wrong


def test_delivered_and_rejected_are_all_that_is_listed_each_with_its_label(scene: Scene, from_folder: Seen) -> None:
    labels = scene.collection.labels()
    assert {i: label for i, (label, _, _) in from_folder.delivered.items()} == {
        i: label for i, label in enumerate(labels) if i not in from_folder.rejected
    }
    counts = from_folder.counts
    assert counts["delivered"] == len(from_folder.delivered) and counts["rejected"] == len(from_folder.rejected)
    assert counts["delivered"] + counts["rejected"] == len(labels) and counts["dropped"] == 0


@pytest.mark.parametrize("source", ["list", "shards"])
def test_other_sources_give_the_same_pictures_labels_and_rejects(scene: Scene, from_folder: Seen, source: str) -> None:
    seen = scene.epoch(source)
    assert seen.delivered == from_folder.delivered
    assert {i: what[1:] for i, what in seen.rejected.items()} == {
        i: what[1:] for i, what in from_folder.rejected.items()
    }
    for i, path in enumerate(scene.collection.judges):
        if i in seen.rejected:
            member = re.escape(path) if source == "list" else rf"\d\.tar/{i:04}\.\w+"
            assert re.search(f"/{member}$", seen.rejected[i][0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_epoch_gives_and_rejects_the_same(scene: Scene, from_folder: Seen, transport: str) -> None:
    again = scene.epoch("folder", 1, transport)
    assert again.rejected == from_folder.rejected and again.delivered == from_folder.delivered


# -- backends and windows, without a daemon -------------------------------------------------------------------


@pytest.fixture(params=["made", "given"])
def collection(request: pytest.FixtureRequest, home: Path) -> tuple[Collection, tuple[int, int]]:
    """And the size to which its pictures are cut or padded."""
    if request.param == "made":
        (home / "data").mkdir()
        return made(home / "data"), MARGIN
    return given(request.getfixturevalue("hard_samples")), LARGE


@pytest.fixture
def dali() -> Iterator[Backend]:
    backend = make("dali-cpu")
    yield backend
    backend.close()


def opened(root: Path, paths: Iterable[str]) -> Iterator[tuple[str, bytes, Picture]]:
    """Those that are not rejected for their header already, whoever renders."""
    for path in paths:
        data = (root / path).read_bytes()
        try:
            yield path, data, probe(data, Decode())
        except BadPicture:
            pass


def verdict(backend: Backend, picture: Picture, params: Params) -> tuple[Pixels, str | None]:
    pixels = np.full((1, *params.size, 3), 77, np.uint8)
    [bad] = backend.render([picture], params, list(pixels), lambda now: None)
    return pixels[0], bad and bad.reason


def test_dali_shows_every_file_as_it_should_be_or_rejects_it_as_pillow_does(
    collection: tuple[Collection, tuple[int, int]], dali: Backend
) -> None:
    files, size = collection
    pillow, wrong = make("pillow"), {}
    for path, data, picture in opened(files.root, files.judges):
        sides = np.array([[picture.height], [picture.width]])
        pixels, reason = verdict(dali, picture, plan([CenterCrop(size)], 0, 0, 0, *sides))
        small = windows(picture, np.array([[0, 0, picture.width, picture.height]]))
        if reason != (other := verdict(pillow, probe(data, Decode()), small)[1]):
            wrong[path] = f"{reason}, and of Pillow {other}"
        elif complaint := files.judges[path](pixels if reason is None else None, reason or ""):
            wrong[path] = complaint
    assert not wrong


@pytest.mark.parametrize("count", [pytest.param(0, id="the corner"), pytest.param(50, id="50", marks=pytest.mark.soak)])
def test_the_verdict_on_a_file_is_that_of_its_whole_whatever_window_pillow_shows(
    collection: tuple[Collection, tuple[int, int]], count: int
) -> None:
    files, _ = collection
    pillow = make("pillow")
    for path, data, picture in opened(files.root, files.judges):
        params = windows(picture, boxes(picture, count))
        want = verdict(pillow, picture, windows(picture, np.array([[0, 0, picture.width, picture.height]])))[1]
        for i in range(len(params)):
            again = probe(data, Decode())
            assert verdict(pillow, again, params.take(np.array([i])))[1] == want, (path, params.box[i])


def test_the_verdict_on_a_file_is_that_of_its_whole_whichever_of_50_windows_dali_decodes(
    collection: tuple[Collection, tuple[int, int]], dali: Backend
) -> None:
    files, _ = collection
    theirs = 0
    for path, data, picture in opened(files.root, files.judges):
        if picture.format not in ("JPEG", "MPO"):
            continue  # Pillow's share: see above
        params = windows(picture, boxes(picture, 50))
        want = verdict(dali, picture, windows(picture, np.array([[0, 0, picture.width, picture.height]])))[1]
        pictures = [probe(data, Decode()) for _ in range(len(params))]
        for again in pictures:
            again.whole = picture.whole  # as the workers share it
        theirs += picture.whole
        out = np.zeros((len(params), *params.size, 3), np.uint8)
        found = {bad and bad.reason for bad in dali.render(pictures, params, list(out), lambda now: None)}
        assert found == {want}, path
    assert theirs >= 20


def boxes(picture: Picture, count: int) -> NDArray[np.float64]:
    """The corner of 16 x 16 pixels at the top left, and so many anywhere, each at least a pixel."""
    height, width = picture.height, picture.width
    low = np.random.default_rng(height * 10_007 + width).uniform(0, 1, (count, 4))
    x0, y0 = np.floor(low[:, 0] * width), np.floor(low[:, 1] * height)
    x1, y1 = np.ceil(x0 + low[:, 2] * (width - x0)), np.ceil(y0 + low[:, 3] * (height - y0))
    anywhere = np.stack([x0, y0, np.maximum(x1, x0 + 1), np.maximum(y1, y0 + 1)], axis=1)
    return np.concatenate([[[0, 0, min(16, width), min(16, height)]], anywhere])


def windows(picture: Picture, box: NDArray[Any]) -> Params:
    still = np.zeros(len(box), np.bool_)
    return Params(box.astype(np.float64), still, still, (16, 16), "bilinear")
