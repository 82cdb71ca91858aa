"""The process of one GPU, `python -m headrace.workers.device FD PID JSON`: several chunks in flight, rendered together.

Reader threads read and plan the next chunks; two lanes, each a thread with a backend of its own, render what is ready.
While one lane waits for its pixels to arrive in the slots, the device works for the other. The main thread talks to the
daemon and alone decides; the others bring it events. Slots are page-locked, so that pixels come straight into them:
each as it is first used, because all of a large ring takes so long that the worker would count as hung.

It ends as a CPU worker does, with its daemon. It ends by itself, after a last word (`Leaving`), with exit status 1 when
the device does not work, and with 0 when it holds more memory than it may and has finished what it had: another one
takes its place.

JSON: `backend`, `device`, `threads`, `gpu_memory` and `hw_decoder_load`, as in `headrace.workers.crew`.
Any backend will do, and tests run those that need no GPU. With "dali-gpu" it has never run.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from headrace.channel import Channel, Closed
from headrace.errors import HeadraceError, to_wire
from headrace.pipeline import wholes
from headrace.pipeline.backend import Backend, BackendFailed, Options, make
from headrace.pipeline.cuda import CudaError, Device
from headrace.pipeline.gpus import OwnMemory, count_by_bus
from headrace.pipeline.index import Index
from headrace.pipeline.render import PART_PIXELS, ChunkReader, Part, render
from headrace.pipeline.spec import Stream
from headrace.slots import Ring
from headrace.stages import Clock, Stages
from headrace.workers import messages
from headrace.workers.iterations import Chunk, Iteration, Iterations
from headrace.workers.messages import Convict, Leaving, Open, Ready, Render, Rendered, RenderFailed
from headrace.workers.process import attach_to_parent

log = logging.getLogger("headrace.device")

#: Seconds that the daemon may take to read an answer of a few hundred bytes.
_ANSWER_TIMEOUT = 60.0
#: Idle is no fault: the wait for a task is ended by the daemon's end, and renewed after this.
_IDLE = 3600.0
#: Iterations at work at once: one computes, one is copied.
LANES = 2
#: Pictures of an iteration.
_PICTURES = 128
#: Parts beyond one per reader that are read and not rendered, at most: two iterations of whole parts.
_AHEAD = 8
#: Chunks after which holding too much memory is the way of things grown over time, which another process mends; before,
#: it would come to the same again.
_FAIR = 64

#: Of a GPU's memory, in bytes, by the documents of DALI and never measured: a CUDA context with DALI's kernels; what
#: each thread of a decoder keeps (`device_memory_padding`, twice); and for each pixel of an iteration the picture, the
#: planes or coefficients it is decoded from, and what pools keep beside.
_CONTEXT = 700 << 20
_THREAD = 2 * (16 << 20)
_PIXEL = 16


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the process is told; see the module."""

    backend: str
    device: int
    threads: int
    gpu_memory: int
    hw_decoder_load: float

    @property
    def lane_threads(self) -> int:
        """That decode, of each lane."""
        return max(1, self.threads // LANES)

    @property
    def options(self) -> Options:
        """Of the backend of a lane."""
        return Options(self.device, self.lane_threads, self.hw_decoder_load, _PICTURES, self.pixels)

    @property
    def pixels(self) -> int:
        """Of an iteration of several parts, so that all lanes together keep within the budget. A part may have more:
        a single picture that is so large.
        """
        left = self.gpu_memory - least_memory(self.threads)
        return max(1 << 20, min(PART_PIXELS, left // (LANES * _PIXEL)))


def least_memory(threads: int) -> int:
    """Bytes of GPU memory that a device worker takes before it has decoded a picture, by estimate."""
    return _CONTEXT + LANES * max(1, threads // LANES) * _THREAD


@dataclass(slots=True)
class _Stream:
    reader: ChunkReader
    ring: Ring
    convicted: dict[int, str]
    locked: set[int] = field(default_factory=set)  # slots


@dataclass(frozen=True, slots=True)
class _PartRead:
    chunk: Chunk
    part: Part


@dataclass(frozen=True, slots=True)
class _ChunkRead:
    chunk: Chunk
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _IterationOver:
    lane: _Lane
    iteration: Iteration
    error: Exception | None


_Event = _PartRead | _ChunkRead | _IterationOver


class _Events:
    """Events of other threads for the main thread, which polls a descriptor for them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Event] = SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)  # only once no thread can write to it any more, or it might be another one's by then

    def fileno(self) -> int:
        return self._fd

    def put(self, event: _Event) -> None:
        self._queue.put(event)
        os.eventfd_write(self._fd, 1)

    def take(self) -> list[_Event]:
        """All that have come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        return [self._queue.get() for _ in range(self._queue.qsize())]


@dataclass(eq=False, slots=True)
class _Lane:
    """A thread that renders one iteration after another, until it is given None."""

    backend: Backend
    events: _Events
    tasks: SimpleQueue[Iteration | None] = field(default_factory=SimpleQueue)
    busy: bool = False

    def give(self, iteration: Iteration) -> None:
        self.busy = True
        self.tasks.put(iteration)

    def run(self) -> None:
        while (iteration := self.tasks.get()) is not None:
            error: Exception | None = None
            try:
                render(self.backend, iteration.parts)
            except Exception as failed:  # of a picture it would be a verdict
                error = failed
            self.events.put(_IterationOver(self, iteration, error))
        self.backend.close()


class DeviceWorker:
    """
    Args:
        channel: to the daemon.
        backends: one per lane, of the same render id.
        told: bounds.
        memory: bytes that this process holds of what `told.gpu_memory` bounds.
        lock: called with address and size of memory into which pixels will come.
    """

    def __init__(
        self,
        channel: Channel,
        backends: list[Backend],
        told: Told,
        memory: Callable[[], int],
        lock: Callable[[int, int], None],
    ) -> None:
        self._channel = channel
        self._told = told
        self._memory = memory
        self._lock = lock
        self._render_id = backends[0].render_id
        self._events = _Events()
        self._lanes = [_Lane(backend, self._events) for backend in backends]
        self._iterations = Iterations(_PICTURES, told.pixels)
        self._streams: dict[int, _Stream] = {}
        self._tasks: SimpleQueue[Chunk | None] = SimpleQueue()
        self._room = threading.Semaphore(told.threads + _AHEAD)
        self._answered = 0
        self._waits = Stages()
        self._idle = Clock(self._waits)
        self._leaving: Leaving | None = None
        self._ended = False

    def run(self) -> Leaving:
        """Until it has a reason to end, which is returned when everything that was begun has been answered.

        Raises:
            Closed: the daemon has ended.
            BackendFailed: the device does not work; nothing that was begun will be answered.
        """
        try:
            return self._run()
        finally:
            # Threads end when they are done with what they are at; nobody waits for that.
            self._ended = True
            self._room.release(self._told.threads)
            for _ in range(self._told.threads):
                self._tasks.put(None)
            for lane in self._lanes:
                lane.tasks.put(None)

    def _run(self) -> Leaving:
        for target in [*(lane.run for lane in self._lanes), *[self._read_chunks] * self._told.threads]:
            threading.Thread(target=target, daemon=True).start()
        self._answer(Ready(render_id=self._render_id))
        self._idle = Clock(self._waits)
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._channel, select.POLLIN)
        while self._leaving is None or not self._iterations.idle:
            ready = {fd for fd, _ in poll.poll(_IDLE * 1000)}
            if self._channel.fileno() in ready:
                for frame, fds in self._channel.receive():
                    self._hear(messages.to_worker.decode(frame), fds)
            for event in self._events.take():
                self._happened(event)
            self._hand_out()
            if self._leaving is not None:
                with suppress(KeyError):
                    poll.unregister(self._channel)  # what comes now is another one's
        return self._leaving

    # -- the daemon -----------------------------------------------------------------------------------------

    def _hear(self, message: Open | Convict | Render, fds: list[int]) -> None:
        match message:
            case Open():
                self._open(message, *fds)
            case Convict(stream=stream, index=index, reason=reason):
                self._streams[stream].convicted[index] = reason
            case Render():
                if self._iterations.idle:
                    self._idle.lap("wait")
                self._lock_slot(message)
                self._tasks.put(self._iterations.begin(message))

    def _open(self, task: Open, ring_fd: int, index_fd: int, wholes_fd: int) -> None:
        stream = Stream.model_validate(json.loads(task.spec))
        index = Index.map(index_fd)
        ring = Ring.attach(ring_fd, task.layout, task.slots, writable=True)
        reader = ChunkReader(stream, index, wholes=wholes.attach(wholes_fd, len(index)))
        self._streams[task.stream] = _Stream(reader, ring, dict(task.convicted))

    def _lock_slot(self, task: Render) -> None:
        at = self._streams[task.stream]
        if task.slot not in at.locked:
            at.locked.add(task.slot)
            stride = at.ring.layout.stride
            self._lock(at.ring.generation.ctypes.data + task.slot * stride, stride)

    def _answer(self, message: Ready | Rendered | RenderFailed) -> None:
        self._channel.send(messages.encode(message), timeout=_ANSWER_TIMEOUT)

    # -- events ---------------------------------------------------------------------------------------------

    def _happened(self, event: _Event) -> None:
        match event:
            case _PartRead(chunk, part):
                self._iterations.add(chunk, part)
            case _ChunkRead(chunk, error):
                self._release(self._iterations.end(chunk, error))
                self._settle([chunk])
            case _IterationOver(lane, iteration, error):
                if error is not None:
                    raise _failure(error)
                lane.busy = False
                self._release(len(iteration.parts))
                self._watch()
                self._settle(self._iterations.rendered(iteration))

    def _hand_out(self) -> None:
        for lane in self._lanes:
            if not lane.busy and (iteration := self._iterations.take()) is not None:
                lane.give(iteration)

    def _settle(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if not chunk.done:
                continue
            task, error, result = chunk.task, chunk.error, chunk.result
            self._answered += 1
            if error is None:
                result.stages.merge(self._waits)
                self._waits = Stages()
            if self._iterations.idle:
                self._idle = Clock(self._waits)
            if error is None:
                self._answer(
                    Rendered(
                        job=task.job,
                        render_id=self._render_id,
                        trouble="",
                        rejects=result.rejects,
                        stages=result.stages.status(),
                    )
                )
                continue
            if isinstance(error, HeadraceError):
                log.error("chunk %d of epoch %d failed: %s", task.chunk, task.epoch, error)
            else:  # whatever it is, this chunk's readers are told and the others go on
                log.error("chunk %d of epoch %d failed", task.chunk, task.epoch, exc_info=error)
            kind, text = to_wire(error)
            self._answer(RenderFailed(job=task.job, kind=kind, text=text))

    def _watch(self) -> None:
        if self._leaving is not None or (used := self._memory()) <= self._told.gpu_memory:
            return
        text = f"it holds {used >> 20} MiB of memory, and workers.gpu_memory is {self._told.gpu_memory >> 20} MiB"
        failed = self._answered < _FAIR
        if failed:
            text += f", after the first {self._answered + 1} chunks: this stream needs more"
        log.warning("%s: it ends when it has finished what it has begun", text)
        self._leaving = Leaving(text=text, failed=failed)

    def _release(self, parts: int) -> None:
        if parts:
            self._room.release(parts)

    # -- reader threads -------------------------------------------------------------------------------------

    def _read_chunks(self) -> None:
        while (chunk := self._tasks.get()) is not None:
            error: Exception | None = None
            try:
                self._read(chunk)
            except Exception as failed:
                error = failed
            self._events.put(_ChunkRead(chunk, error))

    def _read(self, chunk: Chunk) -> None:
        task = chunk.task
        at = self._streams[task.stream]
        parts = at.reader.prepare(task.epoch, task.chunk, at.ring.views[task.slot], task.rows, at.convicted)
        while not self._ended:
            self._room.acquire()  # before it is read, because what is read takes memory
            try:
                part = next(parts, None)
            except BaseException:
                self._room.release()
                raise
            if part is None:
                self._room.release()
                return
            self._events.put(_PartRead(chunk, part))


def _failure(error: Exception) -> BackendFailed:
    """What a backend has raised, which says nothing of pictures."""
    if isinstance(error, BackendFailed):
        return error
    log.error("the backend has raised what it must not", exc_info=error)
    return BackendFailed(f"{type(error).__name__}: {error}")


class _Gpu:
    """What the worker asks of its GPU beside rendering.

    Raises:
        BackendFailed: it does not work.
    """

    def __init__(self, told: Told) -> None:
        if (least := least_memory(told.threads)) > told.gpu_memory:
            raise BackendFailed(
                f"workers.gpu_memory is {told.gpu_memory >> 20} MiB, and {told.threads} threads take {least >> 20} MiB "
                "before the first picture: allow more, or fewer workers.threads"
            )
        self._refused = False
        count_by_bus()
        try:
            self._device = Device(told.device)
            self._own = OwnMemory(told.device)
            self._before = self._device.free
        except CudaError as error:
            raise BackendFailed(str(error)) from error
        if self._own() is None:
            log.info(
                "NVML does not tell what this process holds: counted is what all take of GPU %d from now on",
                told.device,
            )

    def memory(self) -> int:
        try:
            own = self._own()
            return self._before - self._device.free if own is None else own
        except CudaError as error:
            raise BackendFailed(str(error)) from error

    def lock(self, address: int, nbytes: int) -> None:
        if self._refused:
            return
        try:
            self._device.lock(address, nbytes)
        except CudaError as error:
            self._refused = True
            log.warning("slots cannot be page-locked any more, so pixels come slower: %s", error)


class _Cpu:
    """The same where there is no GPU: its memory is that of the process."""

    def memory(self) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def lock(self, address: int, nbytes: int) -> None:
        pass


def serve(channel: Channel, told: Told) -> Leaving:
    """Be the worker until there is a reason to end, which is the last word.

    Raises:
        Closed: the daemon has ended.
    """
    try:
        here = _Gpu(told) if told.backend == "dali-gpu" else _Cpu()
        backends = [make(told.backend, told.options) for _ in range(LANES)]
        return DeviceWorker(channel, backends, told, here.memory, here.lock).run()
    except BackendFailed as error:
        return Leaving(text=str(error), failed=True)


def main(argv: list[str]) -> NoReturn:
    channel = Channel(attach_to_parent(argv), descriptors=3)
    logging.basicConfig(format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s", level=logging.INFO)
    status = 0
    with suppress(Closed):
        last = serve(channel, msgspec.json.decode(argv[3], type=Told))
        status = int(last.failed)
        channel.send(messages.encode(last), timeout=_ANSWER_TIMEOUT)
    # Threads may be in the middle of what nobody waits for any more, and an interpreter that ends would wait for it.
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv)
