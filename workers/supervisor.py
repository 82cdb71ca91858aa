"""Starts, feeds, watches and replaces the workers: a process per GPU, or CPU workers, or these for those.

A chunk that is given to a worker comes back as `Finished` or `Failed`, whatever happens to the worker: when one dies,
the supervisor waits until it is reaped (only then are its slots certainly not written any more), starts another, and
gives its chunks again as their `Fill`s say. A worker that makes no progress is killed first.

While the worker of at least one GPU works, chunks go there. When none does, CPU workers are started and chunks go to
them, in the same order, while the GPUs are tried again, later each time. CPU workers whose backend kills them again and
again are started with the fallback alone for a while.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.channel import Closed
from headrace.errors import ProtocolError
from headrace.pipeline import wholes
from headrace.pipeline.index import Index
from headrace.pipeline.spec import Stream
from headrace.protocol import RowReject
from headrace.slots import Ring, Status
from headrace.workers import messages
from headrace.workers.backoff import Backoff
from headrace.workers.crew import Crew
from headrace.workers.fill import GaveUp, Part
from headrace.workers.loop import Loop
from headrace.workers.member import Given, Job, Member
from headrace.workers.messages import Convict, Leaving, Open, Ready, Render, Rendered, RenderFailed
from headrace.workers.process import Child

log = logging.getLogger(__name__)

#: Seconds without any progress after which a worker counts as hung. Progress is a row that was read or finished; the
#: largest picture that the default limits let through takes minutes as JPEG 2000, on a machine that has other work.
HANG_TIMEOUT = 300.0
#: The same for one that somebody has stopped: it is not working on anything.
STOPPED_TIMEOUT = 20.0
#: Seconds that a worker may take to be ready: importing a large library from a cold disk.
_START_TIMEOUT = 120.0
#: CPU workers that end by themselves before they are ready, in a row, after which there is no point in waiting.
_STARTS = 3
#: Seconds before the next start of a CPU worker, after so many of these.
_CPU_DELAYS = (0.2, 1.0, 5.0)
#: The same after one that was killed before it was ready.
_KILLED_BACKOFF = 0.2
#: Seconds before a device is tried again.
_DEVICE_DELAYS = (1.0, 5.0, 30.0, 60.0, 300.0, 900.0)
#: Crashes of CPU workers in a row, with nothing rendered in between, that tell against their backend, and for how many
#: seconds it is left alone then. A single picture costs two.
_CRASHES = 5
_BACKEND_DELAYS = (30.0, 300.0, 1800.0)
#: Signals by which a process ends itself.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
#: Seconds that CPU workers stay without work once a device renders again.
_LINGER = 60.0
#: Seconds that workers get to end by themselves when the daemon stops.
_GRACE = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The chunk is in its slot; `render_id` names all who have rendered a part of it."""

    job: Job
    rejects: list[RowReject]
    render_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The chunk cannot be had, and nobody writes to its slot any more."""

    job: Job
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Convicted:
    """A sample has killed workers; it is rejected from now on."""

    stream: int
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """A worker is ready: its kind of pictures."""

    render_id: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Workers end before they are ready, again and again."""

    text: str


Report = Finished | Failed | Convicted | Started | Broken


@dataclass(slots=True)
class _Stream:
    spec: Stream
    ring: Ring
    index: Index
    convicted: dict[int, str]
    wholes: int  # a descriptor


@dataclass(eq=False, slots=True)
class _Device:
    """A GPU, its worker, and why it does not work ("": it does, as far as one knows)."""

    number: int
    worker: Member | None = None
    trouble: str = ""
    backoff: Backoff = field(default_factory=lambda: Backoff(_DEVICE_DELAYS))


class Supervisor:
    """
    Args:
        loop: calls back when a worker answers or ends.
        crew: who is to render.
        report: called with everything that happens.
        hang_timeout: seconds.
    """

    def __init__(
        self, loop: Loop, crew: Crew, report: Callable[[Report], None], *, hang_timeout: float = HANG_TIMEOUT
    ) -> None:
        self.crew = crew
        self.seconds: dict[str, float] = {}
        self.nbytes = 0
        self.deaths = 0
        self._loop = loop
        self._report = report
        self._hang_timeout = hang_timeout
        self._streams: dict[int, _Stream] = {}
        self._workers: list[Member] = []
        self._devices = [_Device(number) for number in crew.devices]
        self._again: deque[Job] = deque()
        self._starts = Backoff(_CPU_DELAYS)  # of CPU workers, by those that end before they are ready
        self._bench = Backoff(_BACKEND_DELAYS)  # for their backend, if it kills them
        self._crashes = 0
        self._backend_trouble = ""
        self._said: set[str] = set()
        self._stopping = False

    # -- for the service ------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Chunks that can be at the workers at once."""
        return self.crew.chunks

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    @property
    def ready(self) -> int:
        """Workers that have started, at work or not."""
        return sum(worker.render_id is not None for worker in self._workers)

    @property
    def render_id(self) -> str | None:
        """Of whoever would render the next chunk; None while nobody is ready."""
        return next((w.render_id for w in self._workers if w.render_id is not None and self._serves(w)), None)

    @property
    def notices(self) -> list[str]:
        """What does not work as it is meant to, a sentence each."""
        down = [f"GPU {d.number}: {d.trouble}; {self._instead()}" for d in self._devices if d.trouble]
        return [*down, *([self._backend_trouble] if self._backend_trouble else []), *sorted(self._said)]

    @property
    def idle(self) -> bool:
        """Whether `submit` would give the job to a worker at once."""
        return all(job.fill.part().fallback for job in self._again) and self._taker(Part(())) is not None

    def start(self) -> None:
        self._staff()

    def open_stream(self, number: int, spec: Stream, ring: Ring, index: Index, convicted: Mapping[int, str]) -> None:
        """Make a stream known to all workers, also those to come. Ring and index stay the caller's.

        Raises:
            OSError: memory or descriptors do not suffice.
        """
        self._streams[number] = _Stream(spec, ring, index, dict(convicted), wholes.create(len(index)))
        for worker in self._workers:
            self._tell_stream(worker, number)

    def submit(self, job: Job) -> None:
        """Render it; it comes back in a report."""
        self._again.append(job)
        self._feed()

    def tick(self) -> None:
        """What only time brings: starts that were put off, workers that hang or are not needed. Call about once a
        second.
        """
        now = time.monotonic()
        self._staff()
        for worker in self._workers:
            if worker.deaf is not None and now - worker.deaf > _GRACE:
                worker.child.kill()
            for given in worker.given.values():
                statuses = self._statuses(given.job)
                if statuses != given.seen:
                    given.seen, given.moved = statuses, now
            self._check_hung(worker, now)
            if not worker.given and self._superfluous(worker, now):
                self._retire(worker, now)
        self._feed()

    def stop(self, *, force: bool = False) -> None:
        """End all workers: by closing their channels, after a grace period by SIGKILL. None is left."""
        self._stopping = True
        for worker in self._workers:
            self._unwatch(worker)
            worker.child.channel.close()
            if force:
                worker.child.kill()
        deadline = time.monotonic() + _GRACE
        for worker in self._workers:
            if worker.child.reap(max(0.0, deadline - time.monotonic())) is None:
                worker.child.kill()
                worker.child.reap(timeout=10.0)
            worker.child.close()
        self._workers.clear()
        for stream in self._streams.values():
            os.close(stream.wholes)
        self._streams.clear()

    # -- who is there ---------------------------------------------------------------------------------------

    @property
    def _all_down(self) -> bool:
        """Whether there are only CPU workers to render."""
        return all(device.trouble for device in self._devices)

    def _instead(self) -> str:
        if self._all_down:
            return (
                f"chunks are rendered by {self.crew.processes} CPU workers ({self.crew.cpu_backend}) until it is back"
            )
        return "the others render its chunks until it is back"

    def _serves(self, worker: Member) -> bool:
        """Whether it is of the kind that renders now."""
        if worker.device is not None:
            return not self._all_down
        return self._all_down and worker.told == self._cpu_backends(time.monotonic())

    def _cpu_backends(self, now: float) -> tuple[str, ...]:
        """What a CPU worker is started with."""
        crew = self.crew
        if crew.devices or crew.fallback is None:
            return (crew.cpu_backend,)
        return (crew.backend, crew.fallback) if self._bench.due(now) else (crew.fallback,)

    def _cpu_workers(self) -> int:
        """How many are needed."""
        if self._all_down:
            return self.crew.processes
        return int(any(job.fill.part().fallback for job in self._again))

    def _superfluous(self, worker: Member, now: float) -> bool:
        if worker.device is not None or worker.retired:
            return False
        return worker.told != self._cpu_backends(now) or (not self._cpu_workers() and now - worker.moved > _LINGER)

    def _staff(self) -> None:
        """Start who is missing, as far as it is time."""
        if self._stopping:
            return
        now = time.monotonic()
        for device in self._devices:
            if device.worker is None and device.backoff.due(now):
                self._start_device(device, now)
        here = sum(worker.device is None and not worker.retired for worker in self._workers)
        for _ in range(here, self._cpu_workers()):
            if not self._starts.due(now) or not self._start_cpu(now):
                break

    def _start_device(self, device: _Device, now: float) -> None:
        try:
            child = Child(self.crew.device_module, self.crew.device_argument(device.number))
        except OSError as error:
            self._device_failed(device, f"its worker cannot be started: {error}", now)
            return
        device.worker = self._welcome(Member(child, (), device.number, self.crew.in_flight, now))

    def _start_cpu(self, now: float) -> bool:
        told = self._cpu_backends(now)
        try:
            child = Child(self.crew.cpu_module, *told)
        except OSError as error:  # no descriptors, processes or memory left: that may pass
            log.error("a worker cannot be started: %s", error)
            self._starts.next = now + _CPU_DELAYS[-1]
            return False
        self._welcome(Member(child, told, None, 1, now))
        return True

    def _welcome(self, worker: Member) -> Member:
        self._workers.append(worker)
        self._loop.watch(worker.child.channel, lambda: self._heard(worker))
        self._loop.watch(worker.child.pidfd, lambda: self._ended(worker))
        for number in self._streams:
            self._tell_stream(worker, number)
        return worker

    def _retire(self, worker: Member, now: float) -> None:
        """Have it end, by the end of its channel."""
        log.info("worker %d is not needed any more", worker.pid)
        worker.retired, worker.deaf = True, now
        self._loop.unwatch(worker.child.channel)
        worker.child.channel.close()

    # -- what is said to them and by them -------------------------------------------------------------------

    def _tell_stream(self, worker: Member, number: int) -> None:
        at = self._streams[number]
        message = Open(
            stream=number,
            spec=json.dumps(at.spec.plain()),
            layout=at.ring.layout,
            slots=at.ring.slots,
            convicted=at.convicted,
        )
        self._tell(worker, message, at.ring.fd, at.index.fd, at.wholes)

    def _tell(self, worker: Member, message: Open | Convict | Render, *fds: int) -> None:
        try:
            worker.child.channel.post(messages.encode(message), fds)
        except Closed:
            return  # its pidfd says the rest
        except OSError as error:  # it has missed something: another one, later, will not
            log.error("worker %d cannot be told: %s: killed", worker.pid, error)
            worker.child.kill()
            return
        self._watch_channel(worker)

    def _watch_channel(self, worker: Member) -> None:
        channel = worker.child.channel
        self._loop.watch(channel, lambda: self._heard(worker), write=channel.pending)

    def _heard(self, worker: Member) -> None:
        channel = worker.child.channel
        try:
            channel.flush()
            self._watch_channel(worker)
            for frame, _ in channel.receive():
                self._answered(worker, messages.from_worker.decode(frame))
        except (Closed, ProtocolError, msgspec.DecodeError) as error:
            # It is ending, or has closed its end and lives on, or has lost its mind. Its slots are free only when it is
            # gone, and `tick` sees to that; killing it now would hide the exit status of one that is ending.
            if not isinstance(error, Closed):
                log.error("worker %d sends nonsense: %s", worker.pid, error)
            self._loop.unwatch(channel)
            worker.deaf = time.monotonic()
            return
        self._feed()

    def _answered(self, worker: Member, message: Ready | Rendered | RenderFailed | Leaving) -> None:
        worker.moved = time.monotonic()
        match message:
            case Ready():
                self._is_ready(worker, message)
            case Leaving():
                worker.leaving, worker.deaf = message, worker.moved  # one that then lives on is killed
            case Rendered() | RenderFailed():
                given = worker.given.pop(message.job, None)
                if given is None:
                    raise ProtocolError("an answer that nobody asked for")
                if isinstance(message, RenderFailed):
                    self._report(Failed(given.job, message.kind, message.text))
                else:
                    self._rendered(worker, given, message)

    def _is_ready(self, worker: Member, message: Ready) -> None:
        worker.render_id, worker.ready_since = message.render_id, worker.moved
        if worker.device is None:
            self._starts.failures = 0
            self._in_trouble(worker, message.trouble)
        for device in self._devices:
            if device.worker is worker and device.trouble:
                log.warning("GPU %d works again: chunks go to it", device.number)
                device.trouble = ""
        self._report(Started(message.render_id))

    def _rendered(self, worker: Member, given: Given, message: Rendered) -> None:
        worker.answered += 1
        if not given.part.fallback:
            worker.render_id = message.render_id
            if worker.device is None:
                self._in_trouble(worker, message.trouble)
                if not message.trouble:
                    self._backend_works(worker)
        for stage, seconds in message.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.nbytes += message.nbytes
        job = given.job
        job.fill.rendered(given.part.rows, message.rejects, message.render_id)
        if job.fill.done:
            rejects = sorted(job.fill.rejects, key=lambda reject: reject.row)
            self._report(Finished(job, rejects, job.fill.render_id))
        else:
            self._again.appendleft(job)

    def _in_trouble(self, worker: Member, trouble: str) -> None:
        """Say once for all workers why the fallback renders in some, and when it does in none any more."""
        if len(worker.told) < 2:
            return
        worker.trouble = trouble
        if trouble:
            text = (
                f"{self.crew.backend}: {trouble}; chunks are rendered by {self.crew.fallback} instead until it works "
                "again"
            )
            if text not in self._said:
                log.error("%s; it is tried again from time to time", text)
                self._said.add(text)
        elif self._said and not any(one.trouble for one in self._workers):
            log.warning("%s works again: chunks are rendered by it", self.crew.backend)
            self._said.clear()

    # -- jobs -----------------------------------------------------------------------------------------------

    def _statuses(self, job: Job) -> bytes:
        return self._streams[job.stream].ring.views[job.slot].status.tobytes()

    def _taker(self, part: Part) -> Member | None:
        """Who is to have the part now: of those it may go to, and who have room, the one with the least to do, and who
        has had nothing for longest, so that each shows now and then how it is.
        """
        kind = self._on_cpu if part.fallback else self._serves
        able = [worker for worker in self._workers if worker.takes(part) and kind(worker)]
        return min(able, key=lambda worker: (len(worker.given), worker.moved), default=None)

    def _on_cpu(self, worker: Member) -> bool:
        return worker.device is None

    def _feed(self) -> None:
        for job in list(self._again):
            part = job.fill.part()
            if (worker := self._taker(part)) is not None:
                self._again.remove(job)
                self._give(worker, job, part)

    def _give(self, worker: Member, job: Job, part: Part) -> None:
        # What an earlier writer left there must not be taken for this one's progress.
        self._streams[job.stream].ring.views[job.slot].status[list(part.rows)] = Status.PENDING
        number = worker.give(Given(job, part, self._statuses(job), time.monotonic()))
        task = Render(
            job=number,
            stream=job.stream,
            epoch=job.epoch,
            chunk=job.chunk,
            slot=job.slot,
            rows=part.rows,
            fallback=part.fallback,
        )
        self._tell(worker, task)

    # -- when they die --------------------------------------------------------------------------------------

    def _check_hung(self, worker: Member, now: float) -> None:
        silent = worker.silent(now)
        if worker.render_id is None and now - worker.moved > _START_TIMEOUT:
            worker.hung = f"it was not ready after {_START_TIMEOUT:.0f} s"
        elif silent > self._hang_timeout:
            worker.hung = f"it hung for {silent:.0f} s"
        elif silent > min(STOPPED_TIMEOUT, self._hang_timeout) and worker.child.stopped:
            worker.hung = f"it was stopped for {silent:.0f} s"
        else:
            return
        log.error("worker %d: %s: killed", worker.pid, worker.hung)
        worker.child.kill()

    def _ended(self, worker: Member) -> None:
        status = worker.child.reap()
        if status is None:
            return
        if not worker.retired:
            with contextlib.suppress(Closed, ProtocolError, msgspec.DecodeError):
                for frame, _ in worker.child.channel.receive():  # it may have answered before it ended
                    self._answered(worker, messages.from_worker.decode(frame))
        self._unwatch(worker)
        worker.child.close()
        self._workers.remove(worker)
        if not worker.retired:
            self._bury(worker, status)
        self._staff()
        self._feed()

    def _bury(self, worker: Member, status: int) -> None:
        now = time.monotonic()
        how = worker.hung or (f"signal {-status}" if status < 0 else f"exit status {status}")
        if worker.leaving is not None:
            how = worker.leaving.text
            log.warning("worker %d has ended: %s", worker.pid, how)
        else:
            self.deaths += 1
            log.warning("worker %d ended by %s%s", worker.pid, how, ", at work" if worker.given else "")
        given = list(worker.given.values())
        for one in reversed(given):
            if worker.leaving is not None:
                self._again.appendleft(one.job)
            else:
                self._take_back(one, how, alone=len(given) == 1)
        own = bool(worker.hung) or status >= 0 or -status in _OWN_SIGNALS
        for device in self._devices:
            if device.worker is worker:
                device.worker = None
                self._lost_device(device, worker, how, now)
        if worker.device is None:
            self._lost_cpu(worker, how, now, own=own)

    def _lost_device(self, device: _Device, worker: Member, how: str, now: float) -> None:
        if worker.leaving is None:
            how = f"its worker ended by {how}" if not worker.hung else f"its worker: {how}"
        elif not worker.leaving.failed and worker.answered:
            log.warning("GPU %d: its worker is replaced: %s", device.number, how)
            return
        worked = worker.moved - worker.ready_since if worker.render_id is not None else 0.0  # not while it hung
        self._device_failed(device, how, now, worked)

    def _device_failed(self, device: _Device, trouble: str, now: float, worked: float = 0.0) -> None:
        level = logging.ERROR if trouble != device.trouble else logging.DEBUG
        device.trouble = trouble
        delay = device.backoff.failed(now, worked)
        log.log(level, "GPU %d: %s; %s; trying again in %.0f s", device.number, trouble, self._instead(), delay)
        if self._all_down and (render_id := self.render_id) is not None:
            self._report(Started(render_id))  # CPU workers that are there already: who waited for the device has them

    def _lost_cpu(self, worker: Member, how: str, now: float, *, own: bool) -> None:
        """Put the next start off, if need be.

        Args:
            own: it was not killed by somebody else.
        """
        self._starts.next = now
        failed = worker.leaving is not None and worker.leaving.failed
        if own and not failed and len(worker.told) > 1:
            self._backend_crashed(worker, how, now)
        elif failed or (own and worker.render_id is None):
            self._starts.failed(now)
            if self._starts.failures >= _STARTS:
                self._give_up(f"workers end before they are ready ({how}, {self._starts.failures} times); see the log")
        elif worker.render_id is None:  # whoever sends a signal does not mean the start
            self._starts.next = now + _KILLED_BACKOFF

    def _backend_crashed(self, worker: Member, how: str, now: float) -> None:
        if worker.render_id is None:
            self._starts.next = now + _KILLED_BACKOFF
        self._crashes += 1
        if self._crashes < _CRASHES:
            return
        delay = self._bench.failed(now, worked=now - self._bench.next)
        self._crashes = 0
        self._backend_trouble = (
            f"{self.crew.backend}: {_CRASHES} workers ended in a row ({how}); chunks are rendered by "
            f"{self.crew.fallback} alone until it works again"
        )
        log.error("%s; trying again in %.0f s", self._backend_trouble, delay)

    def _backend_works(self, worker: Member) -> None:
        if len(worker.told) < 2:
            return
        self._crashes = 0
        if self._backend_trouble:
            log.warning("%s works again: chunks are rendered by it", self.crew.backend)
            self._backend_trouble = ""

    def _take_back(self, given: Given, how: str, *, alone: bool) -> None:
        job = given.job
        at = self._streams[job.stream]
        view = at.ring.views[job.slot]
        begun = np.flatnonzero(view.status[: job.rows] == Status.RENDERING).tolist()
        try:
            row = job.fill.died(given.part.rows, begun, alone=alone)
        except GaveUp as error:
            self._report(Failed(job, "HeadraceError", f"chunk {job.chunk} of epoch {job.epoch}: {error} ({how})"))
            return
        if row is not None:
            index = int(view.indices[row])
            second = f", the second time under {self.crew.fallback}" if self.crew.fallback is not None else ""
            reason = f"a worker that rendered only this picture died of it, twice{second} ({how})"
            for same in at.index.repeats(index):
                at.convicted[same] = reason
                for worker in self._workers:
                    self._tell(worker, Convict(stream=job.stream, index=same, reason=reason))
            self._report(Convicted(job.stream, index, reason))
        self._again.appendleft(job)

    def _give_up(self, text: str) -> None:
        """No CPU worker starts: what only they can do fails. It goes on being tried."""
        log.error("%s", text)
        for job in list(self._again):
            if self._all_down or job.fill.part().fallback:
                self._again.remove(job)
                self._report(Failed(job, "HeadraceError", text))
        if self._all_down:
            self._report(Broken(text))

    def _unwatch(self, worker: Member) -> None:
        self._loop.unwatch(worker.child.channel)
        self._loop.unwatch(worker.child.pidfd)
