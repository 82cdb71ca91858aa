from __future__ import annotations

import math

import numpy as np
import pytest
from pictures import noise, stored
from PIL import Image

from headrace.pipeline.probe import Picture
from headrace.pipeline.transforms import Params
from headrace.pipeline.view import Shown, View


def test_a_window_inside_is_shown_by_all_pixels() -> None:
    assert Shown.of(3.5, 20.25, 24, 8) == Shown(0, 8, 3.5, 20.25)


def test_a_window_that_leaves_is_shown_by_the_pixels_whose_middle_is_inside() -> None:
    # Five to a pixel. The second one ends at 2, its middle is at -0.5; the sixth ends at 22, the seventh's is at 24.5.
    assert Shown.of(-8, 32, 24, 8) == Shown(2, 6, 2.0, 22.0)
    # One whose middle is inside begins outside: the picture begins where it does.
    assert Shown.of(-7, 33, 27, 8) == Shown(1, 7, 0.0, 27.0)


def test_of_a_window_outside_nothing_is_shown() -> None:
    for low, high in ((-20.0, -1.0), (24.0, 30.0), (-4.0, 0.0)):
        shown = Shown.of(low, high, 24, 7)
        assert shown.first >= shown.last


def test_pixels_are_as_wide_as_those_of_the_window_wherever_it_lies() -> None:
    rng = np.random.default_rng(0)
    for low, width in zip(rng.uniform(-50, 70, 200), rng.uniform(1, 90, 200), strict=True):
        shown, step = Shown.of(low, low + width, 40, 9), width / 9
        middles = [low + (i + 0.5) * step for i in range(9)]
        assert [0 <= m < 40 for m in middles] == [shown.first <= i < shown.last for i in range(9)]
        if shown.first < shown.last:
            start, end = low + shown.first * step, low + shown.last * step
            assert math.isclose(shown.start, max(start, 0.0), abs_tol=1e-9)
            assert math.isclose(shown.end, min(end, 40.0), abs_tol=1e-9)


@pytest.mark.parametrize("mirror", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_view_of_the_stored_picture_is_the_window_of_the_upright_one(
    orientation: int, mirror: tuple[bool, bool]
) -> None:
    upright, box = noise(13, 22), (3, 2, 12, 7)
    file = stored(upright, orientation)
    picture = Picture(b"", "JPEG", upright.height, upright.width, orientation, None)
    mirror_x, mirror_y = np.array([mirror[0]]), np.array([mirror[1]])
    params = Params(np.array([box], np.float64), mirror_x, mirror_y, (5, 9), "bilinear")
    view = View.of(picture, params, 0)
    assert view.whole == file.size == picture.stored and view.size == ((5, 9) if orientation >= 5 else (9, 5))
    seen = file.crop(view.box)
    for turn, wanted in (
        (Image.Transpose.TRANSPOSE, view.transpose),
        (Image.Transpose.FLIP_LEFT_RIGHT, view.mirror_x),
        (Image.Transpose.FLIP_TOP_BOTTOM, view.mirror_y),
    ):
        seen = seen.transpose(turn) if wanted else seen
    expected = upright.crop(box)
    for turn, wanted in zip((Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM), mirror, strict=True):
        expected = expected.transpose(turn) if wanted else expected
    np.testing.assert_array_equal(np.asarray(seen), np.asarray(expected))
