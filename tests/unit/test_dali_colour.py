"""DALI's operators for colours, on the CPU: the graph of a GPU but for the device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from nvidia import dali
from nvidia.dali.backend import RegisteredCPUOps, RegisteredGPUOps
from parity import by_operators
from pictures import noise
from PIL import Image

from headrace.pipeline import dali_colour
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

Pixels = NDArray[np.uint8]

N = 8
HEIGHT, WIDTH = 24, 31


def painted(images: Pixels, steps: Sequence[Step]) -> Pixels:
    return np.stack([np.asarray(paint(Image.fromarray(image), steps, i)) for i, image in enumerate(images)])


@pytest.fixture(scope="module")
def images() -> Pixels:
    """Slopes, pure noise, one level, two levels, all black, all white, and levels from 60 to 200."""
    rng = np.random.default_rng(1)
    random = rng.integers(0, 256, (N, HEIGHT, WIDTH, 3), np.uint8)
    random[0], random[1] = np.asarray(noise(HEIGHT, WIDTH)), 77
    random[2] = np.where(random[2] < 50, 10, 240)
    random[3], random[4] = 0, 255
    random[5] = np.clip(random[5], 60, 200)
    return random


def alike(matrix: NDArray[np.float64], offset: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Matrix:
    """The same for all pictures."""
    return Matrix(np.tile(matrix, (N, 1, 1)), np.tile(offset, (N, 1)), np.zeros(N), centred=False)


def every(seed: int = 0) -> list[Step]:
    """Each step, different for each picture, for the first not at all."""
    rng = np.random.default_rng(seed)
    on = np.arange(N) > 0
    factor, shift = np.where(on, rng.uniform(0.5, 1.5, N), 1.0), np.where(on[:, None], rng.uniform(-9, 9, (N, 3)), 0.0)
    brightness = factor[:, None, None] * np.eye(3)
    saturation = brightness + (1 - factor[:, None, None]) * np.array(GREY)
    corner, far = rng.integers(0, 12, (N, 2)), rng.integers(12, 24, (N, 2))
    return [
        Matrix(saturation, shift, np.zeros(N), centred=False),
        Matrix(brightness, np.zeros((N, 3)), 1 - factor, centred=True),
        Solarize(np.where(on, rng.integers(0, 257, N), 256)),
        Posterize(np.where(on, 255 & (255 << rng.integers(0, 8, N)), 255).astype(np.uint8)),
        Autocontrast(on & (rng.random(N) < 0.8)),
        Equalize(on & (rng.random(N) < 0.8)),
        Blur(np.where(on, rng.uniform(0.1, 2.0, N), 0.0), (3, 7)),
        Erase(np.where(on[:, None], np.hstack([corner, far]), 0), (1, 20, 200)),
    ]


STEPS = [type(step).__name__ for step in every()]


@pytest.mark.parametrize("k", range(len(STEPS)), ids=STEPS)
def test_a_step_is_that_of_the_cpu_to_one_level(k: int, images: Pixels) -> None:
    for seed in range(2):
        step = every(seed)[k]
        expected, shown = painted(images, [step]), by_operators(images, [step])
        assert np.abs(expected.astype(int) - shown).max() <= isinstance(step, Matrix | Equalize | Blur)
        assert (expected != shown).mean() < (0.35 if isinstance(step, Equalize) else 0.002)
        assert (expected != images).mean() > 0.05
        # What a step leaves alone is left alone to the bit.
        assert np.array_equal(shown[0], images[0])


def test_halves_are_rounded_up_as_on_the_cpu(images: Pixels) -> None:
    half = alike(0.5 * np.eye(3))
    assert np.array_equal(by_operators(images, [half]), (images.astype(int) + 1) // 2)
    negative = alike(-np.eye(3), (0.5, 127.5, 254.5))
    assert np.array_equal(by_operators(images, [negative]), painted(images, [negative]))


def test_no_half_is_left_to_a_gpu_which_would_round_it_to_even() -> None:
    fed, levels = dali_colour.inputs([alike(0.5 * np.eye(3))]), np.arange(256, dtype=np.float32)
    shown = np.rint(levels[:, None] * np.diagonal(fed["matrix_0"][0]) + fed["offset_0"][0])
    assert np.array_equal(shown, np.tile((levels[:, None] + 1) // 2, 3))


def test_a_sigma_that_squares_to_nothing_blurs_nothing(images: Pixels) -> None:
    sigmas = Blur(np.array([0.0, 5e-324, 1e-200, 1e-40, 1e-30, 1e-9, 1e-4, 0.05]), (5, 5))
    assert np.array_equal(by_operators(images, [sigmas]), images)
    assert np.array_equal(painted(images, [sigmas]), images)


def test_thresholds_and_masks_at_their_ends(images: Pixels) -> None:
    thresholds = Solarize(np.array([0, 1, 128, 254, 255, 256, 256, 0]))
    masks = Posterize(np.array([255, 254, 128, 0, 240, 255, 192, 0], np.uint8))
    for step in (thresholds, masks):
        assert np.array_equal(by_operators(images, [step]), painted(images, [step]))


def test_a_kernel_may_reach_as_far_as_the_mirrored_border_goes(images: Pixels) -> None:
    widest = Blur(np.full(N, 9.0), (2 * HEIGHT - 1, 2 * WIDTH - 1))
    assert np.abs(painted(images, [widest]).astype(int) - by_operators(images, [widest])).max() <= 1


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (2, 127), (15, 17), (16, 16)])
def test_histograms_of_few_pixels(size: tuple[int, int]) -> None:
    few = np.random.default_rng(2).integers(0, 256, (N, *size, 3), np.uint8)
    for step in (Autocontrast(np.ones(N, bool)), Equalize(np.ones(N, bool))):
        assert np.abs(painted(few, [step]).astype(int) - by_operators(few, [step])).max() <= 1


def test_a_picture_does_not_depend_on_its_batch_its_place_or_the_threads(images: Pixels) -> None:
    steps = every()
    expected = by_operators(images, steps)
    assert (expected != images).mean() > 0.5
    for batch, threads in ((1, 1), (3, 1), (N, 3)):
        assert np.array_equal(by_operators(images, steps, batch, threads), expected)
    order = np.random.default_rng(3).permutation(N)
    assert np.array_equal(by_operators(images[order], [step.take(order) for step in steps]), expected[order])


def test_the_form_of_a_chain_is_equal_whatever_its_numbers() -> None:
    assert dali_colour.form(every(0)) == dali_colour.form(every(1))
    assert hash(dali_colour.form(every(0))) == hash(dali_colour.form(every(1)))
    blurs = [dali_colour.form([Blur(np.ones(N), size)]) for size in ((3, 3), (3, 5))]
    assert blurs[0] != blurs[1]


def test_a_gpu_has_every_operator_and_gets_its_arguments_from_the_cpu() -> None:
    # Defined as for a GPU; building it would take one. DALI itself refuses arguments on the GPU here.
    pipeline = dali.Pipeline(N, 1, 0)
    with pipeline:
        source = dali.fn.external_source(name="images", dtype=dali.types.UINT8, ndim=3, layout="HWC").gpu()
        result = dali_colour.apply(source, dali_colour.form(every()), (HEIGHT, WIDTH))
    assert result.device == "gpu"
    found: dict[str, set[str]] = {"cpu": set(), "gpu": set()}
    todo: list[Any] = [result]
    while todo:
        node = todo.pop()
        name = re.match(r"OpSpec for (\w+):", str(node.source.spec))
        assert name is not None
        found[node.device].add(name[1])
        todo += node.source.inputs
    assert found["cpu"] <= {"ExternalSource"}
    assert found["gpu"] <= set(RegisteredGPUOps()) & set(RegisteredCPUOps())
    assert len(found["gpu"]) > 8
    # A mean is a sum of floats, in an order that a GPU may choose by the batch.
    assert not any("Mean" in name for name in found["gpu"])
