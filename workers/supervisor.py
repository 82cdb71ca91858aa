"""Starts, feeds, watches and replaces the worker processes.

A chunk that is given to a worker comes back as `Finished` or `Failed`, whatever happens to the worker: when one dies,
the supervisor waits until it is reaped (only then is its slot certainly not written any more), starts another, and
gives the chunk again as its `Fill` says. A worker that makes no progress within a chunk is killed first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.channel import Closed
from headrace.errors import ProtocolError
from headrace.pipeline.index import Index
from headrace.pipeline.spec import Stream
from headrace.protocol import RowReject
from headrace.slots import Ring, Status
from headrace.workers import messages
from headrace.workers.fill import Fill, GaveUp
from headrace.workers.loop import Loop
from headrace.workers.messages import Convict, Open, Ready, Render, Rendered, RenderFailed
from headrace.workers.process import Child

log = logging.getLogger(__name__)

#: Seconds without any progress after which a worker counts as hung. Progress is a row that was read or finished; the
#: largest picture that the default limits let through takes minutes as JPEG 2000, on a machine that has other work.
HANG_TIMEOUT = 300.0
#: The same for one that somebody has stopped: it is not working on anything.
STOPPED_TIMEOUT = 20.0
#: Workers that end by themselves before they are ready, in a row, after which there is no point in waiting.
_STARTS = 3
#: Seconds before the next start, by the number of workers in a row that ended by themselves before they were ready.
_BACKOFF = (0.0, 0.2, 1.0, 5.0)
#: The same after one that was killed before it was ready.
_KILLED_BACKOFF = 0.2
#: Seconds that workers get to end by themselves when the daemon stops.
_GRACE = 2.0


@dataclass(eq=False, slots=True)
class Job:
    """A chunk that is to be rendered into a slot.

    Attributes:
        stream: the stream's number.
        rows: how many rows the chunk has.
        only: the rows that are wanted; None for all.
    """

    stream: int
    epoch: int
    chunk: int
    slot: int
    rows: int
    only: tuple[int, ...] | None = None
    fill: Fill = field(init=False)
    part: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.fill = Fill(range(self.rows) if self.only is None else self.only)


@dataclass(frozen=True, slots=True)
class Finished:
    """The chunk is in its slot."""

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


@dataclass(eq=False, slots=True)
class _Worker:
    child: Child
    render_id: str | None = None  # None: not ready yet
    job: Job | None = None
    seen: bytes = b""  # the statuses of the job's rows when they last changed,
    moved: float = 0.0  # and when that was
    deaf: float | None = None  # since when its channel is of no use
    hung: str = ""  # why it was killed, if it was for hanging

    @property
    def free(self) -> bool:
        return self.render_id is not None and self.job is None and self.deaf is None


class Supervisor:
    """
    Args:
        loop: calls back when a worker answers or ends.
        count: how many workers.
        backend: their renderer, a name of `headrace.pipeline.backend`.
        report: called with everything that happens.
        hang_timeout: seconds.
    """

    def __init__(
        self,
        loop: Loop,
        count: int,
        backend: str,
        report: Callable[[Report], None],
        *,
        hang_timeout: float = HANG_TIMEOUT,
    ) -> None:
        self.count = count
        self.seconds: dict[str, float] = {}
        self.nbytes = 0
        self.deaths = 0
        self._loop = loop
        self._backend = backend
        self._report = report
        self._hang_timeout = hang_timeout
        self._streams: dict[int, _Stream] = {}
        self._workers: list[_Worker] = []
        self._again: deque[Job] = deque()
        self._failed_starts = 0  # workers that ended by themselves before they were ready, in a row
        self._next_start = 0.0
        self._stopping = False

    # -- for the service ------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Chunks that can be at the workers at once."""
        return self.count

    @property
    def pids(self) -> list[int]:
        return [worker.child.pid for worker in self._workers]

    @property
    def ready(self) -> int:
        """Workers that have started, at work or not."""
        return sum(worker.render_id is not None for worker in self._workers)

    @property
    def idle(self) -> bool:
        """Whether `submit` would give the job to a worker at once."""
        return not self._again and any(worker.free for worker in self._workers)

    def start(self) -> None:
        while len(self._workers) < self.count and self._start_one():
            pass

    def open_stream(self, number: int, spec: Stream, ring: Ring, index: Index, convicted: Mapping[int, str]) -> None:
        """Make a stream known to all workers, also those to come. Ring and index stay the caller's."""
        self._streams[number] = _Stream(spec, ring, index, dict(convicted))
        for worker in self._workers:
            self._tell_stream(worker, number)

    def submit(self, job: Job) -> None:
        """Render it; it comes back in a report."""
        self._again.append(job)
        self._feed()

    def tick(self) -> None:
        """What only time brings: replacements that were put off, and workers that hang. Call about once a second."""
        now = time.monotonic()
        if not self._stopping and now >= self._next_start:
            self.start()
        for worker in self._workers:
            if worker.deaf is not None and now - worker.deaf > _GRACE:
                worker.child.kill()
            if worker.job is None:
                continue
            statuses = self._streams[worker.job.stream].ring.views[worker.job.slot].status.tobytes()
            if statuses != worker.seen:
                worker.seen, worker.moved = statuses, now
            else:
                self._check_hung(worker, now - worker.moved)

    def _check_hung(self, worker: _Worker, silent: float) -> None:
        if silent > self._hang_timeout:
            worker.hung = f"it hung for {silent:.0f} s"
        elif silent > min(STOPPED_TIMEOUT, self._hang_timeout) and worker.child.stopped:
            worker.hung = f"it was stopped for {silent:.0f} s"
        else:
            return
        log.error("worker %d: %s: killed", worker.child.pid, worker.hung)
        worker.child.kill()

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

    # -- one worker -----------------------------------------------------------------------------------------

    def _start_one(self) -> bool:
        try:
            worker = _Worker(Child("headrace.workers.worker", self._backend))
        except OSError as error:  # no descriptors, processes or memory left: that may pass
            log.error("a worker cannot be started: %s", error)
            self._next_start = time.monotonic() + _BACKOFF[-1]
            return False
        self._workers.append(worker)
        self._loop.watch(worker.child.channel, lambda: self._heard(worker))
        self._loop.watch(worker.child.pidfd, lambda: self._ended(worker))
        for number in self._streams:
            self._tell_stream(worker, number)
        return True

    def _tell_stream(self, worker: _Worker, number: int) -> None:
        at = self._streams[number]
        message = Open(
            stream=number,
            spec=json.dumps(at.spec.plain()),
            layout=at.ring.layout,
            slots=at.ring.slots,
            convicted=at.convicted,
        )
        self._tell(worker, message, at.ring.fd, at.index.fd)

    def _tell(self, worker: _Worker, message: Open | Convict | Render, *fds: int) -> None:
        try:
            worker.child.channel.post(messages.encode(message), fds)
        except Closed:
            return  # its pidfd says the rest
        except OSError as error:  # it has missed something: another one, later, will not
            log.error("worker %d cannot be told: %s: killed", worker.child.pid, error)
            worker.child.kill()
            return
        self._watch_channel(worker)

    def _watch_channel(self, worker: _Worker) -> None:
        channel = worker.child.channel
        self._loop.watch(channel, lambda: self._heard(worker), write=channel.pending)

    def _heard(self, worker: _Worker) -> None:
        channel = worker.child.channel
        try:
            channel.flush()
            self._watch_channel(worker)
            for frame, _ in channel.receive():
                self._answered(worker, messages.from_worker.decode(frame))
        except (Closed, ProtocolError, msgspec.DecodeError) as error:
            # It is ending, or has closed its end and lives on, or has lost its mind. Its slot is free only when it is
            # gone, and `tick` sees to that; killing it now would hide the exit status of one that is ending.
            if not isinstance(error, Closed):
                log.error("worker %d sends nonsense: %s", worker.child.pid, error)
            self._loop.unwatch(channel)
            worker.deaf = time.monotonic()
            return
        self._feed()

    def _answered(self, worker: _Worker, message: Ready | Rendered | RenderFailed) -> None:
        if isinstance(message, Ready):
            worker.render_id = message.render_id
            self._failed_starts = 0
            self._report(Started(message.render_id))
            return
        job, worker.job = worker.job, None
        if job is None or worker.render_id is None:
            raise ProtocolError("an answer that nobody asked for")
        if isinstance(message, RenderFailed):
            self._report(Failed(job, message.kind, message.text))
            return
        for stage, seconds in message.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.nbytes += message.nbytes
        job.fill.rendered(job.part, message.rejects)
        if job.fill.done:
            rejects = sorted(job.fill.rejects, key=lambda reject: reject.row)
            self._report(Finished(job, rejects, worker.render_id))
        else:
            self._again.appendleft(job)

    def _ended(self, worker: _Worker) -> None:
        status = worker.child.reap()
        if status is None:
            return
        with contextlib.suppress(Closed, ProtocolError, msgspec.DecodeError):
            for frame, _ in worker.child.channel.receive():  # it may have answered before it ended
                self._answered(worker, messages.from_worker.decode(frame))
        self._unwatch(worker)
        worker.child.close()
        self._workers.remove(worker)
        self.deaths += 1
        how = worker.hung or (f"signal {-status}" if status < 0 else f"exit status {status}")
        log.warning("worker %d ended by %s%s", worker.child.pid, how, "" if worker.job is None else ", at work")
        delay = 0.0
        if worker.render_id is None and status < 0:  # whoever sends a signal does not mean the start
            delay = _KILLED_BACKOFF
        elif worker.render_id is None:
            self._failed_starts += 1
            delay = _BACKOFF[min(self._failed_starts, len(_BACKOFF) - 1)]
        if worker.job is not None:
            self._take_back(worker.job, how)
        self._next_start = time.monotonic() + delay
        if self._failed_starts >= _STARTS:
            self._give_up(f"workers end before they are ready ({how}, {self._failed_starts} times); see the log")
        if not delay:
            self._start_one()
        self._feed()

    def _take_back(self, job: Job, how: str) -> None:
        at = self._streams[job.stream]
        view = at.ring.views[job.slot]
        begun = np.flatnonzero(view.status[: job.rows] == Status.RENDERING).tolist()
        try:
            row = job.fill.died(job.part, begun)
        except GaveUp as error:
            self._report(Failed(job, "HeadraceError", f"chunk {job.chunk} of epoch {job.epoch}: {error} ({how})"))
            return
        if row is not None:
            index = int(view.indices[row])
            reason = f"a worker that rendered only this picture died of it, twice ({how})"
            for same in at.index.repeats(index):
                at.convicted[same] = reason
                for worker in self._workers:
                    self._tell(worker, Convict(stream=job.stream, index=same, reason=reason))
            self._report(Convicted(job.stream, index, reason))
        self._again.appendleft(job)

    def _give_up(self, text: str) -> None:
        log.error("%s", text)
        while self._again:
            self._report(Failed(self._again.popleft(), "HeadraceError", text))
        self._report(Broken(text))

    def _feed(self) -> None:
        for worker in self._workers:
            if not self._again:
                return
            if not worker.free:
                continue
            job = self._again.popleft()
            job.part = job.fill.part()
            status = self._streams[job.stream].ring.views[job.slot].status
            # What an earlier writer left there must not be taken for this one's progress.
            status[list(job.part)] = Status.PENDING
            worker.job, worker.seen, worker.moved = job, status.tobytes(), time.monotonic()
            self._tell(
                worker,
                Render(job=0, stream=job.stream, epoch=job.epoch, chunk=job.chunk, slot=job.slot, rows=job.part),
            )

    def _unwatch(self, worker: _Worker) -> None:
        self._loop.unwatch(worker.child.channel)
        self._loop.unwatch(worker.child.pidfd)
