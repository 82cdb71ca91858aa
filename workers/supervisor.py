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
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.channel import Closed
from headrace.errors import ProtocolError
from headrace.pipeline import wholes
from headrace.pipeline.index import Index
from headrace.pipeline.order import order
from headrace.pipeline.spec import Stream
from headrace.protocol import RowReject
from headrace.slots import Ring, Status
from headrace.stages import Stages
from headrace.workers import messages
from headrace.workers.crew import Crew
from headrace.workers.fill import GaveUp, Part
from headrace.workers.loop import Loop
from headrace.workers.member import Given, Job, Member
from headrace.workers.messages import Convict, Leaving, Open, Ready, Render, Rendered, RenderFailed
from headrace.workers.process import Child
from headrace.workers.roster import CPU_DELAYS, KILLED_DELAY, Roster

log = logging.getLogger(__name__)

#: Seconds without any progress after which a worker counts as hung. Progress is a row that was read or finished; the
#: largest picture that the default limits let through takes minutes as JPEG 2000, on a machine that has other work.
HANG_TIMEOUT = 300.0
#: The same for the worker of a GPU, which takes seconds for anything but a giant that Pillow has to decode, and such a
#: one goes to a CPU worker in the end. A `Loader` gives up after 60 s by default, and should not notice.
DEVICE_HANG_TIMEOUT = 40.0
#: The same for one that somebody has stopped: it is not working on anything.
STOPPED_TIMEOUT = 20.0
#: Seconds that a worker may take to be ready: importing a large library from a cold disk.
_START_TIMEOUT = 120.0
#: Signals by which a process ends itself.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
#: Chunks in which a picture has killed the worker that had it alone, and not the fallback's, after which it goes to the
#: fallback at once. Once may be the machine's fault.
_FATAL = 2
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
    fatal: Counter[int] = field(default_factory=Counter)  # of samples that the fallback renders: chunks, as `_FATAL`


class Supervisor:
    """
    Args:
        loop: calls back when a worker answers or ends.
        crew: who is to render.
        report: called with everything that happens.
        hang_timeout: seconds; of a device's worker at most `DEVICE_HANG_TIMEOUT`.
    """

    def __init__(
        self, loop: Loop, crew: Crew, report: Callable[[Report], None], *, hang_timeout: float = HANG_TIMEOUT
    ) -> None:
        self.crew = crew
        self.stages = Stages()
        self.deaths = 0
        self._loop = loop
        self._report = report
        self._hang_timeout = hang_timeout
        self._streams: dict[int, _Stream] = {}
        self._workers: list[Member] = []
        self._roster = Roster(crew)
        self._again: deque[Job] = deque()
        self._lived = 0.0  # of workers that have ended
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
        return self._roster.notices

    def worker_seconds(self, now: float) -> float:
        """From the moment each worker was ready to its end or now."""
        return self._lived + sum(now - worker.ready_since for worker in self._workers if worker.render_id is not None)

    def waited(self, now: float) -> float:
        """Seconds that workers have waited for tasks and not told yet: they do with their next answer."""
        return sum(worker.unsaid(now) for worker in self._workers)

    @property
    def idle(self) -> bool:
        """Whether `submit` would give the job to a worker at once."""
        return all(job.fill.part().fallback for job in self._again) and self._taker(Part(())) is not None

    @property
    def full(self) -> set[int]:
        """Devices that work and have no room: what is for them had better wait, as long as there is something for
        others.
        """
        now = time.monotonic()
        return {
            worker.device
            for worker in self._workers
            if worker.device is not None and self._serves(worker) and worker.full(now)
        }

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
        at = self._streams[job.stream]
        if fatal := [index for index, chunks in at.fatal.items() if chunks >= _FATAL]:
            first = job.chunk * at.spec.chunk
            lines = order(at.spec.seed, job.epoch, len(at.index), first, job.rows, shuffle=at.spec.shuffle)
            job.fill.leave_to_fallback(np.flatnonzero(np.isin(lines, fatal)).tolist())
        self._again.append(job)
        self._feed()

    def tick(self) -> None:
        """What only time brings: starts that were put off, workers that hang or are not needed. Call about once a
        second.
        """
        now = time.monotonic()
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
        self._staff()
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

    def _serves(self, worker: Member) -> bool:
        """Whether it is of the kind that renders now."""
        if worker.device is not None:
            return not self._roster.on_cpu
        return self._roster.on_cpu and worker.told == self._roster.cpu_backends(time.monotonic())

    def _cpu_workers(self) -> int:
        """How many are needed."""
        return self._roster.cpu_workers(fallback=any(job.fill.part().fallback for job in self._again))

    def _superfluous(self, worker: Member, now: float) -> bool:
        if worker.device is not None or worker.retired:
            return False
        idle = now - worker.moved > _LINGER and not self._cpu_workers()
        return idle or worker.told != self._roster.cpu_backends(now)

    def _staff(self) -> None:
        """Start who is missing, as far as it is time."""
        if self._stopping:
            return
        now = time.monotonic()
        here = [worker.device for worker in self._workers if not worker.retired]
        for device in self.crew.devices:
            if device not in here and self._roster.device_due(device, now):
                self._start_device(device, now)
        for _ in range(here.count(None), self._cpu_workers()):
            if not self._roster.cpu_due(now) or not self._start_cpu(now):
                break

    def _start_device(self, device: int, now: float) -> None:
        try:
            child = Child(self.crew.device_module, self.crew.device_argument(device))
        except OSError as error:
            self._device_failed(device, f"its worker cannot be started: {error}", now)
        else:
            self._welcome(Member(child, (), device, self.crew.in_flight, now))

    def _start_cpu(self, now: float) -> bool:
        told = self._roster.cpu_backends(now)
        try:
            child = Child(self.crew.cpu_module, *told)
        except OSError as error:  # no descriptors, processes or memory left: that may pass
            log.error("a worker cannot be started: %s", error)
            self._roster.cpu_put_off(now + CPU_DELAYS[-1])
            return False
        self._welcome(Member(child, told, None, 1, now))
        return True

    def _welcome(self, worker: Member) -> None:
        self._workers.append(worker)
        self._loop.watch(worker.child.channel, lambda: self._heard(worker))
        self._loop.watch(worker.child.pidfd, lambda: self._ended(worker))
        for number in self._streams:
            self._tell_stream(worker, number)

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
        if worker.device is not None:
            _warn(self._roster.device_ready(worker.device))
        else:
            self._roster.cpu_ready()
            if message.trouble:
                self._fell_back(worker, message.trouble)
        self._report(Started(message.render_id))

    def _rendered(self, worker: Member, given: Given, message: Rendered) -> None:
        worker.answered += 1
        if not given.part.fallback:
            worker.render_id = message.render_id
            if message.trouble:
                self._fell_back(worker, message.trouble)
            elif len(worker.told) > 1:
                worker.trouble = ""
                _warn(self._roster.works(everywhere=not any(one.trouble for one in self._workers)))
        self.stages.merge(message.stages)
        worker.waited = 0.0
        job = given.job
        if given.part.fallback and self.crew.fallback is not None:
            at = self._streams[job.stream]
            at.fatal.update(at.ring.views[job.slot].indices[list(given.part.rows)].tolist())
        job.fill.rendered(given.part.rows, message.rejects, message.render_id)
        if job.fill.done:
            rejects = sorted(job.fill.rejects, key=lambda reject: reject.row)
            self._report(Finished(job, rejects, job.fill.render_id))
        else:
            self._again.appendleft(job)

    def _fell_back(self, worker: Member, trouble: str) -> None:
        worker.trouble = trouble
        _fail(self._roster.fell_back(trouble))

    # -- jobs -----------------------------------------------------------------------------------------------

    def _statuses(self, job: Job) -> bytes:
        return self._streams[job.stream].ring.views[job.slot].status.tobytes()

    def _taker(self, part: Part, home: int | None = None) -> Member | None:
        """Who is to have the part now: of those it may go to, and who have room, the worker of `home`, or the one with
        the least to do, and who has had nothing for longest, so that each shows now and then how it is.
        """
        kind = self._on_cpu if part.fallback else self._serves
        able = [worker for worker in self._workers if worker.takes(part) and kind(worker)]
        away = {worker: home is not None and worker.device != home for worker in able}
        return min(able, key=lambda worker: (away[worker], len(worker.given), worker.moved), default=None)

    def _on_cpu(self, worker: Member) -> bool:
        return worker.device is None

    def _feed(self) -> None:
        for job in list(self._again):
            part = job.fill.part()
            if (worker := self._taker(part, job.home)) is not None:
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
        if worker.hung:
            return  # it is killed, and ends when the system lets it
        silent = worker.silent(now)
        limit = self._hang_timeout if worker.device is None else min(self._hang_timeout, DEVICE_HANG_TIMEOUT)
        if worker.render_id is None and now - worker.moved > _START_TIMEOUT:
            worker.hung = f"it was not ready after {_START_TIMEOUT:.0f} s"
        elif silent > limit:
            worker.hung = f"it hung for {silent:.0f} s"
        elif (behind := worker.behind(now)) > 2 * self._hang_timeout:
            worker.hung = f"a chunk hung in it for {behind:.0f} s"
        elif silent > min(STOPPED_TIMEOUT, limit) and worker.child.stopped:
            worker.hung = f"it was stopped for {silent:.0f} s"
        else:
            return
        log.error("worker %d: %s: killed", worker.pid, worker.hung)
        worker.child.kill()
        if worker.device is not None:  # others go on at once: a driver may keep it from ending
            self._lost_device(worker, worker.device, worker.hung, now)

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
        self._account(worker, time.monotonic())
        if not worker.retired:
            self._bury(worker, status)
        self._staff()
        self._feed()

    def _account(self, worker: Member, now: float) -> None:
        """Its life is over."""
        if worker.render_id is not None:
            self._lived += now - worker.ready_since
            self.stages.add("wait", worker.unsaid(now), 0)

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
        if worker.device is None:
            self._lost_cpu(worker, how, now, own=bool(worker.hung) or status >= 0 or -status in _OWN_SIGNALS)
        elif not worker.hung:
            self._lost_device(worker, worker.device, how, now)

    def _lost_device(self, worker: Member, device: int, how: str, now: float) -> None:
        if worker.leaving is None:
            how = f"its worker: {how}" if worker.hung else f"its worker ended by {how}"
        elif not worker.leaving.failed and worker.answered:
            log.warning("GPU %d: its worker is replaced: %s", device, how)
            return
        worked = worker.moved - worker.ready_since if worker.render_id is not None else 0.0  # not while it hung
        self._device_failed(device, how, now, worked)

    def _device_failed(self, device: int, trouble: str, now: float, worked: float = 0.0) -> None:
        _fail(self._roster.device_failed(device, trouble, now, worked))
        if self._roster.on_cpu and (render_id := self.render_id) is not None:
            self._report(Started(render_id))  # CPU workers that are there already: who waited for the device has them

    def _lost_cpu(self, worker: Member, how: str, now: float, *, own: bool) -> None:
        """Put the next start off, if need be.

        Args:
            own: it was not killed by somebody else.
        """
        failed = worker.leaving is not None and worker.leaving.failed
        self._roster.cpu_put_off(now + KILLED_DELAY if worker.render_id is None else now)
        if own and not failed and len(worker.told) > 1:
            _fail(self._roster.crashed(how, now))
        elif (failed or (own and worker.render_id is None)) and (text := self._roster.cpu_failed(how, now)):
            self._give_up(text)

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
        """No CPU worker starts: what only they can do fails, if none is there. It goes on being tried."""
        log.error("%s", text)
        if any(self._on_cpu(one) and one.render_id is not None and not one.retired for one in self._workers):
            return
        for job in list(self._again):
            if self._roster.on_cpu or job.fill.part().fallback:
                self._again.remove(job)
                self._report(Failed(job, "HeadraceError", text))
        if self._roster.on_cpu:
            self._report(Broken(text))

    def _unwatch(self, worker: Member) -> None:
        self._loop.unwatch(worker.child.channel)
        self._loop.unwatch(worker.child.pidfd)


def _warn(text: str) -> None:
    if text:
        log.warning("%s", text)


def _fail(text: str) -> None:
    if text:
        log.error("%s", text)
