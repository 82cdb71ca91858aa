"""The worker process: an address comes, a slot is filled. `python -m headrace.workers.worker FD PID BACKEND [FALLBACK]`

It lives as long as its daemon: the end of the socket pair is its end. It is single-threaded, holds no state but
caches of the pure function, and may be killed at any moment. While its backend does not work, the fallback renders.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from functools import partial

from headrace.channel import Channel, Closed
from headrace.errors import HeadraceError, to_wire
from headrace.pipeline import wholes
from headrace.pipeline.backend import BackendFailed, make
from headrace.pipeline.index import Index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Stream
from headrace.slots import Ring
from headrace.stages import Clock, Stages
from headrace.workers import messages
from headrace.workers.messages import Convict, Leaving, Open, Ready, Render, Rendered, RenderFailed
from headrace.workers.process import attach_to_parent
from headrace.workers.renderer import Renderer

log = logging.getLogger("headrace.worker")

#: Seconds that the daemon may take to read an answer of a few hundred bytes.
_ANSWER_TIMEOUT = 60.0
#: Idle is no fault: the wait for a task is ended by the daemon's end, and renewed after this.
_IDLE = 3600.0


@dataclass(slots=True)
class _Stream:
    renderer: ChunkRenderer
    ring: Ring
    convicted: dict[int, str]


class Worker:
    """Answers one task after the other.

    Args:
        channel: to the daemon.
        renderer: renders.
    """

    def __init__(self, channel: Channel, renderer: Renderer) -> None:
        self._channel = channel
        self._renderer = renderer
        self._streams: dict[int, _Stream] = {}
        self._stages = Stages()
        self._clock = Clock(self._stages)

    def run(self) -> None:
        """Until the daemon's end of the channel is closed.

        Raises:
            BackendFailed: nobody can render any more.
        """
        self._answer(Ready(render_id=self._renderer.choose().render_id, trouble=self._renderer.trouble))
        self._clock = Clock(self._stages)
        while True:
            try:
                frame, fds = self._channel.recv(timeout=_IDLE)
            except TimeoutError:
                continue
            match messages.to_worker.decode(frame):
                case Open() as task:
                    self._open(task, *fds)
                case Convict(stream=stream, index=index, reason=reason):
                    self._streams[stream].convicted[index] = reason
                case Render() as task:
                    self._clock.lap("wait")
                    self._answer(self._try(task))

    def _open(self, task: Open, ring_fd: int, index_fd: int, wholes_fd: int) -> None:
        stream = Stream.model_validate(json.loads(task.spec))
        index = Index.map(index_fd)
        ring = Ring.attach(ring_fd, task.layout, task.slots, writable=True)
        flags = wholes.attach(wholes_fd, len(index))
        renderer = ChunkRenderer(stream, index, self._renderer.choose(), wholes=flags)
        self._streams[task.stream] = _Stream(renderer, ring, dict(task.convicted))

    def _try(self, task: Render) -> Rendered | RenderFailed:
        try:
            return self._render(task)
        except BackendFailed:
            raise
        except HeadraceError as error:
            log.error("chunk %d of epoch %d failed: %s", task.chunk, task.epoch, error)
            kind, text = to_wire(error)
        except Exception as error:  # whatever it is, this chunk's readers are told and the next task is taken
            log.exception("chunk %d of epoch %d failed", task.chunk, task.epoch)
            kind, text = to_wire(error)
        self._clock.lap("read", 0)  # it is samples that cannot be read that fail a chunk
        return RenderFailed(job=task.job, kind=kind, text=text)

    def _render(self, task: Render) -> Rendered:
        at = self._streams[task.stream]
        while True:
            at.renderer.backend = backend = self._renderer.choose(fallback=task.fallback)
            try:
                done = at.renderer.render(task.epoch, task.chunk, at.ring.views[task.slot], task.rows, at.convicted)
                break
            except BackendFailed as error:
                self._clock.lap("render", 0)
                self._renderer.failed(backend, error)  # and once more by whoever takes over, from the files on
        self._renderer.rendered(backend)
        self._stages.merge(done.stages)
        stages, self._stages = self._stages, Stages()
        self._clock = Clock(self._stages)
        return Rendered(
            job=task.job,
            render_id=backend.render_id,
            trouble=self._renderer.trouble,
            rejects=done.rejects,
            stages=stages.status(),
        )

    def _answer(self, message: Ready | Rendered | RenderFailed) -> None:
        self._channel.send(messages.encode(message), timeout=_ANSWER_TIMEOUT)


def main(argv: list[str]) -> int:
    channel = Channel(attach_to_parent(argv), descriptors=3)
    logging.basicConfig(format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s", level=logging.INFO)
    first, fallback = argv[3], argv[4] if len(argv) > 4 else None
    try:
        renderer = Renderer(partial(make, first), None if fallback is None else partial(make, fallback))
        try:
            Worker(channel, renderer).run()
        finally:
            renderer.close()
    except Closed:
        return 0
    except BackendFailed as error:
        channel.send(messages.encode(Leaving(text=str(error), failed=True)), timeout=_ANSWER_TIMEOUT)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
