"""Every backend shows the same pictures, as closely as docs/parity.md says: each row of its tables is rendered here."""

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
from headrace.pipeline.backend import Backend, Options, make
from headrace.pipeline.colour import Step
from headrace.pipeline.dali import DaliBackend
from headrace.pipeline.pillow import PillowBackend
from headrace.pipeline.probe import Picture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import TRANSFORMS, Params, parse, plan

Pixels = NDArray[np.uint8]

PAGE = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
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


@pytest.fixture
def pillow() -> Iterator[Backend]:
    backend = make("pillow")
    yield backend
    backend.close()


@pytest.fixture
def dali_cpu() -> Iterator[Backend]:
    backend = make("dali-cpu")
    yield backend
    backend.close()


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


def assert_within(row: Row, a: Pixels, b: Pixels) -> None:
    for material, (mean, most) in row.limits.items():
        for kind in KINDS:
            chosen = [i for i, file in enumerate(files()) if (file.material, file.kind) == (material, kind)]
            found = distance(a[chosen], b[chosen])
            assert found <= (mean, found[1]) and found[1] <= most, f"{row.chain}: {material}, {kind}: {found}"


# -- the page -------------------------------------------------------------------------------------------------


def test_every_transform_is_in_the_tables_alone_or_after_a_crop_that_changes_no_pixel() -> None:
    chains = [yaml.safe_load(row.chain) for heading in AIMS for row in table(heading)]
    names = [[parse(item).name for item in chain] for chain in chains]
    short = [[name for name in chain if name != "center_crop"] or chain for chain in names if len(chain) < 3]
    assert {name for chain in short if len(chain) == 1 for name in chain} == set(TRANSFORMS)


def test_every_kind_is_on_the_page() -> None:
    assert [cells[0].strip("`") for cells in rows("Decoding")] == list(KINDS)
    assert len(KINDS) == 6 + 8


@pytest.mark.parametrize("heading", AIMS)
def test_what_is_above_the_aim_has_a_reason_that_is_explained(heading: str) -> None:
    explained = re.findall(r"^- \*(\w+)\*:", section(heading), re.M)
    for row in table(heading):
        above = any(limit[0] > AIMS[heading][0] or limit[1] > AIMS[heading][1] for limit in row.limits.values())
        assert above == bool(row.reasons), row.chain
        assert set(row.reasons) <= set(explained), row.chain


# -- the pictures ---------------------------------------------------------------------------------------------


def test_dali_itself_renders_every_kind_but_inks(dali_cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    by_pillow: list[bytes] = []
    renders = PillowBackend.render

    def noted(self: PillowBackend, pictures: Sequence[Picture], *rest: Any) -> Any:
        by_pillow.extend(picture.data for picture in pictures)
        return renders(self, pictures, *rest)

    monkeypatch.setattr(PillowBackend, "render", noted)
    render(dali_cpu, "[{resize: {size: [16, 16]}}]", [file.data for file in files()])
    assert {file.kind for file in files() if file.data in by_pillow} == {"CMYK"}


@pytest.mark.parametrize("row", table("Geometry"), ids=lambda row: row.chain)
def test_geometry_is_as_close_as_the_page_says(row: Row, pillow: Backend, dali_cpu: Backend) -> None:
    encoded = [file.data for file in files()]
    assert_within(row, render(pillow, row.chain, encoded), render(dali_cpu, row.chain, encoded))


@pytest.mark.parametrize("row", table("Colour"), ids=lambda row: row.chain)
def test_colours_are_equal_on_a_cpu_and_as_close_by_dalis_operators_as_the_page_says(
    row: Row, pillow: Backend, dali_cpu: Backend
) -> None:
    encoded = [file.data for file in files()]
    painted = render(pillow, row.chain, encoded)
    assert np.array_equal(painted, render(dali_cpu, row.chain, encoded))
    plain = render(pillow, "[{center_crop: {size: 120}}]", encoded)
    steps = planned(row.chain, [probe(data, Decode()) for data in encoded]).colour
    assert_within(row, painted, by_operators(plain, steps))


def by_operators(images: Pixels, steps: Sequence[Step]) -> Pixels:
    """The pictures after DALI's operators, on the CPU."""
    pipeline = dali.Pipeline(len(images), 1, None, prefetch_queue_depth=1)
    with pipeline:
        source = dali.fn.external_source(name="images", dtype=dali.types.UINT8, ndim=3, layout="HWC")
        size = images.shape[1], images.shape[2]
        pipeline.set_outputs(dali_colour.apply(source, dali_colour.form(steps), size))
    pipeline.build()
    [output] = pipeline.run(images=images, **dali_colour.inputs(steps))
    result: Pixels = output.as_array()
    return result


def test_what_a_gpu_does_is_as_close_with_the_operators_of_a_cpu_whatever_is_rendered_beside(pillow: Backend) -> None:
    backend = DaliBackend(Options())
    backend._cpu = False  # all the way of a picture as on a GPU, which has the colours in its graph
    chain = (
        "[{random_crop: {size: [96, 80], padding: 8}}, {color_jitter: {contrast: 0.4, hue: 0.1}}, "
        "{gaussian_blur: {kernel_size: [3, 9]}}, {random_autocontrast: {p: 0.5}}, {random_erasing: {p: 0.8}}]"
    )
    encoded = [file.data for file in files()]
    shown = render(backend, chain, encoded)
    assert distance(render(pillow, chain, encoded), shown) <= (0.01, 1)
    params = planned(chain, [probe(data, Decode()) for data in encoded])
    order = np.random.default_rng(1).permutation(len(encoded))
    for part in (order[:1], order[1:4], order[4:24]):
        pictures = [probe(encoded[i], Decode()) for i in part]
        assert np.array_equal(rendered(backend, pictures, params.take(part)), shown[part])
    backend.close()


def test_photographs_of_full_size_are_within_the_aim(extra_samples: Path, pillow: Backend, dali_cpu: Backend) -> None:
    encoded = [file.read_bytes() for file in sorted((extra_samples / "photos").rglob("*.jpg"))[::40][:4]]
    for filter in ("bilinear", "bicubic", "lanczos"):
        for transform in ("resize", "random_resized_crop"):
            chain = f"[{{{transform}: {{size: [224, 224], interpolation: {filter}}}}}]"
            mean, most = distance(render(pillow, chain, encoded), render(dali_cpu, chain, encoded))
            assert mean <= AIMS["Geometry"][0] and most <= AIMS["Geometry"][1], chain
