"""The two kinds of transforms: geometric ones, which fold into one window, one size and two mirror flags
(`geometry.py`), and photometric ones, which become steps of colour (`colour.py`). Each is an inert description that
turns uniform numbers into parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors import ConfigError
from headrace.output import Output
from headrace.pipeline.colour import Step
from headrace.pipeline.geometry import Flags, Floats, Geometry, Ints, Outline

GRID = 2.0**-16


def grid(values: Floats) -> Floats:
    """Rounded to multiples of 2**-16: `np.exp` differs by one unit in the last place between CPUs."""
    return np.rint(values / GRID) * GRID


def between(low: float, high: float, u: Floats) -> Floats:
    """A number from `low` to `high`, of one from 0 to 1."""
    return low + (high - low) * u


def pick(u: Floats, choices: Ints | int) -> Ints:
    """One of `0 .. choices - 1`. Of a float below 1 no product rounds up to `choices`, which is at most 2**53."""
    return (u * choices).astype(np.int64)


def rectangle(
    area: Floats | float,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    u: Floats,
    fits: Callable[[Floats, Floats], Flags],
) -> tuple[Ints, Ints]:
    """Two sides in pixels, int64 [n] each: of several tries, as torchvision makes them, the first that fits; zero
    where none does.

    Args:
        area: of the pictures, in pixels: [n, 1], or one for all.
        scale: smallest and largest share of it.
        ratio: smallest and largest of the first side over the second.
        u: float64 [n, 2 * tries], each in [0, 1).
        fits: which sides do; both are whole numbers, float64 [n, tries].
    """
    target = grid(area * between(*scale, u[:, 0::2]))
    shape = np.maximum(grid(np.exp(between(math.log(ratio[0]), math.log(ratio[1]), u[:, 1::2]))), GRID)
    # Square roots, unlike powers and logarithms, are the same on every CPU.
    sides = np.rint(np.sqrt(target * shape)), np.rint(np.sqrt(target / shape))
    good = fits(*sides)
    rows, tried, found = np.arange(len(u)), good.argmax(axis=1), good.any(axis=1)
    one, other = (np.where(found, side[rows, tried], 0).astype(np.int64) for side in sides)
    return one, other


class Transform(BaseModel):
    """A transform: frozen, compared by value. Positional arguments go in the order of the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    draws: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            ConfigError: an argument is wrong; says which and what is allowed.
        """
        fields = list(type(self).model_fields)
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__} takes at most {len(fields)} arguments: {', '.join(fields)}")
        given = dict(zip(fields, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{type(self).__name__}: {', '.join(sorted(twice))} is given twice")
        try:
            super().__init__(**given, **kwargs)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explained(error, type(self))}") from None

    # Or pydantic would call it to validate a mapping, and no longer see one problem beside the other.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def settled(self, output: Output) -> Self:
        """With numbers in the place of what stands for some other part of its stream.

        Raises:
            ValueError: that part cannot stand there.
        """
        return self

    def plain(self) -> dict[str, Any]:
        """`{name: {argument: value}}` with the defaults filled in: equal for equal transforms, and plain data."""
        return {self.name: self.model_dump(mode="json")}


class Geometric(Transform):
    """A transform that decides what is seen of a picture, and where."""

    def outline(self, outline: Outline, name: str) -> Outline:
        """What is known of every picture after this transform, called `name` in its chain. One that only mirrors
        leaves it as it is.

        Raises:
            ValueError: the chain does not fold.
        """
        return outline

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        """The pictures after this transform; `u` is float64 [n, draws], each in [0, 1)."""
        raise NotImplementedError

    def unfit(self, height: int, width: int) -> str | None:
        """Why a picture of this size cannot be transformed, or None."""
        return None


class Photometric(Transform):
    """A transform that changes the colours of a picture which has its last size."""

    def unsuited(self, height: int, width: int) -> str | None:
        """Why no picture of this size can be transformed, or None."""
        return None

    def steps(self, height: int, width: int, u: Floats) -> list[Step]:
        """What is to be done to pictures of this size; `u` is float64 [n, draws], each in [0, 1).

        How many steps there are, and of which kinds, depends on nothing that is drawn.
        """
        raise NotImplementedError


#: Arguments that torchvision has and Headrace has not, with the reason.
_LEFT_OUT = {
    "antialias": "Resampling is always antialiased",
    "padding_mode": "Padding is always constant, by the colour fill; edge, reflect and symmetric do not fold",
    "inplace": "It would change nothing",
}


def explained(error: ValidationError, kind: type[Transform]) -> str:
    """What is wrong with the arguments of a transform, and what is allowed."""

    def sentence(found: Mapping[str, Any]) -> str:
        key = ".".join(str(part) for part in found["loc"])
        if found["type"] == "extra_forbidden":
            hint = f". {_LEFT_OUT[key]}" if key in _LEFT_OUT else ""
            return f"{key}: there is no such argument; there are {', '.join(kind.model_fields)}{hint}"
        if found["type"] == "missing":
            return f"{key}: is required"
        message = str(found["msg"]).removeprefix("Value error, ")
        if not key:
            return message
        shown = "" if found["type"] == "value_error" else f" (got {found['input']!r})"
        return f"{key}: {message}{shown}"

    return "; ".join(sentence(found) for found in error.errors(include_url=False))
