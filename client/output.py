"""What a batch looks like when the trainer gets it: dtype, layout, mean and std, and whether its rows are mixed.

The stream's `output:` holds the defaults and the `Loader` may change each of them, because the client does
the finishing; so none of these is in any fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args

DType = Literal["uint8", "float16", "bfloat16", "float32"]
Layout = Literal["NCHW", "NHWC", "channels_last"]

_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class MixUp:
    """Every picture is a weighted sum of two, and so is its label (Zhang et al., "mixup: Beyond Empirical Risk
    Minimization", ICLR 2018).

    Attributes:
        alpha: the weight λ is of Beta(alpha, alpha).

    Raises:
        ValueError: alpha is no positive, finite number.
    """

    alpha: float = 1.0

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": False}

    def __post_init__(self) -> None:
        _check_alpha(self)


@dataclass(frozen=True, slots=True)
class CutMix:
    """A box of every picture is that of another one, and the label is mixed by area (Yun et al., "CutMix:
    Regularization Strategy to Train Strong Classifiers with Localizable Features", ICCV 2019).

    Attributes:
        alpha: the share λ of a picture outside the box, before the box is cut at the picture's edges, is of
            Beta(alpha, alpha).

    Raises:
        ValueError: alpha is no positive, finite number.
    """

    alpha: float = 1.0

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": False}

    def __post_init__(self) -> None:
        _check_alpha(self)


@dataclass(frozen=True, slots=True)
class Output:
    """The form of a batch.

    Attributes:
        dtype: `uint8` hands out the rendered levels untouched; the others are cast and normalised.
        layout: `NCHW` and `NHWC` are shapes as named, contiguous; `channels_last` has shape NCHW and memory NHWC.
        mean: subtracted from the levels divided by 255, one number per channel.
        std: then divided by, one positive number per channel.
        mixup, cutmix: how rows are mixed in pairs; of both it is one for each batch.

    Raises:
        ValueError: an unknown dtype or layout, a std that is not positive and finite, a mean that is not finite,
            numbers so far apart that float32, or the float16 asked for, cannot hold the result, or mean, std or mixing
            beside `uint8`.
    """

    dtype: DType = "float32"
    layout: Layout = "NCHW"
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    mixup: MixUp | None = None
    cutmix: CutMix | None = None

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": False}

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(get_args(DType))}")
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout: {self.layout!r} is not one of {', '.join(get_args(Layout))}")
        for name in ("mean", "std"):
            object.__setattr__(self, name, _three_numbers(name, getattr(self, name)))
        if not all(v > 0 for v in self.std):
            raise ValueError(f"std: {list(self.std)} must be positive")
        # The client computes x / (255 std) - mean / std in float32.
        if not all(max(1 / 255, abs(m)) / s <= _FLOAT32_MAX for m, s in zip(self.mean, self.std, strict=True)):
            raise ValueError(f"std: with mean {list(self.mean)} and std {list(self.std)} a float32 overflows")
        largest = max(max(abs(m), abs(1 - m)) / s for m, s in zip(self.mean, self.std, strict=True))
        if self.dtype == "float16" and largest > _FLOAT16_MAX:
            raise ValueError(f"std: with mean {list(self.mean)} and std {list(self.std)} a float16 overflows")
        if self.dtype == "uint8" and (self.mean != (0.0, 0.0, 0.0) or self.std != (1.0, 1.0, 1.0)):
            raise ValueError("dtype uint8 hands out the rendered levels; mean and std need a floating dtype")
        object.__setattr__(self, "mixup", _described("mixup", MixUp, self.mixup))
        object.__setattr__(self, "cutmix", _described("cutmix", CutMix, self.cutmix))
        if self.dtype == "uint8" and self.mixed:
            raise ValueError(
                "dtype uint8 hands out the rendered levels, and what is mixed of two of them is none; mixup and cutmix "
                "need a floating dtype"
            )

    @property
    def mixed(self) -> bool:
        """Whether rows are mixed."""
        return self.mixup is not None or self.cutmix is not None

    def replaced(self, **changes: Any) -> Output:
        """This output with every change that is not None; `dtype="uint8"` drops the stream's mean and std, and a mixing
        that is False is none."""
        given = {k: v for k, v in changes.items() if v is not None}
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        if given.get("dtype") == "uint8":
            kept |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        return Output(**(kept | given))


def _three_numbers(name: str, given: Any) -> tuple[float, float, float]:
    try:
        if isinstance(given, str):
            raise TypeError
        r, g, b = (float(value) for value in given)
    except (TypeError, ValueError, OverflowError):
        pass
    else:
        if all(abs(value) < float("inf") for value in (r, g, b)):
            return r, g, b
    raise ValueError(f"{name}: {given!r} is not three finite numbers")


M = TypeVar("M", MixUp, CutMix)


def _described(name: str, kind: type[M], given: Any) -> M | None:
    """What a caller has written: the description or its mapping; None and False are none.

    Raises:
        ValueError: it is something else.
    """
    if given is None or given is False:
        return None
    if isinstance(given, kind):
        return given
    if isinstance(given, Mapping) and set(given) <= {"alpha"}:
        try:
            return kind(**given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    raise ValueError(f"{name}: {given!r} must be {{'alpha': NUMBER}}")


def _check_alpha(kind: MixUp | CutMix) -> None:
    alpha = kind.alpha
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ValueError(f"alpha: {alpha!r} must be a positive number")
    object.__setattr__(kind, "alpha", float(alpha))
