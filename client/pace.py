"""How a Loader is served: what the trainer took and waited for, and how much faster it could be fed. Plain state.

The second is told from how busy those were who feed it, over the time of an epoch:

    the workers     of the chunks that they could have been at for this Loader, the share that it had asked for
    its own thread  copying and finishing

The loader could feed as many times as fast as the busier of the two fits into that time. It is an estimate: too low
where others take from the same workers, for a chunk that waits for theirs counts as if it were rendered; too high where
chunks come that others had rendered before, or where workers that have more to do get in each other's way.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.protocol import StageStatus
from headrace.stages import Stages

#: Seconds between two reports to the daemon.
REPORT_EVERY = 1.0

#: A share of waiting from which on it is worth mending.
_NOTABLE = 0.05
#: Numbers of times up to which it is no faster, and beyond which another figure means nothing.
_FASTER, _MANY = 1.05, 10.0


class Work(NamedTuple):
    """Seconds that a Loader's feeders have been busy."""

    workers: float = 0.0
    thread: float = 0.0

    def since(self, before: Work) -> Work:
        return Work(self.workers - before.workers, self.thread - before.thread)

    def headroom(self, seconds: float) -> float | None:
        """How many times as fast they could have worked, in this time; None if nothing is known."""
        busiest = max(self)
        return max(1.0, seconds / busiest) if seconds > 0 and busiest > 0 else None


class Pace:
    """
    Attributes:
        batches, images: that the trainer took; of images the valid ones.
        waited, spent: seconds inside `next()`, and in all, without what lies between epochs.
        stages: `wait`, `copy`, `finish`, `device`.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.images = 0
        self.waited = 0.0
        self.spent = 0.0
        self.stages = Stages()
        self._urgent = False
        self._reported: tuple[float, int] | None = None
        # Of the fetching thread alone:
        self._workers = 1
        self._most = 1
        self._outstanding = 0
        self._since: float | None = None
        self._busy = 0.0

    # -- the trainer's side -------------------------------------------------------------------------------------

    def took(self, images: int, waited: float, spent: float) -> None:
        """The trainer has a batch."""
        self.batches += 1
        self.images += images
        self.waited += waited
        self.spent += spent
        self.stages.add("wait", waited)

    def epoch_over(self) -> None:
        """The next report is due."""
        self._urgent = True

    @property
    def work(self) -> Work:
        """So far."""
        return Work(self._busy, self.stages.seconds("copy") + self.stages.seconds("finish"))

    # -- the fetching thread's side -----------------------------------------------------------------------------

    def serves(self, workers: int) -> None:
        """A daemon whose workers are at so many chunks at once."""
        self._workers = workers

    def asked(self, outstanding: int, now: float) -> None:
        """From now on so many chunks are asked for."""
        most = max(1, min(self._workers, self._most))
        if self._since is not None:
            self._busy += (now - self._since) * min(self._outstanding, most) / most
        self._since, self._outstanding = now, outstanding
        self._most = max(self._most, outstanding)

    def due(self, now: float) -> bool:
        """Whether to report now, which counts as done."""
        if self._reported is not None and not self._urgent:
            when, batches = self._reported
            if now - when < REPORT_EVERY or batches == self.batches:
                return False
        elif not self.batches:
            return False
        self._urgent = False
        self._reported = now, self.batches
        return True

    def anew(self) -> None:
        """Another session: nothing was reported there."""
        self._reported = None


def summary(epoch: int, images: int, waited: float, spent: float, headroom: float | None) -> str:
    """An epoch in one line."""
    share = waited / spent if spent else 0.0
    line = f"epoch {epoch}: {images} images, waited {100 * share:.0f} % of the time"
    if share >= _NOTABLE:
        return f"{line}; without that the trainer would be {_times(1 / max(1 - share, 1e-9))} as fast"
    if headroom is None:
        return line
    return f"{line}; the loader could feed " + ("no faster" if headroom < _FASTER else f"{_times(headroom)} as fast")


def plain(stages: dict[str, StageStatus]) -> dict[str, dict[str, float]]:
    """Stages for people: count, seconds and bytes."""
    return {
        name: {"count": stage.count, "seconds": stage.seconds, "nbytes": stage.nbytes} for name, stage in stages.items()
    }


def _times(factor: float) -> str:
    return f"more than {_MANY:.0f} times" if factor > _MANY else f"{factor:.1f} times"
