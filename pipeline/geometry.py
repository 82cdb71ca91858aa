"""The algebra that folds resizes, crops and flips into one window, one size and two mirror flags.

A chain of these never needs more than one resample: each axis of the picture at hand is a stretch of the source's
axis, cut into so many pixels, maybe mirrored. Height and width never meet, so a `Geometry` is two equal `Axis`.
Everything is an array over the samples of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.pipeline.colour import Colour

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
BLACK: Colour = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the pictures at hand.

    Attributes:
        low: float64 [n], where the stretch begins, in pixels of the source.
        high: float64 [n], where it ends. Both may lie outside the source.
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

    def padded(self, before: Ints | int, after: Ints | int) -> Axis:
        """With so many pixels more at its two ends."""
        ahead = np.zeros_like(self.pixels)
        ahead += before
        return self.cropped(-ahead, self.pixels + ahead + after)

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
    """What is known of a chain before any picture is: is there one window, one size and one colour around it?

    Attributes:
        height: of every picture so far, or None where it depends on the picture.
        width: likewise.
        least: height and width that every picture has at least.
        resampled_by: the transform that has resampled, by its ordinal name, or None.
        cropped_by: the last that has cut pixels away, or None.
        padded_by: the last that was asked to add pixels around the picture, or None.
        fill: the colour of what lies outside the picture.
        filled_by: whose it is, or None as long as nothing outside can show.
        interpolation: of the one resample.
    """

    height: int | None = None
    width: int | None = None
    least: tuple[int, int] = (1, 1)
    resampled_by: str | None = None
    cropped_by: str | None = None
    padded_by: str | None = None
    fill: Colour = BLACK
    filled_by: str | None = None
    interpolation: str = "bilinear"

    def sized(self, height: int | None, width: int | None, least: tuple[int, int] = (1, 1)) -> Outline:
        """With another height and width, or if they depend on the picture, at least `least`."""
        return replace(self, height=height, width=width, least=(height or least[0], width or least[1]))

    def resized(
        self, name: str, height: int | None, width: int | None, interpolation: str, least: tuple[int, int] = (1, 1)
    ) -> Outline:
        """After a resample.

        Raises:
            ValueError: there has been one already, or padding that it would resample too.
        """
        if self.resampled_by is not None:
            raise ValueError(
                f"transforms: {self.resampled_by} and {name} would each resample the picture, and Headrace resamples "
                "once, from the original pixels; keep one of the two"
            )
        if self.padded_by is not None:
            raise ValueError(
                f"transforms: {name} would resample what {self.padded_by} has put around the picture, and the border "
                "of the picture with it, which does not fold into one window of the original picture. "
                f"Pad after {name}, by as many pixels as the result shall have"
            )
        return replace(self.sized(height, width, least), resampled_by=name, interpolation=interpolation)

    def padded(self, name: str, vertical: int, horizontal: int, fill: Colour) -> Outline:
        """After so many pixels more, above and below, left and right together.

        Raises:
            ValueError: an earlier crop has cut the picture, or the colour is not that of earlier padding.
        """
        if not vertical and not horizontal:
            return self
        filled = self.framed(name, fill)
        return filled.sized(
            None if self.height is None else self.height + vertical,
            None if self.width is None else self.width + horizontal,
            (self.least[0] + vertical, self.least[1] + horizontal),
        )

    def framed(self, name: str, fill: Colour) -> Outline:
        """With something around the picture.

        Raises:
            ValueError: as `padded`.
        """
        if self.cropped_by is not None:
            raise ValueError(
                f"transforms: {name} would pad what {self.cropped_by} has cut; such a frame does not fold into one "
                f"window of the original picture, which goes on there. Pad before {self.cropped_by}, or not at all"
            )
        return replace(self._filled(name, fill), padded_by=name)

    def cropped(self, name: str, height: int, width: int, fill: Colour = BLACK) -> Outline:
        """After a crop to a fixed size, which pads what is smaller.

        Raises:
            ValueError: it would pad what an earlier crop has cut, or with another colour than earlier padding.
        """
        for axis, had, wanted in (("high", self.height, height), ("wide", self.width, width)):
            if self.cropped_by is not None and (had is None or had < wanted):
                raise ValueError(
                    f"transforms: {name} would pad to {wanted} pixels {axis} what {self.cropped_by} has cut"
                    + (f" to {had}" if had is not None else "")
                    + "; such a frame does not fold into one window of the original picture. "
                    f"Make {name} at most as large, or leave one of the two out"
                )
        may_pad = self.least[0] < height or self.least[1] < width
        outline = self._filled(name, fill) if may_pad else self
        return replace(outline.sized(height, width), cropped_by=name)

    def _filled(self, name: str, fill: Colour) -> Outline:
        if self.filled_by is not None and self.fill != fill:
            raise ValueError(
                f"transforms: {self.filled_by} puts {list(self.fill)} around the picture and {name} {list(fill)}, and "
                "what lies outside a picture has one colour. Give both the same fill (center_crop, where it pads, has "
                "black)"
            )
        return replace(self, fill=fill, filled_by=name)
