from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from pictures import chunk, encode, exif, noise, quadrants, with_chunk
from PIL import Image

from headrace.pipeline import png


def made(height: int, width: int, depth: int, colour: int, pixels: bytes, interlaced: int = 0) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def test_chunks_are_found_in_order() -> None:
    kinds = [kind for kind, _ in png.chunks(encode(noise(8, 8)))]
    assert kinds[0] == b"IHDR" and b"IDAT" in kinds and kinds[-1] == b"IEND"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (7, 13), (64, 96)])
def test_whole_pictures_miss_nothing(mode: str, size: tuple[int, int]) -> None:
    picture = Image.fromarray(np.zeros(size, np.uint16)) if mode == "I;16" else noise(*size).convert(mode)
    assert not png.missing_pixels(encode(picture))


@pytest.mark.parametrize("rows", [0, 1, 63])
def test_a_row_less_is_missed(rows: int) -> None:
    whole = (b"\0" + bytes(96 * 3)) * 64
    assert not png.missing_pixels(made(64, 96, 8, 2, whole))
    assert png.missing_pixels(made(64, 96, 8, 2, whole[: rows * (1 + 96 * 3)]))
    assert png.missing_pixels(made(64, 96, 8, 2, whole[:-1]))


@pytest.mark.parametrize(
    "height, width, depth, size", [(8, 8, 8, 79), (1, 1, 8, 2), (5, 3, 8, 25), (3, 5, 1, 14), (1, 2, 8, 4)]
)
def test_interlaced_pictures_are_counted_by_their_passes(height: int, width: int, depth: int, size: int) -> None:
    # 8x8: passes of 1x1, 1x1, 1x2, 2x2, 2x4, 4x4, 4x8 (rows x columns), each row with a filter byte: 64 + 15.
    assert not png.missing_pixels(made(height, width, depth, 0, bytes(size), 1))
    assert png.missing_pixels(made(height, width, depth, 0, bytes(size - 1), 1))


def test_pixels_in_several_chunks_are_one_stream() -> None:
    stream = zlib.compress(bytes(17 * 8))
    data = made(8, 16, 8, 0, b"")
    start, end = data.find(b"IDAT") - 4, data.find(b"IEND") - 4
    parts = b"".join(chunk(b"IDAT", stream[i : i + 3]) for i in range(0, len(stream), 3))
    assert not png.missing_pixels(data[:start] + parts + data[end:])


def test_no_more_is_inflated_than_the_picture_needs() -> None:
    data = made(4, 4, 8, 0, bytes(1 << 26))
    tracemalloc.start()
    try:
        assert not png.missing_pixels(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_exif_after_the_pixels_is_found_and_nothing_else() -> None:
    content = exif(6).tobytes()
    data = encode(noise(8, 8))
    assert png.exif_after_pixels(with_chunk(data, b"eXIf", content[6:], before=b"IEND")) == content
    assert png.exif_after_pixels(data) is None
    assert png.exif_after_pixels(data + b"eXIf") is None


def test_pixels_that_do_not_match_their_checksum_are_damaged() -> None:
    data = encode(noise(64, 96))
    assert not png.damaged_pixels(data)
    start = data.find(b"IDAT")
    length = int.from_bytes(data[start - 4 : start], "big")
    for at in (start + 4, start + 4 + length // 2, start + 4 + length):
        assert png.damaged_pixels(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    # Other chunks are none of its business, nor is a checksum that is not there.
    assert not png.damaged_pixels(data[: start + 4 + length + 2])
    assert not png.damaged_pixels(data[:-1] + bytes([data[-1] ^ 1]))


def test_bare_pictures_keep_what_pixels_and_orientation_need() -> None:
    plain = encode(quadrants().quantize(4))
    exif_too = with_chunk(plain, b"eXIf", b"MM\0*", before=b"IDAT")
    for data in (plain, exif_too):
        assert png.bare(data) == data
        for before in (b"PLTE", b"IDAT", b"IEND"):
            for kind in (b"iCCP", b"zTXt", b"gAMA"):
                assert png.bare(with_chunk(data, kind, b"x\0\1no", before=before)) == data
    cut = with_chunk(plain, b"iCCP", b"x\0\1no", before=b"IDAT")[:-30]
    assert png.bare(cut) == plain[:-30]


def test_what_follows_the_pixels_can_be_left_out() -> None:
    data = encode(quadrants())
    pixels = data[:-12]
    assert png.until_end_of_pixels(with_chunk(data, b"tEXt", b"a\0b", before=b"IEND")) == pixels
    assert png.until_end_of_pixels(data + b"more") == pixels
    for whole in (data, pixels, pixels[:-7], data[:20], data[:9], b""):
        assert png.until_end_of_pixels(whole) is whole
