"""What the stages of the way of a picture take: count, seconds, bytes and a histogram. Always on, so it must be cheap.

A stage is what one process does with one thread after another: of workers `wait` (for a task), `read`, `plan`,
`decode`, `resize`, `colour`, `write`, or `render` where a backend does all of these at once; of the daemon `send`; of a
Loader `wait` (for a batch), `copy`, `finish` and `device` (a GPU that is behind). Measuring one piece of work takes
about a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from headrace.protocol import BUCKETS, StageStatus

#: Those of a Loader, the only ones that a daemon takes down of what a client says of itself.
CLIENT = ("wait", "copy", "finish", "device")


def bucket(seconds: float) -> int:
    """In which bucket of a histogram a piece of work counts that took so long."""
    return min(int(seconds * 1e6).bit_length(), BUCKETS - 1)


class Stage:
    """What one stage has taken so far."""

    __slots__ = ("count", "histogram", "nbytes", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.nbytes = 0
        self.histogram = [0] * BUCKETS

    def add(self, seconds: float, count: int = 1, nbytes: int = 0) -> None:
        """So many pieces of work were done together; 0: it was none, and still took time."""
        self.count += count
        self.seconds += seconds
        self.nbytes += nbytes
        if count:
            self.histogram[bucket(seconds / count)] += count

    def merge(self, other: Stage | StageStatus) -> None:
        self.count += other.count
        self.seconds += other.seconds
        self.nbytes += other.nbytes
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]

    def status(self) -> StageStatus:
        return StageStatus(self.count, self.seconds, self.nbytes, [*self.histogram])


class Stages:
    """Stages by name; one comes to be with what is first added to it. One thread adds, others may look."""

    __slots__ = ("_stages",)

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}

    def add(self, name: str, seconds: float, count: int = 1, nbytes: int = 0) -> None:
        """As `Stage.add`."""
        stage = self._stages.get(name)
        if stage is None:
            stage = self._stages[name] = Stage()
        stage.add(seconds, count, nbytes)

    def merge(self, other: Stages | Mapping[str, StageStatus]) -> None:
        theirs = other._stages if isinstance(other, Stages) else other
        for name, stage in theirs.items():
            self._stages.setdefault(name, Stage()).merge(stage)

    def seconds(self, name: str) -> float:
        """Of one stage so far."""
        stage = self._stages.get(name)
        return 0.0 if stage is None else stage.seconds

    def status(self) -> dict[str, StageStatus]:
        return {name: stage.status() for name, stage in self._stages.copy().items()}


class Lap(Protocol):
    def __call__(self, name: str, count: int = 1, nbytes: int = 0) -> None:
        """This was the stage since the last lap: as `Stage.add`."""


class Clock:
    """Adds the time since the last lap to a stage, so that no time is lost between two."""

    __slots__ = ("_last", "_stages")

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._last = time.perf_counter()

    def lap(self, name: str, count: int = 1, nbytes: int = 0) -> None:
        """As `Lap`."""
        now = time.perf_counter()
        self._stages.add(name, now - self._last, count, nbytes)
        self._last = now


def unmeasured(name: str, count: int = 1, nbytes: int = 0) -> None:
    """A lap that nobody counts."""
