"""The table of colours in docs/pictures.md, kind by kind, on files made bit by bit."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pictures import (
    BLUE,
    GREEN,
    RED,
    YELLOW,
    chunk,
    corners,
    encode,
    exif,
    made_gif,
    made_png,
    made_tiff,
    noise,
    quadrants,
    stored,
    with_chunk,
)
from PIL import Image

from headrace.pipeline.pillow import PillowBackend
from headrace.pipeline.probe import BadPicture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import Resize, plan

Ints = NDArray[np.int64]
SHAPE = (16, 24)


def show(data: bytes) -> Ints:
    """The picture at its own size.

    Raises:
        BadPicture: the verdict.
    """
    picture = probe(data, Decode())
    sides = np.array([picture.height]), np.array([picture.width])
    params = plan([Resize((picture.height, picture.width))], 0, 0, 0, *sides)
    out = np.empty((*params.size, 3), np.uint8)
    [verdict] = PillowBackend().render([picture], params, [out], lambda i: None)
    if verdict is not None:
        raise verdict
    return out.astype(np.int64)


def levels(*channels: int, below: int = 256, dtype: Any = np.uint8) -> NDArray[Any]:
    return np.random.default_rng(0).integers(0, below, (*SHAPE, *channels), dtype=dtype)


def same(data: bytes, expected: Any, tolerance: int = 0) -> None:
    wanted = np.asarray(expected, dtype=float)
    wanted = wanted[..., None] if wanted.ndim == 2 else wanted
    assert np.abs(show(data) - wanted).max() <= tolerance


def rejected(data: bytes) -> str:
    with pytest.raises(BadPicture) as caught:
        show(data)
    return caught.value.reason


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_few_bits_are_spread_over_all_levels(depth: int) -> None:
    samples = levels(below=1 << depth)
    spread = samples * (255 // ((1 << depth) - 1))
    same(made_png(samples, depth, 0), spread)
    same(made_png(samples, depth, 0, chunk(b"tRNS", b"\0\1")), spread)
    same(made_tiff(samples, depth, 1), spread)
    same(made_tiff(samples, depth, 0), 255 - spread)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palettes_of_any_depth_are_looked_up(depth: int) -> None:
    samples = levels(below=1 << depth)
    palette = np.random.default_rng(1).integers(0, 256, (1 << depth, 3), dtype=np.uint8)
    entries = chunk(b"PLTE", palette.tobytes())
    same(made_png(samples, depth, 3, entries), palette[samples])
    same(made_png(samples, depth, 3, entries + chunk(b"tRNS", b"\0\x80")), palette[samples])
    same(made_tiff(samples, depth, 3, palette=[int(v) * 257 for v in palette.T.ravel()]), palette[samples])


@pytest.mark.parametrize("channels, colour", [((), 0), ((3,), 2), ((2,), 4), ((4,), 6)])
def test_sixteen_bits_of_a_png_are_scaled_or_their_upper_byte(channels: tuple[int, ...], colour: int) -> None:
    samples = levels(*channels, below=65536, dtype=np.uint16)
    upper = samples // 256
    expected = {0: np.rint(samples / 257), 4: upper[..., :1], 2: upper, 6: upper[..., :3]}[colour]
    same(made_png(samples, 16, colour), expected)


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bits_of_a_tiff_are_scaled(order: str) -> None:
    grey, colour = (levels(*c, below=65536, dtype=np.uint16) for c in ((), (3,)))
    same(made_tiff(grey.astype(f"{order}u2"), 16, 1, order=order), np.rint(grey / 257))
    same(made_tiff(colour.astype(f"{order}u2"), 16, 2, order=order), colour // 256)


def test_white_may_be_zero() -> None:
    grey = levels(below=65536, dtype=np.uint16)
    same(made_tiff(grey, 16, 0), 255 - np.rint(grey / 257))
    same(made_tiff(levels(), 8, 0), 255 - levels())


@pytest.mark.parametrize("top", [1, 100, 255, 1000, 65535])
def test_any_largest_level_of_a_netpbm_file_is_white(top: int) -> None:
    dtype = ">u2" if top > 255 else "u1"
    for kind, channels in ((5, ()), (6, (3,))):
        samples = levels(*channels, below=top + 1, dtype=np.uint16)
        header = b"P%d 24 16 %d\n" % (kind, top)
        same(header + samples.astype(dtype).tobytes(), np.rint(samples / top * 255), 1)
    bits = levels(below=2)
    same(b"P4 24 16\n" + np.packbits(bits, axis=1).tobytes(), 255 - bits * 255)


@pytest.mark.parametrize("depth", [8, 16])
def test_four_inks_of_a_tiff(depth: int) -> None:
    inks = levels(4)
    paper = 255 - inks.astype(int)
    data = made_tiff(inks if depth == 8 else (inks * np.uint16(257)).astype("<u2"), depth, 5)
    same(data, paper[..., :3] * paper[..., 3:] / 255, 1)


def test_transparency_is_dropped_and_what_was_multiplied_by_it_divided() -> None:
    colour, grey = levels(4), levels(2)
    same(made_tiff(colour, 8, 2, extra=2), colour[..., :3])
    same(made_tiff(grey, 8, 1, extra=2), grey[..., :1])
    colour[..., 3:] |= 1
    grey[..., 1:] |= 1
    for samples, photometric in ((colour, 2), (grey, 1)):
        samples[..., :-1] = np.minimum(samples[..., :-1], samples[..., -1:])
        divided = samples[..., :-1] * 255.0 / samples[..., -1:]
        same(made_tiff(samples, 8, photometric, extra=1), divided, 1)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TGA", "QOI", "JPEG2000", "ICO"])
def test_colours_that_are_not_visible_stand(format: str) -> None:
    picture = Image.fromarray(np.dstack([np.asarray(noise(32, 32)), np.zeros((32, 32), np.uint8)]))
    options: dict[str, Any] = {"WEBP": {"lossless": True, "exact": True}, "ICO": {"sizes": [(32, 32)]}}.get(format, {})
    same(encode(picture, format, **options), np.asarray(noise(32, 32)))


def test_planes_stored_one_after_another_are_one_picture() -> None:
    samples = levels(3)
    same(made_tiff(samples, 8, 2, planar=True), samples)
    assert "fewer strips" in rejected(made_tiff(samples, 8, 2, planar=True, strips=2))


@pytest.mark.parametrize(
    "samples, depth, format",
    [
        (levels(), 8, 2),
        (levels(dtype=np.uint16), 16, 2),
        (levels(dtype=np.uint32), 32, 1),
        (levels(dtype=np.uint32), 32, 3),
    ],
)
def test_samples_without_a_white_are_refused(samples: NDArray[Any], depth: int, format: int) -> None:
    assert "nothing says what is black and what is white" in rejected(made_tiff(samples, depth, 1, format=format))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_format_that_has_an_orientation_is_turned_upright(format: str, orientation: int) -> None:
    data = encode(stored(quadrants(), orientation), format, exif=exif(orientation))
    assert np.abs(np.array(corners(show(data))) - [RED, GREEN, BLUE, YELLOW]).max() <= 8


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "MPO", "AVIF"])
def test_exif_that_is_damaged_in_any_way_is_no_reason_to_reject(format: str) -> None:
    rng = np.random.default_rng(0)
    whole = exif(1).tobytes() + bytes(40)
    damages: list[Callable[[bytearray], bytearray]] = [
        lambda b: b[: rng.integers(6, len(b))],
        lambda b: b[: rng.integers(6, 20)] + b"\xff" * 30,
        lambda b: b[:6] + rng.bytes(60),
        lambda b: b[:10] + rng.bytes(4) + b[14:],
        lambda b: b[:14] + rng.bytes(12) + b[26:],
    ]
    seen = 0
    for i in range(60):
        block = bytes(damages[i % len(damages)](bytearray(whole)))
        try:
            data = encode(quadrants(), format, exif=block)
        except Exception:  # the encoder of AVIF reads it
            assert format == "AVIF"
            continue
        seen += 1
        assert show(data).shape in ((64, 96, 3), (96, 64, 3))
    assert seen > 10


def test_of_an_animation_the_first_frame_is_shown_or_the_picture_beside_it() -> None:
    magenta = Image.new("RGB", (96, 64), (255, 0, 255))
    data = encode(quadrants(), "AVIF", save_all=True, append_images=[magenta])
    assert np.abs(np.array(corners(show(data))) - [RED, GREEN, BLUE, YELLOW]).max() <= 8
    same(encode(quadrants(), save_all=True, default_image=True, append_images=[magenta, magenta]), quadrants())


# what ends early


@pytest.mark.parametrize("transparent", [None, 0, 5])
def test_a_gif_whose_data_say_that_they_end_early_is_a_reject(transparent: int | None) -> None:
    indices = levels(below=128)
    same(made_gif(indices, 16, transparent), indices * 2)
    for rows in (0, 7, 15):
        cut = made_gif(indices, rows, transparent)
        assert rejected(cut)
        assert rejected(cut[:-1] + made_gif(indices, 16)[cut.index(b",", 200) :])


@pytest.mark.parametrize("transparent", [None, 0, 5])
@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_gif_of_one_colour_is_whole(index: int, transparent: int | None) -> None:
    same(made_gif(np.full(SHAPE, index, np.uint8), 16, transparent), np.full(SHAPE, 2 * index))


def test_a_tiff_with_a_jpeg_in_it_that_was_cut_is_a_reject() -> None:
    data = encode(noise(64, 96), "TIFF", compression="jpeg")
    tags = Image.open(io.BytesIO(data)).tag_v2  # type: ignore[attr-defined]
    end = tags[273][-1] + tags[279][-1] - 2
    show(data)
    assert data[end : end + 2] == b"\xff\xd9"
    assert (
        rejected(data[: end - 500] + bytes(502) + data[end + 2 :]) == "TIFF whose JPEG data end before the picture does"
    )


@pytest.mark.parametrize("rows", [0, 20, 63])
def test_a_bmp_in_run_length_coding_that_ends_early_is_a_reject(rows: int) -> None:
    def bmp(rows: int) -> bytes:
        palette = b"".join(bytes([i, i, i, 0]) for i in range(256))
        body = b"".join(b"".join(bytes([1, x + y]) for x in range(96)) + b"\0\0" for y in range(rows)) + b"\0\1"
        header = struct.pack("<IiiHHIIiiII", 40, 96, 64, 1, 8, 1, len(body), 0, 0, 256, 0)
        return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(body), 0, 0, 54 + 1024) + header + palette + body

    same(bmp(64), np.add.outer(np.arange(63, -1, -1), np.arange(96)))
    assert rejected(bmp(rows))


def test_plain_text_pixels_that_end_early_are_a_reject() -> None:
    data = b"P3 24 16 255\n" + b" ".join(b"%d" % v for v in levels(3).ravel())
    same(data, levels(3))
    assert rejected(data[: len(data) // 2])


def test_a_png_with_a_wrong_checksum_is_a_reject() -> None:
    data = encode(noise(16, 24), exif=exif(1))
    for kind in (b"IHDR", b"eXIf", b"IDAT"):
        at = data.find(kind)
        end = at + 4 + int.from_bytes(data[at - 4 : at], "big")
        assert "checksum" in rejected(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :])


@pytest.mark.parametrize("before", [b"IDAT", b"IEND"])
@pytest.mark.parametrize(
    "kind, content",
    [
        (b"zTXt", b"Raw profile type xmp\0\0" + zlib.compress(bytes(3 << 20))),
        (b"iTXt", b"workflow\0\1\0\0\0" + zlib.compress(bytes(3 << 20))),
        (b"zTXt", b"of another method\0\1no"),
        (b"tEXt", b"long\0" + bytes(70 << 20)),
        (b"gAMA", b""),
        (b"pHYs", b"\0"),
        (b"tRNS", b""),
        (b"iCCP", b""),
        (b"acTL", b"\0"),
    ],
)
def test_what_no_pixel_of_a_png_depends_on_may_be_long_or_damaged(kind: bytes, content: bytes, before: bytes) -> None:
    upright = encode(stored(quadrants(), 6), exif=exif(6))
    same(with_chunk(upright, kind, content, before), quadrants())


def test_a_png_is_whole_when_all_its_rows_are_there() -> None:
    data = encode(noise(16, 24))
    for cut in (12, 16):  # without its end marker, and without the checksum before it
        same(data[:-cut], noise(16, 24))
