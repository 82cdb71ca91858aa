"""A stand-in for a GPU's worker: several chunks at once, answers in any order. `python -m fake_device FD PID JSON`

It renders as the fake backend does. What else it does stands in the file that the variable FAKE_DEVICE names, a word,
which it reads whenever it has something to decide: see `ORDERS`. It notes the chunks that it was given, see `given`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from headrace.channel import Channel, Closed
from headrace.pipeline.fake import FakeBackend
from headrace.pipeline.index import Index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Stream
from headrace.slots import Ring, Status
from headrace.workers import messages
from headrace.workers.crew import IN_FLIGHT
from headrace.workers.messages import Convict, Leaving, Open, Ready, Render, Rendered
from headrace.workers.process import attach_to_parent

RENDER_ID = "fake-device/1"
VARIABLE = "FAKE_DEVICE"
ORDERS = (
    "work",
    "cannot start",  # says so, and ends
    "crash at start",
    "hold",  # takes chunks, begins one picture of each, and answers nothing
    "fail",  # the device is gone: says so with what it has unanswered, and ends
    "leave",  # answers one more chunk, says that it is over its memory, and ends
)


def order() -> str:
    return Path(os.environ[VARIABLE]).read_text()


def given(device: int) -> list[int]:
    """The chunks that the workers of this device were given, in order."""
    try:
        return [int(line) for line in _notes(device).read_text().splitlines()]
    except FileNotFoundError:
        return []


def _notes(device: int) -> Path:
    return Path(f"{os.environ[VARIABLE]}.{device}")


class Device:
    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._streams: dict[int, tuple[ChunkRenderer, Ring, dict[int, str]]] = {}
        self._tasks: list[Render] = []
        self._random = random.Random(3)

    def run(self) -> None:
        self._say(Ready(render_id=RENDER_ID))
        while True:
            try:
                frame, fds = self._channel.recv(timeout=0.02 if self._tasks else 0.2)
            except TimeoutError:
                if self._tasks and not self._work():
                    return
                continue
            match messages.to_worker.decode(frame):
                case Open() as at:
                    index = Index.map(fds[1])
                    renderer = ChunkRenderer(Stream.model_validate(json.loads(at.spec)), index, FakeBackend())
                    ring = Ring.attach(fds[0], at.layout, at.slots, writable=True)
                    os.close(fds[2])
                    self._streams[at.stream] = renderer, ring, dict(at.convicted)
                case Convict() as one:
                    self._streams[one.stream][2][one.index] = one.reason
                case Render() as task:
                    assert not task.fallback
                    self._tasks.append(task)
                    with _notes(self._number).open("a") as notes:
                        notes.write(f"{task.chunk}\n")
                    assert len(self._tasks) <= IN_FLIGHT

    def _work(self) -> bool:
        """Something of what is to be done; whether to go on."""
        what = order()
        if what == "hold":
            for task in self._tasks:
                _, ring, _ = self._streams[task.stream]
                ring.views[task.slot].status[task.rows[0]] = Status.RENDERING
            time.sleep(0.02)
            return True
        if what == "fail":
            self._say(Leaving(text="the device has fallen off the bus", failed=True))
            return False
        self._answer(self._tasks.pop(self._random.randrange(len(self._tasks))))
        if what == "leave":
            self._say(Leaving(text="it uses 5 of 4 GiB", failed=False))
            return False
        return True

    def _answer(self, task: Render) -> None:
        renderer, ring, convicted = self._streams[task.stream]
        done = renderer.render(task.epoch, task.chunk, ring.views[task.slot], task.rows, convicted)
        self._say(
            Rendered(
                job=task.job,
                render_id=RENDER_ID,
                trouble="",
                rejects=done.rejects,
                stages=done.stages.status(),
            )
        )

    def _say(self, message: Ready | Rendered | Leaving) -> None:
        self._channel.send(messages.encode(message), timeout=30.0)


def main(argv: list[str]) -> int:
    channel = Channel(attach_to_parent(argv), descriptors=3)
    told = json.loads(argv[3])
    if order() == "cannot start":
        channel.send(messages.encode(Leaving(text=f"no driver for {told['device']}", failed=True)), timeout=30.0)
        return 1
    if order() == "crash at start":
        os.kill(os.getpid(), signal.SIGSEGV)
    try:
        Device(channel, told["device"]).run()
    except Closed:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
