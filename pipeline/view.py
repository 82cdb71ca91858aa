"""What a backend has to show of a picture, seen from the picture as it is stored: EXIF's orientation undone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.pipeline.probe import Picture
from headrace.pipeline.transforms import Params

#: EXIF orientation: (transpose first, then mirror left and right, then top and bottom).
_UPRIGHT = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """Along one axis, the pixels of the result that show the picture, and the stretch of it that they show.

    A pixel of the result shows the picture if its middle lies inside. All others have the colour of what is outside.

    Attributes:
        first: of these pixels.
        last: behind the last of them; not after `first` if the picture is not to be seen at all.
        start: where the stretch begins, in pixels of the stored picture.
        end: where it ends.
    """

    first: int
    last: int
    start: float
    end: float

    @classmethod
    def of(cls, low: float, high: float, length: int, pixels: int) -> Shown:
        """Of a window low..high that is cut into so many pixels, in a picture 0..length."""
        step = (high - low) / pixels
        first = max(0, math.ceil(-low / step - 0.5))
        last = min(pixels, math.ceil((length - low) / step - 0.5))
        start = low if first == 0 else low + first * step
        end = high if last == pixels else low + last * step
        return cls(first, last, max(start, 0.0), min(end, float(length)))


@dataclass(frozen=True, slots=True)
class View:
    """A window in the stored picture, and how the result is turned upright.

    Attributes:
        box: the window, x0, y0, x1, y1 in pixels.
        size: (width, height) into which it is resampled.
        whole: (width, height) of the picture.
        transpose: whether rows and columns of the result change places.
        mirror_x: whether the result is then mirrored left and right.
        mirror_y: likewise top and bottom.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]
    whole: tuple[int, int]
    transpose: bool
    mirror_x: bool
    mirror_y: bool

    @classmethod
    def of(cls, picture: Picture, params: Params, i: int) -> View:
        """By row `i` of the parameters."""
        transpose, flip_x, flip_y = _UPRIGHT[picture.orientation]
        x0, y0, x1, y1 = params.box[i].tolist()
        (height, width), whole = params.size, (picture.width, picture.height)
        # From the upright picture back to the stored one.
        if flip_x:
            x0, x1 = picture.width - x1, picture.width - x0
        if flip_y:
            y0, y1 = picture.height - y1, picture.height - y0
        if transpose:
            x0, y0, x1, y1, width, height, whole = y0, x0, y1, x1, height, width, whole[::-1]
        mirror_x, mirror_y = flip_x ^ bool(params.mirror_x[i]), flip_y ^ bool(params.mirror_y[i])
        return cls((x0, y0, x1, y1), (width, height), whole, transpose, mirror_x, mirror_y)

    @property
    def step(self) -> tuple[float, float]:
        """Pixels of the window for one of the result, across and down."""
        x0, y0, x1, y1 = self.box
        return (x1 - x0) / self.size[0], (y1 - y0) / self.size[1]

    @property
    def margin(self) -> float:
        """Pixels of the picture around the window, where they are fewest; below 0 if it leaves the picture."""
        x0, y0, x1, y1 = self.box
        return min(x0, y0, self.whole[0] - x1, self.whole[1] - y1)

    @property
    def across(self) -> Shown:
        """Along a row."""
        return Shown.of(self.box[0], self.box[2], self.whole[0], self.size[0])

    @property
    def down(self) -> Shown:
        """Along a column."""
        return Shown.of(self.box[1], self.box[3], self.whole[1], self.size[1])
