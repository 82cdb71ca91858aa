"""`headrace verify`: everything is read and decoded once, to tell before a run what would be rejected in it, and why.

Nothing here judges a picture. The workers of the daemon do, under its supervisor, in a ring of slots that nobody reads:
so pictures that kill or hang workers are convicted as in serving, and stand in the same ledger afterwards. A verdict
depends on neither order, window nor chunk, so the listing is taken line by line, in chunks of a size of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from headrace import __version__
from headrace.errors import ConfigError, DeadlineError, HeadraceError
from headrace.pipeline.dataset import open_index
from headrace.pipeline.index import Index, mtime_of
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.spec import Config, Stream
from headrace.server import ring_size
from headrace.server.findings import Finding
from headrace.server.journal import Journal
from headrace.server.signals import Signals
from headrace.server.tally import ERROR, Found, Tally
from headrace.slots import Ring
from headrace.workers.crew import crew as who_renders
from headrace.workers.loop import Loop
from headrace.workers.member import Job
from headrace.workers.supervisor import (
    HANG_TIMEOUT,
    Broken,
    Convicted,
    Failed,
    Finished,
    Report,
    Started,
    Supervisor,
)

log = logging.getLogger(__name__)

#: The stage of a reject that the ledger is the reason for.
_WORKER = "worker"

#: Pictures of a job, and the bytes above which they are fewer.
_CHUNK = 32
_CHUNK_BYTES = 16 << 20
#: Seconds between two looks at what only time brings.
_TICK = 1.0
#: Seconds that the first worker may take to start, or the next one when all have died: longer than the supervisor waits
#: for one that hangs, before others take over.
_START_TIMEOUT = 240.0
_STAT_THREADS = 16


class Progress(Protocol):
    """Called with samples done, samples in all (0: unknown) and what else is to be said."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


#: `watch("listing train")` shows how far something is, as long as its context lasts.
Watch = Callable[[str], AbstractContextManager[Progress]]


class Interrupted(Exception):
    """By this signal. What was judged is kept."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@dataclass(slots=True)
class _Subject:
    """A stream that is verified."""

    name: str
    spec: Stream
    index: Index
    ledger: Ledger
    journal: Journal
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally(len(self.index), self.spec.chunk)

    def key(self, render_id: str) -> dict[str, str | int]:
        """Everything that a verdict depends on, except for what names the journal."""
        return {
            "version": __version__,
            "data": self.index.data_fingerprint,
            "modified": hashlib.sha256(np.ascontiguousarray(self.index.mtimes_ns, "<i8").data).hexdigest(),
            "chunk": self.spec.chunk,
            "render_id": render_id,
        }

    def holds(self, chunk: int, found: Found) -> bool:
        """Whether what an interrupted run has found in a chunk is what would be found now."""
        if not 0 <= chunk < self.tally.chunks:
            return False
        first, rows = chunk * self.tally.chunk, self.tally.rows(chunk)
        if not all(0 <= row < rows for row, _, _ in found):
            return False
        convicted = {row for row in range(rows) if first + row in self.ledger.convicted}
        if convicted != {row for row, stage, _ in found if stage == _WORKER}:
            return False
        return all(_unchanged(self.index, i) for i in range(first, first + rows))

    def convict(self) -> None:
        """Take up what was convicted after it was judged: by a daemon, or when another stream was verified."""
        rejected = {index for index, stage, _ in self.tally.found() if stage == _WORKER}
        for index, reason in Ledger(self.index).convicted.items():
            if index not in rejected:
                self.tally.overrule(index, _WORKER, reason)

    def sum_up(self) -> None:
        tally = self.tally
        stages = ", ".join(f"{count} {stage}" for stage, count in sorted(tally.stages.items()))
        if tally.judged == tally.samples:
            log.info(
                "stream %s: %d samples, %s", self.name, tally.samples, f"found: {stages}" if stages else "all good"
            )
            return
        goes_on = "the same command goes on there" if self.journal.kept else "the same command starts anew"
        log.warning("stream %s: stopped after %d of %d samples; %s", self.name, tally.judged, tally.samples, goes_on)


class Verification:
    """A run over some streams of a configuration.

    Args:
        names: of the streams.
        watch: shows progress.
        restart: do not go on where an interrupted run was.
        hang_timeout: seconds without any progress after which a worker counts as hung.

    Raises:
        DatasetError: a data set cannot be listed.
        ConfigError: another process verifies one of them, or what is to render cannot run here.
    """

    def __init__(
        self,
        config: Config,
        names: Iterable[str],
        watch: Watch,
        *,
        restart: bool = False,
        hang_timeout: float = HANG_TIMEOUT,
    ) -> None:
        self._crew = who_renders(config.workers, private=False)
        self._watch = watch
        self._restart = restart
        self._hang_timeout = hang_timeout
        with ExitStack() as opened:
            self._subjects = [self._open(config, name, opened) for name in names]
            self._opened = opened.pop_all()

    def _open(self, config: Config, name: str, opened: ExitStack) -> _Subject:
        spec = config.streams[name]
        with self._watch(f"listing {name}") as progress:
            index = open_index(spec.dataset, config.cache_folder, progress=progress)
        opened.callback(index.close)
        for notice in index.notices:
            log.warning("stream %s: %s", name, notice)
        spec = _line_by_line(spec, index)
        journal = opened.enter_context(Journal.open(_place(index, name, spec), f"stream {name}"))
        return _Subject(name, spec, index, Ledger(index), journal)

    @property
    def found(self) -> int:
        """Rejects, and files without a verdict."""
        return sum(at.tally.stages.total() for at in self._subjects)

    @property
    def data(self) -> list[Path]:
        """Folders and files that are never written to. What lies beside a list's files, or beside tars, is no data."""
        places = [at.spec.dataset.folder or at.spec.dataset.list for at in self._subjects]
        return [Path(os.path.realpath(place)) for place in places if place is not None]

    def run(self) -> None:
        """Judge everything that an interrupted run has not.

        Raises:
            Interrupted: by SIGINT or SIGTERM.
            HeadraceError: workers cannot be started, or end as soon as they are; what was judged is kept.
        """
        stopped: list[int] = []
        signals = Signals(stopped.append)
        try:
            for at in self._subjects:
                try:
                    if len(at.index):
                        self._judge(at, signals, stopped)
                finally:
                    at.sum_up()
            for at in self._subjects:
                at.convict()
        finally:
            signals.restore()

    def _judge(self, at: _Subject, signals: Signals, stopped: Sequence[int]) -> None:
        crew = replace(self._crew, processes=min(self._crew.processes, at.tally.chunks))
        with ExitStack() as opened:
            loop = Loop()
            loop.watch(signals.fileno(), signals.drain)
            reports: list[Report] = []
            supervisor = Supervisor(loop, crew, reports.append, hang_timeout=self._hang_timeout)
            ring = opened.enter_context(contextlib.closing(_ring(at, supervisor.in_flight)))
            opened.push(lambda kind, *_: supervisor.stop(force=kind is not None))
            supervisor.open_stream(0, at.spec, ring, at.index, at.ledger.convicted)
            supervisor.start()
            judges = _Crew(at, loop, supervisor, reports, stopped, ring.slots)
            self._take_up(at, judges)
            with self._watch(f"verifying {at.name}") as progress:
                judges.work(progress)

    def _take_up(self, at: _Subject, crew: _Crew) -> None:
        """Go on where an interrupted run was, as far as its files are still what they were."""
        with self._watch(f"starting workers for {at.name}"):
            key = at.key(crew.render_id())
        if not (before := dict(at.journal.begin(key, restart=self._restart))):
            return
        with self._watch(f"comparing what was judged of {at.name}") as progress:
            self._compare(at, before, crew, progress)
        log.info(
            "stream %s: goes on where an interrupted run was, after %d of %d samples",
            at.name,
            at.tally.judged,
            at.tally.samples,
        )

    def _compare(self, at: _Subject, before: dict[int, Found], crew: _Crew, progress: Progress) -> None:
        pool = ThreadPoolExecutor(_STAT_THREADS, "headrace-verify")  # on a network disk each answer is a round trip
        try:
            held = pool.map(at.holds, before, before.values())
            for done, (chunk, holds) in enumerate(zip(before, held, strict=True), 1):
                crew.check_interrupted()
                if holds:
                    at.tally.settle(chunk, None, before[chunk])
                progress(done * at.tally.chunk, len(before) * at.tally.chunk)
        finally:
            pool.shutdown(cancel_futures=True)

    def findings(self) -> Iterator[Finding]:
        """What was found, by stream and line of the listing: a value for each of `COLUMNS`."""
        for at in self._subjects:
            for index, stage, reason in at.tally.found():
                yield at.name, index, at.index.shown(index), stage, reason

    def finish(self) -> None:
        """What was found is delivered: the next run starts anew."""
        for at in self._subjects:
            at.journal.forget()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Crew:
    """Workers that judge one stream, and slots for their work.

    Args:
        loop: watches the workers and the signals.
        reports: where the supervisor puts what happens.
        stopped: signals that came.
    """

    def __init__(
        self,
        at: _Subject,
        loop: Loop,
        supervisor: Supervisor,
        reports: list[Report],
        stopped: Sequence[int],
        slots: int,
    ) -> None:
        self._at = at
        self._loop = loop
        self._supervisor = supervisor
        self._reports = reports
        self._stopped = stopped
        self._free = list(range(slots))
        self._ticked = self._had_workers = time.monotonic()
        self._render_id: str | None = None

    def check_interrupted(self) -> None:
        if self._stopped:
            raise Interrupted(signal.Signals(self._stopped[0]))

    def render_id(self) -> str:
        """What the workers render with; waits for the first one."""
        while self._render_id is None:
            self._turn()
        return self._render_id

    def work(self, progress: Progress) -> None:
        """Until all is judged."""
        tally = self._at.tally
        self._had_workers = time.monotonic()
        while tally.judged < tally.samples:
            while self._free and (task := tally.take()) is not None:
                chunk, only = task
                self._supervisor.submit(Job(0, 0, chunk, self._free.pop(), tally.rows(chunk), only))
            self._turn()
            found = tally.stages.total()
            progress(tally.judged, tally.samples, f", {found} found" if found else "")

    def _turn(self) -> None:
        self._loop.run_once(_TICK)
        self.check_interrupted()
        now = time.monotonic()
        if now - self._ticked >= _TICK:
            self._ticked = now
            self._supervisor.tick()
        if self._supervisor.ready:
            self._had_workers = now
        elif now - self._had_workers > _START_TIMEOUT:
            raise DeadlineError(f"no worker has become ready in {_START_TIMEOUT:.0f} s; see the log")
        reports, self._reports[:] = self._reports[:], []
        # First of all: jobs that fail because there are no workers say nothing about a sample.
        if (broken := next((r for r in reports if isinstance(r, Broken)), None)) is not None:
            raise HeadraceError(broken.text)
        for report in reports:
            self._take(report)

    def _take(self, report: Report) -> None:
        match report:
            case Started(render_id=render_id):
                self._compare(render_id)
            case Finished(job=job, rejects=rejects, render_id=render_id):
                self._compare(render_id)
                found = [(reject.row, reject.stage, reject.reason) for reject in rejects]
                self._done(job, self._at.tally.settle(job.chunk, job.only, found), kept=render_id == self._render_id)
            case Failed(job=job, text=text):
                self._done(job, self._at.tally.fail(job.chunk, job.only, text), kept=False)
            case Convicted(index=index, reason=reason):
                self._at.ledger.convict(index, reason)

    def _compare(self, render_id: str) -> None:
        if self._render_id is None:
            self._render_id = render_id
        elif render_id != self._render_id and self._supervisor.crew.fallback is None:
            raise HeadraceError(
                f"workers render with {self._render_id} and with {render_id}: something was installed meanwhile"
            )

    def _done(self, job: Job, found: Found | None, *, kept: bool) -> None:
        """
        Args:
            kept: for a run that goes on where this one is interrupted. What could not be read now may be readable then,
                and what the fallback judged, which judges alike, is not what the journal says it holds.
        """
        self._free.append(job.slot)
        if kept and found is not None and all(stage != ERROR for _, stage, _ in found):
            self._at.journal.add(job.chunk, found)


def _line_by_line(spec: Stream, index: Index) -> Stream:
    """The stream with chunk after chunk of the listing for jobs, of a size that keeps all workers at work."""
    chunk = _CHUNK
    while True:
        spec = spec.model_copy(update={"shuffle": False, "chunk": chunk})
        if chunk == 1 or spec.layout(index).stride <= _CHUNK_BYTES:
            return spec
        chunk //= 2


def _place(index: Index, name: str, spec: Stream) -> Path | None:
    """The journal of this data set as this stream, under its decode options and transforms."""
    if index.file is None:
        return None
    options = {"stream": name, "decode": spec.decode.plain(), "transforms": [t.plain() for t in spec.transforms]}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode("ascii")).hexdigest()
    return index.file.with_suffix(f".verify-{digest[:16]}")


def _ring(at: _Subject, count: int) -> Ring:
    layout, slots = at.spec.layout(at.index), count + 1  # one that waits for the next worker that is free
    need, available = slots * layout.stride, ring_size.available_bytes()
    try:
        if need <= available:
            return Ring.create(layout, slots)
        reason = f"this machine (or its cgroup) leaves {available}"
    except OSError as error:
        reason = error.strerror or str(error)
    raise ConfigError(
        f"stream {at.name}: {count} chunks in flight need {need} bytes, but {reason}: set `workers.processes` "
        "or `workers.in_flight` to less"
    )


def _unchanged(index: Index, i: int) -> bool:
    if index.container is not None:
        return True  # it was compared when the index was opened
    try:
        now = os.stat(index.full_path(i))
    except OSError:
        return False
    same = now.st_size == index.sizes[i] and mtime_of(now) == index.mtimes_ns[i]
    return bool(same) and stat.S_ISREG(now.st_mode)
