"""The pictures of a GPU beside those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from parity import assert_within, by_operators, distance, files, planned, render, rendered, table

from headrace.pipeline.backend import Backend, BackendFailed, make
from headrace.pipeline.probe import probe
from headrace.pipeline.spec import Decode

pytestmark = pytest.mark.gpu

#: What its decoders may add to a figure of the page.
DECODED = (1.0, 8)
CROP = "[{center_crop: {size: 120}}]"


@pytest.fixture
def dali_gpu() -> Iterator[Backend]:
    try:
        backend = make("dali-gpu")
    except BackendFailed as why:
        pytest.skip(f"no GPU that renders: {why}")
    yield backend
    backend.close()


@pytest.fixture
def encoded() -> list[bytes]:
    return [file.data for file in files()]


def test_dali_gpu_parity_is_that_of_the_page_but_for_the_decoding(dali_gpu: Backend, encoded: list[bytes]) -> None:
    pillow = make("pillow")
    for row in table("Geometry"):
        assert_within(row, render(pillow, row.chain, encoded), render(dali_gpu, row.chain, encoded), DECODED)


def test_operators_for_colours_do_what_they_do_on_a_cpu(dali_gpu: Backend, encoded: list[bytes]) -> None:
    images = render(make("pillow"), CROP, encoded)
    pictures = [probe(data, Decode()) for data in encoded]
    for row in table("Colour"):
        steps = planned(row.chain, pictures).colour
        mean, most = distance(by_operators(images, steps), by_operators(images, steps, device=0))
        assert mean <= 0.01 and most <= 1, f"{row.chain}: {mean}, {most}"


def test_dali_gpu_purity_whatever_is_rendered_beside(dali_gpu: Backend, encoded: list[bytes]) -> None:
    chain = (
        "[{random_resized_crop: {size: 96}}, random_horizontal_flip, {color_jitter: {contrast: 0.4, hue: 0.1}}, "
        "{gaussian_blur: {kernel_size: 9}}, {random_erasing: {p: 0.8}}]"
    )
    expected = render(dali_gpu, chain, encoded)
    params = planned(chain, [probe(data, Decode()) for data in encoded])
    order = np.random.default_rng(1).permutation(len(encoded))
    for part in (order[:1], order[1:4], order[4:24], order):
        pictures = [probe(encoded[i], Decode()) for i in part]
        assert np.array_equal(rendered(dali_gpu, pictures, params.take(part)), expected[part])
