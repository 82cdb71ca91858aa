"""What a torchvision pipeline says, in Headrace's words. torchvision itself is not needed: classes are told by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.output import Output
from headrace.pipeline.transforms import Transform, output_size, parse

#: Classes of torchvision that only hold others, and what torch has for it.
_HOLDERS = ("Compose", "Sequential")
#: Classes that change nothing here: every picture is RGB, and every batch a plain tensor.
_NOTHING = ("Identity", "RGB")
_FLOATS = ("float16", "bfloat16", "float32")
#: Pillow's numbers, which torchvision took before it had names.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


class _Refused(Exception):
    """Why a transform cannot be translated."""


def from_torchvision(transform: object) -> dict[str, Any]:
    """Arguments of a `Stream`, `{"transforms": [...], "output": {...}}`, that do what a torchvision pipeline does.

    Args:
        transform: a transform of `torchvision.transforms` or `torchvision.transforms.v2`, a `Compose` or sequence of
            them, nested or not, or the `transforms()` of a classification model's weights.

    Returns:
        Plain data. `output` is empty where the pipeline makes no tensors.

    Raises:
        ConfigError: what cannot be translated: each transform with its place and the reason, a line for each; or
            the chain does not fold into one resample.
    """
    translation = _Translation()
    problems = []
    for place, part in _flat(transform, ""):
        try:
            translation.add(part)
        except _Refused as error:
            problems.append(f"from_torchvision: {place}{type(part).__name__}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    output = translation.output()
    try:
        output_size(translation.transforms)
        Output(**output)
    except ValueError as error:
        raise ConfigError(f"from_torchvision: {str(error).removeprefix('transforms: ')}") from None
    return {"transforms": [part.plain() for part in translation.transforms], "output": output}


def _flat(part: object, place: str) -> Iterator[tuple[str, object]]:
    inner = _inner(part)
    if inner is None:
        yield f"transforms{place}: " if place else "", part
        return
    for i, item in enumerate(inner):
        yield from _flat(item, f"{place}[{i}]")


def _inner(part: Any) -> list[object] | None:
    if isinstance(part, list | tuple):
        return list(part)
    if _torchvision_name(part) not in _HOLDERS:
        return None
    return list(part if type(part).__name__ == "Sequential" else part.transforms)


def _torchvision_name(part: object) -> str | None:
    """The name of a class of torchvision's (or torch's `Sequential`), else None. A subclass may do anything."""
    module, name = type(part).__module__, type(part).__name__
    if module.startswith("torchvision.transforms.") or (module, name) == ("torch.nn.modules.container", "Sequential"):
        return name
    return None


class _Translation:
    """The pipeline so far.

    What runs through it is at first "picture", with levels 0 to 255, an image of Pillow's or a tensor of uint8; then
    "tensor", surely one; then "float", 0 to 1; then "normalized".
    """

    def __init__(self) -> None:
        self.transforms: list[Transform] = []
        self._stage = "picture"
        self._dtype = "uint8"
        self.kind = "Image"  # the class by which version 2 tells tensors of pictures from others
        self._normalize: dict[str, list[float]] = {}

    def output(self) -> dict[str, Any]:
        """Arguments of an `Output`."""
        return {} if self._stage == "picture" else {"dtype": self._dtype, **self._normalize}

    def add(self, part: Any) -> None:
        """
        Raises:
            _Refused: it cannot be translated.
        """
        name = _torchvision_name(part)
        if name is None:
            raise _Refused(f"is no transform of torchvision's but one of {type(part).__module__}; {_ON_BATCHES}")
        if name in _NOTHING:
            return
        if name not in _RULES:
            raise _Refused(f"Headrace has no such transform; {_ON_BATCHES}")
        try:
            _RULES[name](self, part)
        except (AttributeError, TypeError, ValueError) as error:
            raise _Refused(f"is not as in the versions of torchvision that are known: {error}") from error

    def append(self, name: str, arguments: Mapping[str, Any], pads: bool = False) -> None:
        """A transform of ours."""
        if pads and self._stage == "normalized":
            raise _Refused("stands after Normalize, where what it pads with is the mean and not black; put it before")
        try:
            self.transforms.append(parse({name: arguments}))
        except ValueError as error:
            raise _Refused(str(error).removeprefix(f"{name}: ")) from None

    def to_tensor(self, scaled: bool, kind: str = "Tensor") -> None:
        self.kind = kind
        if self._stage != "picture":
            raise _Refused("stands where the picture is a tensor already; leave it out")
        self._stage, self._dtype = ("float", "float32") if scaled else ("tensor", "uint8")

    def to_pure_tensor(self) -> None:
        self.kind = "Tensor"

    def to_dtype(self, dtype: str | None, scale: bool) -> None:
        if dtype is None:
            return
        if dtype not in (*_FLOATS, "uint8"):
            raise _Refused(f"batches are uint8, float16, bfloat16 or float32, not {dtype}")
        if dtype == "uint8" and self._stage in ("float", "normalized"):
            raise _Refused("would turn floats into uint8 again; leave out what made them floats")
        if dtype != "uint8" and self._stage in ("picture", "tensor"):
            if not scale:
                raise _Refused("scale=False makes floats from 0 to 255, and Headrace's are from 0 to 1; say scale=True")
            self._stage = "float"
        elif dtype == "uint8":
            self._stage = "tensor"
        self._dtype = dtype

    def normalize(self, part: Any) -> None:
        if self._stage != "float":
            why = "is the second of its kind" if self._stage == "normalized" else "stands before the levels are floats"
            raise _Refused(f"{why}, and Headrace normalizes once, from 0 to 1")
        values: dict[str, Any] = {key: [float(v) for v in getattr(part, key)] for key in ("mean", "std")}
        if any(len(value) not in (1, 3) for value in values.values()):
            raise _Refused("pictures have three channels, so mean and std have three numbers, or one for all")
        values = {key: value * 3 if len(value) == 1 else value for key, value in values.items()}
        try:
            Output("float32", "NCHW", **values)
        except ValueError as error:
            raise _Refused(str(error)) from None
        self._stage, self._normalize = "normalized", values

    def fill(self, part: Any) -> list[int]:
        """The colour of padding, as levels."""
        fill = part.fill
        if fill is None:
            return [0]
        if isinstance(fill, Mapping):
            raise _Refused("fill: of several kinds of input; give the one for images")
        values = list(fill) if isinstance(fill, Sequence) else [fill]
        levels = [float(v) * self.levels for v in values]
        if not all(abs(level - round(level)) < 1e-4 for level in levels):
            raise _Refused(f"fill: {fill!r} is no whole level from 0 to 255")
        return [round(level) for level in levels]

    @property
    def levels(self) -> int:
        """How many levels the number 1 is."""
        return 255 if self._stage == "float" else 1

    def colour(self, name: str, arguments: Mapping[str, Any]) -> None:
        """A transform of ours that changes colours."""
        if self._stage == "normalized":
            raise _Refused("stands after Normalize, and Headrace changes colours before it; put it before")
        self.append(name, arguments)

    def erased_to(self, values: Sequence[float]) -> object:
        """What an erased box is set to, in the picture before it is normalized."""
        if self._stage != "normalized":
            return [value * (self.levels / 255) for value in values]
        mean, std = self._normalize["mean"], self._normalize["std"]
        values = list(values) * 3 if len(values) == 1 else values
        shown = [value * s + m for value, m, s in zip(values, mean, std, strict=True)]
        if not all(-1e-6 <= value <= 1 + 1e-6 for value in shown):
            raise _Refused(
                f"value: {list(values)} after Normalize are {[round(v, 3) for v in shown]} before it, and Headrace "
                "erases before it, with a colour from 0 to 1"
            )
        return [min(max(value, 0.0), 1.0) for value in shown] if any(values) else "mean"

    def likely(self, p: float, parts: Sequence[object]) -> None:
        """Transforms of torchvision's that are done with this probability, or not."""
        if p == 1:
            for part in parts:
                self.add(part)
            return
        if len(parts) != 1:
            raise _Refused("does several transforms or none, and Headrace draws for each; use one RandomApply for each")
        had = len(self.transforms)
        self.add(parts[0])
        match self.transforms[had:]:
            # Of several, as another RandomApply holds them, each would be left out by itself.
            case [one] if "p" in type(one).model_fields:
                arguments = one.plain()[one.name]
                self.transforms[-1] = parse({one.name: arguments | {"p": arguments["p"] * p}})
            case _:
                raise _Refused(f"{type(parts[0]).__name__} cannot be left out at random; Headrace always does it")


_ON_BATCHES = "leave it out here, and do it to the batches in the trainer"


def _antialiased(part: Any) -> None:
    if getattr(part, "antialias", None) is False:
        raise _Refused("antialias=False: Headrace always antialiases, as torchvision does with images of Pillow's")


def _interpolation(part: Any) -> str:
    value = getattr(part.interpolation, "value", part.interpolation)
    return str(_FILTERS.get(value, value) if isinstance(value, int) else value)


def _plain_size(size: Any) -> Any:
    return list(size) if isinstance(size, Sequence) else size


def _resize(to: _Translation, part: Any) -> None:
    _antialiased(part)
    size = _plain_size(part.size)
    to.append("resize", {"size": size, "interpolation": _interpolation(part), "max_size": part.max_size})


def _random_resized_crop(to: _Translation, part: Any) -> None:
    _antialiased(part)
    arguments = {"size": _plain_size(part.size), "scale": list(part.scale), "ratio": list(part.ratio)}
    to.append("random_resized_crop", arguments | {"interpolation": _interpolation(part)})


def _center_crop(to: _Translation, part: Any) -> None:
    to.append("center_crop", {"size": _plain_size(part.size)}, pads=True)


def _random_crop(to: _Translation, part: Any) -> None:
    _constant(part)
    padding = _plain_size(part.padding)
    if type(part).__module__.startswith("torchvision.transforms.v2") and padding is not None:
        left, right, top, bottom = padding  # the order in which version 2 keeps it
        padding = [left, top, right, bottom]
    arguments = {"size": _plain_size(part.size), "padding": padding, "pad_if_needed": part.pad_if_needed}
    pads = bool(part.pad_if_needed or padding)
    to.append("random_crop", arguments | ({"fill": to.fill(part)} if pads else {}), pads)


def _pad(to: _Translation, part: Any) -> None:
    _constant(part)
    to.append("pad", {"padding": _plain_size(part.padding), "fill": to.fill(part)}, pads=True)


def _constant(part: Any) -> None:
    if part.padding_mode != "constant":
        raise _Refused(f"padding_mode={part.padding_mode!r}: Headrace pads with one colour; say 'constant'")


def _flip(name: str) -> Callable[[_Translation, Any], None]:
    return lambda to, part: to.append(name, {"p": float(part.p)})


def _color_jitter(to: _Translation, part: Any) -> None:
    spans = {name: getattr(part, name) for name in ("brightness", "contrast", "saturation", "hue")}
    to.colour("color_jitter", {name: span if span is None else list(span) for name, span in spans.items()})


def _gaussian_blur(to: _Translation, part: Any) -> None:
    to.colour("gaussian_blur", {"kernel_size": _plain_size(part.kernel_size), "sigma": list(part.sigma)})


def _random_erasing(to: _Translation, part: Any) -> None:
    value = "random" if part.value is None else part.value  # None is what version 2 keeps of "random"
    if not isinstance(value, str):
        value = to.erased_to([float(v) for v in (value if isinstance(value, Sequence) else [value])])
    arguments = {"p": float(part.p), "scale": list(part.scale), "ratio": list(part.ratio), "value": value}
    to.append("random_erasing", arguments)


def _grayscale(to: _Translation, part: Any) -> None:
    if part.num_output_channels != 3:
        raise _Refused("makes one channel, and Headrace's pictures have three; say num_output_channels=3")
    to.colour("random_grayscale", {"p": 1.0})


def _random_solarize(to: _Translation, part: Any) -> None:
    to.colour("random_solarize", {"threshold": float(part.threshold) * to.levels, "p": float(part.p)})


def _random_posterize(to: _Translation, part: Any) -> None:
    to.colour("random_posterize", {"bits": part.bits, "p": float(part.p)})


def _random_invert(to: _Translation, part: Any) -> None:
    to.colour("random_solarize", {"threshold": 0.0, "p": float(part.p)})


def _maybe(name: str) -> Callable[[_Translation, Any], None]:
    return lambda to, part: to.colour(name, {"p": float(part.p)})


def _random_apply(to: _Translation, part: Any) -> None:
    to.likely(float(part.p), [inner for _, inner in _flat(list(part.transforms), "")])


def _to_dtype(to: _Translation, part: Any) -> None:
    dtype = part.dtype
    if isinstance(dtype, Mapping):
        named = {key if isinstance(key, str) else key.__name__: value for key, value in dtype.items()}
        dtype = named.get(to.kind, named.get("others"))
    to.to_dtype(None if dtype is None else str(dtype).removeprefix("torch."), part.scale)


def _convert_image_dtype(to: _Translation, part: Any) -> None:
    to.to_dtype(str(part.dtype).removeprefix("torch."), scale=True)


def _image_classification(to: _Translation, part: Any) -> None:
    _antialiased(part)
    to.append("resize", {"size": _plain_size(part.resize_size), "interpolation": _interpolation(part)})
    to.append("center_crop", {"size": _plain_size(part.crop_size)}, pads=True)
    if to.output():
        to.to_dtype("float32", scale=True)
    else:
        to.to_tensor(scaled=True)
    to.normalize(part)


_RULES: dict[str, Callable[[_Translation, Any], None]] = {
    "Resize": _resize,
    "RandomResizedCrop": _random_resized_crop,
    "CenterCrop": _center_crop,
    "RandomCrop": _random_crop,
    "Pad": _pad,
    "RandomHorizontalFlip": _flip("random_horizontal_flip"),
    "RandomVerticalFlip": _flip("random_vertical_flip"),
    "ColorJitter": _color_jitter,
    "RandomGrayscale": _maybe("random_grayscale"),
    "GaussianBlur": _gaussian_blur,
    "RandomErasing": _random_erasing,
    "RandomSolarize": _random_solarize,
    "RandomPosterize": _random_posterize,
    "RandomAutocontrast": _maybe("random_autocontrast"),
    "RandomEqualize": _maybe("random_equalize"),
    "RandomInvert": _random_invert,
    "Grayscale": _grayscale,
    "RandomApply": _random_apply,
    "ToTensor": lambda to, part: to.to_tensor(scaled=True),
    "PILToTensor": lambda to, part: to.to_tensor(scaled=False),
    "ToImage": lambda to, part: to.to_tensor(scaled=False, kind="Image"),
    "ToPureTensor": lambda to, part: to.to_pure_tensor(),
    "ToDtype": _to_dtype,
    "ConvertImageDtype": _convert_image_dtype,
    "Normalize": lambda to, part: to.normalize(part),
    "ImageClassification": _image_classification,
}
