"""What is done to the colours of a picture after its one resample: a list of steps, each with its numbers per picture.

A step is inert. Transforms make steps of their draws; every backend applies the same ones. A picture is uint8
(height, width, 3), RGB, before and after each step. Row `i` of a step's arrays is one picture; for each step there are
numbers that leave a picture as it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]  # red, green, blue, 0 to 255

#: Weights of red, green and blue in a grey (ITU-R BT.601), as Pillow and torchvision take them.
GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Arrays with a row for each picture; what is no array is the same for all of them."""

    def take(self, rows: NDArray[np.int64]) -> Self:
        """Those of some rows, in that order."""
        return replace(self, **{name: array[rows] for name, array in self._arrays().items()})

    def followed_by(self, others: Sequence[Any]) -> Self:
        """These, and then those of others that differ in their arrays only."""
        several = [self, *others]
        return replace(
            self, **{name: np.concatenate([getattr(each, name) for each in several]) for name in self._arrays()}
        )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, slots=True)
class Matrix(_Rows):
    """`clip(round(matrix @ rgb + offset + gain * mean))`, where `mean` is the mean grey of the picture as it comes in.

    Attributes:
        matrix: float64 [n, 3, 3].
        offset: float64 [n, 3], in levels.
        gain: float64 [n].
        centred: whether a gain of any picture may be other than 0; the same for all pictures of a chain.
    """

    matrix: NDArray[np.float64]
    offset: NDArray[np.float64]
    gain: NDArray[np.float64]
    centred: bool


@dataclass(frozen=True, slots=True)
class Solarize(_Rows):
    """`255 - x` where `x >= threshold`.

    Attributes:
        threshold: int64 [n], 0 to 256; 256 changes nothing.
    """

    threshold: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Posterize(_Rows):
    """`x & mask`.

    Attributes:
        mask: uint8 [n]; 255 changes nothing.
    """

    mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Autocontrast(_Rows):
    """Each channel stretched from its `least` and `greatest` level to 0 and 255, `(x - least) * 255 // (greatest -
    least)`; one of a single level stays.

    Attributes:
        apply: bool [n].
    """

    apply: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Equalize(_Rows):
    """Each channel through the table that makes its histogram as flat as can be, as Pillow's `ImageOps.equalize`.

    Attributes:
        apply: bool [n].
    """

    apply: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Blur(_Rows):
    """A separable Gaussian of `size` taps, weights `exp(-k^2 / (2 sigma^2))` normed to 1, the border mirrored without
    repeating its last pixel.

    Attributes:
        sigma: float64 [n], in pixels; 0 changes nothing.
        size: (height, width) of the kernel, odd.
    """

    sigma: NDArray[np.float64]
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Erase(_Rows):
    """A rectangle of one colour.

    Attributes:
        box: int64 [n, 4], x0, y0, x1, y1; an empty one changes nothing.
        fill: red, green, blue.
    """

    box: NDArray[np.int64]
    fill: Colour

    def mirrored(self, flip_y: NDArray[np.bool_], flip_x: NDArray[np.bool_], size: tuple[int, int]) -> Erase:
        """Where it is in a picture of this (height, width) that is mirrored; flags are bool [n]."""
        x0, y0, x1, y1 = self.box.T
        x0, x1 = np.where(flip_x, size[1] - x1, x0), np.where(flip_x, size[1] - x0, x1)
        y0, y1 = np.where(flip_y, size[0] - y1, y0), np.where(flip_y, size[0] - y0, y1)
        return replace(self, box=np.stack([x0, y0, x1, y1], axis=1))


Step = Matrix | Solarize | Posterize | Autocontrast | Equalize | Blur | Erase
