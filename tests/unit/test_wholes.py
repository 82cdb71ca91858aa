"""Flags that processes share, and what they permit: a part decoded alone, once the whole was found good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.pipeline import render, wholes
from headrace.pipeline.backend import Backend, make
from headrace.pipeline.dataset import open_index
from headrace.pipeline.probe import probe
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config
from headrace.pipeline.wholes import PARTS
from headrace.slots import Ring, Status

_SET = """
import sys
from headrace.pipeline import wholes
flags = wholes.attach(int(sys.argv[1]), 5)
assert flags.tolist() == [0, 1, 0, 0, 0]
flags[4] = 1
"""


def test_a_flag_that_one_process_sets_all_of_them_see() -> None:
    fd = wholes.create(5)
    flags = wholes.attach(os.dup(fd), 5)
    assert flags.dtype == np.uint8 and flags.tolist() == [0] * 5
    flags[1] = 1
    subprocess.run([sys.executable, "-c", _SET, str(fd)], pass_fds=[fd], check=True, timeout=60)
    os.close(fd)
    assert flags.tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("samples", [0, 1, 100_000])
def test_there_is_a_flag_per_sample(samples: int) -> None:
    assert wholes.attach(wholes.create(samples), samples).shape == (samples,)


def test_the_descriptor_is_taken_over() -> None:
    fd = wholes.create(1)
    wholes.attach(fd, 1)
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = make("dali-cpu")
    yield made
    made.close()


def test_after_a_good_verdict_parts_are_decoded_and_look_the_same(
    backend: Backend, many: Callable[[int], Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many(6)
    victim = sorted(folder.glob("*/*"))[2]
    data = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(data[:-40])
    stream = {"dataset": {"folder": str(folder)}, "transforms": [{"random_resized_crop": {"size": 16}}], "chunk": 6}
    spec = Config.load({"streams": {"s": stream}}).streams["s"]
    index = open_index(spec.dataset, home / "cache")
    ring = Ring.create(spec.layout(index), 1)
    view, flags = ring.views[0], np.zeros(6, np.uint8)
    asked: list[list[bool]] = []
    real = backend.render

    def spy(pictures: Any, *rest: Any) -> Any:
        asked.append([picture.whole for picture in pictures])
        return real(pictures, *rest)

    monkeypatch.setattr(backend, "render", spy)
    renderer = ChunkRenderer(spec, index, backend, wholes=flags)
    seen = []
    for _ in range(2):
        [reject] = renderer.render(3, 0, view).rejects
        assert reject.row == 2 and view.status.tolist().count(Status.OK) == 5
        assert flags.tolist() == [1 | PARTS, 1 | PARTS, 0, 1 | PARTS, 1 | PARTS, 1 | PARTS]
        seen.append(view.images.tobytes())
    assert asked == [[False] * 6, [True, True, False, True, True, True]]
    assert seen[0] == seen[1]
    ring.close()
    index.close()


def _turned(folder: Path) -> None:
    """A JPEG of each EXIF orientation, a damaged one and a PNG."""
    (folder / "a").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (37, 50, 3), np.uint8)
    image = Image.fromarray(noise).resize((50, 37), Image.Resampling.BICUBIC, (10, 10, 30, 25))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(folder / "a" / f"{orientation}.jpg", exif=exif, quality=90)
    cut = (folder / "a" / "1.jpg").read_bytes()[:-30]
    (folder / "a" / "cut.jpg").write_bytes(cut)
    image.save(folder / "a" / "z.png")


@pytest.mark.parametrize("name, parts", [("pillow", 0), ("dali-cpu", PARTS)])
def test_what_was_found_good_is_not_looked_at_again_and_comes_out_the_same(
    name: str, parts: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _turned(home / "photos")
    transforms = [{"random_resized_crop": {"size": [16, 24]}}, "random_horizontal_flip"]
    stream = {"dataset": {"folder": str(home / "photos")}, "transforms": transforms, "chunk": 10}
    spec = Config.load({"streams": {"s": stream}}).streams["s"]
    index = open_index(spec.dataset, home / "cache")
    ring, flags = Ring.create(spec.layout(index), 1), np.zeros(10, np.uint8)
    view, backend = ring.views[0], make(name)
    renderer = ChunkRenderer(spec, index, backend, wholes=flags)
    first = renderer.render(2, 0, view).rejects
    assert flags.tolist() == [*(orientation | parts for orientation in range(1, 9)), 0, 0]
    pixels, probed = view.images.tobytes(), []
    monkeypatch.setattr(render, "probe", lambda data, decode: probed.append(data[:2]) or probe(data, decode))
    view.images[...] = 7
    again = renderer.render(2, 0, view).rejects
    assert (again, view.images.tobytes()) == (first, pixels)
    assert [reject.row for reject in again] == [8]
    assert probed == [b"\xff\xd8", b"\x89P"]  # the damaged one and the PNG
    backend.close()
    ring.close()
    index.close()


def test_parts_are_for_whom_they_were_found_and_a_fallback_keeps_them(photos: Path, home: Path) -> None:
    stream = {"dataset": {"folder": str(photos)}, "transforms": [{"random_resized_crop": {"size": 16}}], "chunk": 4}
    spec = Config.load({"streams": {"s": stream}}).streams["s"]
    index = open_index(spec.dataset, home / "cache")
    ring, flags = Ring.create(spec.layout(index), 1), np.zeros(len(index), np.uint8)
    flags[:2] = 1 | PARTS
    ChunkRenderer(spec, index, make("pillow"), wholes=flags).render(0, 0, ring.views[0])
    assert flags[:4].tolist() == [1 | PARTS, 1 | PARTS, 1, 1]
    ring.close()
    index.close()
