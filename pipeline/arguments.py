"""What arguments of transforms may be: sizes, colours, spans, as they are written, made into one form.

A value that is wrong is a ValueError that says what is allowed; pydantic puts the argument's name before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from headrace.pipeline.colour import Colour

MAX_SIDE = 16384  # pixels of an output; a mistyped size should not ask for terabytes of slots

Interpolation = Literal["bilinear", "bicubic", "lanczos"]


def _side(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIDE:
        raise ValueError(f"{value!r} is not a whole number of pixels from 1 to {MAX_SIDE}")
    return value


def _shorter_or_exact(value: object) -> int | tuple[int, int]:
    if isinstance(value, list | tuple):
        if len(value) == 1:
            return _side(value[0])
        if len(value) != 2:
            raise ValueError(f"{list(value)!r} is neither one number nor [height, width]")
        return _side(value[0]), _side(value[1])
    return _side(value)


def _height_and_width(value: object) -> tuple[int, int]:
    size = _shorter_or_exact(value)
    return size if isinstance(size, tuple) else (size, size)


def _or_none(check: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else check(value)


def _whole(value: object, most: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not {what} from 0 to {most}")
    return value


def _colour(value: object) -> Colour:
    if isinstance(value, list | tuple):
        if len(value) not in (1, 3):
            raise ValueError(f"{list(value)!r} is neither one level nor [red, green, blue]")
        value = value[0] if len(value) == 1 else value
    levels = value if isinstance(value, list | tuple) else (value,) * 3
    red, green, blue = (_whole(level, 255, "a level") for level in levels)
    return red, green, blue


def _padding(value: object) -> tuple[int, int, int, int]:
    if value is None:
        return 0, 0, 0, 0
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(sides) not in (1, 2, 4):
        raise ValueError(
            f"{sides!r} is neither one number nor [left and right, top and bottom] nor [left, top, right, bottom]"
        )
    left, top, right, bottom = (_whole(side, MAX_SIDE, "a number of pixels") for side in (sides * 4)[:4])
    return left, top, right, bottom


def _span(positive: bool) -> BeforeValidator:
    bound = "0 < min" if positive else "0 <= min"

    def check(value: object) -> tuple[float, float]:
        two = list(value) if isinstance(value, list | tuple) else []
        if len(two) == 2 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in two):
            low, high = float(two[0]), float(two[1])
            if math.isfinite(high) and 0 <= low <= high and high > 0 and (low > 0 or not positive):
                return low, high
        shown = list(value) if isinstance(value, tuple) else value
        raise ValueError(f"{shown!r} is not [min, max], two numbers with {bound} <= max")

    return BeforeValidator(check)


#: One number is both sides.
HeightAndWidth = Annotated[tuple[int, int], BeforeValidator(_height_and_width)]
#: One level is all three.
Fill = Annotated[Colour, BeforeValidator(_colour)]
#: One number is every side, two are left and right, top and bottom; kept as left, top, right, bottom.
Padding = Annotated[tuple[int, int, int, int], BeforeValidator(_padding)]
Probability = Annotated[float, Field(ge=0, le=1)]
#: The length of the shorter side, or height and width.
ShorterOrExact = Annotated[int | tuple[int, int] | None, BeforeValidator(_or_none(_shorter_or_exact))]
LongerSide = Annotated[int | None, BeforeValidator(_or_none(_side))]
#: Shares of an area, and width over height: smallest and largest.
Shares = Annotated[tuple[float, float], _span(positive=False)]
Ratios = Annotated[tuple[float, float], _span(positive=True)]
