"""What docs/parity.md says, the pictures it says it of, and how they are compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from nvidia import dali
from pictures import encode, exif, stored
from PIL import Image

from headrace.pipeline import dali_colour
from headrace.pipeline.backend import Backend
from headrace.pipeline.colour import Step
from headrace.pipeline.probe import Picture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import Params, parse, plan

Pixels = NDArray[np.uint8]

PAGE = (Path(__file__).parents[1] / "docs" / "parity.md").read_text(encoding="utf-8")
#: Mean, and what 99.9 % of the values reach at most.
AIMS = {"Geometry": (0.25, 3), "Colour": (0.25, 1)}


def _jpeg(image: Image.Image, **options: Any) -> bytes:
    return encode(image, "JPEG", quality=92, **options)


def _turned(orientation: int, image: Image.Image) -> bytes:
    return _jpeg(stored(image, orientation), exif=exif(orientation))


#: Every kind of JPEG, as it is made of an RGB picture.
KINDS: dict[str, Callable[[Image.Image], bytes]] = {
    "4:4:4": lambda image: _jpeg(image, subsampling=0),
    "4:2:2": lambda image: _jpeg(image, subsampling=1),
    "4:2:0": lambda image: _jpeg(image, subsampling=2),
    "progressive": lambda image: _jpeg(image, progressive=True),
    "grey": lambda image: _jpeg(image.convert("L")),
    "CMYK": lambda image: _jpeg(image.convert("CMYK")),
    **{f"EXIF {n}": partial(_turned, n) for n in range(1, 9)},
}


class Row(NamedTuple):
    """A chain as in a configuration; per material the limits of its pictures; the reasons to be above the aim."""

    chain: str
    limits: dict[str, tuple[float, float]]
    reasons: list[str]


def section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found is not None, heading
    return found[1]


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the table below a heading, without its head."""
    for line in re.findall(r"^\|(.*)\|$", section(heading), re.M)[2:]:
        yield [cell.strip() for cell in line.split("|")]


def table(heading: str) -> list[Row]:
    return [
        Row(
            chain.strip("`"),
            {"photos": (float(a), float(b)), "noise": (float(c), float(d))},
            re.findall(r"\w+", reasons),
        )
        for chain, a, b, c, d, reasons in rows(heading)
    ]


class File(NamedTuple):
    material: str
    kind: str
    data: bytes


@cache
def files() -> list[File]:
    """Parts of two photographs, and noise, each as every kind. What is in them matters more than how many they are."""
    skimage = pytest.importorskip("skimage")
    images = [("noise", Image.fromarray(np.random.default_rng(5).integers(0, 256, (216, 288, 3), np.uint8)))]
    for name, box in (("astronaut.png", (100, 40, 388, 256)), ("coffee.png", (180, 60, 468, 276))):
        with Image.open(Path(skimage.__file__).parent / "data" / name) as image:
            images.append(("photos", image.convert("RGB").crop(box)))
    return [File(material, kind, make_kind(image)) for material, image in images for kind, make_kind in KINDS.items()]


def planned(chain: str, pictures: Sequence[Picture]) -> Params:
    heights, widths = (np.array([getattr(p, side) for p in pictures]) for side in ("height", "width"))
    return plan([parse(item) for item in yaml.safe_load(chain)], 1, 0, 0, heights, widths)


def render(backend: Backend, chain: str, encoded: Sequence[bytes]) -> Pixels:
    pictures = [probe(data, Decode()) for data in encoded]
    return rendered(backend, pictures, planned(chain, pictures))


def rendered(backend: Backend, pictures: Sequence[Picture], params: Params) -> Pixels:
    out = np.full((len(pictures), *params.size, 3), 77, np.uint8)
    assert backend.render(pictures, params, list(out), lambda begun: None) == [None] * len(pictures)
    return out


def distance(a: Pixels, b: Pixels) -> tuple[float, int]:
    """Mean, and the most that 99.9 % of the values differ by, in levels."""
    counts = np.bincount(np.abs(a.astype(np.int16) - b).ravel(), minlength=256)
    shares = counts / counts.sum()
    return float(shares @ np.arange(256)), int(np.argmax(shares.cumsum() >= 0.999))


def assert_close(a: Pixels, b: Pixels, mean: float, most: int) -> None:
    found = distance(a, b)
    assert found[0] <= mean and found[1] <= most, found


def assert_within(row: Row, a: Pixels, b: Pixels, more: tuple[float, int] = (0.0, 0)) -> None:
    """Each material and kind is within the limits of its row, and `more`."""
    for material, (mean, most) in row.limits.items():
        for kind in KINDS:
            chosen = [i for i, file in enumerate(files()) if (file.material, file.kind) == (material, kind)]
            found = distance(a[chosen], b[chosen])
            within = found[0] <= mean + more[0] and found[1] <= most + more[1]
            assert within, f"{row.chain}: {material}, {kind}: {found}"


def by_operators(
    images: Pixels, steps: Sequence[Step], batch: int | None = None, threads: int = 1, device: int | None = None
) -> Pixels:
    """The pictures after DALI's operators for colours, so many at a time (None: all), on the CPU or a GPU."""
    batch = batch or len(images)
    pipeline = dali.Pipeline(batch, threads, device, prefetch_queue_depth=1)
    with pipeline:
        source = dali.fn.external_source(name="images", dtype=dali.types.UINT8, ndim=3, layout="HWC")
        source = source if device is None else source.gpu()
        pipeline.set_outputs(dali_colour.apply(source, dali_colour.form(steps), images.shape[1:3]))
    pipeline.build()
    parts = []
    for first in range(0, len(images), batch):
        rows = np.arange(first, min(first + batch, len(images)))
        [output] = pipeline.run(images=images[rows], **dali_colour.inputs([step.take(rows) for step in steps]))
        parts.append(output.as_cpu().as_array())
    return np.concatenate(parts)
