"""The DALI graph that decodes and resamples pictures, the same for its CPU and its GPU operators.

Encoded bytes and numbers go in, upright pictures of one size come out. What is fixed for all pictures of a graph is its
`Form`; everything else comes with each picture. Nothing is drawn at random in here.

The CPU decodes the window that is to be seen, with as many pixels around it as the filter reaches: of a picture that
may be decoded in part (`Form.part`) that window alone, of another one the whole, of which the same window is cut. Both
give the same pixels, and both are then resampled from the same stretch of that window. A GPU decodes the whole and
resamples from it.

With its CPU operators the graph runs whole in tests, and stands there for the one of a GPU. A CPU worker's ends with
the window, which Pillow resamples in 0.9 ms where DALI takes 1.4 (224 pixels, of a photo of 500 by 375), or before the
colours: `paint` is several times faster than the operators of `dali_colour`.

Colour steps are the business of `dali_colour`. What it gets are the upright pictures, mirrored and with their frame, so
that boxes and kernels are in the frame in which the steps are meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

from headrace.pipeline import dali_colour
from headrace.pipeline.colour import Colour
from headrace.pipeline.view import Shown, View

#: DALI's name of a filter, and how far it reaches, in pixels of the coarser side.
_FILTERS = {
    "bilinear": (types.INTERP_LINEAR, 1),
    "bicubic": (types.INTERP_CUBIC, 2),
    "lanczos": (types.INTERP_LANCZOS3, 3),
}


@dataclass(frozen=True, slots=True)
class Form:
    """What is compiled into a graph.

    Attributes:
        part: whether only the window is decoded.
        transpose: whether rows and columns of the result change places.
        size: (height, width) of the output; None: the graph ends with the window, and whoever runs it resamples.
        interpolation: "bilinear", "bicubic" or "lanczos".
        fill: of what lies outside of the pictures; None if no window leaves its picture.
        colour: of the colour steps.
    """

    part: bool
    transpose: bool
    size: tuple[int, int] | None
    interpolation: str
    fill: Colour | None
    colour: dali_colour.Form


@dataclass(frozen=True, slots=True)
class Executor:
    """Where and with what a graph runs.

    Attributes:
        device: number of the GPU, None for the CPU.
        batch: pictures at once, at most.
        threads: that decode.
        hw_decoder_load: as in `headrace.pipeline.backend.Options`.
    """

    device: int | None = None
    batch: int = 8
    threads: int = 1
    hw_decoder_load: float = 0.0


def build(form: Form, executor: Executor) -> Pipeline:
    """The pipeline; `inputs` says what it is fed. Its outputs are the pictures, uint8 (height, width, 3), or their
    windows, and unless only parts are decoded the last pixel of each whole picture, uint8 (1, 1, 3), on the device.
    """
    gpu = executor.device is not None
    pipeline = Pipeline(
        batch_size=executor.batch,
        num_threads=executor.threads,
        device_id=executor.device,
        prefetch_queue_depth=1,
        # The executor that gives memory back, and on the CPU does not copy encoded bytes into memory for a GPU. There
        # it works while it is asked to, and not ahead.
        exec_dynamic=True,
        **({} if gpu else {"exec_async": False, "exec_pipelined": False}),
    )
    with pipeline:
        images, last = _decoded(form, executor)
        if form.size is not None:
            images = _resampled(images, form, *form.size)
            images = dali_colour.apply(images, form.colour, form.size)
        pipeline.set_outputs(images, *last)
    pipeline.build()
    return pipeline


def _decoded(form: Form, executor: Executor) -> tuple[Any, list[Any]]:
    data = fn.external_source(name="data", dtype=types.UINT8, ndim=1, no_copy=True)
    gpu = executor.device is not None
    options: dict[str, Any] = {"device": "cpu", "output_type": types.RGB, "adjust_orientation": False}
    if gpu:
        options |= {
            "device": "mixed",
            "hw_decoder_load": executor.hw_decoder_load,
            "jpeg_fancy_upsampling": True,
        }
    if not form.part:
        images = fn.decoders.image(data, **options)
        return images if gpu else fn.slice(images, **_window()), [_last_pixel(images)]
    return fn.decoders.image_slice(data, **_window(), **options), []


def _window() -> dict[str, Any]:
    return {
        "start": fn.external_source(name="start", dtype=types.INT32, ndim=1),
        "shape": fn.external_source(name="shape", dtype=types.INT32, ndim=1),
        "axes": [0, 1],
    }


def _last_pixel(images: Any) -> Any:
    return fn.crop(images, crop=[1, 1], crop_pos_x=1.0, crop_pos_y=1.0)


def _resampled(images: Any, form: Form, height: int, width: int) -> Any:
    if form.transpose:
        height, width = width, height
    images = fn.resize(
        images,
        # Mirrored where a stretch ends before it starts.
        roi_start=fn.external_source(name="roi_start", dtype=types.FLOAT, ndim=1),
        roi_end=fn.external_source(name="roi_end", dtype=types.FLOAT, ndim=1),
        size=fn.external_source(name="size", dtype=types.FLOAT, ndim=1) if form.fill is not None else [height, width],
        interp_type=_FILTERS[form.interpolation][0],
        antialias=True,
    )
    if form.fill is not None:
        images = fn.slice(
            images,
            start=fn.external_source(name="frame", dtype=types.INT32, ndim=1),
            shape=[height, width],
            axes=[0, 1],
            out_of_bounds_policy="pad",
            fill_values=list(form.fill),
        )
    return fn.transpose(images, perm=[1, 0, 2], output_layout="HWC") if form.transpose else images


def inputs(form: Form, executor: Executor, views: Sequence[View], encoded: Sequence[bytes]) -> dict[str, Any]:
    """What the pipeline is fed for these pictures, all but what the colour steps need."""
    ends = [_ends(view, form) for view in views]
    # Row 0 of each is the y axis, row 1 the x axis: offset, pixels, roi's start and end, size, frame.
    table = np.array(ends, np.float64)
    offset, pixels, start, end, size, frame = np.moveaxis(table, 2, 0)
    fed: dict[str, Any] = {"data": [np.frombuffer(data, np.uint8) for data in encoded]}
    if executor.device is None or form.part:
        fed |= {"start": offset.astype(np.int32), "shape": pixels.astype(np.int32)}
        start, end = start - offset, end - offset
    if form.size is None:
        return fed
    fed |= {"roi_start": start.astype(np.float32), "roi_end": end.astype(np.float32)}
    if form.fill is not None:
        fed |= {"size": size.astype(np.float32), "frame": frame.astype(np.int32)}
    return fed


Numbers = tuple[float, float, float, float, float, float]


def _ends(view: View, form: Form) -> tuple[Numbers, Numbers]:
    reach = _FILTERS[form.interpolation][1]
    # The mirrors are those of the upright result, after the transposition.
    mirror_y, mirror_x = (view.mirror_x, view.mirror_y) if view.transpose else (view.mirror_y, view.mirror_x)
    (width, height), (columns, rows) = view.size, view.whole
    y, x = view.down, view.across
    if y.first >= y.last or x.first >= x.last:
        # Nothing of the picture is to be seen: a frame around one pixel of it, and that outside.
        return (0, 1, 0, 1, 1, 1), (0, 1, 0, 1, 1, 1)
    return _axis(y, height, rows, mirror_y, reach), _axis(x, width, columns, mirror_x, reach)


def _axis(shown: Shown, pixels: int, length: int, mirror: bool, reach: int) -> Numbers:
    size = shown.last - shown.first
    margin = math.ceil(reach * max((shown.end - shown.start) / size, 1.0)) + 1
    low = max(0, math.floor(shown.start) - margin)
    high = min(length, math.ceil(shown.end) + margin)
    if mirror:
        return low, high - low, shown.end, shown.start, size, shown.last - pixels
    return low, high - low, shown.start, shown.end, size, -shown.first
