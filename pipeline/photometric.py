"""Transforms that change colours: torchvision's, by their names, arguments and defaults, as steps of `colour.py`.

They are done in a picture of eight bits, each rounded to levels before the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from headrace.output import Output
from headrace.pipeline.arguments import (
    Bits,
    ErasedShares,
    ErasedTo,
    Factors,
    KernelSize,
    Probability,
    Ratios,
    Sigma,
    Threshold,
    Turns,
)
from headrace.pipeline.colour import (
    GREY,
    Autocontrast,
    Blur,
    Colour,
    Equalize,
    Erase,
    Matrix,
    Posterize,
    Solarize,
    Step,
)
from headrace.pipeline.geometry import Flags, Floats
from headrace.pipeline.kinds import Photometric, between, grid, pick, rectangle

_SAME = np.eye(3)
#: Red, green and blue all the grey of a picture.
_TO_GREY = np.array([GREY, GREY, GREY])

# A hue is turned in the plane of I and Q, as DALI's `color_twist` does it, with DALI's numbers of both directions.
_TO_IQ = np.array([[0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
_FROM_IQ = np.array([[0.956, 0.621], [-0.272, -0.647], [-1.107, 1.705]])
#: What the sine of the angle is multiplied with; written out, because products of matrices differ between CPUs.
_ACROSS = np.array(
    [[_FROM_IQ[r, 0] * _TO_IQ[1, c] - _FROM_IQ[r, 1] * _TO_IQ[0, c] for c in range(3)] for r in range(3)]
)

_Matrices = NDArray[np.float64]  # [n, 3, 3]


def _chosen(u: Floats, p: float) -> Flags:
    """Which pictures are transformed, with probability `p`: what the first number of each is for."""
    chosen: Flags = u[:, 0] < p
    return chosen


def _brightness(factor: Floats) -> tuple[_Matrices, Floats]:
    return factor[:, None, None] * _SAME, np.zeros_like(factor)


def _contrast(factor: Floats) -> tuple[_Matrices, Floats]:
    return factor[:, None, None] * _SAME, 1.0 - factor


def _saturation(factor: Floats) -> tuple[_Matrices, Floats]:
    by = factor[:, None, None]
    return by * _SAME + (1.0 - by) * _TO_GREY, np.zeros_like(factor)


def _hue(turns: Floats) -> tuple[_Matrices, Floats]:
    """What a pixel has beside its grey is turned; a turn of 0 is the unit matrix, bit for bit."""
    angle = 2.0 * math.pi * turns[:, None, None]
    cosine, sine = grid(np.cos(angle)), grid(np.sin(angle))
    return _SAME + (cosine - 1.0) * (_SAME - _TO_GREY) + sine * _ACROSS, np.zeros_like(turns)


#: What a jitter does, with the number that changes nothing, in the order in which it draws them.
_OPERATIONS = (
    ("brightness", 1.0, _brightness),
    ("contrast", 1.0, _contrast),
    ("saturation", 1.0, _saturation),
    ("hue", 0.0, _hue),
)
_ORDERS = np.array(list(permutations(range(len(_OPERATIONS)))))


class ColorJitter(Photometric):
    """Brightness, contrast, saturation and hue, each by a random amount, in random order.

    One number x stands for factors from 1 - x to 1 + x, of `hue` for turns from -x to x. All of it is done with
    probability `p`.
    """

    if TYPE_CHECKING:  # or type checkers would take keywords only, and only what a field holds

        def __init__(
            self,
            brightness: float | Sequence[float] | None = ...,
            contrast: float | Sequence[float] | None = ...,
            saturation: float | Sequence[float] | None = ...,
            hue: float | Sequence[float] | None = ...,
            p: float = ...,
        ) -> None: ...

    name = "color_jitter"
    draws = 2 + len(_OPERATIONS)  # whether, the order, the amounts
    brightness: Factors = None
    contrast: Factors = None
    saturation: Factors = None
    hue: Turns = None
    p: Probability = 1.0

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        done, order = _chosen(u, self.p), _ORDERS[pick(u[:, 1], len(_ORDERS))]
        matrices, gains = np.tile(_SAME, (len(_OPERATIONS), len(u), 1, 1)), np.zeros((len(_OPERATIONS), len(u)))
        used = np.zeros(len(_OPERATIONS), np.bool_)
        for i, (argument, neutral, operation) in enumerate(_OPERATIONS):
            span: tuple[float, float] | None = getattr(self, argument)
            if span is not None:
                used[i] = True
                amount = np.where(done, between(*span, u[:, 2 + i]), neutral)
                matrices[i], gains[i] = operation(amount)
        # Row by row those that are used, in their order.
        chosen, rows = order[used[order]].reshape(len(u), used.sum()), np.arange(len(u))
        centred = self.contrast is not None
        return [Matrix(matrices[which, rows], np.zeros((len(u), 3)), gains[which, rows], centred) for which in chosen.T]


class RandomGrayscale(Photometric):
    """Turned to grey with probability `p`."""

    if TYPE_CHECKING:

        def __init__(self, p: float = ...) -> None: ...

    name = "random_grayscale"
    draws = 1
    p: Probability = 0.1

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        matrix = np.where(_chosen(u, self.p)[:, None, None], _TO_GREY, _SAME)
        return [Matrix(matrix, np.zeros((len(u), 3)), np.zeros(len(u)), centred=False)]


class GaussianBlur(Photometric):
    """Blurred with a Gaussian of random `sigma`, cut to `kernel_size`: one number, or `[width, height]`.

    It is done with probability `p`.
    """

    if TYPE_CHECKING:

        def __init__(
            self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = ..., p: float = ...
        ) -> None: ...

    name = "gaussian_blur"
    draws = 2
    kernel_size: KernelSize
    sigma: Sigma = (0.1, 2.0)
    p: Probability = 1.0

    def unsuited(self, height: int, width: int) -> str | None:
        if self.kernel_size[0] < 2 * width and self.kernel_size[1] < 2 * height:
            return None
        return (
            f"kernel_size {list(self.kernel_size)} (width, height) reaches beyond the mirrored border of pictures of "
            f"{height}x{width} pixels (height x width); make it at most {[2 * width - 1, 2 * height - 1]}"
        )

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        sigma = np.where(_chosen(u, self.p), between(*self.sigma, u[:, 1]), 0.0)
        return [Blur(sigma, (self.kernel_size[1], self.kernel_size[0]))]


class RandomErasing(Photometric):
    """A rectangle set to `value` with probability `p`.

    `scale` bounds the rectangle's share of the picture's area, `ratio` its height over its width. As in torchvision ten
    are tried, and if none fits, the picture stays. `value` is a number from 0 to 1, one for each channel, or "mean":
    the mean of the stream's output.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            p: float = ...,
            scale: Sequence[float] = ...,
            ratio: Sequence[float] = ...,
            value: float | Sequence[float] | str = ...,
        ) -> None: ...

    name = "random_erasing"
    p: Probability = 0.5
    scale: ErasedShares = (0.02, 0.33)
    ratio: Ratios = (0.3, 3.3)
    value: ErasedTo = (0.0, 0.0, 0.0)

    tries: ClassVar[int] = 10
    draws = 1 + 2 * tries + 2  # whether, area and ratio per try, then the place

    def settled(self, output: Output) -> Self:
        if self.value != "mean":
            return self
        if not all(0 <= mean <= 1 for mean in output.mean):
            raise ValueError(
                f"transforms: {self.name}: value: mean stands for the mean of the stream's output, and "
                f"{list(output.mean)} is no colour, which has numbers from 0 to 1; write one"
            )
        return self.model_copy(update={"value": tuple(_level(mean) / 255 for mean in output.mean)})

    @property
    def fill(self) -> Colour:
        """The value in levels."""
        if self.value == "mean":
            raise ValueError(
                f"transforms: {self.name}: value: mean is that of a stream's output, and here is no stream"
            )
        red, green, blue = (_level(value) for value in self.value)
        return red, green, blue

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        high, wide = rectangle(
            height * width, self.scale, self.ratio, u[:, 1:-2], lambda high, wide: (high < height) & (wide < width)
        )
        top, left = pick(u[:, -2], height - high + 1), pick(u[:, -1], width - wide + 1)
        box = np.stack([left, top, left + wide, top + high], axis=1)
        erased = _chosen(u, self.p) & (high > 0) & (wide > 0)
        return [Erase(np.where(erased[:, None], box, 0), self.fill)]


def _level(value: float) -> int:
    return math.floor(255 * value + 0.5)


class RandomSolarize(Photometric):
    """Levels from `threshold` on inverted, with probability `p`."""

    if TYPE_CHECKING:

        def __init__(self, threshold: float, p: float = ...) -> None: ...

    name = "random_solarize"
    draws = 1
    threshold: Threshold
    p: Probability = 0.5

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        return [Solarize(np.where(_chosen(u, self.p), math.ceil(self.threshold), 256))]


class RandomPosterize(Photometric):
    """Only the upper `bits` of each level kept, with probability `p`."""

    if TYPE_CHECKING:

        def __init__(self, bits: int, p: float = ...) -> None: ...

    name = "random_posterize"
    draws = 1
    bits: Bits
    p: Probability = 0.5

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        mask = 255 & (255 << (8 - self.bits))
        return [Posterize(np.where(_chosen(u, self.p), mask, 255).astype(np.uint8))]


class RandomAutocontrast(Photometric):
    """Each channel stretched to all levels, with probability `p`."""

    if TYPE_CHECKING:

        def __init__(self, p: float = ...) -> None: ...

    name = "random_autocontrast"
    draws = 1
    p: Probability = 0.5

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        return [Autocontrast(_chosen(u, self.p))]


class RandomEqualize(Photometric):
    """The histogram of each channel made flat, with probability `p`."""

    if TYPE_CHECKING:

        def __init__(self, p: float = ...) -> None: ...

    name = "random_equalize"
    draws = 1
    p: Probability = 0.5

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        return [Equalize(_chosen(u, self.p))]
