"""The steps of `colour.py` as operators of DALI, of one definition for its CPU and its GPU operators.

What is fixed for all pictures of a graph is its `Form`; everything else comes with each picture, by external sources
that `apply` declares and `inputs` fills. For each step there are numbers that leave a picture as it is, bit for bit.

On a CPU most of these operators take 3 to 9 times as long as `paint.py`, so there `paint.py` is what changes colours;
they are for GPUs, and are tested on the CPU. DALI's GPU operators take the same arguments.

DALI rounds halves up on a CPU and to even on a GPU. No half is left to that: `_NUDGE` lifts them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types

from headrace.pipeline.colour import (
    GREY,
    Autocontrast,
    Blur,
    Equalize,
    Erase,
    Matrix,
    Posterize,
    Solarize,
    Step,
)

#: What is the same for all pictures of a step: its class, and of some a setting.
Form: TypeAlias = tuple[tuple[type[Step], bool | tuple[int, ...] | None], ...]

#: Levels. Above what float32 loses in a sum of levels, so that a half is surely lifted, and else without effect.
_NUDGE = 2.0**-13
#: Pixels. Weighs only the middle, exp(-1 / (2 sigma^2)) is 0 in float32, as with any less; to DALI 0 means one of its
#: own choice, and of what squares to 0 it makes NaN.
_NO_BLUR = 2.0**-10
#: A grey in whole numbers, and what to divide it by.
_GREY, _GREY_UNIT = np.rint(np.array(GREY) * 1000).astype(np.int64), 1000


def form(steps: Sequence[Step]) -> Form:
    """What a graph for these steps is built from; equal for all chunks of a chain."""
    return tuple((type(step), _setting(step)) for step in steps)


def _setting(step: Step) -> bool | tuple[int, ...] | None:
    match step:
        case Matrix():
            return step.centred
        case Blur():
            return step.size
        case Erase():
            return step.fill
        case _:
            return None


def apply(images: Any, form: Form, size: tuple[int, int]) -> Any:
    """The node of the pictures after the steps; called where a pipeline is defined.

    Args:
        images: node of upright pictures, uint8 HWC, RGB; on the GPU if it is.
        form: of the steps.
        size: (height, width) of each picture.
    """
    for i, (kind, setting) in enumerate(form):
        images = _step(images, kind, setting, _Sources(i, images.device), size[0] * size[1])
    return images


def inputs(steps: Sequence[Step]) -> dict[str, NDArray[Any]]:
    """What the pipeline is fed for these pictures, by name: a row each."""
    return {f"{name}_{i}": array for i, step in enumerate(steps) for name, array in _numbers(step).items()}


def _numbers(step: Step) -> dict[str, NDArray[Any]]:
    match step:
        case Matrix():
            matrix, offset = step.matrix.astype(np.float32), (step.offset + _NUDGE).astype(np.float32)
            gain = {"gain": step.gain.astype(np.float32)} if step.centred else {}
            return {"matrix": matrix, "offset": offset, **gain}
        case Solarize():
            return {"threshold": step.threshold.astype(np.int16)}
        case Posterize():
            return {"mask": step.mask}
        case Autocontrast() | Equalize():
            return {"apply": step.apply.astype(np.int32)}
        case Blur():
            return {"sigma": np.maximum(step.sigma, _NO_BLUR).astype(np.float32)}
        case Erase():
            x0, y0, x1, y1 = step.box.T.astype(np.float32)
            return {"anchor": np.stack([y0, x0], axis=1), "shape": np.stack([y1 - y0, x1 - x0], axis=1)}


class _Sources:
    """The numbers of one step, as nodes.

    Args:
        number: of the step in its chain; the names of its external sources end with it.
        device: where the pictures are.
    """

    def __init__(self, number: int, device: str) -> None:
        self._number = number
        self._device = device

    def argument(self, name: str, dtype: Any, ndim: int) -> Any:
        """For a named argument of an operator: those are on the CPU."""
        return fn.external_source(name=f"{name}_{self._number}", dtype=dtype, ndim=ndim)

    def operand(self, name: str, dtype: Any, ndim: int) -> Any:
        """For an expression together with pictures."""
        node = self.argument(name, dtype, ndim)
        return node.gpu() if self._device == "gpu" else node

    def constant(self, values: NDArray[Any]) -> Any:
        """Likewise, the same for all pictures."""
        return types.Constant(values, device=self._device)


def _step(x: Any, kind: type[Step], setting: Any, sources: _Sources, pixels: int) -> Any:
    if kind is Matrix:
        return _matrix(x, sources, bool(setting), pixels)
    if kind is Solarize:
        return x ^ ((x >= sources.operand("threshold", types.INT16, 0)) * _white())
    if kind is Posterize:
        return x & sources.operand("mask", types.UINT8, 0)
    if kind is Autocontrast:
        return _autocontrast(x, sources)
    if kind is Equalize:
        return _equalize(x, sources, pixels)
    if kind is Blur:
        return fn.gaussian_blur(x, sigma=sources.argument("sigma", types.FLOAT, 0), window_size=list(setting))
    anchor, shape = (sources.argument(name, types.FLOAT, 1) for name in ("anchor", "shape"))
    return fn.erase(x, anchor=anchor, shape=shape, axis_names="HW", fill_value=[float(level) for level in setting])


def _matrix(x: Any, sources: _Sources, centred: bool, pixels: int) -> Any:
    matrix, offset = sources.argument("matrix", types.FLOAT, 2), sources.argument("offset", types.FLOAT, 1)
    if not centred:
        return fn.coord_transform(x, M=matrix, T=offset, dtype=types.UINT8)
    # An argument cannot come from a GPU, so what depends on the pixels is added behind.
    y = fn.coord_transform(x, M=matrix, T=offset, dtype=types.FLOAT)
    # Whole numbers, whose sum is the same in whatever order a device adds them, and beside whatever batch.
    total = fn.reductions.sum(fn.reductions.sum(x, axes=[0, 1]) * sources.constant(_GREY), axes=[0])
    mean = total * (1 / (_GREY_UNIT * pixels))
    return fn.cast(y + sources.operand("gain", types.FLOAT, 0) * mean, dtype=types.UINT8)


def _autocontrast(x: Any, sources: _Sources) -> Any:
    # In whole numbers, because the result is cut and not rounded.
    low, high = fn.reductions.min(x, axes=[0, 1]), fn.reductions.max(x, axes=[0, 1])
    go = sources.operand("apply", types.INT32, 0) * (high > low)
    low = low * go
    span = (high - low) * go + 255 * (1 - go)
    return fn.cast((x - _per_channel(low)) * 255 // _per_channel(span), dtype=types.UINT8)


def _equalize(x: Any, sources: _Sources, pixels: int) -> Any:
    """Pillow's level is `(below + step // 2) // step`: `below` counts the pixels with a smaller level, `step` is
    `rest // 255`, and `rest` counts all but those with the greatest level. DALI's, upside down, is
    `round(255 * below / rest)`. From that `below` is known to half a step, and Pillow's level to one.
    """
    flat = _white() - fn.equalize(_white() - x)
    greatest = x == _per_channel(fn.reductions.max(x, axes=[0, 1]))
    rest = pixels - fn.reductions.sum(fn.cast(greatest, dtype=types.INT64), axes=[0, 1])
    step = rest // 255
    go = sources.operand("apply", types.INT32, 0) * (step > 0)
    factor, half, divisor = rest * go + 1 - go, 255 * (step // 2) * go, 255 * step * go + 1 - go
    level = flat * _per_channel(go) + x * _per_channel(1 - go)
    return fn.cast((level * _per_channel(factor) + _per_channel(half)) // _per_channel(divisor), dtype=types.UINT8)


def _white() -> Any:
    return types.Constant(255, dtype=types.UINT8)


def _per_channel(x: Any) -> Any:
    return fn.reshape(x, shape=[1, 1, 3], layout="HWC")
