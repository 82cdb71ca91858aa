"""What may happen to a picture: torchvision's transforms, by their names, arguments and defaults.

Each is one class: an inert description, how many uniform numbers it draws per sample, and how it turns them and the
pictures' sizes into parameters. Those in here are geometry, and fold into one window, one size and two mirror flags;
those of `photometric.py` become steps of colour after that. Any backend can render both; `plan` makes them for a chunk.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from headrace.draws import uniforms
from headrace.pipeline.arguments import (
    MAX_SIDE,
    Fill,
    HeightAndWidth,
    Interpolation,
    LongerSide,
    Padding,
    Probability,
    Ratios,
    Shares,
    ShorterOrExact,
)
from headrace.pipeline.colour import Colour, Erase, Step
from headrace.pipeline.geometry import BLACK, Axis, Floats, Geometry, Ints, Outline
from headrace.pipeline.kinds import Geometric, Photometric, explained, pick, rectangle
from headrace.pipeline.kinds import Transform as Transform
from headrace.pipeline.photometric import (
    ColorJitter,
    GaussianBlur,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomPosterize,
    RandomSolarize,
)


class Resize(Geometric):
    """Resize to `size`: one number is the length of the shorter side, `[height, width]` is exact.

    The longer side has at most `max_size` pixels, if it is given. Without a `size` it has just so many.
    """

    if TYPE_CHECKING:  # or type checkers would take keywords only, and only what a field holds

        def __init__(
            self, size: int | Sequence[int] | None, interpolation: Interpolation = ..., max_size: int | None = ...
        ) -> None: ...

    name = "resize"
    size: ShorterOrExact
    interpolation: Interpolation = "bilinear"
    max_size: LongerSide = None

    @model_validator(mode="after")
    def _sides(self) -> Self:
        if self.size is None and self.max_size is None:
            raise ValueError("size: may be null only where max_size is given")
        if isinstance(self.size, tuple) and self.max_size is not None:
            raise ValueError("max_size: belongs to a size of one number, or to none; [height, width] is exact")
        if isinstance(self.size, int) and self.max_size is not None and self.max_size <= self.size:
            raise ValueError(
                f"max_size: {self.max_size} is of the longer side and must be larger than size, {self.size}"
            )
        return self

    def outline(self, outline: Outline, name: str) -> Outline:
        if isinstance(self.size, tuple):
            return outline.resized(name, *self.size, self.interpolation)
        if outline.height is not None and outline.width is not None:
            height, width = (int(v[0]) for v in self._sizes(np.array([outline.height]), np.array([outline.width])))
            return outline.resized(name, height, width, self.interpolation)
        least = self.size if isinstance(self.size, int) and self.max_size is None else 1
        return outline.resized(name, None, None, self.interpolation, (least, least))

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        height, width = self._sizes(geometry.y.pixels, geometry.x.pixels)
        return Geometry(geometry.y.resized(height), geometry.x.resized(width))

    def _sizes(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """Heights and widths of the result. torchvision cuts fractions off and does not round."""
        if isinstance(self.size, tuple):
            return np.full_like(heights, self.size[0]), np.full_like(widths, self.size[1])
        short, long = np.minimum(heights, widths), np.maximum(heights, widths)
        if self.size is None:
            new_short, new_long = (self.max_size * short / long).astype(np.int64), np.full_like(long, self.max_size)
        else:
            new_short, new_long = np.full_like(short, self.size), (self.size * long / short).astype(np.int64)
            if self.max_size is not None:
                shrunk = (self.max_size * new_short / new_long).astype(np.int64)
                new_short = np.where(new_long > self.max_size, shrunk, new_short)
                new_long = np.minimum(new_long, self.max_size)
        new_short = np.maximum(new_short, 1)  # torchvision would make a picture without any pixel
        return np.where(heights <= widths, new_short, new_long), np.where(widths <= heights, new_short, new_long)


class CenterCrop(Geometric):
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


class RandomCrop(Geometric):
    """Cut `size` out at a random place, after `padding` was put around the picture.

    With `pad_if_needed` a picture that is still too small is padded further, on both sides by all that is missing, so
    that it comes to lie anywhere in the result. Without, it is a reject.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            size: int | Sequence[int],
            padding: int | Sequence[int] | None = ...,
            pad_if_needed: bool = ...,
            fill: int | Sequence[int] = ...,
        ) -> None: ...

    name = "random_crop"
    draws = 2
    size: HeightAndWidth
    padding: Padding = (0, 0, 0, 0)
    pad_if_needed: Annotated[bool, Field(strict=True)] = False
    fill: Fill = BLACK

    def outline(self, outline: Outline, name: str) -> Outline:
        left, top, right, bottom = self.padding
        outline = outline.padded(name, top + bottom, left + right, self.fill)
        height, width = self.size
        if not self.pad_if_needed:
            if (outline.height or height) < height or (outline.width or width) < width:
                had = [outline.height or "any", outline.width or "any"]
                raise ValueError(
                    f"transforms: {name} would cut {list(self.size)} pixels (height, width) out of pictures that have "
                    f"{had[0]} x {had[1]}; make it at most as large"
                )
            # What is too small nevertheless is a reject, so nothing is padded.
            outline = replace(outline, least=(max(outline.least[0], height), max(outline.least[1], width)))
        elif outline.least[0] < height or outline.least[1] < width:
            outline = outline.framed(name, self.fill)
        return outline.cropped(name, height, width, self.fill)

    def unfit(self, height: int, width: int) -> str | None:
        left, top, right, bottom = self.padding
        padded = height + top + bottom, width + left + right
        if self.pad_if_needed or (padded[0] >= self.size[0] and padded[1] >= self.size[1]):
            return None
        with_padding = f", with its padding {padded[0]}x{padded[1]}" if any(self.padding) else ""
        return (
            f"a picture of {height}x{width} pixels (height x width){with_padding} is too small to cut "
            f"{self.size[0]}x{self.size[1]} out of it; pad_if_needed: true would pad it"
        )

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        left, top, right, bottom = self.padding
        y, x = (
            self._cut(axis.padded(before, after), side, u[:, i])
            for i, (axis, before, after, side) in enumerate(
                ((geometry.y, top, bottom, self.size[0]), (geometry.x, left, right, self.size[1]))
            )
        )
        return Geometry(y, x)

    def _cut(self, axis: Axis, side: int, u: Floats) -> Axis:
        if self.pad_if_needed:
            missing = np.maximum(side - axis.pixels, 0)
            axis = axis.padded(missing, missing)
        offset = pick(u, np.maximum(axis.pixels - side + 1, 1))
        return axis.cropped(offset, np.full_like(axis.pixels, side))


class Pad(Geometric):
    """Put `padding` pixels of the colour `fill` around the picture: one number, `[left and right, top and bottom]` or
    `[left, top, right, bottom]`.
    """

    if TYPE_CHECKING:

        def __init__(self, padding: int | Sequence[int], fill: int | Sequence[int] = ...) -> None: ...

    name = "pad"
    padding: Padding
    fill: Fill = BLACK

    def outline(self, outline: Outline, name: str) -> Outline:
        left, top, right, bottom = self.padding
        return outline.padded(name, top + bottom, left + right, self.fill)

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        left, top, right, bottom = self.padding
        return Geometry(geometry.y.padded(top, bottom), geometry.x.padded(left, right))


class Letterbox(Geometric):
    """Resize so that the whole picture fits into `size`, keeping its ratio, with the colour `fill` around it.

    Sides are rounded to the nearest pixel; an odd pixel of the frame is at the bottom or on the right. Without
    `upscale` a picture that fits already keeps its size.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            size: int | Sequence[int],
            fill: int | Sequence[int] = ...,
            upscale: bool = ...,
            interpolation: Interpolation = ...,
        ) -> None: ...

    name = "letterbox"
    size: HeightAndWidth
    fill: Fill = BLACK
    upscale: Annotated[bool, Field(strict=True)] = True
    interpolation: Interpolation = "bilinear"

    def outline(self, outline: Outline, name: str) -> Outline:
        resized = outline.resized(name, None, None, self.interpolation)
        return resized.framed(name, self.fill).sized(*self.size)

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        (height, width), (y, x) = self.size, (geometry.y, geometry.x)
        scale = np.minimum(height / y.pixels, width / x.pixels)
        if not self.upscale:
            scale = np.minimum(scale, 1.0)
        return Geometry(_framed(y, scale, height), _framed(x, scale, width))


def _framed(axis: Axis, scale: Floats, side: int) -> Axis:
    inside = axis.resized(np.maximum(np.rint(axis.pixels * scale), 1).astype(np.int64))
    missing = side - inside.pixels
    return inside.padded(missing // 2, missing - missing // 2)


class RandomResizedCrop(Geometric):
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
    scale: Shares = (0.08, 1.0)
    ratio: Ratios = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    tries: ClassVar[int] = 10
    draws = 2 * tries + 2  # area and ratio per try, then the place

    def outline(self, outline: Outline, name: str) -> Outline:
        # The window never leaves the picture at hand, so it pads nothing.
        return replace(outline, cropped_by=name).resized(name, *self.size, self.interpolation)

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        heights, widths = geometry.y.pixels[:, None], geometry.x.pixels[:, None]
        width, height = rectangle(
            (heights * widths).astype(np.float64),
            self.scale,
            self.ratio,
            u[:, :-2],
            lambda wide, high: (0 < wide) & (wide <= widths) & (0 < high) & (high <= heights),
        )
        top = pick(u[:, -2], geometry.y.pixels - height + 1)
        left = pick(u[:, -1], geometry.x.pixels - width + 1)
        # What did not fit in ten tries is cut from the middle.
        tried = height > 0
        middle_height, middle_width = self._middle_window(geometry.y.pixels, geometry.x.pixels)
        top = np.where(tried, top, (geometry.y.pixels - middle_height) // 2)
        left = np.where(tried, left, (geometry.x.pixels - middle_width) // 2)
        y = geometry.y.cropped(top, np.where(tried, height, middle_height))
        x = geometry.x.cropped(left, np.where(tried, width, middle_width))
        return Geometry(*(a.resized(np.full_like(a.pixels, s)) for a, s in zip((y, x), self.size, strict=True)))

    def _middle_window(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        low, high = self.ratio
        ratio = widths / heights
        # At least one pixel: torchvision would cut a window without any out of a very thin picture.
        height = np.where(ratio < low, np.maximum(np.rint(widths / low), 1), heights).astype(np.int64)
        width = np.where(ratio > high, np.maximum(np.rint(heights * high), 1), widths).astype(np.int64)
        return np.minimum(height, heights), np.minimum(width, widths)


class RandomHorizontalFlip(Geometric):
    """Mirror left and right with probability `p`."""

    if TYPE_CHECKING:

        def __init__(self, p: float = ...) -> None: ...

    name = "random_horizontal_flip"
    draws = 1
    p: Probability = 0.5

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        return Geometry(geometry.y, geometry.x.flipped(u[:, 0] < self.p))


class RandomVerticalFlip(Geometric):
    """Mirror top and bottom with probability `p`."""

    if TYPE_CHECKING:

        def __init__(self, p: float = ...) -> None: ...

    name = "random_vertical_flip"
    draws = 1
    p: Probability = 0.5

    def apply(self, geometry: Geometry, u: Floats) -> Geometry:
        return Geometry(geometry.y.flipped(u[:, 0] < self.p), geometry.x)


#: Every transform, by the name that a configuration uses.
TRANSFORMS: dict[str, type[Transform]] = {
    t.name: t
    for t in (
        RandomResizedCrop,
        Resize,
        CenterCrop,
        RandomCrop,
        Pad,
        Letterbox,
        RandomHorizontalFlip,
        RandomVerticalFlip,
        ColorJitter,
        RandomGrayscale,
        GaussianBlur,
        RandomErasing,
        RandomSolarize,
        RandomPosterize,
        RandomAutocontrast,
        RandomEqualize,
    )
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


#: What is no transform here but stands elsewhere in a stream.
_ELSEWHERE = {
    "normalize": "mean and std stand in the stream's output: {mean: [...], std: [...]}",
    "to_tensor": "leave it out: batches are tensors; dtype and layout stand in the stream's output",
    "to_image": "leave it out: batches are tensors; dtype and layout stand in the stream's output",
    "pil_to_tensor": "leave it out; for whole levels: output: {dtype: uint8}",
    "to_dtype": "dtype stands in the stream's output: {dtype: ...}",
    "convert_image_dtype": "dtype stands in the stream's output: {dtype: ...}",
    "compose": "write its transforms one by one, or translate it with headrace.from_torchvision",
    "random_apply": "give the transform a p of its own; color_jitter and gaussian_blur have one, too",
    "grayscale": "write random_grayscale: {p: 1}",
    "random_invert": "write random_solarize: {threshold: 0}, which inverts all levels",
}


def _build(name: object, arguments: object) -> Transform:
    kind = TRANSFORMS.get(name) if isinstance(name, str) else None
    if kind is None:
        if elsewhere := _ELSEWHERE.get(_snake(str(name)).replace("p_i_l_", "pil_")):
            raise ValueError(f"{name!r} is not a transform: {elsewhere}")
        near = difflib.get_close_matches(_snake(str(name)), TRANSFORMS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{name!r} is not a transform{hint}; there are {', '.join(TRANSFORMS)}")
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        fields = ", ".join(kind.model_fields)
        raise ValueError(f"{name}: {arguments!r} is not a mapping of arguments, which are {fields}")
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        raise ValueError(f"{name}: {explained(error, kind)}") from None


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def named(transforms: Sequence[Transform]) -> Iterator[tuple[str, Transform]]:
    """Each with its ordinal name: `resize`, and `resize.2` for a second one of the kind.

    The name is the key of its draws, so that another transform, before it or after it, leaves them alone.
    """
    seen: dict[str, int] = {}
    for transform in transforms:
        n = seen[transform.name] = seen.get(transform.name, 0) + 1
        yield transform.name if n == 1 else f"{transform.name}.{n}", transform


def _fold(transforms: Sequence[Transform]) -> tuple[Outline, tuple[int, int]]:
    """What is known of every picture of the chain, and its height and width."""
    outline, coloured_by = Outline(), None
    for name, transform in named(transforms):
        if isinstance(transform, Photometric):
            coloured_by = coloured_by or name
        elif isinstance(transform, Geometric):
            before, outline = outline, transform.outline(outline, name)
            if coloured_by is not None and outline != before:
                raise ValueError(
                    f"transforms: {name} changes what is seen of a picture, or its size, after {coloured_by} has "
                    "changed its colours; Headrace resamples the original pixels, so colour comes after all of that, "
                    f"and only flips after it. Put {name} before {coloured_by}"
                )
    size = _size(transforms, outline)
    for name, transform in named(transforms):
        if isinstance(transform, Photometric) and (why := transform.unsuited(*size)):
            raise ValueError(f"transforms: {name}: {why}")
    return outline, size


def output_size(transforms: Sequence[Transform]) -> tuple[int, int]:
    """(height, width) of every picture that the chain makes.

    Raises:
        ValueError: the chain does not fold into one resample with colour after it, or has no fixed size at its end;
            says why.
    """
    return _fold(transforms)[1]


def _size(transforms: Sequence[Transform], outline: Outline) -> tuple[int, int]:
    if outline.height is None or outline.width is None:
        after = f"after {', '.join(name for name, _ in named(transforms))} " if transforms else ""
        raise ValueError(
            f"transforms: {after}the pictures have no fixed size, so they cannot be stacked into a batch. "
            "Add random_resized_crop, center_crop, random_crop, letterbox, or resize with [height, width]"
        )
    if max(outline.height, outline.width) > MAX_SIDE:
        raise ValueError(
            f"transforms: pictures of {outline.height}x{outline.width} pixels are over the limit of {MAX_SIDE} a side"
        )
    return outline.height, outline.width


def unfit(transforms: Sequence[Transform], height: int, width: int) -> str | None:
    """Why a picture of this size cannot go through the chain, or None: a function of the sizes alone.

    Args:
        height: of the picture after its EXIF orientation, at least 1.
        width: likewise.
    """
    shapes = [(name, transform) for name, transform in named(transforms) if isinstance(transform, Geometric)]
    choosy = [i for i, (_, transform) in enumerate(shapes) if type(transform).unfit is not Geometric.unfit]
    if not choosy:
        return None
    geometry: Geometry | None = None
    for i, (name, transform) in enumerate(shapes[: choosy[-1] + 1]):
        if why := transform.unfit(height, width):
            return f"{name}: {why}"
        if i < choosy[-1]:
            geometry = geometry or Geometry.whole(np.array([height]), np.array([width]))
            # No draw decides a size.
            geometry = transform.apply(geometry, np.zeros((1, transform.draws)))
            height, width = int(geometry.y.pixels[0]), int(geometry.x.pixels[0])
    return None


@dataclass(frozen=True, slots=True)
class Params:
    """What a backend needs to render some pictures; row `i` is one picture.

    Attributes:
        box: float64 [n, 4], the window x0, y0, x1, y1 in pixels of the picture after its EXIF orientation. It may
            extend beyond the picture.
        mirror_x: bool [n], mirrored left and right after resampling.
        mirror_y: bool [n], likewise top and bottom.
        size: (height, width) of the output.
        interpolation: "bilinear", "bicubic" or "lanczos", antialiased.
        fill: red, green, blue of what lies outside the picture.
        framed: whether a window may extend beyond its picture; the same for all pictures of a chain.
        colour: what is then done to the picture's colours, in this order.
    """

    box: NDArray[np.float64]
    mirror_x: NDArray[np.bool_]
    mirror_y: NDArray[np.bool_]
    size: tuple[int, int]
    interpolation: str
    fill: Colour = BLACK
    framed: bool = False
    colour: tuple[Step, ...] = ()

    def __len__(self) -> int:
        return len(self.box)

    def take(self, rows: NDArray[np.int64]) -> Params:
        """Those of some rows, in that order."""
        return replace(
            self,
            box=self.box[rows],
            mirror_x=self.mirror_x[rows],
            mirror_y=self.mirror_y[rows],
            colour=tuple(step.take(rows) for step in self.colour),
        )

    @classmethod
    def joined(cls, several: Sequence[Params]) -> Params:
        """The rows of some of one chain, one after another."""
        if len(several) == 1:
            return several[0]
        return replace(
            several[0],
            box=np.concatenate([params.box for params in several]),
            mirror_x=np.concatenate([params.mirror_x for params in several]),
            mirror_y=np.concatenate([params.mirror_y for params in several]),
            colour=tuple(step.followed_by(more) for step, *more in zip(*(p.colour for p in several), strict=True)),
        )


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
    outline, size = _fold(transforms)
    geometry, colour = Geometry.whole(heights, widths), list[Step]()
    for name, transform in named(transforms):
        u = uniforms(seed, epoch, name, first, len(heights), transform.draws)
        if isinstance(transform, Photometric):
            colour += transform.steps(*size, u)
        elif isinstance(transform, Geometric):
            before, geometry = geometry, transform.apply(geometry, u)
            if colour:
                colour = _turned(colour, size, before, geometry)
    return Params(
        box=geometry.box,
        mirror_x=geometry.x.mirror,
        mirror_y=geometry.y.mirror,
        size=size,
        interpolation=outline.interpolation,
        fill=outline.fill,
        framed=outline.filled_by is not None,
        colour=tuple(colour),
    )


def _turned(steps: Sequence[Step], size: tuple[int, int], before: Geometry, after: Geometry) -> list[Step]:
    """Steps of a picture that is mirrored after them, as steps of one that was mirrored before them."""
    flip_y, flip_x = before.y.mirror ^ after.y.mirror, before.x.mirror ^ after.x.mirror
    # A box has a place; what else there is does the same to a mirrored picture.
    return [step.mirrored(flip_y, flip_x, size) if isinstance(step, Erase) else step for step in steps]
