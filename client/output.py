"""What a batch looks like when the trainer gets it: dtype, layout, mean and std.

The stream's `output:` holds the defaults and the `Loader` may change each of them, because the client does
the finishing; so none of these is in any fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

DType = Literal["uint8", "float16", "bfloat16", "float32"]
Layout = Literal["NCHW", "NHWC", "channels_last"]


@dataclass(frozen=True, slots=True)
class Output:
    """The form of a batch.

    Attributes:
        dtype: `uint8` hands out the rendered levels untouched; the others are cast and normalised.
        layout: `NCHW` and `NHWC` are shapes as named, contiguous; `channels_last` has shape NCHW and memory NHWC.
        mean: subtracted from the levels divided by 255, one number per channel.
        std: then divided by, one positive number per channel.

    Raises:
        ValueError: an unknown dtype or layout, a std that is not positive and finite, a mean that is not finite,
            or mean or std beside `uint8`.
    """

    dtype: DType = "float32"
    layout: Layout = "NCHW"
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": False}

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(get_args(DType))}")
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout: {self.layout!r} is not one of {', '.join(get_args(Layout))}")
        for name in ("mean", "std"):
            values = tuple(float(v) for v in getattr(self, name))
            if len(values) != 3 or not all(abs(v) < float("inf") for v in values):
                raise ValueError(f"{name}: {getattr(self, name)!r} is not three finite numbers")
            object.__setattr__(self, name, values)
        if not all(v > 0 for v in self.std):
            raise ValueError(f"std: {list(self.std)} must be positive")
        if self.dtype == "uint8" and (self.mean != (0.0, 0.0, 0.0) or self.std != (1.0, 1.0, 1.0)):
            raise ValueError("dtype uint8 hands out the rendered levels; mean and std need a floating dtype")

    def replaced(self, **changes: Any) -> Output:
        """This output with every change that is not None; `dtype="uint8"` drops the stream's mean and std."""
        given = {k: v for k, v in changes.items() if v is not None}
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        if given.get("dtype") == "uint8":
            kept |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        return Output(**(kept | given))
