from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from pictures import encode, exif, noise, quadrants, stored, with_chunk
from PIL import Image

from headrace.pipeline.formats import DECODED
from headrace.pipeline.probe import MAX_LENGTH, BadPicture, Picture, probe
from headrace.pipeline.spec import Decode


def look(data: bytes, **limits: Any) -> Picture:
    picture = probe(data, Decode(**limits))
    picture.take().close()
    return picture


def refused(data: bytes, **limits: Any) -> str:
    with pytest.raises(BadPicture) as caught:
        look(data, **limits)
    assert caught.value.stage == "probe"
    return caught.value.reason


@pytest.mark.parametrize("name", [n for n in DECODED if n not in ("PSD", "ICO")])
def test_format_and_size_come_from_the_content(name: str) -> None:
    picture = look(encode(noise(48, 64), name))
    assert (picture.format, picture.height, picture.width, picture.orientation) == (name, 48, 64, 1)


def test_an_icon_is_its_largest_picture() -> None:
    picture = look(encode(noise(64, 64), "ICO", sizes=[(16, 16), (64, 64), (32, 32)]))
    assert (picture.height, picture.width) == (64, 64)


def test_a_stereo_jpeg_is_named_as_what_it_is() -> None:
    data = encode(quadrants(), "MPO", save_all=True, append_images=[noise(64, 96)])
    assert look(data).format == "MPO"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_are_those_of_the_upright_picture(format: str, orientation: int) -> None:
    data = encode(stored(quadrants(64, 96), orientation), format, exif=exif(orientation))
    picture = look(data)
    assert (picture.height, picture.width) == (64, 96)
    # Pillow turns TIFFs by itself.
    assert picture.orientation == (1 if format == "TIFF" else orientation)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_where_orientations_are_ignored_sizes_are_those_of_the_stored_picture(format: str, orientation: int) -> None:
    image = stored(quadrants(64, 96), orientation)
    picture = probe(encode(image, format, exif=exif(orientation)), Decode(ignore_orientation=True))
    assert (picture.width, picture.height) == image.size


def test_an_orientation_after_the_pixels_of_a_png_counts() -> None:
    data = with_chunk(encode(stored(quadrants(64, 96), 6)), b"eXIf", exif(6).tobytes()[6:], before=b"IEND")
    assert (look(data).orientation, look(data).height) == (6, 64)


@pytest.mark.parametrize("value", [0, 9, 6000])
def test_an_undefined_orientation_counts_as_upright(value: int) -> None:
    assert look(encode(quadrants(), "JPEG", exif=exif(value))).orientation == 1


@pytest.mark.parametrize("cut", range(6, 40, 3))
def test_damaged_exif_counts_as_upright(cut: int) -> None:
    block = exif(1).tobytes()[:cut].ljust(cut, b"\xff") + b"\xff" * 8
    picture = look(encode(quadrants(), "JPEG", exif=b"Exif\0\0" + block))
    assert (picture.height, picture.width, picture.orientation) == (64, 96, 1)


def test_exif_of_an_avif_does_not_cost_the_picture_nor_its_orientation() -> None:
    block = exif(6)
    block[0x0103] = 6  # Pillow leaves the orientation to the format, and keeps the rest
    data = encode(stored(quadrants(), 6), "AVIF", exif=block)
    at = data.rindex(b"MM\0*")
    for start in (at, at + 4):
        picture = look(data[:start] + b"\xff" * 8 + data[start + 8 :])
        assert (picture.height, picture.width, picture.orientation) == (64, 96, 6)
    # What EXIF says without the format's own rotation does not count.
    upright = encode(quadrants(), "AVIF", exif=block)
    said = upright.replace(b"\x01\x03\0\3\0\0\0\1\0\6", b"\x01\x12\0\3\0\0\0\1\0\6")
    assert said != upright and look(said).orientation == 1


def test_too_many_pixels_are_refused_with_both_numbers() -> None:
    data = encode(noise(10, 10))
    look(data, max_pixels=100)
    reason = refused(data, max_pixels=99)
    assert reason == "PNG of 10x10 pixels (width x height) has 100, over the limit of 99 (decode: max_pixels)"


def test_a_bomb_is_refused_from_its_header() -> None:
    data = bytearray(encode(noise(10, 10)))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    assert "60000x60000" in refused(bytes(data))
    gif = bytearray(encode(noise(10, 10), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    assert "65535x65535" in refused(bytes(gif))
    # Pillow's WebP decoder reserves its canvas when it is made, before there is a size to ask for.
    webp = bytearray(encode(noise(16, 16), "WEBP", lossless=True))
    webp[21:25] = (16380 | 16380 << 14).to_bytes(4, "little")
    assert "268337161 pixels, over the limit of 178956970" in refused(bytes(webp))


def test_the_own_limit_of_pillow_does_not_bite() -> None:
    # It would warn from 89 million pixels on and refuse twice that.
    data = bytearray(encode(noise(10, 10), "BMP"))
    data[18:26] = struct.pack("<ii", 20_000, 20_000)
    assert look(bytes(data), max_pixels=500_000_000).width == 20_000
    assert "over the limit of 178956970" in refused(bytes(data))


def test_a_side_longer_than_resampling_is_exact_for_is_refused() -> None:
    data = bytearray(encode(noise(1, 1), "BMP"))
    data[18:26] = struct.pack("<ii", MAX_LENGTH + 1, 1)
    assert f"over the limit of {MAX_LENGTH}" in refused(bytes(data))


@pytest.mark.parametrize(
    "data, text",
    [
        (b"", "the file is empty"),
        (b"hello", "text: 'hello'"),
        (b"\xff\x0a" + bytes(9), "JPEG XL"),
        (b"\xff\xd8", "something that begins with ff d8"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "EPS"),
        (b"\x89PNG\r\n\x1a\n", "PNG with a damaged"),
        (b"GIF89a", "GIF with a damaged"),
    ],
)
def test_what_is_no_picture_is_refused_as_what_it_is(data: bytes, text: str) -> None:
    assert text in refused(data)


def test_a_jpeg_of_more_than_8_bits_is_refused_as_such() -> None:
    data = bytearray(encode(noise(16, 16), "JPEG"))
    data[data.find(b"\xff\xc0") + 4] = 12
    assert "12-bit" in refused(bytes(data))


def test_the_pixels_are_not_decoded() -> None:
    data = encode(noise(64, 96))
    picture = probe(data[: data.find(b"IDAT") + 10], Decode())
    assert picture.height == 64
    picture.take().close()


def test_no_warning_escapes_whatever_the_filters() -> None:
    trap = [encode(noise(8, 8).convert("P"), "PNG", transparency=bytes(9)), _bad_tiff(), _bad_apng()]
    for action in ("error", "always"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)  # type: ignore[arg-type]
            for data in trap:
                look(data)
    assert not caught


def _bad_tiff() -> bytes:
    # A tag whose data would lie beyond the end of the file.
    data = bytearray(encode(noise(8, 8), "TIFF", software="x" * 20))
    at = data.find(struct.pack("<H", 305))
    data[at + 8 : at + 12] = struct.pack("<I", 1 << 20)
    return bytes(data)


def _bad_apng() -> bytes:
    return with_chunk(encode(noise(8, 8)), b"acTL", bytes(8), before=b"IDAT")


def test_the_settings_of_pillow_and_of_warnings_are_as_before() -> None:
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    look(encode(noise(8, 8)))
    refused(b"")
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


def test_several_threads_come_to_the_verdicts_of_one_and_leave_the_settings_as_they_were() -> None:
    # Each limit lets the smaller picture through and not the larger one; under the limit of another thread, or with
    # Pillow's own, verdicts or reasons would be others.
    small, large = encode(noise(40, 40)), encode(noise(40, 50), "GIF")
    cases = [(data, limit) for data in (small, large, _bad_tiff()) for limit in (800, 1600, 1999, 4000)]

    def verdict(case: tuple[bytes, int]) -> str:
        try:
            return str(look(case[0], max_pixels=case[1]).width)
        except BadPicture as bad:
            return bad.reason

    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    alone = [verdict(case) for case in cases]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(verdict, cases * 30))
    finally:
        sys.setswitchinterval(interval)
    assert together == alone * 30
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


def test_plugins_of_other_formats_are_not_even_loaded() -> None:
    code = "import headrace.pipeline.probe, sys; print([m for m in sys.modules if 'Eps' in m or 'Fits' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert run.stdout.strip() == "[]", run.stderr


def test_random_bytes_behind_every_signature_are_verdicts() -> None:
    rng = np.random.default_rng(0)
    for name in DECODED:
        if name == "PSD":
            head = b"8BPS\0\1" + bytes(6) + b"\0\3" + struct.pack(">II", 8, 8) + b"\0\x08\0\3"
        else:
            head = encode(noise(16, 16), name)
        for cut in (4, 8, 12, 20, 40):
            data = head[:cut] + rng.bytes(100) + (head[-18:] if name == "TGA" else b"")
            try:
                look(data)
            except BadPicture as bad:
                assert bad.stage == "probe" and bad.reason


def test_reading_goes_no_further_than_the_bytes() -> None:
    # The picture keeps its data, and Pillow reads from memory.
    data = encode(noise(8, 8))
    picture = probe(data, Decode())
    assert picture.data is data
    with picture.take() as image:
        assert isinstance(image.fp, io.BytesIO)


def test_an_image_is_taken_once() -> None:
    picture = probe(encode(noise(8, 8)), Decode())
    picture.take().close()
    with pytest.raises(ValueError, match="taken already"):
        picture.take()
