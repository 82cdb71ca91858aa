"""Steps of colour on the CPU, one picture at a time.

A picture comes out the same to the bit on every x86-64 CPU: Pillow's C code and elementwise arithmetic round each
operation alike everywhere, which products of matrices and dot products do not. What one level becomes by itself is a
table of 256; tables that follow one another are one, and the pixels are touched once for all of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headrace.pipeline.colour import (
    GREY,
    Autocontrast,
    Blur,
    Equalize,
    Erase,
    Matrix,
    Posterize,
    Solarize,
    Step,
)

_Table = NDArray[np.uint8]  # [3, 256] or [256], what becomes of each level, of a channel or of red, green and blue
_Counts = NDArray[np.int64]  # likewise, how many pixels have a level

_LEVELS = np.arange(256)
_SAME: _Table = _LEVELS.astype(np.uint8)


def paint(image: Image.Image, steps: Sequence[Step], i: int) -> Image.Image:
    """An RGB image after row `i` of the steps. `image` itself stays as it is; steps that change nothing cost nothing.

    Levels are rounded half up after each step.
    """
    canvas = _Canvas(image)
    for step in steps:
        match step:
            case Matrix():
                _matrix(canvas, step, i)
            case Solarize():
                if (threshold := step.threshold[i]) <= 255:
                    canvas.map(np.tile(np.where(threshold <= _SAME, 255 - _SAME, _SAME), (3, 1)))
            case Posterize():
                if (mask := step.mask[i]) != 255:
                    canvas.map(np.tile(_SAME & mask, (3, 1)))
            case Autocontrast():
                if step.apply[i]:
                    canvas.map(np.stack([_stretching(counts) for counts in canvas.counts]))
            case Equalize():
                if step.apply[i]:
                    canvas.map(np.stack([_flattening(counts) for counts in canvas.counts]))
            case Blur():
                _blur(canvas, step, i)
            case Erase():
                x0, y0, x1, y1 = step.box[i].tolist()
                if x0 < x1 and y0 < y1:
                    erased = canvas.image().copy()
                    erased.paste(step.fill, (x0, y0, x1, y1))
                    canvas.show(erased)
    return canvas.image()


class _Canvas:
    """An image, and the table through which it is still to be seen."""

    def __init__(self, image: Image.Image) -> None:
        self.show(image)

    def show(self, image: Image.Image) -> None:
        """Go on with another image."""
        self._image = image
        self._table: _Table | None = None
        self._counts: _Counts | None = None

    def map(self, table: _Table) -> None:
        """Put each level through a table, uint8 [3, 256]."""
        if self._table is not None:
            table = np.take_along_axis(table, self._table.astype(np.intp), axis=1)
        self._table = table

    @property
    def counts(self) -> _Counts:
        """How many pixels have a level now: int64 [3, 256]."""
        if self._counts is None:
            self._counts = np.array(self._image.histogram(), np.int64).reshape(3, 256)
        if self._table is None:
            return self._counts
        # Floats count exactly as far as pixels go.
        seen = [np.bincount(t, c, 256) for t, c in zip(self._table, self._counts, strict=True)]
        return np.stack(seen).astype(np.int64)

    @property
    def mean(self) -> float:
        """The mean grey, in levels."""
        red, green, blue = ((self.counts * _LEVELS).sum(axis=1) / (self._image.width * self._image.height)).tolist()
        return float(GREY[0] * red + GREY[1] * green + GREY[2] * blue)

    def image(self) -> Image.Image:
        """What is seen."""
        if self._table is not None:
            self.show(self._image.point(self._table.ravel().tolist()))
        return self._image


def _matrix(canvas: _Canvas, step: Matrix, i: int) -> None:
    rows, offset, gain = step.matrix[i].tolist(), step.offset[i].tolist(), float(step.gain[i])
    if gain:
        mean = canvas.mean
        offset = [value + gain * mean for value in offset]
    if all(rows[r][c] == 0.0 for r in range(3) for c in range(3) if r != c):
        scale = [rows[c][c] for c in range(3)]
        if scale != [1.0, 1.0, 1.0] or any(offset):
            levels = np.array(scale)[:, None] * _LEVELS + np.array(offset)[:, None]
            canvas.map(np.clip(np.floor(levels + 0.5), 0, 255).astype(np.uint8))
        return
    numbers = [(*row, value) for row, value in zip(rows, offset, strict=True)]
    if numbers[0] == numbers[1] == numbers[2]:
        canvas.show(canvas.image().convert("L", numbers[0]).convert("RGB"))
    else:
        canvas.show(canvas.image().convert("RGB", sum(numbers, ())))


def _stretching(counts: _Counts) -> _Table:
    """The least level to 0, the greatest to 255."""
    there = np.flatnonzero(counts)
    least, greatest = int(there[0]), int(there[-1])
    if least == greatest:
        return _SAME
    stretched: _Table = np.clip((_LEVELS - least) * 255 // (greatest - least), 0, 255).astype(np.uint8)
    return stretched


def _flattening(counts: _Counts) -> _Table:
    """That of `PIL.ImageOps.equalize`."""
    step = int(counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    if step == 0:
        return _SAME
    below = np.cumsum(counts) - counts
    flat: _Table = np.minimum((step // 2 + below) // step, 255).astype(np.uint8)
    return flat


def _blur(canvas: _Canvas, step: Blur, i: int) -> None:
    down, across = (_weights(float(step.sigma[i]), taps) for taps in step.size)
    if len(down) > 1 or len(across) > 1:
        canvas.show(Image.fromarray(_blurred(np.asarray(canvas.image()), down, across)))


def _weights(sigma: float, taps: int) -> list[np.float32]:
    """Of a Gaussian, from the middle tap on; what would weigh nothing is left out.

    They are multiples of 2**-16 whose sum over both sides is 1: `exp` differs in the last place between CPUs.
    """
    if sigma == 0.0:
        return [np.float32(1)]
    # Products overflow to infinity, which weighs nothing; powers would raise.
    shape = [math.exp(-0.5 * (k / sigma) * (k / sigma)) for k in range(taps // 2 + 1)]
    total = 2 * sum(shape) - shape[0]
    whole = [round(value / total * 2**16) for value in shape]
    sides = [value for value in whole[1:] if value]
    return [np.float32(value / 2**16) for value in (2**16 - 2 * sum(sides), *sides)]


#: Numbers of a strip of a picture that are worked on at once, and stay in the cache of a core.
_STRIP = 1 << 18


class _Scratch(threading.local):
    """Memory to work in: fresh memory would cost as much as the arithmetic."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.float32]] = {}

    def __call__(self, name: str, size: int) -> NDArray[np.float32]:
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, np.float32)
        return array[:size]


_scratch = _Scratch()


def _blurred(pixels: NDArray[np.uint8], down: list[np.float32], across: list[np.float32]) -> NDArray[np.uint8]:
    """uint8 [height, width, 3] convolved along both axes, the border mirrored without its last pixel."""
    height, width, _ = pixels.shape
    y, x = len(down) - 1, len(across) - 1
    row, wide = width * 3, (width + 2 * x) * 3
    out = np.empty_like(pixels)
    strip = max(1, _STRIP // wide)
    for top in range(0, height, strip):
        n = min(strip, height - top)
        rows = np.abs(np.arange(top - y, top + n + y))
        source = _scratch("source", len(rows) * row)
        source.reshape(len(rows), width, 3)[:] = pixels[np.where(rows < height, rows, 2 * height - 2 - rows)]
        mirrored = _scratch("mirrored", n * wide).reshape(n, width + 2 * x, 3)
        mirrored[:, x : x + width] = _convolved(source, down, row)[: n * row].reshape(n, width, 3)
        mirrored[:, :x] = mirrored[:, 2 * x : x : -1]
        mirrored[:, x + width :] = mirrored[:, x + width - 2 : width - 2 : -1]
        # All rows as one: what mixes the end of a row with the beginning of the next lies where the border was.
        blurred = _convolved(mirrored.reshape(-1), across, 3).reshape(n, width + 2 * x, 3)[:, :width]
        np.add(blurred, np.float32(0.5), out=blurred)
        out[top : top + n] = blurred
    return out


def _convolved(source: NDArray[np.float32], weights: list[np.float32], step: int) -> NDArray[np.float32]:
    """`source` with weights for neighbours at multiples of `step`, from its first number with all of them on; as long
    as `source`, with anything in the place of the last ones.
    """
    border = (len(weights) - 1) * step
    n = source.size - 2 * border
    total = _scratch("total", source.size)
    out, pair = total[:n], _scratch("pair", n)
    np.multiply(source[border : border + n], weights[0], out=out)
    for k, weight in enumerate(weights[1:], 1):
        before, after = border - k * step, border + k * step
        np.add(source[before : before + n], source[after : after + n], out=pair)
        np.multiply(pair, weight, out=pair)
        np.add(out, pair, out=out)
    return total
