"""Every backend shows the same pictures, as closely as docs/parity.md says: each row of its tables is rendered here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from parity import (
    AIMS,
    KINDS,
    Row,
    assert_close,
    assert_within,
    by_operators,
    distance,
    files,
    planned,
    render,
    rendered,
    rows,
    section,
    table,
)

from headrace.pipeline.backend import Backend, Options, make
from headrace.pipeline.dali import DaliBackend
from headrace.pipeline.pillow import PillowBackend
from headrace.pipeline.probe import Picture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import TRANSFORMS, parse


@pytest.fixture
def pillow() -> Iterator[Backend]:
    backend = make("pillow")
    yield backend
    backend.close()


@pytest.fixture
def dali_cpu() -> Iterator[Backend]:
    backend = make("dali-cpu")
    yield backend
    backend.close()


@pytest.fixture
def operators() -> Iterator[Backend]:
    """All the way of a picture as on a GPU, by the operators of a CPU."""
    backend = DaliBackend(Options(), through=True)
    yield backend
    backend.close()


# -- the page -------------------------------------------------------------------------------------------------


def test_every_transform_is_in_the_tables_alone_or_after_a_crop_that_changes_no_pixel() -> None:
    chains = [yaml.safe_load(row.chain) for heading in AIMS for row in table(heading)]
    names = [[parse(item).name for item in chain] for chain in chains]
    short = [[name for name in chain if name != "center_crop"] or chain for chain in names if len(chain) < 3]
    assert {name for chain in short if len(chain) == 1 for name in chain} == set(TRANSFORMS)


def test_every_kind_is_on_the_page() -> None:
    assert [cells[0].strip("`") for cells in rows("Decoding")] == list(KINDS)
    assert len(KINDS) == 6 + 8


@pytest.mark.parametrize("heading", AIMS)
def test_what_is_above_the_aim_has_a_reason_that_is_explained(heading: str) -> None:
    explained = re.findall(r"^- \*(\w+)\*:", section(heading), re.M)
    for row in table(heading):
        above = any(limit[0] > AIMS[heading][0] or limit[1] > AIMS[heading][1] for limit in row.limits.values())
        assert above == bool(row.reasons), row.chain
        assert set(row.reasons) <= set(explained), row.chain


# -- the pictures ---------------------------------------------------------------------------------------------


def test_dali_itself_renders_every_kind_but_inks(dali_cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    by_pillow: list[bytes] = []
    renders = PillowBackend.render

    def noted(self: PillowBackend, pictures: Sequence[Picture], *rest: Any) -> Any:
        by_pillow.extend(picture.data for picture in pictures)
        return renders(self, pictures, *rest)

    monkeypatch.setattr(PillowBackend, "render", noted)
    render(dali_cpu, "[{resize: {size: [16, 16]}}]", [file.data for file in files()])
    assert {file.kind for file in files() if file.data in by_pillow} == {"CMYK"}


@pytest.mark.parametrize("row", table("Geometry"), ids=lambda row: row.chain)
def test_geometry_is_all_but_equal_on_a_cpu_and_as_close_by_dalis_operators_as_the_page_says(
    row: Row, pillow: Backend, dali_cpu: Backend, operators: Backend
) -> None:
    encoded = [file.data for file in files()]
    resampled = render(pillow, row.chain, encoded)
    decoded = render(dali_cpu, row.chain, encoded)
    coarse = "size: 56" in row.chain  # which DALI resamples on a CPU, too
    assert_close(resampled, decoded, 0.25 if coarse else 0.1, 1)
    assert_within(row, resampled, decoded)
    assert_within(row, resampled, render(operators, row.chain, encoded))


@pytest.mark.parametrize("row", table("Colour"), ids=lambda row: row.chain)
def test_colours_are_equal_on_a_cpu_and_as_close_by_dalis_operators_as_the_page_says(
    row: Row, pillow: Backend, dali_cpu: Backend
) -> None:
    encoded = [file.data for file in files()]
    painted = render(pillow, row.chain, encoded)
    assert np.array_equal(painted, render(dali_cpu, row.chain, encoded))
    plain = render(pillow, "[{center_crop: {size: 120}}]", encoded)
    steps = planned(row.chain, [probe(data, Decode()) for data in encoded]).colour
    assert_within(row, painted, by_operators(plain, steps))


def test_what_a_gpu_does_is_as_close_with_the_operators_of_a_cpu_whatever_is_rendered_beside(
    pillow: Backend, operators: Backend
) -> None:
    chain = (
        "[{random_crop: {size: [96, 80], padding: 8}}, {color_jitter: {contrast: 0.4, hue: 0.1}}, "
        "{gaussian_blur: {kernel_size: [3, 9]}}, {random_autocontrast: {p: 0.5}}, {random_erasing: {p: 0.8}}]"
    )
    encoded = [file.data for file in files()]
    shown = render(operators, chain, encoded)
    assert_close(render(pillow, chain, encoded), shown, 0.01, 1)
    params = planned(chain, [probe(data, Decode()) for data in encoded])
    order = np.random.default_rng(1).permutation(len(encoded))
    for part in (order[:1], order[1:4], order[4:24]):
        pictures = [probe(encoded[i], Decode()) for i in part]
        assert np.array_equal(rendered(operators, pictures, params.take(part)), shown[part])


def test_photographs_of_full_size_are_within_the_aim(extra_samples: Path, pillow: Backend, operators: Backend) -> None:
    encoded = [file.read_bytes() for file in sorted((extra_samples / "photos").rglob("*.jpg"))[::40][:4]]
    for filter in ("bilinear", "bicubic", "lanczos"):
        for transform in ("resize", "random_resized_crop"):
            chain = f"[{{{transform}: {{size: [224, 224], interpolation: {filter}}}}}]"
            mean, most = distance(render(pillow, chain, encoded), render(operators, chain, encoded))
            assert mean <= AIMS["Geometry"][0] and most <= AIMS["Geometry"][1], chain
