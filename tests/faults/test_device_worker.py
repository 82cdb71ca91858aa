"""The real worker of a device under its supervisor, with DALI's CPU operators in place of a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plant import Plant, plants, run_epoch

from headrace.workers import roster
from headrace.workers.crew import Crew
from headrace.workers.supervisor import Convicted, Failed, Finished

#: CPU workers that take over would render the same.
CREW = Crew("dali-cpu", 1, devices=(0,), threads=2)


@pytest.fixture
def plant(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Plant]]:
    monkeypatch.setattr(roster, "DEVICE_DELAYS", (0.3,))
    with plants(home / "cache") as build:
        yield lambda folder, crew=CREW: build(folder, crew, truth="dali-cpu")


def spoil(folder: Path, number: int, data: bytes) -> Path:
    """Another content for one file of the folder."""
    file = sorted(folder.glob("*/*"))[number]
    file.unlink()  # a hard link: the photo itself stays good
    file.write_bytes(data)
    return file


def test_a_device_worker_renders_what_a_cpu_worker_does_to_the_bit_through_kills_and_bad_files(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(120)
    good = sorted(folder.glob("*/*"))[0].read_bytes()
    bad = {spoil(folder, number, data).name for number, data in ((7, good[:-200]), (50, b"text"), (90, good[:300]))}
    at = plant(folder)
    at.ready(1)
    kills = [15, 5]

    def disturb() -> None:
        if kills and len(at.of(Finished)) >= kills[-1] and at.supervisor.pids:
            os.kill(at.supervisor.pids[0], signal.SIGKILL)
            kills.pop()

    done = run_epoch(at, 30, disturb)
    rejects = [reject for report in done for reject in report.rejects]
    assert {Path(reject.path).name for reject in rejects} == bad and len(rejects) == 3
    assert {report.render_id for report in done} == {at.truth.backend.render_id}
    assert not at.of(Convicted)
    assert at.supervisor.deaths == 2


def test_a_chunk_that_cannot_be_read_fails_alone_and_a_worker_without_enough_memory_says_so(
    plant: Callable[..., Plant], many: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = many(16)
    at = plant(folder, replace(CREW, gpu_memory=1 << 20))
    sorted(folder.glob("*/*"))[5].unlink()
    at.ready(1)
    for chunk in range(4):
        at.supervisor.submit(at.job(chunk, chunk))
    at.until(lambda: len(at.reports) >= 5 and at.supervisor.notices)
    [failed] = at.of(Failed)
    assert isinstance(failed, Failed) and failed.kind == "DatasetError"
    [notice] = at.supervisor.notices
    assert "workers.gpu_memory is 1 MiB" in notice and "this stream needs more" in notice
    assert at.supervisor.deaths == 0
