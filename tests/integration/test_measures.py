"""What a daemon, its workers and its clients measure: that it adds up, and that it arrives."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plant import Plant, plants
from scripted import Do, ScriptedDaemon, wait_until
from service import Daemon, stream, until

from headrace import Loader
from headrace.ping import ask
from headrace.protocol import ClientStatus
from headrace.workers.crew import Crew
from headrace.workers.supervisor import Finished

CHUNK = 4


@pytest.fixture
def plant(home: Path, many: Any) -> Iterator[Plant]:
    with plants(home / "cache") as build:
        yield build(many(40), Crew("pillow", 2), truth="pillow")


def run(at: Plant, seconds: float) -> int:
    """Keep both workers busy for so long; how many chunks they have rendered."""
    end = time.monotonic() + seconds
    given = finished = 0
    free = list(range(at.ring.slots))
    while time.monotonic() < end or finished < given:
        assert time.monotonic() < end + 60
        while time.monotonic() < end and free and at.supervisor.idle:
            at.supervisor.submit(at.job(given % 10, free.pop(), epoch=given // 10))
            given += 1
        at.step()
        for report in at.of(Finished)[finished:]:
            assert isinstance(report, Finished)
            free.append(report.job.slot)
            finished += 1
    return given


def test_stages_and_waiting_of_workers_add_up_to_their_lives_within_five_percent(plant: Plant) -> None:
    plant.ready(2)
    idle_before = plant.supervisor.waited(time.monotonic())
    chunks = run(plant, 1.5)
    now = time.monotonic()
    stages = plant.supervisor.stages.status()
    seconds = sum(stage.seconds for stage in stages.values()) + plant.supervisor.waited(now)
    assert seconds == pytest.approx(plant.supervisor.worker_seconds(now), rel=0.05)
    assert stages.keys() == {"wait", "read", "plan", "decode", "resize", "write"}
    pictures = chunks * CHUNK
    assert {name: stage.count for name, stage in stages.items()} == {
        "wait": chunks, "read": pictures, "plan": pictures, "decode": pictures, "resize": pictures, "write": pictures,
    }  # fmt: skip
    assert all(sum(stage.histogram) == stage.count for stage in stages.values())
    assert stages["write"].nbytes == pictures * 32 * 32 * 3
    assert stages["wait"].seconds >= idle_before > 0
    # Waiting goes on to count while nobody has anything to do, and a worker's end takes nothing back.
    before = plant.supervisor.waited(now)
    plant.supervisor._workers[0].child.kill()
    plant.until(lambda: plant.supervisor.deaths)
    later = time.monotonic()
    waiting = plant.supervisor.stages.seconds("wait") + plant.supervisor.waited(later)
    assert waiting >= stages["wait"].seconds + before
    assert plant.supervisor.worker_seconds(later) >= plant.supervisor.worker_seconds(now)


@pytest.fixture(scope="module")
def daemon(photos: Path, session_home: Path) -> Iterator[Daemon]:
    folder = session_home / "measures"
    folder.mkdir()
    with Daemon(folder, {"train": stream(photos)}, tcp=True) as running:
        yield running


def client(daemon: Daemon) -> ClientStatus:
    [status] = daemon.ping().clients
    return status


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_session_is_shown_with_what_its_loader_reports(daemon: Daemon, transport: str) -> None:
    address = daemon.tcp_address if transport == "tcp" else daemon.address
    with Loader(address, batch_size=16, transport=transport, output="numpy", rank=0, world_size=1) as loader:
        before = daemon.status()
        assert sum(batch.valid.sum() for batch in loader) == 48
        until(lambda: client(daemon).batches == 3, "the report of the epoch's end")
        status, after = client(daemon), daemon.status()
        assert (status.stream, status.transport, status.device, status.lag) == ("train", transport, "", 0)
        assert status.images == 48
        assert 0 < status.waited <= status.spent <= status.age
        assert status.stages.keys() == {"wait", "copy", "finish"}
        assert status.stages["wait"].count == 3
        # The next epoch's first batches may be on their way by now, and end.
        until(lambda: client(daemon).leases == 0, "the end of every lease")
        assert status.stages["finish"].count >= 48
        assert status.delivered >= 12 and 0 <= status.hits <= status.delivered
        assert after.delivered - before.delivered >= 12
        assert loader.stats()["stages"]["wait"]["count"] == 3
        assert loader.stats()["wait_share"] == pytest.approx(status.waited / status.spent)
    until(lambda: not daemon.ping().clients, "the session's end")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_asks_only_whether_a_daemon_is_usable_is_told_no_details(daemon: Daemon, transport: str) -> None:
    address = daemon.tcp_address if transport == "tcp" else daemon.address
    never = os.eventfd(0)
    try:
        with Loader(daemon.address, batch_size=16, output="numpy", rank=0, world_size=1):
            brief, full = (ask(address, timeout=30, stop=never, detail=detail) for detail in (False, True))
    finally:
        os.close(never)
    assert (brief.sessions, brief.clients, brief.stages) == (1, [], {})
    assert len(full.clients) == 1 and full.stages


def test_the_daemon_shows_its_stages_and_its_slots(daemon: Daemon) -> None:
    with Loader(daemon.address, batch_size=16, output="numpy", rank=0, world_size=1) as loader:
        for _ in range(2):
            assert sum(1 for _ in loader) == 3
        until(lambda: not daemon.status().waiting + daemon.status().leased, "the end of what is asked ahead")
        pong = daemon.ping()
    status = pong.streams["train"]
    assert status is not None
    assert status.leased == status.filling == 0
    assert 0 < status.ready <= status.slots
    assert status.images == CHUNK * status.computed  # 48 pictures, in whole chunks
    assert status.rejected == status.failed == 0
    assert status.delivered - status.computed <= status.hits < status.delivered
    assert pong.stages["send"].count == status.delivered
    assert pong.stages["decode"].count == status.images
    assert sum(pong.stages[name].seconds for name in pong.stages.keys() - {"send"}) == pytest.approx(
        pong.worker_seconds, rel=0.05
    )
    assert pong.worker_seconds < pong.uptime


def test_a_loader_reports_over_what_carries_its_requests_and_says_how_an_epoch_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ScriptedDaemon(tmp_path / "s.sock", samples=12) as scripted,
        Loader(scripted.address, batch_size=4, output="numpy", dtype="uint8", rank=0, world_size=1) as loader,
        caplog.at_level(logging.INFO, "headrace.loader"),
    ):
        list(loader)
        wait_until(lambda: scripted.reports and scripted.reports[-1].batches == 3)
        list(loader)
        wait_until(lambda: scripted.reports[-1].batches == 6)
        last = scripted.reports[-1]
        assert last.images == 24
        assert len(scripted.reports) <= 4  # one a second and one for each epoch
        assert 0 < last.waited <= last.spent
        headrooms = [epoch["headroom"] for epoch in loader.stats()["epochs"].values()]
        assert all(headroom is None or headroom >= 1 for headroom in headrooms)
    lines = [record.message for record in caplog.records if record.message.startswith("epoch ")]
    assert [re.match(r"epoch (\d): 12 images, waited \d+ % of the time", line)[1] for line in lines] == ["0", "1"]  # type: ignore[index]


def test_a_trainer_that_waits_for_nothing_is_told_how_much_faster_it_could_be_fed(tmp_path: Path) -> None:
    """Chunks come after 20 ms each, from one worker, and the trainer takes 120 ms for a batch of two of them."""
    behave = lambda get: time.sleep(0.02) or Do.ANSWER  # noqa: E731
    with (
        ScriptedDaemon(tmp_path / "s.sock", samples=80, slots=12, window=8, in_flight=1, behave=behave) as scripted,
        Loader(scripted.address, batch_size=8, output="numpy", dtype="uint8", rank=0, world_size=1) as loader,
    ):
        for _ in loader:
            time.sleep(0.12)
        epoch = loader.stats()["epochs"][0]
    assert epoch["wait_share"] < 0.3
    # It is 3 times; on a machine that has other work less, and never more than that by much.
    assert 1.3 < epoch["headroom"] < 4.5
