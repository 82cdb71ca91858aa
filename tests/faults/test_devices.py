"""Workers of GPUs that cannot start, crash, hang, leave and come back: CPU workers take over, and nothing is lost."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_device
import pytest
from plant import CHUNK, Plant, plants, poison, run_epoch

from headrace.pipeline.fake import CRASH
from headrace.slots import Status
from headrace.workers import roster, supervisor
from headrace.workers.crew import Crew
from headrace.workers.supervisor import Convicted, Finished

DEVICE, CPU = fake_device.RENDER_ID, "fake/1"


class Order:
    """What the stand-in of a GPU's worker is to do."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self("work")

    def __call__(self, what: str) -> None:
        assert what in fake_device.ORDERS
        partial = self._file.with_suffix(".partial")
        partial.write_text(what)
        partial.rename(self._file)


@pytest.fixture
def order(home: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    monkeypatch.setenv(fake_device.VARIABLE, str(home / "order"))
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_device.__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr(roster, "DEVICE_DELAYS", (0.3, 1.0))
    return Order(home / "order")


@pytest.fixture
def plant(home: Path, order: Order, many: Callable[[int], Path]) -> Iterator[Callable[..., Plant]]:
    with plants(home / "cache") as build:

        def make(
            samples: int | Path,
            *,
            devices: tuple[int, ...] = (0,),
            hang: float = 60.0,
            module: str = "fake_device",
        ) -> Plant:
            folder = many(samples) if isinstance(samples, int) else samples
            crew = Crew("fake", 1, devices, threads=2, device_module=module)
            return build(folder, crew, hang=hang)

        yield make


def submit(at: Plant, chunks: range) -> None:
    for slot, chunk in enumerate(chunks):
        at.supervisor.submit(at.job(chunk, slot))


def finished(at: Plant, count: int, before: int = 0) -> list[Finished]:
    """So many chunks more than before, each right and none of them twice."""
    at.until(lambda: len(at.of(Finished)) >= before + count)
    done = [report for report in at.of(Finished) if isinstance(report, Finished)]
    assert len({report.job.chunk for report in done}) == len(done) == before + count
    for report in done[before:]:
        at.check(report.job, {reject.index for reject in report.rejects})
    return done[before:]


def held(at: Plant, count: int) -> bool:
    """Whether so many chunks were begun."""
    return sum(Status.RENDERING in view.status for view in at.ring.views) >= count


def ids(reports: list[Finished]) -> set[str]:
    return {report.render_id for report in reports}


def test_while_a_device_works_it_renders_all_and_no_cpu_worker_exists(plant: Callable[..., Plant]) -> None:
    at = plant(40, devices=(0, 1))
    assert at.supervisor.in_flight == 1 + 2 * 4 and at.supervisor.render_id is None
    assert ids(run_epoch(at, 10)) == {DEVICE}
    assert len(at.supervisor.pids) == 2 and at.supervisor.notices == [] and at.supervisor.render_id == DEVICE


def test_a_device_worker_that_is_killed_with_four_chunks_in_flight_costs_none(
    plant: Callable[..., Plant], order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    at = plant(16)
    at.ready(1)
    order("hold")
    submit(at, range(4))
    at.until(lambda: held(at, 4))
    order("work")
    [pid] = at.supervisor.pids
    os.kill(pid, signal.SIGKILL)
    finished(at, 4)
    assert at.supervisor.deaths == 1 and not at.of(Convicted)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said == [
        "GPU 0: its worker ended by signal 9; chunks are rendered by 1 CPU workers (fake) until it is back; trying "
        "again in 0 s"
    ]


def test_a_device_worker_that_hangs_is_killed_sooner_than_others_and_another_one_has_its_chunks(
    plant: Callable[..., Plant], order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supervisor.DEVICE_HANG_TIMEOUT < 50 < supervisor.HANG_TIMEOUT  # a Loader waits for 60 s by default
    monkeypatch.setattr(supervisor, "DEVICE_HANG_TIMEOUT", 1.0)
    at = plant(20)
    at.ready(1)
    order("hold")
    submit(at, range(4))
    at.until(lambda: held(at, 4))
    with monkeypatch.context() as patch:
        patch.setattr(at.supervisor, "_ended", lambda worker: None)  # as long as a driver keeps it from ending
        at.until(lambda: at.supervisor.notices)
        order("work")
        at.supervisor.submit(at.job(4, 4))
        finished(at, 1)  # whatever becomes of the others; into their slots nobody writes
        assert held(at, 4) and not at.supervisor.deaths
    finished(at, 4, before=1)
    assert at.supervisor.deaths == 1 and not at.of(Convicted)


def test_cpu_workers_serve_while_a_device_cannot_start_and_it_is_tried_ever_more_rarely(
    plant: Callable[..., Plant], order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    order("cannot start")
    at = plant(40)
    begun = time.monotonic()
    assert ids(run_epoch(at, 10)) == {CPU}
    at.until(lambda: sum(message.endswith("has ended: no driver for 0") for message in caplog.messages) >= 3)
    assert time.monotonic() - begun >= 0.3 + 1.0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1 and said[0].startswith("GPU 0: no driver for 0; chunks are rendered by 1 CPU workers (fake)")
    assert at.supervisor.notices == [
        "GPU 0: no driver for 0; chunks are rendered by 1 CPU workers (fake) until it is back"
    ]
    assert at.supervisor.render_id == CPU


def test_a_device_that_comes_back_gets_the_chunks_again_and_idle_cpu_workers_end(
    plant: Callable[..., Plant],
    order: Order,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervisor, "_LINGER", 0.2)
    at = plant(64)
    at.ready(1)
    order("fail")
    submit(at, range(4))
    at.until(lambda: at.supervisor.notices)
    order("crash at start")
    finished(at, 4)
    assert at.supervisor.notices and at.supervisor.render_id == CPU
    order("work")
    at.until(lambda: at.supervisor.render_id == DEVICE)
    assert at.supervisor.notices == []
    before = len(at.of(Finished))
    submit(at, range(8, 12))
    assert ids(finished(at, 4, before)) == {DEVICE}
    at.until(lambda: len(at.supervisor.pids) == 1)
    assert "GPU 0 works again: chunks go to it" in caplog.messages


def test_a_device_worker_over_its_memory_is_replaced_at_once_and_nothing_is_lost(
    plant: Callable[..., Plant], order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    at = plant(64)
    at.ready(1)
    submit(at, range(1))
    finished(at, 1)
    order("leave")
    submit(at, range(1, 5))
    at.until(lambda: "GPU 0: its worker is replaced: it uses 5 of 4 GiB" in caplog.messages)
    order("work")
    assert ids(finished(at, 4, before=1)) == {DEVICE}
    assert at.supervisor.deaths == 0 and at.supervisor.notices == []


def test_with_one_of_two_devices_down_the_other_renders_all(plant: Callable[..., Plant], order: Order) -> None:
    at = plant(40, devices=(0, 1))
    at.ready(2)
    order("cannot start")
    os.kill(at.supervisor.pids[0], signal.SIGKILL)
    at.until(lambda: at.supervisor.notices)
    order("work")
    assert ids(run_epoch(at, 10)) == {DEVICE}
    assert all("the others render its chunks" in notice for notice in at.supervisor.notices)


def test_a_device_gets_what_is_for_it_while_it_has_room_and_others_get_it_then(
    plant: Callable[..., Plant], order: Order
) -> None:
    at = plant(64, devices=(0, 1))
    at.ready(2)
    order("hold")
    for chunk in range(4):
        at.supervisor.submit(at.job(chunk, chunk, home=1))
        assert at.supervisor.full == ({1} if chunk == 3 else set())
    assert at.supervisor.idle
    for chunk in range(4, 8):
        at.supervisor.submit(at.job(chunk, chunk, home=1))
    assert at.supervisor.full == {0, 1} and not at.supervisor.idle
    at.until(lambda: held(at, 8))
    order("work")
    finished(at, 8)
    assert at.supervisor.full == set()
    assert [fake_device.given(device) for device in (0, 1)] == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_what_is_for_a_device_that_does_not_work_goes_to_the_others(plant: Callable[..., Plant], order: Order) -> None:
    at = plant(64, devices=(0, 1))
    at.ready(2)
    order("hold")
    for chunk in range(4):
        at.supervisor.submit(at.job(chunk, chunk, home=1))
    at.until(lambda: held(at, 4))
    order("cannot start")
    os.kill(at.supervisor.pids[1], signal.SIGKILL)
    at.until(lambda: at.supervisor.notices)
    assert 1 not in at.supervisor.full  # nobody waits for it
    order("work")
    finished(at, 4)
    assert set(fake_device.given(0)) == {0, 1, 2, 3}  # in parts, for they were begun


def test_a_picture_that_kills_the_device_and_the_cpu_worker_is_convicted_and_no_other(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(16)
    guilty = poison(folder, 6, CRASH)
    at = plant(folder)
    at.ready(1)
    submit(at, range(4))
    done = finished(at, 4)
    rejects = [reject for report in done for reject in report.rejects]
    assert [(reject.index, reject.stage) for reject in rejects] == [(guilty, "worker")]
    assert len(at.of(Convicted)) == 1 and at.supervisor.deaths <= 3 and CHUNK == 4


def test_the_real_worker_of_a_device_may_be_killed_at_any_moment(
    plant: Callable[..., Plant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "DEVICE_DELAYS", (0.0,))
    at = plant(100, module="headrace.workers.device")
    kills = 0

    def disturb() -> None:
        nonlocal kills
        if kills < 2 and len(at.of(Finished)) > 10 * kills and at.supervisor.render_id is not None:
            kills += 1
            os.kill(at.supervisor.pids[0], signal.SIGKILL)

    run_epoch(at, 25, disturb)
    assert kills == 2 and at.supervisor.deaths == 2 and not at.of(Convicted)
