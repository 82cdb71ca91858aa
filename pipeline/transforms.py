"""What may happen to a picture: torchvision's transforms, by their names, arguments and defaults.

Each is one class: an inert description, how many uniform numbers it draws per sample, and how it turns them and the
pictures' sizes into geometry. All of them fold into one window, one size and two mirror flags (`geometry.py`), which
any backend can render; `plan` does that for a chunk.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headrace.draws import uniforms
from headrace.errors import ConfigError
from headrace.pipeline.geometry import Floats, Geometry, Ints, Outline

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


def _span(positive: bool) -> AfterValidator:
    def check(value: tuple[float, float]) -> tuple[float, float]:
        low, high = value
        if not (math.isfinite(high) and 0 <= low <= high and high > 0 and (low > 0 or not positive)):
            raise ValueError(f"{list(value)} is not [min, max] with {'0 < min' if positive else '0 <= min'} <= max")
        return value

    return AfterValidator(check)


GRID = 2.0**-16


def grid(values: Floats) -> Floats:
    """Rounded to multiples of 2**-16: `np.exp` differs by one unit in the last place between CPUs."""
    return np.rint(values / GRID) * GRID


#: One number is the shorter side, two are exact.
ShorterOrExact = Annotated[int | tuple[int, int], BeforeValidator(_shorter_or_exact)]
#: One number is both sides.
HeightAndWidth = Annotated[tuple[int, int], BeforeValidator(_height_and_width)]
Probability = Annotated[float, Field(ge=0, le=1)]


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
            raise ConfigError(f"{type(self).__name__}: {_plain(error, type(self))}") from None

    # Or pydantic would call it to validate a mapping, and no longer see one problem beside the other.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def outline(self, outline: Outline, name: str) -> Outline:
        """What is known of every picture after this transform, called `name` in its chain.

        Raises:
            ValueError: the chain does not fold.
        """
        return outline

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        """The pictures after this transform; `u` is float64 [n, draws], each in [0, 1)."""
        raise NotImplementedError

    def plain(self) -> dict[str, Any]:
        """`{name: {argument: value}}` with the defaults filled in: equal for equal transforms, and plain data."""
        return {self.name: self.model_dump(mode="json")}


class Resize(Transform):
    """Resize to `size`: one number is the length of the shorter side, `[height, width]` is exact."""

    if TYPE_CHECKING:  # what a caller may write is more than what a field holds

        def __init__(self, size: int | Sequence[int], interpolation: Interpolation = ...) -> None: ...

    name = "resize"
    size: ShorterOrExact
    interpolation: Interpolation = "bilinear"

    def outline(self, outline: Outline, name: str) -> Outline:
        h: int | None
        w: int | None
        if isinstance(self.size, tuple):
            h, w = self.size
        elif outline.height is not None and outline.width is not None:
            new = _shorter_side(self.size, np.array([outline.height]), np.array([outline.width]))
            h, w = int(new[0][0]), int(new[1][0])
        else:
            h = w = None
        return outline.resized(name, h, w, self.interpolation)

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        if isinstance(self.size, tuple):
            height, width = (np.full_like(geometry.y.pixels, side) for side in self.size)
        else:
            height, width = _shorter_side(self.size, geometry.y.pixels, geometry.x.pixels)
        return Geometry(geometry.y.resized(height), geometry.x.resized(width))


def _shorter_side(size: int, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
    # torchvision's `int(size * long / short)`, cut off and not rounded.
    short, long = np.minimum(heights, widths), np.maximum(heights, widths)
    longer = (size * long / short).astype(np.int64)
    return np.where(heights <= widths, size, longer), np.where(widths <= heights, size, longer)


class CenterCrop(Transform):
    """Cut `size` out of the middle; where the picture is smaller it is padded with black."""

    if TYPE_CHECKING:

        def __init__(self, size: int | Sequence[int]) -> None: ...

    name = "center_crop"
    size: HeightAndWidth

    def outline(self, outline: Outline, name: str) -> Outline:
        return outline.cropped(name, *self.size)

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        y, x = (
            axis.cropped(_middle(axis.pixels, side), np.full_like(axis.pixels, side))
            for axis, side in zip((geometry.y, geometry.x), self.size, strict=True)
        )
        return Geometry(y, x)


def _middle(pixels: Ints, side: int) -> Ints:
    # torchvision rounds half to even where it cuts, and puts the odd pixel last where it pads.
    cut = np.rint((pixels - side) / 2.0).astype(np.int64)
    return np.where(pixels < side, -((side - pixels) // 2), cut)


class RandomResizedCrop(Transform):
    """Cut out a window of random area and aspect ratio and resize it to `size`.

    `scale` bounds the window's share of the picture's area, `ratio` its width over its height. As in torchvision ten
    windows are tried, and if none fits, the middle of the picture is taken with the nearest allowed ratio.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            size: int | Sequence[int],
            scale: Sequence[float] = ...,
            ratio: Sequence[float] = ...,
            interpolation: Interpolation = ...,
        ) -> None: ...

    name = "random_resized_crop"
    size: HeightAndWidth
    scale: Annotated[tuple[float, float], _span(positive=False)] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], _span(positive=True)] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    tries: ClassVar[int] = 10
    draws = 2 * tries + 2  # area and ratio per try, then the place

    def outline(self, outline: Outline, name: str) -> Outline:
        # The window never leaves the picture at hand, so it pads nothing.
        return replace(outline, cropped_by=name).resized(name, *self.size, self.interpolation)

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        height, width = self._window(geometry.y.pixels, geometry.x.pixels, u[:, :-2])
        top = _pick(u[:, -2], geometry.y.pixels - height + 1)
        left = _pick(u[:, -1], geometry.x.pixels - width + 1)
        # What did not fit in ten tries is cut from the middle.
        tried = height > 0
        middle_height, middle_width = self._middle_window(geometry.y.pixels, geometry.x.pixels)
        top = np.where(tried, top, (geometry.y.pixels - middle_height) // 2)
        left = np.where(tried, left, (geometry.x.pixels - middle_width) // 2)
        y = geometry.y.cropped(top, np.where(tried, height, middle_height))
        x = geometry.x.cropped(left, np.where(tried, width, middle_width))
        return Geometry(*(a.resized(np.full_like(a.pixels, s)) for a, s in zip((y, x), self.size, strict=True)))

    def _window(self, heights: Ints, widths: Ints, u: Floats) -> tuple[Ints, Ints]:
        """Height and width of the first try that fits, zero where none does."""
        area = (heights * widths)[:, None].astype(np.float64)
        target = grid(area * _between(*self.scale, u[:, 0::2]))
        log_ratio = _between(math.log(self.ratio[0]), math.log(self.ratio[1]), u[:, 1::2])
        ratio = np.maximum(grid(np.exp(log_ratio)), GRID)
        # Square roots, unlike powers and logarithms, are the same on every CPU.
        width = np.rint(np.sqrt(target * ratio)).astype(np.int64)
        height = np.rint(np.sqrt(target / ratio)).astype(np.int64)
        fits = (0 < width) & (width <= widths[:, None]) & (0 < height) & (height <= heights[:, None])
        rows, first = np.arange(len(heights)), fits.argmax(axis=1)
        found = fits.any(axis=1)
        return np.where(found, height[rows, first], 0), np.where(found, width[rows, first], 0)

    def _middle_window(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        low, high = self.ratio
        ratio = widths / heights
        # At least one pixel: torchvision would cut a window without any out of a very thin picture.
        height = np.where(ratio < low, np.maximum(np.rint(widths / low), 1), heights).astype(np.int64)
        width = np.where(ratio > high, np.maximum(np.rint(heights * high), 1), widths).astype(np.int64)
        return np.minimum(height, heights), np.minimum(width, widths)


def _between(low: float, high: float, u: Floats) -> Floats:
    return low + (high - low) * u


def _pick(u: Floats, choices: Ints) -> Ints:
    """One of `0 .. choices - 1`."""
    # The product may round up to `choices` itself.
    return np.minimum((u * choices).astype(np.int64), choices - 1)


class RandomHorizontalFlip(Transform):
    """Mirror left and right with probability `p`."""

    name = "random_horizontal_flip"
    draws = 1
    p: Probability = 0.5

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        return Geometry(geometry.y, geometry.x.flipped(u[:, 0] < self.p))


class RandomVerticalFlip(Transform):
    """Mirror top and bottom with probability `p`."""

    name = "random_vertical_flip"
    draws = 1
    p: Probability = 0.5

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        return Geometry(geometry.y.flipped(u[:, 0] < self.p), geometry.x)


#: Every transform, by the name that a configuration uses.
TRANSFORMS: dict[str, type[Transform]] = {
    t.name: t for t in (RandomResizedCrop, Resize, CenterCrop, RandomHorizontalFlip, RandomVerticalFlip)
}


def parse(item: object) -> Transform:
    """The transform that a configuration means: `name`, `{name: {argument: value}}`, or a `Transform` itself.

    Raises:
        ValueError: says what is wrong and what is allowed.
    """
    if isinstance(item, Transform):
        return item
    if isinstance(item, str):
        return _build(item, {})
    if isinstance(item, Mapping) and len(item) == 1:
        [(name, arguments)] = item.items()
        return _build(name, {} if arguments is None else arguments)
    raise ValueError(f"{item!r} is not a transform: write a name or {{name: {{argument: value}}}}, one per list item")


def _build(name: object, arguments: object) -> Transform:
    kind = TRANSFORMS.get(name) if isinstance(name, str) else None
    if kind is None:
        near = difflib.get_close_matches(_snake(str(name)), TRANSFORMS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{name!r} is not a transform{hint}; there are {', '.join(TRANSFORMS)}")
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        fields = ", ".join(kind.model_fields)
        raise ValueError(f"{name}: {arguments!r} is not a mapping of arguments, which are {fields}")
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        raise ValueError(f"{name}: {_plain(error, kind)}") from None


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _plain(error: ValidationError, kind: type[Transform]) -> str:
    def sentence(found: Mapping[str, Any]) -> str:
        key = ".".join(str(part) for part in found["loc"])
        if found["type"] == "extra_forbidden":
            return f"{key}: there is no such argument; there are {', '.join(kind.model_fields)}"
        if found["type"] == "missing":
            return f"{key}: is required"
        message = str(found["msg"]).removeprefix("Value error, ")
        shown = "" if found["type"] == "value_error" else f" (got {found['input']!r})"
        return f"{key}: {message}{shown}"

    return "; ".join(sentence(found) for found in error.errors(include_url=False))


def named(transforms: Sequence[Transform]) -> Iterator[tuple[str, Transform]]:
    """Each with its ordinal name: `resize`, and `resize.2` for a second one of the kind.

    The name is the key of its draws, so that another transform, before it or after it, leaves them alone.
    """
    seen: dict[str, int] = {}
    for transform in transforms:
        n = seen[transform.name] = seen.get(transform.name, 0) + 1
        yield transform.name if n == 1 else f"{transform.name}.{n}", transform


def _outline(transforms: Sequence[Transform]) -> tuple[int, int, str]:
    outline = Outline()
    for name, transform in named(transforms):
        outline = transform.outline(outline, name)
    if outline.height is None or outline.width is None:
        after = f"after {', '.join(name for name, _ in named(transforms))} " if transforms else ""
        raise ValueError(
            f"transforms: {after}the pictures have no fixed size, so they cannot be stacked into a batch. "
            "Add random_resized_crop, center_crop, or resize with [height, width]"
        )
    return outline.height, outline.width, outline.interpolation


def output_size(transforms: Sequence[Transform]) -> tuple[int, int]:
    """(height, width) of every picture that the chain makes.

    Raises:
        ValueError: the chain does not fold into one resample, or has no fixed size at its end; says why.
    """
    height, width, _ = _outline(transforms)
    return height, width


@dataclass(frozen=True, slots=True)
class Params:
    """What a backend needs to render some pictures; row `i` is one picture.

    Attributes:
        box: float64 [n, 4], the window x0, y0, x1, y1 in pixels of the picture after its EXIF orientation. It may
            extend beyond the picture: black there.
        mirror_x: bool [n], mirrored left and right after resampling.
        mirror_y: bool [n], likewise top and bottom.
        size: (height, width) of the output.
        interpolation: "bilinear", "bicubic" or "lanczos", antialiased.
    """

    box: NDArray[np.float64]
    mirror_x: NDArray[np.bool_]
    mirror_y: NDArray[np.bool_]
    size: tuple[int, int]
    interpolation: str

    def __len__(self) -> int:
        return len(self.box)

    def take(self, rows: NDArray[np.int64]) -> Params:
        """Those of some rows, in that order."""
        return replace(self, box=self.box[rows], mirror_x=self.mirror_x[rows], mirror_y=self.mirror_y[rows])


def plan(
    transforms: Sequence[Transform],
    seed: int,
    epoch: int,
    first: int,
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> Params:
    """The parameters of the positions from `first` on.

    Args:
        transforms: the chain.
        seed: of the stream.
        epoch: of the positions.
        first: position of row 0.
        heights: int64 [n], of the pictures after their EXIF orientation, at least 1.
        widths: int64 [n], likewise.

    Raises:
        ValueError: as `output_size`.
    """
    height, width, interpolation = _outline(transforms)
    geometry = Geometry.whole(heights, widths)
    for name, transform in named(transforms):
        u = uniforms(seed, epoch, name, first, len(heights), transform.draws)
        geometry = transform.apply(geometry, u)
    return Params(geometry.box, geometry.x.mirror, geometry.y.mirror, (height, width), interpolation)
