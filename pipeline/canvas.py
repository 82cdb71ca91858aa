"""Pixels between NumPy and Pillow, with no more copies than there must be.

Left to itself Pillow clears memory that it then writes to, in pages that the kernel has to find for each picture, and
gives pixels away in pieces that are put together afterwards.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, _imaging

#: Pillow has four bytes for a pixel of RGB.
_PIXEL = 4

#: Pixels that a canvas keeps memory for; larger pictures are rare, and Pillow's memory goes back to the system.
_KEPT = 1 << 23


class Canvas:
    """Memory that one picture after another is drawn into, so that no pages are looked up and cleared for each."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def image(self, pixels: NDArray[np.uint8]) -> Image.Image:
        """An RGB image with these pixels, uint8 (height, width, 3) and contiguous. It is good until the next call."""
        height, width = pixels.shape[:2]
        size = height * width * _PIXEL
        if size > _KEPT * _PIXEL:
            image = Image.new("RGB", (width, height), None)
            image.frombytes(pixels, "raw", "RGB")
            return image
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)  # an image that is still there keeps the former
        core = _imaging.map_buffer(self._memory.data, (width, height), "raw", 0, ("RGB", 0, 1))
        decoder = Image._getdecoder("RGB", "raw", ("RGB",))
        decoder.setimage(core, (0, 0, width, height))
        _, problem = decoder.decode(pixels)
        if problem:
            raise RuntimeError(f"Pillow does not take the pixels: error {problem}")
        return Image.Image()._new(core)


def levels(image: Image.Image) -> NDArray[np.uint8]:
    """Of an RGB image, uint8 (height, width, 3), read-only. `np.asarray` gets them in pieces, and joins these."""
    encoder = Image._getencoder("RGB", "raw", ("RGB",))
    encoder.setimage(image.im, (0, 0, *image.size))
    _, status, data = encoder.encode(3 * image.width * image.height)
    if status != 1:
        raise RuntimeError(f"Pillow does not give its pixels: status {status}")
    return np.frombuffer(data, np.uint8).reshape(image.height, image.width, 3)
