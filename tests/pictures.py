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
