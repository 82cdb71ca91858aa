"""A stream at the daemon: closed until somebody asks for it, then listed by an indexer, then open with a ring."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.channel import Closed
from headrace.errors import ConfigError, ProtocolError
from headrace.pipeline.index import Index
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.spec import Config, Stream
from headrace.protocol import Fingerprints, StreamStatus
from headrace.server import ring_size
from headrace.server.desk import Desk
from headrace.slots import Ring, SlotLayout
from headrace.workers import messages
from headrace.workers.loop import Loop
from headrace.workers.messages import Build, BuildFailed, Built, Progress
from headrace.workers.process import Child

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenStream:
    """What an open stream is made of."""

    index: Index
    ring: Ring
    desk: Desk
    ledger: Ledger
    fingerprints: Fingerprints

    reserved: bool = False
    #: Samples whose pictures the log says to be bad.
    named: set[int] = field(default_factory=set)
    #: Rows that were computed, and how many of these are bad pictures.
    images: int = 0
    rejected: int = 0

    @property
    def chunks(self) -> int:
        return self.ring.layout.chunks(len(self.index))

    def rows(self, chunk: int) -> int:
        return self.ring.layout.rows(len(self.index), chunk)

    def reserve(self, nbytes: int) -> None:
        """So much more of the ring's memory.

        Raises:
            ConfigError: it is not there.
        """
        try:
            self.reserved = self.ring.reserve(nbytes)
        except OSError as error:
            raise ConfigError(_no_memory(self.ring.nbytes, error)) from error

    def status(self) -> StreamStatus:
        desk, done = self.desk, self.desk.counters
        return StreamStatus(
            samples=len(self.index),
            slots=self.ring.slots,
            computed=done.computed,
            recomputed=done.recomputed,
            delivered=done.delivered,
            failed=done.failed,
            ready=desk.cache.ready,
            leased=desk.leased,
            filling=desk.cache.filling,
            waiting=desk.waiting,
            hits=done.hits,
            rejected=self.rejected,
            images=self.images,
        )

    def close(self) -> None:
        self.ring.close()
        self.index.close()


def open_stream(config: Config, name: str, index: Index, in_flight: int, memory: int) -> OpenStream:
    """Lay out the ring, its memory yet to be reserved, and set up the desk.

    Args:
        index: owned from now on.
        memory: bytes that the machine left when the daemon started, so that streams opened later get as much.

    Raises:
        ConfigError: the memory does not suffice.
    """
    spec = config.streams[name]
    try:
        layout = spec.layout(index)
        chunks = layout.chunks(len(index))
        need = ring_size.Need(layout, in_flight, chunks, len(config.streams))
        count = ring_size.slots(name, config.memory, need, memory, ring_size.available_bytes())
        desk, ledger = Desk(count, in_flight, chunks), Ledger(index)
        ring = _begin(layout, count)
    except BaseException:
        index.close()
        raise
    log.info(
        "stream %s: %d samples in %d chunks; memory for %d chunks (%d MiB)",
        name,
        len(index),
        chunks,
        count,
        ring.nbytes >> 20,
    )
    return OpenStream(index, ring, desk, ledger, spec.fingerprints(index.data_fingerprint))


def _begin(layout: SlotLayout, count: int) -> Ring:
    try:
        return Ring.begin(layout, count)
    except OSError as error:
        raise ConfigError(_no_memory(count * layout.stride, error)) from error


def _no_memory(nbytes: int, error: OSError) -> str:
    return (
        f"memory: {nbytes} bytes for the slots of a stream are not to be had: {error.strerror}; make `memory` smaller"
    )


def _mapped(fd: int, file: str | None) -> Index | tuple[str, str]:
    try:
        return Index(fd, None if file is None else Path(file))
    except (ValueError, OSError) as error:
        return "DatasetError", f"the index cannot be mapped: {error}"


class Listing:
    """An indexer at work on one stream.

    Args:
        loop: calls back when the indexer says something.
        progress: called with `(done, total)`.
        done: called once, with the index or with `(kind, text)` of an error.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        loop: Loop,
        spec: Stream,
        cache_dir: Path,
        progress: Callable[[int, int], None],
        done: Callable[[Index | tuple[str, str]], None],
    ) -> None:
        self._loop = loop
        self._progress = progress
        self._done = done
        self._child = Child("headrace.workers.indexer", descriptors=1)
        build = Build(spec=json.dumps(spec.plain()), cache_dir=str(cache_dir))
        self._child.channel.post(messages.encode(build))
        loop.watch(self._child.channel, self._heard)

    def _heard(self) -> None:
        try:
            frames = self._child.channel.receive()
        except (Closed, ProtocolError):
            self._finish(("DatasetError", "the indexer has ended without a result; see the log"))
            return
        for frame, fds in frames:
            try:
                message = messages.from_indexer.decode(frame)
            except msgspec.DecodeError as error:
                self._finish(("DatasetError", f"the indexer sends nonsense: {error}"))
                return
            match message:
                case Progress(done=done, total=total):
                    self._progress(done, total)
                case Built(file=file):
                    self._finish(_mapped(fds[0], file))
                    return
                case BuildFailed(kind=kind, text=text):
                    self._finish((kind, text))
                    return

    def _finish(self, result: Index | tuple[str, str]) -> None:
        self.stop()
        self._done(result)

    def stop(self) -> None:
        """End the indexer, whatever it is doing."""
        self._loop.unwatch(self._child.channel)
        self._child.kill()
        self._child.reap(timeout=1.0)  # one that hangs in a dead disk goes when it can
        self._child.close()
