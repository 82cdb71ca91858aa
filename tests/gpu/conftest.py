"""Nothing here runs where there is no GPU, and the summary of a run says so."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None, None, None]:
    """The figures, behind all else at the end of a run that asked for them."""
    yield
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if report.nodeid.endswith("test_gpu_figures.py::test_figures"):
                terminalreporter.section("figures")
                for name, line in report.user_properties:
                    if name == "figure":
                        terminalreporter.write_line(line)
                if outcome == "skipped":
                    terminalreporter.write_line(f"not measured: {report.longrepr[2].removeprefix('Skipped: ')}")
