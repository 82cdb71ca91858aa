"""A supervisor in this process with real workers, for tests: fed, disturbed, and compared with what must come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from headrace.pipeline.backend import make
from headrace.pipeline.dataset import open_index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config
from headrace.slots import Ring
from headrace.workers.crew import Crew
from headrace.workers.loop import Loop
from headrace.workers.member import Job
from headrace.workers.supervisor import Failed, Finished, Report, Started, Supervisor

CHUNK = 4


class Plant:
    """A supervisor with workers, fed chunk after chunk; what comes back is compared with what must."""

    def __init__(self, folder: Path, cache: Path, crew: Crew, *, hang: float = 60.0, truth: str = "fake") -> None:
        transforms = [{"random_resized_crop": {"size": 32}}]
        stream = {"dataset": {"folder": str(folder)}, "shuffle": True, "chunk": CHUNK, "transforms": transforms}
        self.spec = Config.load({"streams": {"s": stream}}).streams["s"]
        self.index = open_index(self.spec.dataset, cache)
        self.loop = Loop()
        self.reports: list[Report] = []
        self.supervisor = Supervisor(self.loop, crew, self.reports.append, hang_timeout=hang)
        self.ring = Ring.create(self.spec.layout(self.index), self.supervisor.in_flight + 1)
        self.scratch = Ring.create(self.spec.layout(self.index), 1)
        self.truth = ChunkRenderer(self.spec, self.index, make(truth))
        self.supervisor.start()
        self.supervisor.open_stream(0, self.spec, self.ring, self.index, {})

    def job(self, chunk: int, slot: int, epoch: int = 0, home: int | None = None) -> Job:
        return Job(0, epoch, chunk, slot, self.truth.rows(chunk), home=home)

    def step(self, timeout: float = 0.05) -> None:
        self.loop.run_once(timeout)
        self.supervisor.tick()

    def until(self, done: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.reports
            self.step()

    def of(self, kind: type) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]

    def ready(self, count: int) -> None:
        self.until(lambda: len(self.of(Started)) >= count)

    def check(self, job: Job, rejected: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """The slot holds the chunk, byte for byte, as a renderer in this process makes it."""
        view, want = self.ring.views[job.slot], self.scratch.views[0]
        convicted = dict.fromkeys(rejected, "")
        self.truth.render(job.epoch, job.chunk, want, convicted=convicted)
        rows = slice(0, job.rows)
        for name in ("images", "labels", "indices", "status"):
            np.testing.assert_array_equal(getattr(view, name)[rows], getattr(want, name)[rows], err_msg=name)

    def close(self) -> None:
        self.supervisor.stop()
        self.truth.backend.close()
        self.ring.close()
        self.scratch.close()
        self.index.close()


def poison(folder: Path, number: int, how: bytes) -> int:
    """Make one file of the folder behave badly; its place in the listing."""
    files = sorted(folder.glob("*/*"))
    data = files[number].read_bytes()
    files[number].unlink()  # a hard link: the photo itself stays good
    files[number].write_bytes(data + how)
    return number


def run_epoch(at: Plant, chunks: int, disturb: Callable[[], None] = lambda: None) -> list[Finished]:
    """Every chunk of an epoch through the ring, with something done at each turn."""
    todo = [at.job(chunk, 0) for chunk in range(chunks)]
    free = list(range(at.ring.slots))
    done: list[Finished] = []
    deadline = time.monotonic() + 90
    while len(done) < chunks:
        assert time.monotonic() < deadline, at.reports[-5:]
        while free and todo and at.supervisor.idle:
            job = todo.pop(0)
            job.slot = free.pop()
            at.supervisor.submit(job)
        at.step(0.02)
        disturb()
        assert not at.of(Failed), at.of(Failed)
        for report in at.of(Finished)[len(done) :]:
            assert isinstance(report, Finished)
            at.check(report.job, {r.index for r in report.rejects if r.stage == "worker"})
            free.append(report.job.slot)
            done.append(report)
    return done


@contextmanager
def plants(cache: Path) -> Iterator[Callable[..., Plant]]:
    """`Plant` without its cache, for as many as are wanted; they are closed in the end."""
    made: list[Plant] = []

    def build(folder: Path, crew: Crew, *, hang: float = 60.0, truth: str = "fake") -> Plant:
        made.append(Plant(folder, cache, crew, hang=hang, truth=truth))
        return made[-1]

    yield build
    for one in made:
        one.close()
