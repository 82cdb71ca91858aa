"""Nothing here runs where there is no GPU, and the summary of a run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.pipeline import gpus
from headrace.pipeline.backend import BackendFailed, make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    if mine and (trouble := gpus.look().trouble):
        for item in mine:
            item.add_marker(pytest.mark.skip(f"no GPU that renders: {trouble}"))


@pytest.fixture(scope="session")
def why_not() -> str:
    """What keeps DALI from rendering on the GPU that is there, or ""."""
    gpus.count_by_bus()
    try:
        make("dali-gpu").close()
    except BackendFailed as failed:
        return str(failed)
    return ""


@pytest.fixture(autouse=True)
def with_gpu(why_not: str) -> None:
    if why_not:
        pytest.skip(f"no GPU that renders: {why_not}")
