from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.pipeline.geometry import Axis, Geometry, Outline


def axis(pixels: int) -> Axis:
    return Axis.whole(np.array([pixels]))


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def flags(*values: bool) -> NDArray[np.bool_]:
    return np.array(values, np.bool_)


def stretch(a: Axis) -> tuple[float, float, int, bool]:
    return float(a.low[0]), float(a.high[0]), int(a.pixels[0]), bool(a.mirror[0])


def test_the_whole_picture_is_itself() -> None:
    assert stretch(axis(100)) == (0, 100, 100, False)


def test_a_crop_moves_the_window() -> None:
    assert stretch(axis(100).cropped(ints(10), ints(30))) == (10, 40, 30, False)


def test_a_crop_after_a_crop_counts_from_the_first() -> None:
    assert stretch(axis(100).cropped(ints(10), ints(50)).cropped(ints(5), ints(20))) == (15, 35, 20, False)


def test_a_crop_after_a_resize_counts_in_the_new_pixels() -> None:
    assert stretch(axis(100).resized(ints(50)).cropped(ints(10), ints(20))) == (20, 60, 20, False)


def test_a_resize_after_a_crop_keeps_the_window() -> None:
    assert stretch(axis(100).cropped(ints(10), ints(40)).resized(ints(7))) == (10, 50, 7, False)


def test_a_crop_after_a_flip_counts_from_the_other_end() -> None:
    assert stretch(axis(100).flipped(flags(True)).cropped(ints(10), ints(30))) == (60, 90, 30, True)


def test_a_flip_after_a_crop_keeps_the_window() -> None:
    assert stretch(axis(100).cropped(ints(10), ints(30)).flipped(flags(True))) == (10, 40, 30, True)


def test_two_flips_cancel() -> None:
    assert stretch(axis(100).flipped(flags(True)).flipped(flags(True))) == (0, 100, 100, False)


def test_padding_leaves_the_picture() -> None:
    assert stretch(axis(10).cropped(ints(-2), ints(15))) == (-2, 13, 15, False)


def test_uneven_padding_after_a_flip_leaves_it_at_the_other_end() -> None:
    assert stretch(axis(10).flipped(flags(True)).cropped(ints(-2), ints(15))) == (-3, 12, 15, True)


def test_a_crop_out_of_padding_counts_from_the_padding() -> None:
    assert stretch(axis(10).cropped(ints(-2), ints(14)).cropped(ints(1), ints(5))) == (-1, 4, 5, False)


def test_samples_are_independent() -> None:
    a = Axis.whole(ints(100, 50)).flipped(flags(True, False)).cropped(ints(10, 5), ints(20, 20))
    np.testing.assert_array_equal(a.low, [70, 5])
    np.testing.assert_array_equal(a.high, [90, 25])


def test_a_box_is_x0_y0_x1_y1() -> None:
    g = Geometry.whole(ints(30), ints(40))
    assert Geometry(g.y.cropped(ints(1), ints(2)), g.x.cropped(ints(5), ints(7))).box.tolist() == [[5, 1, 12, 3]]


@pytest.mark.parametrize("seed", range(50))
def test_any_chain_shows_what_doing_it_step_by_step_shows(seed: int) -> None:
    # Without resizing every pixel of the result is one pixel of the source, or black (-1).
    rng = np.random.default_rng(seed)
    source = np.arange(rng.integers(5, 30))
    shown, folded = source, axis(len(source))
    padded = False
    for _ in range(rng.integers(1, 6)):
        if rng.random() < 0.5:
            shown, folded = shown[::-1], folded.flipped(flags(True))
        elif rng.random() < 0.3 and not padded and len(shown) == len(source):
            left, right = (int(v) for v in rng.integers(0, 4, 2))
            folded = folded.cropped(ints(-left), ints(len(shown) + left + right))
            shown, padded = np.pad(shown, (left, right), constant_values=-1), True
        else:
            first = int(rng.integers(0, len(shown)))
            count = int(rng.integers(1, len(shown) - first + 1))
            shown, folded = shown[first : first + count], folded.cropped(ints(first), ints(count))
    low, high, pixels, mirror = stretch(folded)
    positions = np.arange(low, high).astype(int)
    expected = np.where((positions >= 0) & (positions < len(source)), positions, -1)
    assert pixels == len(shown)
    np.testing.assert_array_equal(shown, expected[::-1] if mirror else expected)


def refused(build: Callable[[], Outline]) -> str:
    with pytest.raises(ValueError) as caught:
        build()
    return str(caught.value)


def test_two_resamples_are_refused_by_their_names() -> None:
    text = refused(lambda: Outline().resized("a", 5, 5, "bilinear").resized("b", 4, 4, "bilinear"))
    assert "a and b would each resample" in text


def test_padding_what_was_cut_is_refused_with_the_sizes() -> None:
    text = refused(lambda: Outline().cropped("a", 224, 224).cropped("b", 200, 256))
    assert "b would pad to 256 pixels wide what a has cut to 224" in text


def test_padding_what_was_never_cut_is_fine() -> None:
    assert Outline().resized("a", 100, 100, "bilinear").cropped("b", 200, 256).width == 256
