"""Finishing: one formula, bit for bit, whatever the dtype, the layout and the library."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.finish import Finisher, constants, to_bfloat16
from headrace.output import DType, Layout, Output

torch = pytest.importorskip("torch")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES: tuple[DType, ...] = ("uint8", "float16", "bfloat16", "float32")
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "channels_last")
SIZES = [(1, 1), (3, 5), (8, 6), (5, 4)]


def output(dtype: DType, layout: Layout) -> Output:
    return Output(dtype, layout) if dtype == "uint8" else Output(dtype, layout, MEAN, STD)


def pictures(count: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 256, (count, height, width, 3), np.uint8)


def finished(levels: NDArray[np.uint8], form: Output) -> NDArray[Any]:
    """NHWC, whatever the layout; bfloat16 as its bits."""
    finisher = Finisher(form, *levels.shape[1:3])
    memory = np.full(len(levels) * finisher.row_bytes, 0xA5, np.uint8)
    out = finisher.rows(memory, len(levels))
    finisher.finish(levels, out)
    return out.transpose(0, 2, 3, 1) if form.layout == "NCHW" else out


def reference(levels: NDArray[np.uint8], form: Output) -> Any:
    """The formula step by step in torch, NHWC."""
    if form.dtype == "uint8":
        return torch.from_numpy(levels)
    a, b = (torch.from_numpy(v) for v in constants(form))
    return (torch.from_numpy(levels).float() * a + b).to(getattr(torch, form.dtype))


def bits(values: Any) -> NDArray[Any]:
    array = values.view(torch.int16).numpy() if getattr(values, "dtype", None) is torch.bfloat16 else np.asarray(values)
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize(("dtype", "layout", "size"), [*product(DTYPES, LAYOUTS, SIZES)])
def test_every_form_equals_the_formula_bit_for_bit(dtype: DType, layout: Layout, size: tuple[int, int]) -> None:
    for count in (1, 2, 7):
        levels = pictures(count, *size)
        form = output(dtype, layout)
        assert np.array_equal(bits(finished(levels, form)), bits(reference(levels, form)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mean_std", [(MEAN, STD), ((0.0,) * 3, (1.0,) * 3), ((-3.0, 1e-6, 900.0), (1e-4, 40.0, 7.0))])
def test_each_level_of_each_channel_equals_the_formula(
    dtype: DType, mean_std: tuple[tuple[float, float, float], tuple[float, float, float]]
) -> None:
    levels = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 16, 16, 3)
    form = Output(dtype, "NHWC", *mean_std)
    assert np.array_equal(bits(finished(levels, form)), bits(reference(levels, form)))


def test_more_rows_than_one_block_are_all_written() -> None:
    levels = pictures(40, 224, 224)
    for dtype in ("float16", "bfloat16"):
        for layout in LAYOUTS:
            form = output(dtype, layout)
            assert np.array_equal(bits(finished(levels, form)), bits(reference(levels, form)))


def test_rows_beside_the_finished_ones_stay_untouched() -> None:
    levels = pictures(3, 3, 5)
    for dtype, layout in product(DTYPES, LAYOUTS):
        finisher = Finisher(output(dtype, layout), 3, 5)
        memory = np.full(7 * finisher.row_bytes, 0xA5, np.uint8)
        finisher.finish(levels, finisher.rows(memory, 7)[2:5])
        assert (memory[: 2 * finisher.row_bytes] == 0xA5).all()
        assert (memory[5 * finisher.row_bytes :] == 0xA5).all()


def test_the_constants_are_rounded_once_from_the_exact_value() -> None:
    a, b = constants(output("float32", "NHWC"))
    for channel in range(3):
        mean, std = Fraction(MEAN[channel]), Fraction(STD[channel])
        for got, exact in ((a[channel], 1 / (255 * std)), (b[channel], -mean / std)):
            error = abs(Fraction(float(got)) - exact)
            assert error <= abs(Fraction(float(np.spacing(got)))) * Fraction(51, 100)


def test_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    rng = np.random.default_rng(3)
    patterns = rng.integers(0, 1 << 32, 200_000, np.uint32)
    patterns[:50_000] = (patterns[:50_000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # ties
    values = patterns.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values), expected)
