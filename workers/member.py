"""One worker as its supervisor sees it: the process, what it was given, and when it last moved. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.workers.fill import Fill, Part
from headrace.workers.messages import Leaving
from headrace.workers.process import Child

#: Seconds without a sign of work after which nobody waits any more for a worker's room while others have some.
PROMPT = 5.0


@dataclass(eq=False, slots=True)
class Job:
    """A chunk that is to be rendered into a slot.

    Attributes:
        stream: the stream's number.
        rows: how many rows the chunk has.
        only: the rows that are wanted; None for all.
        home: the device that is to render it while it has room; None: any.
    """

    stream: int
    epoch: int
    chunk: int
    slot: int
    rows: int
    only: tuple[int, ...] | None = None
    home: int | None = None
    fill: Fill = field(init=False)

    def __post_init__(self) -> None:
        self.fill = Fill(range(self.rows) if self.only is None else self.only)


@dataclass(slots=True)
class Given:
    """A part of a job that a worker has. `seen` are the statuses of the job's rows when they last changed, and `moved`
    is when that was.
    """

    job: Job
    part: Part
    seen: bytes
    moved: float


@dataclass(eq=False, slots=True)
class Member:
    """
    Attributes:
        child: the process.
        told: the backends it was started with, if it is a CPU worker.
        device: number of its GPU, or None.
        room: parts that it may have at once.
        moved: when it was last seen to do something; at first, when it was started.
        render_id: of its renderer; None until it is ready.
        ready_since: when it became that.
        trouble: why its fallback renders, or "".
        given: by job number.
        answered: parts that it has rendered.
        leaving: what it said when it decided to end.
        retired: it is asked to end, and has nothing to do.
        deaf: since when its channel is of no use, or None.
        hung: why it was killed, if it was for hanging.
        waited: seconds without a task, as seen from here, that it has not told of itself yet.
    """

    child: Child
    told: tuple[str, ...]
    device: int | None
    room: int
    moved: float
    render_id: str | None = None
    ready_since: float = 0.0
    trouble: str = ""
    given: dict[int, Given] = field(default_factory=dict)
    answered: int = 0
    leaving: Leaving | None = None
    retired: bool = False
    deaf: float | None = None
    hung: str = ""
    waited: float = 0.0
    _numbers: int = 0

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def works(self) -> bool:
        """Whether it can have anything, now or when it has done something of what it has."""
        return self.render_id is not None and self.deaf is None and self.leaving is None and not self.hung

    def takes(self, part: Part) -> bool:
        """Whether it can have the part now."""
        if not self.works:
            return False
        if part.alone:
            return not self.given
        return len(self.given) < self.room and not any(given.part.alone for given in self.given.values())

    def full(self, now: float) -> bool:
        """Whether it has no room, and shows that it will have some soon. One that may hang is worth no waiting."""
        return self.works and not self.takes(Part(())) and self.silent(now) < PROMPT

    def give(self, given: Given) -> int:
        """Note the part; its number."""
        if not self.given:
            self.waited += given.moved - self.moved
        self._numbers += 1
        self.given[self._numbers] = given
        return self._numbers

    def unsaid(self, now: float) -> float:
        """Seconds for which it has had no task and has not told so."""
        return self.waited + (0.0 if self.given or self.render_id is None else now - self.moved)

    def silent(self, now: float) -> float:
        """Seconds without a sign of work on anything it has."""
        return now - max(self.moved, *(given.moved for given in self.given.values())) if self.given else 0.0

    def behind(self, now: float) -> float:
        """Seconds without a sign of work on the part that moved least: others may leave it behind, or it waits."""
        return max((now - given.moved for given in self.given.values()), default=0.0)
