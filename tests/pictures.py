"""Encoded pictures for tests, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RED, GREEN, BLUE, YELLOW = (220, 40, 40), (40, 180, 60), (50, 80, 210), (230, 210, 60)


def quadrants(height: int = 64, width: int = 96) -> Image.Image:
    """Top-left red, top-right green, bottom-left blue, bottom-right yellow: shows size, colour order, orientation."""
    pixels = np.empty((height, width, 3), np.uint8)
    h, w = height // 2, width // 2
    pixels[:h, :w], pixels[:h, w:], pixels[h:, :w], pixels[h:, w:] = RED, GREEN, BLUE, YELLOW
    return Image.fromarray(pixels)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """Slopes with some noise, no level below 1; nothing in it is symmetric."""
    y, x = np.mgrid[0:height, 0:width]
    slopes = np.stack([x * 250 / width, y * 250 / height, (x + y) * 250 / (height + width)], axis=2)
    return Image.fromarray(
        np.clip(slopes + np.random.default_rng(seed).normal(0, 8, slopes.shape), 1, 255).astype(np.uint8)
    )


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The file as bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def planar_jpeg(image: Image.Image, **options: Any) -> list[bytes]:
    """A baseline JPEG whose three components come one after another: its header, the three scans, its end."""
    # Each is coded as a grey picture is, with the same tables.
    greys = [encode(band, "JPEG", **options) for band in image.convert("YCbCr").split()]
    frame, scan = greys[0].find(b"\xff\xc0"), greys[0].find(b"\xff\xda")
    sides = greys[0][frame + 4 : frame + 9]
    components = b"\3" + b"".join(bytes([i, 0x11, 0]) for i in (1, 2, 3))
    header = greys[0][:frame] + b"\xff\xc0\0\x11" + sides + components + greys[0][frame + 13 : scan]
    scans = [
        b"\xff\xda\0\x08\x01" + bytes([i, 0, 0, 63, 0]) + grey[grey.find(b"\xff\xda") + 10 : -2]
        for i, grey in enumerate(greys, 1)
    ]
    return [header, *scans, b"\xff\xd9"]


def exif(orientation: int) -> Image.Exif:
    """EXIF data with an orientation."""
    data = Image.Exif()
    data[0x0112] = orientation
    return data


def stored(image: Image.Image, orientation: int) -> Image.Image:
    """How a camera would store `image`, so that the orientation turns it upright again."""
    inverse = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    return image if inverse is None else image.transpose(inverse)


def corners(pixels: NDArray[np.uint8]) -> list[tuple[int, ...]]:
    """Colours in the middle of the four quadrants: top left, top right, bottom left, bottom right."""
    h, w = pixels.shape[0] // 4, pixels.shape[1] // 4
    return [tuple(int(v) for v in pixels[y, x]) for y in (h, 3 * h) for x in (w, 3 * w)]


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunk(png: bytes, kind: bytes, content: bytes, before: bytes) -> bytes:
    """The PNG with one chunk more, before the first of another kind."""
    at = png.find(before) - 4
    return png[:at] + chunk(kind, content) + png[at:]


def made_png(samples: NDArray[Any], depth: int, colour: int, extra: bytes = b"") -> bytes:
    """A PNG of uint8 [H, W] or [H, W, n], or uint16 where the depth is 16; `extra` are chunks before the pixels."""
    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row for row in packed(samples.astype(">u2") if depth == 16 else samples, depth))
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def packed(samples: NDArray[Any], depth: int) -> list[bytes]:
    """The rows; below eight bits several samples a byte, the first in the highest bits."""
    if depth >= 8:
        return [row.tobytes() for row in samples]
    bits = np.unpackbits(samples[..., None], axis=2)[..., 8 - depth :]
    return [row.tobytes() for row in np.packbits(bits.reshape(len(samples), -1), axis=1)]


def made_tiff(
    samples: NDArray[Any],
    depth: int,
    photometric: int,
    *,
    extra: int | None = None,
    format: int | None = None,
    palette: list[int] | None = None,
    planar: bool = False,
    strips: int | None = None,
    order: str = "<",
) -> bytes:
    """An uncompressed TIFF of [H, W] or [H, W, n]: one strip, or one for each plane, or the first `strips` of these."""
    height, width = samples.shape[:2]
    count = samples.shape[2] if samples.ndim == 3 else 1
    planes = list(np.moveaxis(samples, 2, 0)) if planar else [samples]
    data = [b"".join(packed(plane, depth)) for plane in planes][:strips]
    starts = [8 + sum(map(len, data[:i])) for i in range(len(data))]
    tags: list[tuple[int, str, list[int]]] = [
        (256, "H", [width]),
        (257, "H", [height]),
        (258, "H", [depth] * count),
        (259, "H", [1]),
        (262, "H", [photometric]),
        (273, "I", starts),
        (277, "H", [count]),
        (278, "H", [height]),
        (279, "I", [len(d) for d in data]),
        (284, "H", [2 if planar else 1]),
        *([(320, "H", palette)] if palette else []),
        *([(338, "H", [extra])] if extra is not None else []),
        *([(339, "H", [format] * count)] if format is not None else []),
    ]
    pixels = b"".join(data)
    pixels += bytes(len(pixels) % 2)
    directory, behind = struct.pack(order + "H", len(tags)), b""
    end = 8 + len(pixels) + 2 + 12 * len(tags) + 4
    for tag, kind, values in tags:
        content = struct.pack(f"{order}{len(values)}{kind}", *values)
        directory += struct.pack(order + "HHI", tag, {"H": 3, "I": 4}[kind], len(values))
        directory += content.ljust(4, b"\0") if len(content) <= 4 else struct.pack(order + "I", end + len(behind))
        behind += content + bytes(len(content) % 2) if len(content) > 4 else b""
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order]
    return magic + struct.pack(order + "I", 8 + len(pixels)) + pixels + directory + bytes(4) + behind


def made_gif(indices: NDArray[np.uint8], rows: int, transparent: int | None = None) -> bytes:
    """A GIF with a palette of 128 greys whose data are those of the first `rows`, and end as they should."""
    height, width = indices.shape
    palette = bytes(v for i in range(128) for v in (2 * i,) * 3)
    codes = [
        v for i, index in enumerate(indices[:rows].ravel().tolist()) for v in ([128] if i % 100 == 0 else []) + [index]
    ]
    # Cleared before the codes would grow: each has eight bits.
    data = bytes([*codes, 129])
    blocks = b"".join(bytes([len(data[i : i + 255])]) + data[i : i + 255] for i in range(0, len(data), 255))
    control = b"" if transparent is None else bytes([0x21, 0xF9, 4, 1, 0, 0, transparent, 0])
    screen = struct.pack("<HHBBB", width, height, 0xF6, 0, 0)
    frame = struct.pack("<HHHHB", 0, 0, width, height, 0)
    return b"GIF89a" + screen + palette + control + b"," + frame + b"\x07" + blocks + b"\0;"
