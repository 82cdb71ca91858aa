"""The worker process, `python -m headrace.workers.worker FD PID BACKEND`: an address comes, a slot is filled.

It lives as long as its daemon: the end of the socket pair is its end. It is single-threaded, holds no state but
caches of the pure function, and may be killed at any moment.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass

from headrace.channel import Channel, Closed
from headrace.errors import HeadraceError, to_wire
from headrace.pipeline.backend import Backend, make
from headrace.pipeline.index import Index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Stream
from headrace.slots import Ring
from headrace.workers import messages
from headrace.workers.messages import Convict, Open, Ready, Render, Rendered, RenderFailed
from headrace.workers.process import attach_to_parent

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
        backend: renders.
    """

    def __init__(self, channel: Channel, backend: Backend) -> None:
        self._channel = channel
        self._backend = backend
        self._streams: dict[int, _Stream] = {}

    def run(self) -> None:
        """Until the daemon's end of the channel is closed."""
        self._answer(Ready(render_id=self._backend.render_id))
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
                    self._answer(self._render(task))

    def _open(self, task: Open, ring_fd: int, index_fd: int) -> None:
        stream = Stream.model_validate(json.loads(task.spec))
        index = Index.map(index_fd)
        ring = Ring.attach(ring_fd, task.layout, task.slots, writable=True)
        renderer = ChunkRenderer(stream, index, self._backend)
        self._streams[task.stream] = _Stream(renderer, ring, dict(task.convicted))

    def _render(self, task: Render) -> Rendered | RenderFailed:
        at = self._streams[task.stream]
        try:
            done = at.renderer.render(task.epoch, task.chunk, at.ring.views[task.slot], task.rows, at.convicted)
        except HeadraceError as error:
            log.error("chunk %d of epoch %d failed: %s", task.chunk, task.epoch, error)
            kind, text = to_wire(error)
            return RenderFailed(job=task.job, kind=kind, text=text)
        except Exception as error:  # whatever it is, this chunk's readers are told and the next task is taken
            log.exception("chunk %d of epoch %d failed", task.chunk, task.epoch)
            kind, text = to_wire(error)
            return RenderFailed(job=task.job, kind=kind, text=text)
        return Rendered(
            job=task.job,
            render_id=self._backend.render_id,
            trouble="",
            rejects=done.rejects,
            seconds=dict(done.seconds),
            nbytes=done.nbytes,
        )

    def _answer(self, message: Ready | Rendered | RenderFailed) -> None:
        self._channel.send(messages.encode(message), timeout=_ANSWER_TIMEOUT)


def main(argv: list[str]) -> int:
    channel = Channel(attach_to_parent(argv), descriptors=2)
    logging.basicConfig(format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s", level=logging.INFO)
    backend = make(argv[3])
    try:
        Worker(channel, backend).run()
    except Closed:
        return 0
    finally:
        backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
