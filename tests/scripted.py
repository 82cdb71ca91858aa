"""A tiny daemon for tests of the client: real sockets, ring and messages, pictures from arithmetic, faults on cue.

The picture at `(epoch, position)` has one level everywhere, `level(epoch, position)`; its index is a fixed
permutation of the position, its label a tenth of the index.
"""

from __future__ import annotations

import enum
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import zmq

from headrace.channel import Channel, Closed
from headrace.output import Output
from headrace.protocol import (
    CLIENT_LIMIT,
    VERSION,
    Cancel,
    Chunk,
    Failed,
    Fingerprints,
    Get,
    Goodbye,
    Hello,
    Indexing,
    Message,
    Refused,
    Release,
    RowReject,
    Unknown,
    Welcome,
    decode_client,
    decode_session_request,
    encode,
)
from headrace.slots import Ring, SlotLayout, Status


class Do(enum.Enum):
    """What a GET is answered with."""

    ANSWER = enum.auto()
    NOTHING = enum.auto()
    FAIL = enum.auto()
    UNKNOWN = enum.auto()
    OLD_GENERATION = enum.auto()  # as if the slot had been reused before the client looks
    NO_SLOT = enum.auto()  # one that the ring does not have
    WRONG_STATUS = enum.auto()  # a row that was never rendered
    GARBAGE = enum.auto()
    VANISH = enum.auto()  # as if killed
    GOODBYE = enum.auto()


def level(epoch: int, position: int) -> int:
    """Never black."""
    return 1 + (epoch * 31 + position * 7) % 255


def index_of(position: int, samples: int) -> int:
    return samples - 1 - position


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def welcome(**change: Any) -> Welcome:
    """Some `Welcome` for a ring of three slots of four pictures of 2 by 2."""
    about: dict[str, Any] = {
        "pid": 1, "token": b"t" * 16, "endpoint": "ipc:///nowhere", "transport": "shm", "stream": "a",
        "layout": SlotLayout(4, 2, 2), "slots": 3, "samples": 9, "seed": 0, "classes": [],
        "labels": "numbers", "columns": [],
        "fingerprints": Fingerprints("d", "o", "p"), "output": Output(), "on_bad_sample": "skip", "max_bad": 0.01,
        "render_id": "r", "window": 1, "notices": [],
    }  # fmt: skip
    return Welcome(**(about | change))


class ScriptedDaemon:
    """Serves until it is closed; a context manager.

    Attributes:
        behave: decides about each GET; called in the daemon's thread.
        gets, hellos: what came, in order.
        sessions: the token of each.
        leases: deliveries that were not released.
        cancelled: the requests that Cancel named.
    """

    def __init__(
        self,
        path: Path,
        *,
        samples: int = 40,
        chunk: int = 4,
        size: tuple[int, int] = (2, 3),
        slots: int = 6,
        window: int = 3,
        bad: Iterable[int] = (),
        output: Output | None = None,
        on_bad_sample: str = "skip",
        max_bad: float = 1.0,
        render_id: str = "script/1",
        order: str = "order",
        pixels: str = "pixels",
        seed: int = 0,
        notices: Iterable[str] = (),
        indexing: int | None = 0,
        refuse: Refused | None = None,
        behave: Callable[[Get], Do] = lambda get: Do.ANSWER,
    ) -> None:
        self.address = f"ipc://{path}"
        self.behave = behave
        self.gets: list[Get] = []
        self.hellos: list[Hello] = []
        self.sessions: dict[Channel, bytes] = {}
        self.leases: dict[tuple[bytes, int], int] = {}
        self.cancelled: list[int] = []
        self.render_id = render_id
        self.bad = frozenset(bad)
        self.seen: set[int] = set()
        self._path, self._samples, self._window = path, samples, window
        self._layout = SlotLayout(chunk, *size)
        self._ring = Ring.create(self._layout, slots)
        self._free = list(range(slots))
        self._waiting: list[tuple[bytes, Get, Do]] = []
        self._indexing, self._refuse = indexing, refuse
        self._about: dict[str, Any] = {
            "samples": samples, "seed": seed, "classes": ["cat", "dog"], "output": output or Output(),
            "labels": "numbers", "columns": [],
            "fingerprints": Fingerprints(data="data", order=order, pixels=pixels), "on_bad_sample": on_bad_sample,
            "max_bad": max_bad, "notices": list(notices),
        }  # fmt: skip
        self._channels: dict[int, Channel] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(f"{self.address}.zmq")
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._gone = False
        self._thread = threading.Thread(target=self._run, name="scripted-daemon", daemon=True)
        self._thread.start()

    def __enter__(self) -> ScriptedDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End as if killed. May be called twice."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            self._thread.join(10)
            assert not self._thread.is_alive()
            os.close(self._stop)
            self._stop = -1

    def wait_released(self) -> None:
        """Until no delivery is leased any more."""
        wait_until(lambda: not self.leases)

    @property
    def asked(self) -> list[tuple[int, int]]:
        return [(get.epoch, get.chunk) for get in self.gets]

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop, zmq.POLLIN)
        poller.register(self._listener.fileno(), zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while not self._gone:
                ready = dict(poller.poll())
                if self._stop in ready:
                    return
                if self._listener.fileno() in ready:
                    connection, _ = self._listener.accept()
                    channel = Channel(connection, limit=CLIENT_LIMIT)
                    self._channels[channel.fileno()] = channel
                    poller.register(channel.fileno(), zmq.POLLIN)
                for fd in [fd for fd in self._channels if fd in ready]:
                    if not self._talk(self._channels[fd]):
                        poller.unregister(fd)
                        self._end(self._channels.pop(fd))
                while not self._gone and cast(int, self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    identity, data = self._router.recv_multipart(zmq.NOBLOCK)
                    self._hear(identity, data)
        finally:
            for channel in self._channels.values():
                channel.close()
            self._listener.close()
            self._router.close()
            self._context.term()
            self._ring.close()

    def _talk(self, channel: Channel) -> bool:
        """Answer a connection; False once it has ended."""
        try:
            for data, _ in channel.receive():
                message = decode_session_request(data)
                assert isinstance(message, Hello)
                self.hellos.append(message)
                for done in range(self._indexing or 0):
                    channel.post(encode(Indexing(stream="train", unit="files", done=done, total=self._indexing or 0)))
                if self._refuse is not None:
                    channel.post(encode(self._refuse))
                elif self._indexing is not None:
                    self._welcome(channel)
        except Closed:
            return False
        return True

    def _welcome(self, channel: Channel) -> None:
        token = self.sessions[channel] = secrets.token_bytes(16)
        fd = self._ring.read_only_fd()
        welcome = Welcome(
            pid=os.getpid(), token=token, endpoint=f"{self.address}.zmq", transport="shm", stream="train",
            layout=self._layout, slots=self._ring.slots, render_id=self.render_id, window=self._window,
            **self._about,
        )  # fmt: skip
        channel.post(encode(welcome), [fd])
        os.close(fd)

    def _end(self, channel: Channel) -> None:
        token = self.sessions.pop(channel, b"")
        for key in [key for key in self.leases if key[0] == token]:
            self._free.append(self.leases.pop(key))
        channel.close()

    def _hear(self, identity: bytes, data: bytes) -> None:
        message = decode_client(data)
        if message.token not in self.sessions.values():
            self._send(identity, Unknown(token=message.token))
        elif isinstance(message, Release):
            self._free.append(self.leases.pop((message.token, message.request)))
        elif isinstance(message, Cancel):
            self.cancelled.append(message.request)
            self._waiting = [w for w in self._waiting if w[1].token != message.token or w[1].request > message.request]
        else:
            self.gets.append(message)
            self._act(identity, message, self.behave(message))
        while self._free and self._waiting:
            self._deliver(*self._waiting.pop(0))

    def _act(self, identity: bytes, get: Get, do: Do) -> None:
        if do is Do.FAIL:
            self._send(identity, Failed(request=get.request, kind="DatasetError", text=f"chunk {get.chunk}: EIO"))
        elif do is Do.UNKNOWN:
            self._send(identity, Unknown(token=get.token))
        elif do is Do.GARBAGE:
            self._router.send_multipart([identity, bytes([VERSION]) + b"\x81\xa4type\xa5Hello"])
        elif do is Do.VANISH:
            self._gone = True
        elif do is Do.GOODBYE:
            for channel in self._channels.values():
                channel.post(encode(Goodbye(reason="maintenance")))
            self._gone = True
        elif do is not Do.NOTHING:
            self._waiting.append((identity, get, do))

    def _deliver(self, identity: bytes, get: Get, do: Do) -> None:
        slot = self._free.pop()
        view, rejects = self._ring.views[slot], []
        self._ring.generation[slot] += 1
        for row in range(self._layout.chunk):
            position = get.chunk * self._layout.chunk + row
            if position >= self._samples:
                view.status[row] = Status.PENDING
                continue
            index = index_of(position, self._samples)
            view.indices[row], view.labels[row] = index, index // 10
            view.status[row], view.images[row] = Status.OK, level(get.epoch, position)
            if position in self.bad:
                view.status[row], view.images[row] = Status.REJECTED, 0
                rejects.append(
                    RowReject(row=row, index=index, path=f"/data/{position}.jpg", stage="decode", reason="cut short")
                )
        if do is Do.WRONG_STATUS:
            view.status[0] = Status.RENDERING
        self.leases[get.token, get.request] = slot
        generation = int(self._ring.generation[slot])
        if do is Do.OLD_GENERATION:
            generation -= 1
            view.images[...] = 255
        self._send(
            identity,
            Chunk(
                request=get.request, slot=self._ring.slots if do is Do.NO_SLOT else slot, generation=generation,
                render_id=self.render_id,
                window=self._window, rejects=rejects,
            ),
        )  # fmt: skip

    def _send(self, identity: bytes, message: Message) -> None:
        self._router.send_multipart([identity, encode(message)])
