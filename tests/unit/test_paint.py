"""Steps of colour on the CPU, against what they are defined to be."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pictures import noise
from PIL import Image, ImageOps

from headrace.pipeline import paint as module
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
from headrace.pipeline.paint import paint

PICTURE = noise(30, 42)


def matrix(rows: Any, offset: Any = (0, 0, 0), gain: float = 0.0) -> Matrix:
    numbers = np.array(rows, np.float64), np.array(offset, np.float64), np.array(gain, np.float64)
    return Matrix(numbers[0][None], numbers[1][None], numbers[2][None], centred=gain != 0)


def scaled(factor: float, offset: float = 0.0, gain: float = 0.0) -> Matrix:
    return matrix(factor * np.eye(3), [offset] * 3, gain)


def blur(sigma: float, height: int, width: int) -> Blur:
    return Blur(np.array([sigma]), (height, width))


def erase(box: Sequence[int], fill: tuple[int, int, int] = (9, 8, 7)) -> Erase:
    return Erase(np.array([box]), fill)


def solarize(threshold: int) -> Solarize:
    return Solarize(np.array([threshold]))


def posterize(mask: int) -> Posterize:
    return Posterize(np.array([mask], np.uint8))


STRETCH, FLATTEN = Autocontrast(np.array([True])), Equalize(np.array([True]))


def painted(*steps: Step, picture: Image.Image = PICTURE) -> NDArray[np.uint8]:
    return np.asarray(paint(picture, steps, 0))


def defined(step: Matrix, picture: Image.Image) -> NDArray[np.float64]:
    """By the definition, before rounding and clipping."""
    levels = np.asarray(picture).astype(np.float64)
    mean = (levels @ np.array(GREY)).mean()
    return levels @ step.matrix[0].T + step.offset[0] + step.gain[0] * mean  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "step",
    [
        scaled(1.3),
        scaled(0.0),
        scaled(1.0, 0.4),
        scaled(-1.0, 255.0),
        matrix(np.diag([0.5, 1.5, 1.0])),
        scaled(0.4, gain=0.6),
        scaled(1.7, gain=-0.7),
        matrix([GREY] * 3),
        matrix([GREY] * 3, [5, 5, 5], 0.25),
        matrix([GREY] * 3, [5, 0, 0]),
        matrix([[0.2, 0.3, 0.6], [1.1, -0.4, 0.2], [-0.3, 0.9, 0.7]], [1, -20, 30], -0.1),
    ],
)
def test_a_matrix_is_rounded_to_the_nearest_level_and_clipped(step: Matrix) -> None:
    exact = defined(step, PICTURE)
    # Sums in float32 lose less than this.
    assert np.abs(painted(step) - np.clip(exact, 0, 255)).max() <= 0.5 + 1e-3


def test_what_is_exactly_between_two_levels_becomes_the_upper() -> None:
    picture = Image.fromarray(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3))
    expected = (np.asarray(picture).astype(int) + 1) // 2
    np.testing.assert_array_equal(painted(scaled(0.5), picture=picture), expected)
    mixed = matrix([[0.25, 0.25, 0.0], [0.0, 0.25, 0.25], [0.25, 0.0, 0.25]])
    np.testing.assert_array_equal(painted(mixed, picture=picture), expected)


def test_steps_that_change_nothing_give_the_picture_itself() -> None:
    off = np.array([False])
    steps = [
        scaled(1.0),
        matrix(np.eye(3), gain=0.0),
        solarize(256),
        posterize(255),
        Autocontrast(off),
        Equalize(off),
        blur(0.0, 5, 5),
        blur(2.0, 1, 1),
        blur(0.05, 5, 5),
        blur(1e-200, 5, 5),
        blur(5e-324, 5, 5),
        erase([3, 3, 3, 9]),
        erase([0, 0, 0, 0]),
    ]
    assert paint(PICTURE, steps, 0) is PICTURE
    assert paint(PICTURE, [], 0) is PICTURE


def test_the_picture_at_hand_is_left_as_it_is() -> None:
    picture = noise(20, 20)
    painted(erase([0, 0, 9, 9]), scaled(0.5), blur(1, 3, 3), STRETCH, picture=picture)
    np.testing.assert_array_equal(picture, noise(20, 20))


def test_each_row_has_its_own_numbers() -> None:
    steps = [
        Matrix(np.stack([np.eye(3), 0.5 * np.eye(3)]), np.zeros((2, 3)), np.zeros(2), False),
        Erase(np.array([[0, 0, 2, 2], [0, 0, 0, 0]]), (1, 2, 3)),
        Posterize(np.array([255, 128], np.uint8)),
    ]
    levels = np.asarray(PICTURE)
    first, second = (np.asarray(paint(PICTURE, steps, i)) for i in range(2))
    assert (first[:2, :2] == (1, 2, 3)).all() and (first[2:] == levels[2:]).all()
    np.testing.assert_array_equal(second, (levels.astype(int) + 1) // 2 & 128)
    np.testing.assert_array_equal(paint(PICTURE, [step.take(np.array([1])) for step in steps], 0), second)


def test_a_box_is_filled_and_nothing_else() -> None:
    expected = np.array(PICTURE)
    expected[5:9, 3:42] = (9, 8, 7)
    np.testing.assert_array_equal(painted(erase([3, 5, 42, 9])), expected)


FEW = Image.fromarray(np.array([[[3, 10, 200], [250, 10, 201]], [[77, 10, 200], [3, 10, 201]]], np.uint8))


@pytest.mark.parametrize("picture", [PICTURE, FEW])
def test_equalize_is_that_of_pillow(picture: Image.Image) -> None:
    np.testing.assert_array_equal(painted(FLATTEN, picture=picture), ImageOps.equalize(picture))


def test_autocontrast_reaches_both_ends_and_leaves_one_level_alone() -> None:
    np.testing.assert_array_equal(
        painted(STRETCH, picture=FEW), [[[0, 10, 0], [255, 10, 255]], [[74 * 255 // 247, 10, 0], [0, 10, 255]]]
    )


# a Gaussian


def gaussian(levels: NDArray[np.float64], sigma: float, taps: int) -> NDArray[np.float64]:
    """Along the first axis."""
    k = np.arange(taps) - taps // 2
    weights = np.exp(-0.5 * (k / sigma) ** 2)
    weights /= weights.sum()
    borders = np.pad(levels, [(taps // 2, taps // 2), (0, 0), (0, 0)], mode="reflect")
    return sum(w * borders[i : i + len(levels)] for i, w in enumerate(weights))  # type: ignore[return-value]


@pytest.mark.parametrize("sigma, height, width", [(0.3, 3, 3), (1.0, 9, 1), (1.0, 1, 9), (2.0, 23, 7), (50.0, 59, 83)])
@pytest.mark.parametrize("strip", [1 << 18, 1000, 1])
def test_a_blur_is_a_gaussian_over_a_mirrored_border(
    sigma: float, height: int, width: int, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STRIP", strip)
    exact = gaussian(np.asarray(PICTURE).astype(np.float64), sigma, height)
    exact = gaussian(exact.transpose(1, 0, 2), sigma, width).transpose(1, 0, 2)
    # Weights are multiples of 2**-16.
    assert np.abs(painted(blur(sigma, height, width)) - exact).max() <= 0.55


@pytest.mark.parametrize("height, width", [(1, 1), (1, 7), (2, 2), (3, 40)])
def test_a_blur_of_a_small_picture_reaches_as_far_as_it_goes(height: int, width: int) -> None:
    picture = noise(height, width)
    exact = gaussian(np.asarray(picture).astype(np.float64), 1.5, 2 * height - 1)
    exact = gaussian(exact.transpose(1, 0, 2), 1.5, 2 * width - 1).transpose(1, 0, 2)
    assert np.abs(painted(blur(1.5, 2 * height - 1, 2 * width - 1), picture=picture) - exact).max() <= 0.55


@pytest.mark.parametrize("level", [0, 1, 128, 255])
def test_a_blur_leaves_one_colour_alone(level: int) -> None:
    plain = Image.new("RGB", (30, 20), (level, 255 - level, level))
    np.testing.assert_array_equal(painted(blur(3.0, 23, 23), picture=plain), plain)


def test_a_blur_remembers_nothing_of_what_was_blurred_before_or_beside_it() -> None:
    steps = [blur(2.0, 9, 9)]
    expected = painted(*steps)
    painted(blur(7.0, 31, 31), picture=noise(90, 80))
    painted(blur(0.5, 3, 3), picture=noise(4, 5))
    np.testing.assert_array_equal(painted(*steps), expected)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(20):
            if seed:
                painted(blur(3.0, 9, 9), picture=noise(40, 40, seed))
            elif not np.array_equal(painted(*steps), expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# steps one after another

ONE = st.one_of(
    st.builds(scaled, st.floats(0, 2), st.floats(-50, 50), st.floats(-1, 1)),
    st.builds(solarize, st.integers(0, 256)),
    st.builds(posterize, st.integers(0, 255)),
    st.sampled_from([STRETCH, FLATTEN, blur(1.0, 3, 5), erase([1, 2, 9, 9]), matrix([GREY] * 3)]),
    st.just(matrix([[0.5, 0.4, 0.3], [0.1, 0.8, 0.3], [0.2, 0.1, 0.6]], gain=0.1)),
)


@given(st.lists(ONE, max_size=6))
def test_several_steps_are_each_of_them_after_the_other(steps: list[Step]) -> None:
    # Tables that follow one another are put together, and counts of levels go through them.
    expected = PICTURE
    for step in steps:
        expected = Image.fromarray(np.asarray(paint(expected, [step], 0)))
    np.testing.assert_array_equal(painted(*steps), expected)


def test_the_bits_never_change() -> None:
    # Expected values: if this fails, the code is wrong, not the test. They are the same on every x86-64 CPU.
    steps = [
        scaled(1.2),
        scaled(0.8, gain=0.2),
        matrix([[0.85, 0.12, 0.03], [0.06, 0.91, 0.03], [0.07, 0.13, 0.8]]),
        matrix([[0.83, -0.09, 0.26], [0.2, 0.93, -0.13], [-0.57, 0.59, 0.98]]),
        blur(1.3, 7, 11),
        erase([3, 4, 12, 10]),
        STRETCH,
        FLATTEN,
        solarize(200),
        posterize(252),
    ]
    levels = np.arange(30 * 42 * 3, dtype=np.uint64) * 2654435761 % 2**32 >> 24  # made of integers alone
    picture = Image.fromarray(levels.astype(np.uint8).reshape(30, 42, 3))
    assert sha256(painted(*steps, picture=picture).tobytes()).hexdigest() == DIGEST


DIGEST = "ca2954803dfcbd0c4454b701ae9a78813b33afffed6074e087d40a26bd3607d7"
