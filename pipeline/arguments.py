"""What arguments of transforms may be: sizes, colours, spans, as they are written, made into one form.

A value that is wrong is a ValueError that says what is allowed; pydantic puts the argument's name before it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from headrace.pipeline.colour import Colour

MAX_SIDE = 16384  # pixels of an output; a mistyped size should not ask for terabytes of slots

#: Of a colour; from 255 on nothing but black and white is left, and far beyond it levels overflow.
_MAX_FACTOR = 1000.0

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


def _numbers(value: object) -> list[float]:
    """Those of a list of numbers that a float holds, none where it is anything else."""
    items = list(value) if isinstance(value, list | tuple) else []
    most = sys.float_info.max
    good = all(isinstance(v, int | float) and not isinstance(v, bool) and -most <= v <= most for v in items)
    return [float(v) for v in items] if good else []


def _show(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _span(positive: bool, most: float = math.inf) -> BeforeValidator:
    bounds = f"{'0 < min' if positive else '0 <= min'} <= max{'' if math.isinf(most) else f' <= {most:g}'}"

    def check(value: object) -> tuple[float, float]:
        match _numbers(value):
            case [low, high] if 0 <= low <= high <= most and high > 0 and (low > 0 or not positive):
                return low, high
        raise ValueError(f"{_show(value)} is not [min, max], two numbers with {bounds}")

    return BeforeValidator(check)


def _around(neutral: float, least: float, most: float) -> BeforeValidator:
    """[min, max], or by how much at most they differ from what changes nothing, which is None."""
    one, bounds = f"from 0 to {most - neutral:g}", f"{least:g} <= min <= max <= {most:g}"

    def check(value: object) -> tuple[float, float] | None:
        if value is None:
            return None
        match _numbers(value if isinstance(value, list | tuple) else [value]):
            case [by] if by >= 0:
                low, high = max(neutral - by, least), neutral + by
            case [low, high]:
                pass
            case _:
                low, high = math.inf, -math.inf
        if not least <= low <= high <= most:
            raise ValueError(f"{_show(value)} is neither one number {one} nor [min, max], two numbers with {bounds}")
        return None if low == high == neutral else (low, high)

    return BeforeValidator(check)


def _sigma(value: object) -> tuple[float, float]:
    match _numbers(value if isinstance(value, list | tuple) else [value]):
        case [low] if 0 < low <= MAX_SIDE:
            return low, low
        case [low, high] if 0 < low <= high <= MAX_SIDE:
            return low, high
    raise ValueError(f"{_show(value)} is neither one number nor two, [min, max], with 0 < min <= max <= {MAX_SIDE}")


def _odd(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % 2 == 0:
        raise ValueError(f"{value!r} is not an odd whole number of pixels, from 1 on")
    return value


def _kernel(value: object) -> tuple[int, int]:
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(sides) not in (1, 2):
        raise ValueError(f"{sides!r} is neither one number nor [width, height]")
    width, height = (_odd(side) for side in (sides * 2)[:2])
    return width, height


def _threshold(value: object) -> float:
    match _numbers([value]):
        case [level] if 0 <= level <= 255:
            return level
    raise ValueError(f"{value!r} is not a level, a number from 0 to 255")


def _bits(value: object) -> int:
    return _whole(value, 8, "a number of bits")


def _erased_to(value: object) -> Literal["mean"] | tuple[float, float, float]:
    if isinstance(value, str) and value == "mean":
        return "mean"
    allowed = 'a number from 0 to 1, [red, green, blue] of such, or "mean", which is the mean of the stream\'s output'
    if isinstance(value, str) and value == "random":
        raise ValueError(
            f"'random' would need a draw for each value of each picture, so Headrace has it not; write {allowed}, or "
            "erase in the trainer"
        )
    levels = _numbers(value if isinstance(value, list | tuple) else [value])
    if len(levels) in (1, 3) and all(0 <= level <= 1 for level in levels):
        red, green, blue = (levels * 3)[:3]
        return red, green, blue
    hint = "; divide levels by 255" if levels and all(0 <= level <= 255 for level in levels) else ""
    raise ValueError(f"{_show(value)} is not {allowed}{hint}")


#: One number is both sides.
HeightAndWidth = Annotated[tuple[int, int], BeforeValidator(_height_and_width)]
#: One level is all three.
Fill = Annotated[Colour, BeforeValidator(_colour)]
#: One number is every side, two are left and right, top and bottom; kept as left, top, right, bottom.
Padding = Annotated[tuple[int, int, int, int], BeforeValidator(_padding)]
Probability = Annotated[float, Field(ge=0, le=1, strict=True)]
#: The length of the shorter side, or height and width.
ShorterOrExact = Annotated[int | tuple[int, int] | None, BeforeValidator(_or_none(_shorter_or_exact))]
LongerSide = Annotated[int | None, BeforeValidator(_or_none(_side))]
#: Shares of an area, and width over height: smallest and largest.
Shares = Annotated[tuple[float, float], _span(positive=False)]
Ratios = Annotated[tuple[float, float], _span(positive=True)]
ErasedShares = Annotated[tuple[float, float], _span(positive=False, most=1.0)]
#: Smallest and largest factor; one number x is from 1 - x to 1 + x. None changes nothing.
Factors = Annotated[tuple[float, float] | None, _around(1.0, 0.0, _MAX_FACTOR)]
#: Smallest and largest turn; one number x is from -x to x. None changes nothing.
Turns = Annotated[tuple[float, float] | None, _around(0.0, -0.5, 0.5)]
#: Smallest and largest; one number is both.
Sigma = Annotated[tuple[float, float], BeforeValidator(_sigma)]
#: One number is both sides; kept as width, height, the order in which torchvision has it.
KernelSize = Annotated[tuple[int, int], BeforeValidator(_kernel)]
Threshold = Annotated[float, BeforeValidator(_threshold)]
Bits = Annotated[int, BeforeValidator(_bits)]
#: One number is all three.
ErasedTo = Annotated[Literal["mean"] | tuple[float, float, float], BeforeValidator(_erased_to)]
