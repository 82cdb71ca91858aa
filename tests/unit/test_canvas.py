from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from headrace.pipeline import canvas
from headrace.pipeline.canvas import Canvas, levels

SIZES = [(1, 1), (1, 700), (700, 1), (31, 17), (224, 224), (853, 640)]


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_levels_are_those_of_the_image(height: int, width: int) -> None:
    pixels = noise(height, width)
    ours = levels(Image.fromarray(pixels))
    np.testing.assert_array_equal(ours, pixels)
    assert not ours.flags.writeable


def test_each_picture_on_the_canvas_has_its_own_size_and_pixels() -> None:
    drawn = Canvas()
    for height, width in [*SIZES, *SIZES[::-1]]:
        pixels = noise(height, width)
        image = drawn.image(pixels)
        assert (image.mode, image.size) == ("RGB", (width, height))
        np.testing.assert_array_equal(np.asarray(image), pixels)


def test_nothing_of_the_picture_before_gets_into_what_is_made_of_the_next() -> None:
    drawn, white, black = Canvas(), np.full((64, 64, 3), 255, np.uint8), np.zeros((32, 32, 3), np.uint8)
    first = drawn.image(white).resize((8, 8), Image.Resampling.LANCZOS, (0, 0, 64, 64))
    second = drawn.image(black).resize((8, 8), Image.Resampling.LANCZOS, (0, 0, 32, 32))
    assert levels(first).min() == 255 and levels(second).max() == 0


def test_what_was_resampled_or_copied_stays_when_the_canvas_is_drawn_on_again() -> None:
    drawn, pixels = Canvas(), noise(20, 30)
    image = drawn.image(pixels)
    whole, turned, shown = image.resize((30, 20)), image.transpose(Image.Transpose.ROTATE_180), levels(image)
    drawn.image(np.zeros((20, 30, 3), np.uint8))
    np.testing.assert_array_equal(np.asarray(whole), pixels)
    np.testing.assert_array_equal(np.asarray(turned), pixels[::-1, ::-1])
    np.testing.assert_array_equal(shown, pixels)


def test_a_picture_that_is_too_large_to_keep_memory_for_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "_KEPT", 100)
    drawn, pixels = Canvas(), noise(11, 10)
    large = drawn.image(pixels)
    drawn.image(noise(10, 10))
    np.testing.assert_array_equal(np.asarray(large), pixels)
