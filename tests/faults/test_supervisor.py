"""Workers that are killed, stopped, hang or crash: every chunk comes back, and only the guilty are convicted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plant import CHUNK, Plant, plants, poison, run_epoch

from headrace.pipeline.fake import CRASH, HANG, REJECT
from headrace.workers.crew import Crew
from headrace.workers.member import Job
from headrace.workers.supervisor import Broken, Convicted, Failed, Finished


@pytest.fixture
def plant(home: Path) -> Iterator[Callable[..., Plant]]:
    with plants(home / "cache") as build:
        yield lambda folder, count=2, hang=60.0: build(folder, Crew("fake", count), hang=hang)


def test_every_chunk_comes_back_while_workers_are_killed_at_random(
    plant: Callable[..., Plant], many: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    at = plant(many(400))
    at.ready(2)
    random_ = random.Random(1)
    kills = 0

    def disturb() -> None:
        nonlocal kills
        if kills < 12 and at.supervisor.pids and random_.random() < 0.1:
            worker = random_.choice(at.supervisor.pids)
            kills += 1
            with contextlib.suppress(ProcessLookupError):  # it is dead already, and not replaced yet
                os.kill(worker, signal.SIGKILL)

    run_epoch(at, 100, disturb)
    assert kills == 12 and any(record.message.endswith("at work") for record in caplog.records)
    assert not at.of(Convicted)


def test_a_stopped_worker_delays_its_chunk_and_changes_nothing(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    at = plant(many(200))
    at.ready(2)
    random_ = random.Random(2)
    stopped: list[tuple[int, float]] = []

    def disturb() -> None:
        now = time.monotonic()
        if len(stopped) < 1 and random_.random() < 0.2:
            stopped.append((random_.choice(at.supervisor.pids), now + random_.uniform(0.02, 0.1)))
            os.kill(stopped[-1][0], signal.SIGSTOP)
        while stopped and stopped[0][1] < now:
            os.kill(stopped.pop(0)[0], signal.SIGCONT)

    run_epoch(at, 50, disturb)
    for pid, _ in stopped:
        os.kill(pid, signal.SIGCONT)
    assert at.supervisor.deaths == 0


def test_a_picture_that_kills_its_worker_is_convicted_and_the_rest_of_its_chunk_delivered(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(40)
    guilty = poison(folder, 17, CRASH)
    at = plant(folder)
    done = run_epoch_with_convicted(at, 10, guilty)
    rejects = [reject for report in done for reject in report.rejects]
    assert [(r.index, r.stage) for r in rejects] == [(guilty, "worker")]
    assert "died of it, twice (signal 9)" in rejects[0].reason
    assert len(at.of(Convicted)) == 1
    # From now on it is rejected unseen, by workers that start later too.
    deaths = at.supervisor.deaths
    for pid in at.supervisor.pids:
        os.kill(pid, signal.SIGKILL)
    at.until(lambda: at.supervisor.deaths == deaths + 2)
    again = run_epoch_with_convicted(at, 10, guilty)
    assert sum(len(report.rejects) for report in again) == 1 and at.supervisor.deaths == deaths + 2


def run_epoch_with_convicted(at: Plant, chunks: int, guilty: int) -> list[Finished]:
    before = len(at.of(Finished))
    for chunk in range(chunks):
        job = at.job(chunk, 0)
        at.supervisor.submit(job)
        at.until(lambda wanted=before + chunk + 1: len(at.of(Finished)) >= wanted)
        at.check(job, {guilty})
    return at.of(Finished)[before:]  # type: ignore[return-value]


def test_a_worker_that_hangs_in_a_picture_is_killed_and_the_picture_convicted(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(8)
    guilty = poison(folder, 3, HANG)
    at = plant(folder, hang=0.5)
    done = run_epoch_with_convicted(at, 2, guilty)
    assert [r.index for report in done for r in report.rejects] == [guilty]


def test_a_worker_that_stays_stopped_is_replaced(plant: Callable[..., Plant], many: Callable[[int], Path]) -> None:
    at = plant(many(8), count=1, hang=0.5)
    at.ready(1)
    [pid] = at.supervisor.pids
    os.kill(pid, signal.SIGSTOP)
    job = at.job(0, 0)
    at.supervisor.submit(job)
    at.until(lambda: at.of(Finished))
    at.check(job)
    assert at.supervisor.pids != [pid] and not at.of(Convicted)


def test_a_bad_picture_is_a_reject_and_kills_nobody(plant: Callable[..., Plant], many: Callable[[int], Path]) -> None:
    folder = many(8)
    bad = poison(folder, 5, REJECT)
    at = plant(folder)
    rejects = []
    for chunk in range(2):
        at.supervisor.submit(job := at.job(chunk, chunk))
        at.until(lambda wanted=chunk + 1: len(at.of(Finished)) >= wanted)
        at.check(job)
        rejects += at.of(Finished)[chunk].rejects  # type: ignore[union-attr]
    assert [(r.index, r.stage) for r in rejects] == [(bad, "decode")]
    assert at.supervisor.deaths == 0


def test_a_sample_that_cannot_be_read_fails_its_chunk_by_name_and_only_that(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(8)
    at = plant(folder)
    victim = sorted(folder.glob("*/*"))[2]
    victim.unlink()
    for chunk in range(2):
        at.supervisor.submit(at.job(chunk, chunk))
    at.until(lambda: len(at.of(Failed)) == 1 and len(at.of(Finished)) == 1)
    [failed] = at.of(Failed)
    assert isinstance(failed, Failed) and failed.kind == "DatasetError" and str(victim) in failed.text
    [finished] = at.of(Finished)
    assert isinstance(finished, Finished)
    at.check(finished.job)


def test_workers_that_cannot_start_are_given_up_with_a_reason(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(4)
    at = plant(folder)
    at.supervisor.crew = replace(
        at.supervisor.crew, cpu_module="headrace.nosuch"
    )  # what a broken installation does to workers that start later
    at.supervisor.submit(at.job(0, 0))
    at.until(lambda: at.of(Finished))
    for pid in at.supervisor.pids:
        os.kill(pid, signal.SIGKILL)
    at.until(lambda: len(at.of(Broken)) >= 1)
    at.supervisor.submit(at.job(0, 0))
    at.until(lambda: at.of(Failed))
    assert "before they are ready" in at.of(Failed)[0].text  # type: ignore[union-attr]


def test_while_one_worker_works_no_request_fails_because_another_cannot_start(
    plant: Callable[..., Plant], many: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    at = plant(many(4))
    at.ready(2)
    at.supervisor.crew = replace(at.supervisor.crew, cpu_module="headrace.nosuch")
    os.kill(at.supervisor.pids[0], signal.SIGKILL)
    at.until(lambda: any("before they are ready" in message for message in caplog.messages))
    assert not at.of(Broken)
    at.supervisor.submit(at.job(0, 0))
    at.until(lambda: at.of(Finished))


def test_a_job_may_want_single_rows_of_a_chunk(plant: Callable[..., Plant], many: Callable[[int], Path]) -> None:
    at = plant(many(8))
    at.ready(1)
    before = at.ring.views[1].images.copy()
    at.supervisor.submit(Job(0, 0, 1, 1, CHUNK, only=(2,)))
    at.until(lambda: at.of(Finished))
    view, want = at.ring.views[1], at.scratch.views[0]
    at.truth.render(0, 1, want)
    np.testing.assert_array_equal(view.images[2], want.images[2])
    np.testing.assert_array_equal(view.images[[0, 1, 3]], before[[0, 1, 3]])


def test_stopping_ends_even_workers_that_are_stopped_or_busy(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(8)
    poison(folder, 0, HANG)
    at = plant(folder)
    at.ready(2)
    for chunk in range(2):
        at.supervisor.submit(at.job(chunk, chunk))
    os.kill(at.supervisor.pids[0], signal.SIGSTOP)
    begin = time.monotonic()
    at.supervisor.stop()
    assert time.monotonic() - begin < 15
    assert at.supervisor.pids == []
