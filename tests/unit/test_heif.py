"""HEIC with the extra installed, and without it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import BLUE, GREEN, RED, YELLOW, corners, exif, noise, quadrants, stored
from PIL import Image

from headrace.pipeline import heif
from headrace.pipeline.pillow import PillowBackend
from headrace.pipeline.probe import BadPicture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import Resize, plan


@pytest.fixture
def plugin() -> Any:
    return pytest.importorskip("pillow_heif")


def encoded(plugin: Any, image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    plugin.from_pillow(image).save(buffer, quality=90, **options)
    return buffer.getvalue()


def show(data: bytes, **limits: Any) -> Any:
    picture = probe(data, Decode(**limits))
    assert (picture.format, picture.orientation) == ("HEIF", 1)
    sides = np.array([picture.height]), np.array([picture.width])
    params = plan([Resize((picture.height, picture.width))], 0, 0, 0, *sides)
    out = np.empty((*params.size, 3), np.uint8)
    [verdict] = PillowBackend().render([picture], params, [out], lambda i: None)
    if verdict is not None:
        raise verdict
    return out


@pytest.mark.parametrize("orientation", range(1, 9))
def test_it_comes_out_upright(plugin: Any, orientation: int) -> None:
    data = encoded(plugin, stored(quadrants(), orientation), exif=exif(orientation).tobytes())
    assert np.abs(np.array(corners(show(data))) - [RED, GREEN, BLUE, YELLOW]).max() <= 4


@pytest.mark.parametrize("mode", ["L", "RGBA", "LA"])
def test_grey_is_copied_and_transparency_dropped(plugin: Any, mode: str) -> None:
    expected = quadrants().convert("L" if "L" in mode else "RGB").convert("RGB")
    got = corners(show(encoded(plugin, quadrants().convert(mode))))
    assert np.abs(np.array(got) - corners(np.asarray(expected))).max() <= 4


def test_of_several_pictures_the_first_is_shown(plugin: Any) -> None:
    file = plugin.from_pillow(quadrants())
    file.add_from_pillow(Image.new("RGB", (96, 64), (255, 0, 255)))
    buffer = io.BytesIO()
    file.save(buffer, quality=90)
    assert np.abs(np.array(corners(show(buffer.getvalue()))) - [RED, GREEN, BLUE, YELLOW]).max() <= 4


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.99])
def test_what_was_cut_off_is_a_reject(plugin: Any, share: float) -> None:
    data = encoded(plugin, noise(64, 96))
    with pytest.raises(BadPicture):
        show(data[: int(len(data) * share)])


def test_too_many_pixels_are_refused_before_any_is_decoded(plugin: Any) -> None:
    with pytest.raises(BadPicture, match="HEIF of 96x64 pixels .* over the limit of 5000"):
        show(encoded(plugin, noise(64, 96)), max_pixels=5000)


def test_random_damage_never_raises(plugin: Any) -> None:
    data, rng = encoded(plugin, noise(48, 48)), np.random.default_rng(0)
    for i in range(100):
        damaged = bytearray(data)
        for _ in range(rng.integers(1, 5)):
            damaged[rng.integers(12, len(damaged) if i % 2 else 400)] = rng.integers(0, 256)
        try:
            show(bytes(damaged))
        except BadPicture as bad:
            assert bad.reason


def test_the_version_is_in_the_render_id(plugin: Any) -> None:
    assert PillowBackend().render_id.endswith(f"/pillow-heif-{plugin.__version__}")


def test_without_the_extra_it_is_a_reject_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heif, "version", lambda: None)
    with pytest.raises(BadPicture, match=r"HEIC, which is decoded where the extra headrace\[heif\] is installed"):
        probe(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", Decode())
    assert "heif" not in PillowBackend().render_id


def test_the_name_of_the_extra_is_that_of_the_project() -> None:
    assert '\nheif = ["pillow-heif' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert heif.EXTRA == "headrace[heif]"
