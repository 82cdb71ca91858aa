"""Daemon, workers and trainers killed or stopped at random moments: nothing lost, nothing twice, no mixed picture."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
from service import Daemon, Trainer, Truth, at_work, signal_, stream, until

ENTRIES = 500
EPOCHS = 200  # more than is ever reached: trainers are ended when the faults are over


class Scene:
    """A daemon on the smallest ring but one, two bystanders with different batch sizes, and a victim."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.home = home
        self.daemon = Daemon(home, {"train": stream(folder, size=64)}, workers=2, slots=4)
        self.daemon.start()
        self.trainers = [
            Trainer(self.daemon.address, home / f"{size}.jsonl", batch_size=size, epochs=EPOCHS)
            for size in (16, 9, 25)  # none but the first is a multiple of the chunk
        ]
        self.victim = self.trainers[0]
        for trainer in self.trainers:
            trainer.start()
        until(lambda: all(trainer.record.exists() and trainer.batches for trainer in self.trainers), "first batches")

    def go_on(self, timeout: float = 60.0) -> None:
        """Wait until every trainer has got a batch more."""
        start = [trainer.record.stat().st_size for trainer in self.trainers]
        until(
            lambda: all(t.record.stat().st_size > before for t, before in zip(self.trainers, start, strict=True)),
            "all trainers to go on",
            timeout,
        )

    def workers(self) -> list[int]:
        """Those that live; all may be dead and not replaced yet."""
        found: list[int] = []
        until(lambda: found.extend(self.daemon.ping().workers) or found, "a worker to be started")
        return found

    def end(self) -> int:
        """Stop everything and compare each trainer's record with the truth; rows compared."""
        for trainer in self.trainers:
            assert trainer.running, trainer.record.with_suffix(".log").read_text()[-3000:]
            trainer.kill()
        assert self.daemon.stop() == 0
        truth = Truth(self.daemon.config, self.home / "cache")
        compared = 0
        for trainer in self.trainers:
            rows = trainer.rows()
            want: list[tuple[int, int, str]] = []
            epoch = 0
            while len(want) < len(rows):
                want += truth.rows(epoch)
                epoch += 1
            assert rows == want[: len(rows)]
            compared += len(rows)
        return compared

    def abandon(self) -> None:
        for trainer in self.trainers:
            if trainer.running:
                trainer.kill()
        self.daemon.stop()


@pytest.fixture
def scene(many: Callable[[int], Path], home: Path):  # type: ignore[no-untyped-def]
    made = Scene(many(ENTRIES), home)
    yield made
    made.abandon()


def both_lengths(test: Callable[..., None]) -> Callable[..., None]:
    """Four times in every run, twenty times in a long one."""
    return pytest.mark.parametrize("times", [3, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])(
        test
    )


def report(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n  {text}", end=" ")  # noqa: T201


@both_lengths
def test_killed_workers(scene: Scene, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(times)
    for _ in range(times):
        time.sleep(choose.uniform(0.0, 0.8))
        signal_(choose.choice(scene.workers()), SIGKILL)
    scene.go_on()
    rows = scene.end()
    log = scene.daemon.log.read_text()
    ended = re.findall(r"ended by signal 9(, at work)?", log)
    assert len(ended) == times and "not rendered" not in log
    report(capsys, f"{times} workers killed, {sum(map(bool, ended))} at work; {rows} rows compared")


@both_lengths
def test_stopped_workers(scene: Scene, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(times + 1)
    hits = 0
    for _ in range(times):
        time.sleep(choose.uniform(0.0, 0.2))
        pid = choose.choice(scene.workers())
        hits += at_work(pid)
        signal_(pid, SIGSTOP)
        time.sleep(choose.uniform(0.05, 0.5))
        signal_(pid, SIGCONT)
    scene.go_on()
    report(capsys, f"{times} workers stopped, {hits} at work; {scene.end()} rows compared")


@both_lengths
def test_a_killed_daemon_that_is_started_again(scene: Scene, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(times + 2)
    hits = 0
    for _ in range(times):
        time.sleep(choose.uniform(0.0, 0.5))
        workers = scene.daemon.ping().workers
        hits += any(at_work(pid) for pid in workers)
        scene.daemon.kill()
        until(lambda pids=workers: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its workers to end")
        scene.daemon.start()
        scene.go_on()
    report(capsys, f"{times} daemons killed, {hits} with work in flight; {scene.end()} rows compared")


@both_lengths
def test_a_stopped_daemon(scene: Scene, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(times + 3)
    hits = 0
    for _ in range(times):
        time.sleep(choose.uniform(0.0, 0.3))
        hits += any(at_work(pid) for pid in scene.daemon.ping().workers)
        signal_(scene.daemon.pid, SIGSTOP)
        time.sleep(choose.uniform(0.05, 0.5))
        signal_(scene.daemon.pid, SIGCONT)
    scene.go_on()
    report(capsys, f"{times} times stopped, {hits} with work in flight; {scene.end()} rows compared")


@both_lengths
def test_a_killed_trainer_that_goes_on_from_its_state(
    scene: Scene, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = random.Random(times + 4)
    others = scene.trainers[1:]
    for _ in range(times):
        time.sleep(choose.uniform(0.0, 0.5))
        scene.victim.kill()
        before = [trainer.record.stat().st_size for trainer in others]
        until(
            lambda sizes=before: all(t.record.stat().st_size > s for t, s in zip(others, sizes, strict=True)),
            "the other trainers to go on",
        )
        until(lambda: scene.daemon.ping().sessions == len(others), "the daemon to see that it is dead")
        scene.victim.start()
        scene.go_on()
    report(capsys, f"{times} trainers killed, all with requests outstanding; {scene.end()} rows compared")


@both_lengths
def test_a_stopped_trainer_disturbs_nobody_and_goes_on(
    scene: Scene, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = random.Random(times + 5)
    others = scene.trainers[1:]
    for _ in range(times):
        time.sleep(choose.uniform(0.0, 0.2))
        signal_(scene.victim.pid, SIGSTOP)
        before = [trainer.record.stat().st_size for trainer in others]
        until(
            lambda sizes=before: all(t.record.stat().st_size > s for t, s in zip(others, sizes, strict=True)),
            "the other trainers to go on",
        )
        time.sleep(choose.uniform(0.0, 0.3))
        signal_(scene.victim.pid, SIGCONT)
        scene.go_on()
    report(capsys, f"{times} trainers stopped, all with requests outstanding; {scene.end()} rows compared")
