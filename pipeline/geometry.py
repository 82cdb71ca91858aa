"""The algebra that folds resizes, crops and flips into one window, one size and two mirror flags.

A chain of these never needs more than one resample: each axis of the picture at hand is a stretch of the source's
axis, cut into so many pixels, maybe mirrored. Height and width never meet, so a `Geometry` is two equal `Axis`.
Everything is an array over the samples of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the pictures at hand.

    Attributes:
        low: float64 [n], where the stretch begins, in pixels of the source.
        high: float64 [n], where it ends. Both may lie outside the source: it is black there.
        pixels: int64 [n], into how many pixels the stretch is cut.
        mirror: bool [n], whether pixel 0 lies at the high end.
    """

    low: Floats
    high: Floats
    pixels: Ints
    mirror: Flags

    @classmethod
    def whole(cls, pixels: Ints) -> Axis:
        """The source itself, `pixels` (int64 [n], at least 1) long."""
        return cls(np.zeros(len(pixels)), pixels.astype(np.float64), pixels, np.zeros(len(pixels), np.bool_))

    def resized(self, pixels: Ints) -> Axis:
        """The same stretch cut into other pixels."""
        return replace(self, pixels=pixels)

    def cropped(self, offset: Ints, pixels: Ints) -> Axis:
        """`pixels` pixels from `offset` on; beyond the ends the stretch goes on."""
        # As seen from the low end of the source.
        before = np.where(self.mirror, self.pixels - offset - pixels, offset)
        length = self.high - self.low
        low = self.low + before * length / self.pixels
        high = self.low + (before + pixels) * length / self.pixels
        return Axis(low, high, pixels, self.mirror)

    def flipped(self, flip: Flags) -> Axis:
        """Mirrored where `flip` is set."""
        return replace(self, mirror=self.mirror ^ flip)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The pictures of a chunk after some transforms, seen from their sources (the oriented pictures)."""

    y: Axis
    x: Axis

    @classmethod
    def whole(cls, heights: Ints, widths: Ints) -> Geometry:
        """The sources themselves; int64 [n] each, at least 1."""
        return cls(Axis.whole(heights), Axis.whole(widths))

    @property
    def box(self) -> Floats:
        """float64 [n, 4]: x0, y0, x1, y1 of the windows, in pixels of the sources."""
        return np.stack([self.x.low, self.y.low, self.x.high, self.y.high], axis=1)


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a chain before any picture is: is there one window and one size at its end?

    Attributes:
        height: of every picture so far, or None where it depends on the picture.
        width: likewise.
        resampled_by: the transform that has resampled, by its ordinal name, or None.
        cropped_by: the last that has cut pixels away, or None.
        interpolation: of the one resample.
    """

    height: int | None = None
    width: int | None = None
    resampled_by: str | None = None
    cropped_by: str | None = None
    interpolation: str = "bilinear"

    def resized(self, name: str, height: int | None, width: int | None, interpolation: str) -> Outline:
        """After a resample.

        Raises:
            ValueError: there has been one already.
        """
        if self.resampled_by is not None:
            raise ValueError(
                f"transforms: {self.resampled_by} and {name} would each resample the picture, and Headrace resamples "
                "once, from the original pixels; keep one of the two"
            )
        return replace(self, height=height, width=width, resampled_by=name, interpolation=interpolation)

    def cropped(self, name: str, height: int, width: int) -> Outline:
        """After a crop to a fixed size.

        Raises:
            ValueError: it would pad with black what an earlier crop has cut.
        """
        for axis, had, wanted in (("high", self.height, height), ("wide", self.width, width)):
            if self.cropped_by is not None and (had is None or had < wanted):
                raise ValueError(
                    f"transforms: {name} would pad to {wanted} pixels {axis} what {self.cropped_by} has cut"
                    + (f" to {had}" if had is not None else "")
                    + "; such a frame does not fold into one window of the original picture. "
                    f"Make {name} at most as large, or leave one of the two out"
                )
        return replace(self, height=height, width=width, cropped_by=name)
