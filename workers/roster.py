"""Which workers there are to be while GPUs, or what CPU workers render with, do not work; and what is to be said of it.
No I/O: the caller brings the time, starts processes and tells how they end.
"""

from __future__ import annotations

from headrace.workers.backoff import Backoff
from headrace.workers.crew import Crew

#: CPU workers that end by themselves before they are ready, in a row, after which there is no point in waiting.
STARTS = 3
#: Seconds before the next start of a CPU worker, after so many of these; the last also where none can be started.
CPU_DELAYS = (0.2, 1.0, 5.0)
#: The same after one that was killed before it was ready.
KILLED_DELAY = 0.2
#: Seconds before a device is tried again.
DEVICE_DELAYS = (1.0, 5.0, 30.0, 60.0, 300.0, 900.0)
#: Troubles of a backend that are said, until it works again. Their texts hold numbers, and may never be the same.
_TROUBLES = 8
#: Crashes of CPU workers in a row, with nothing rendered in between, that tell against their backend, and for how many
#: seconds it is left alone then. A single picture costs two, and a chunk is given up after `fill.UNEXPLAINED`.
CRASHES = 4
BACKEND_DELAYS = (30.0, 300.0, 1800.0)


class Roster:
    """Devices render while at least one works, CPU workers while none does. A CPU worker is started with the crew's
    backend and the fallback, or with the fallback alone: beside devices, and while the backend kills its workers.

    What is returned as text is to be logged; it is empty if that was said already.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._troubles = dict.fromkeys(crew.devices, "")  # why a device does not work
        self._devices = {device: Backoff(DEVICE_DELAYS) for device in crew.devices}
        self._starts = Backoff(CPU_DELAYS)
        self._backend = Backoff(BACKEND_DELAYS)
        self._crashes = 0
        self._crashing = ""  # what is said of a backend that kills its workers,
        self._failing: set[str] = set()  # and of one that fails

    @property
    def on_cpu(self) -> bool:
        """Whether CPU workers render: there is no device, or none that works."""
        return all(self._troubles.values())

    @property
    def notices(self) -> list[str]:
        """What does not work as it is meant to, a sentence each."""
        down = [f"{_down(device, trouble)}; {self._instead}" for device, trouble in self._troubles.items() if trouble]
        return [*down, *([self._crashing] if self._crashing else []), *sorted(self._failing)]

    @property
    def _instead(self) -> str:
        if not self.on_cpu:
            return "the others render its chunks until it is back"
        crew = self._crew
        return f"chunks are rendered by {crew.processes} CPU workers ({crew.cpu_backend}) until it is back"

    # -- devices --------------------------------------------------------------------------------------------

    def device_due(self, device: int, now: float) -> bool:
        """Whether its worker may be started."""
        return self._devices[device].due(now)

    def device_ready(self, device: int) -> str:
        """Its worker is."""
        if not self._troubles[device]:
            return ""
        self._troubles[device] = ""
        return f"GPU {device} works again: chunks go to it"

    def device_failed(self, device: int, trouble: str, now: float, worked: float = 0.0) -> str:
        """It could not be started, or has worked for so many seconds."""
        delay = self._devices[device].failed(now, worked)
        if trouble == self._troubles[device]:
            return ""
        self._troubles[device] = trouble
        return f"{_down(device, trouble)}; {self._instead}; trying again in {delay:.0f} s"

    # -- CPU workers ----------------------------------------------------------------------------------------

    def cpu_workers(self, *, fallback: bool) -> int:
        """How many are needed.

        Args:
            fallback: something waits that only they may render.
        """
        return self._crew.processes if self.on_cpu else int(fallback)

    def cpu_backends(self, now: float) -> tuple[str, ...]:
        """What those are started with that are to render now: the backend, and who takes over."""
        crew = self._crew
        if crew.devices or crew.fallback is None:
            return (crew.cpu_backend,)
        return (crew.backend, crew.fallback) if self._backend.due(now) else (crew.fallback,)

    def cpu_due(self, now: float) -> bool:
        """Whether one may be started."""
        return self._starts.due(now)

    def cpu_ready(self) -> None:
        self._starts.failures = 0

    def cpu_put_off(self, until: float) -> None:
        """The next one starts then, and no failure is counted."""
        self._starts.next = until

    def cpu_failed(self, how: str, now: float) -> str:
        """One ended by itself before it was ready, or because its backend does not work and nobody takes over.

        Returns:
            Why there is no point in waiting for another one, or "".
        """
        self._starts.failed(now)
        failures = self._starts.failures
        if failures < STARTS:
            return ""
        return f"workers end before they are ready ({how}, {failures} times); see the log"

    def crashed(self, how: str, now: float) -> str:
        """One that renders with the backend has been killed by it."""
        self._crashes += 1
        if self._crashes < CRASHES:
            return ""
        self._crashes = 0
        delay = self._backend.failed(now, worked=now - self._backend.next)
        crew = self._crew
        self._crashing = (
            f"{crew.backend}: {CRASHES} workers ended in a row ({how}); chunks are rendered by {crew.fallback} alone "
            "until it works again"
        )
        return f"{self._crashing}; trying again in {delay:.0f} s"

    def fell_back(self, trouble: str) -> str:
        """In a worker the fallback renders, because of this."""
        text = f"{self._crew.backend}: {trouble}; chunks are rendered by {self._crew.fallback} until it works again"
        if text in self._failing or len(self._failing) >= _TROUBLES:
            return ""
        self._failing.add(text)
        return f"{text}; it is tried again from time to time"

    def works(self, *, everywhere: bool) -> str:
        """In a worker the backend has rendered.

        Args:
            everywhere: the fallback renders in no other worker.
        """
        self._crashes = 0
        before = bool(self._crashing or self._failing)
        self._crashing = ""
        if everywhere:
            self._failing.clear()
        after = bool(self._failing)
        return f"{self._crew.backend} works again: chunks are rendered by it" if before and not after else ""


def _down(device: int, trouble: str) -> str:
    return f"GPU {device}: {trouble}"
