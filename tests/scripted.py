"""A tiny daemon for tests of the client: real sockets, ring and messages, pictures from arithmetic, faults on cue.

The picture at `(epoch, position)` has one level everywhere, `level(epoch, position)`; its index is a fixed
permutation of the position, and `label_of` and `text_of` it follow from the index. It serves shared memory at its
Unix socket, and tcp at `tcp_address`, or where a Hello on the Unix socket asks for it.
"""

from __future__ import annotations

import enum
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import zmq

from headrace.channel import Channel, Closed
from headrace.output import Output
from headrace.protocol import (
    CLIENT_LIMIT,
    VERSION,
    Alive,
    Attach,
    Attached,
    Cancel,
    Chunk,
    Failed,
    Fingerprints,
    Get,
    Goodbye,
    Hello,
    Indexing,
    Leave,
    Message,
    Ping,
    Pong,
    Refused,
    Release,
    Report,
    RowReject,
    Rows,
    Unknown,
    Welcome,
    decode_client,
    decode_remote,
    decode_session_request,
    encode,
)
from headrace.slots import Ring, SlotLayout, SlotView, Status

#: Of the streams that scripted daemons serve, unless a test says otherwise.
SAMPLES = 40


class Do(enum.Enum):
    """What a GET is answered with."""

    ANSWER = enum.auto()
    NOTHING = enum.auto()
    FAIL = enum.auto()
    UNKNOWN = enum.auto()
    OLD_GENERATION = enum.auto()  # as if the slot had been reused before the client looks
    NO_SLOT = enum.auto()  # one that the ring does not have
    WRONG_STATUS = enum.auto()  # a row that was never rendered
    WRONG_TEXT = enum.auto()  # a text that is none
    GARBAGE = enum.auto()
    VANISH = enum.auto()  # as if killed
    GOODBYE = enum.auto()
    # over tcp only
    WHOLE_CHUNK = enum.auto()  # more rows than were asked for
    SHORT_FRAME = enum.auto()
    LONG_FRAME = enum.auto()
    FRAME_LESS = enum.auto()
    FRAME_MORE = enum.auto()
    OTHER_ROWS = enum.auto()  # not those that were asked for
    BEYOND = enum.auto()  # rows that no chunk has
    OTHER_REQUEST = enum.auto()  # a number that was never used
    TWICE = enum.auto()
    STRANGE_REJECT = enum.auto()  # of a row that did not come
    FALLING_ENDS = enum.auto()
    MORE_TEXT = enum.auto()  # than its ends say
    BEHIND_FAILED = enum.auto()  # frames where none belong


def level(epoch: int, position: int) -> int:
    """Never black."""
    return 1 + (epoch * 31 + position * 7) % 255


def index_of(position: int, samples: int) -> int:
    return samples - 1 - position


def label_of(index: int, layout: SlotLayout) -> Any:
    """As the layout has it: a number, or as many as it is wide."""
    if layout.label_width:
        return [index // 10 + column / 2 for column in range(layout.label_width)]
    return index // 10 + (0.5 if layout.label_dtype == "float32" else 0)


def text_of(index: int, labels: str, columns: Iterable[str]) -> list[Any]:
    """The values of a row's text."""
    values: list[Any] = [f"label {index} é"] if labels == "text" else []
    return values + [[f"{column} " * (index % 3), {"n": index}, None, index / 2][index % 4] for column in columns]


def check_epoch(batches: Any, epoch: int, first: int = 0, samples: int = SAMPLES) -> None:
    """The rest of the epoch is just what it should be."""
    seen: list[int] = []
    for batch in batches:
        assert batch.epoch == epoch
        positions = [samples - 1 - int(i) for i in batch.indices]
        assert (batch.images == np.array([level(epoch, p) for p in positions], np.uint8)[:, None, None, None]).all()
        seen += positions
    assert seen == list(range(first, samples))


def once(do: Do, chunk: int) -> Callable[[Get], Do]:
    """That, for the first request for the chunk."""
    done: list[int] = []

    def behave(get: Get) -> Do:
        if get.chunk == chunk and not done:
            done.append(get.request)
            return do
        return Do.ANSWER

    return behave


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
        "render_id": "r", "window": 1, "in_flight": 1, "notices": [],
    }  # fmt: skip
    return Welcome(**(about | change))


@dataclass(eq=False)
class Remote:
    """A session over tcp, at the daemon: its connections, and whose turn it is to bring rows."""

    control: bytes | None
    lanes: list[bytes] = field(default_factory=list)
    turn: int = 0

    def next_lane(self) -> bytes:
        self.turn += 1
        return self.lanes[self.turn % len(self.lanes)]


class ScriptedDaemon:
    """Serves until it is closed; a context manager.

    Args:
        split: rows of a frame of images.
        endpoint: where tcp is to be served; None: where there is room.
        heartbeat: milliseconds between two over tcp, and of silence after which a client is gone.

    Attributes:
        behave: decides about each GET; called in the daemon's thread.
        gets, hellos: what came, in order.
        sessions: the token of each on a Unix connection.
        remote: the sessions over tcp, by token.
        leases: deliveries that were not released.
        cancelled: the requests that Cancel named.
        left: the tokens that Leave named.
        reports: what came of them.
    """

    def __init__(
        self,
        path: Path,
        *,
        samples: int = SAMPLES,
        chunk: int = 4,
        size: tuple[int, int] = (2, 3),
        slots: int = 6,
        window: int = 3,
        in_flight: int = 2,
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
        label_dtype: Any = "int64",
        label_width: int = 0,
        labels: str = "numbers",
        columns: Iterable[str] = (),
        split: int = 3,
        endpoint: str | None = None,
        heartbeat: tuple[int, int] | None = None,
        behave: Callable[[Get], Do] = lambda get: Do.ANSWER,
    ) -> None:
        self.address = f"ipc://{path}"
        self.behave = behave
        self.gets: list[Get] = []
        self.hellos: list[Hello] = []
        self.sessions: dict[Channel, bytes] = {}
        self.remote: dict[bytes, Remote] = {}
        self.leases: dict[tuple[bytes, int], int] = {}
        self.cancelled: list[int] = []
        self.left: list[bytes] = []
        self.reports: list[Report] = []
        self.render_id = render_id
        self.bad = frozenset(bad)
        self.seen: set[int] = set()
        self.instance = secrets.token_bytes(16)
        self.unix_address = self.address  # as Pong has it
        self._path, self._samples, self._window, self._split = path, samples, window, split
        self._in_flight = in_flight
        self._labels, self._columns = labels, list(columns)
        text = 0
        if self._columns or labels == "text":
            text = chunk * max(len(self._text(index)) for index in range(samples))
        self.layout = SlotLayout(chunk, *size, label_dtype, label_width, text)
        self._ring = Ring.create(self.layout, slots)
        self._spare = Ring.create(self.layout, 1)
        self._free = list(range(slots))
        self._waiting: list[tuple[bytes, Get, Do]] = []
        self._indexing, self._refuse = indexing, refuse
        self._about: dict[str, Any] = {
            "samples": samples, "seed": seed, "classes": ["cat", "dog"], "output": output or Output(),
            "labels": labels, "columns": self._columns,
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
        self._tcp = self._context.socket(zmq.ROUTER)
        self._tcp.linger = 0
        self._tcp.ipv6 = "[" in (endpoint or "")
        if heartbeat is not None:
            self._tcp.heartbeat_ivl, self._tcp.heartbeat_timeout = heartbeat
        self._tcp.bind(endpoint or "tcp://127.0.0.1:*")
        self.tcp_address = cast(bytes, self._tcp.last_endpoint).decode().rstrip("\0")
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
        poller.register(self._tcp, zmq.POLLIN)
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
                while not self._gone and cast(int, self._tcp.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    identity, data = self._tcp.recv_multipart(zmq.NOBLOCK)
                    self._hear_remote(identity, decode_remote(data))
        finally:
            for channel in self._channels.values():
                channel.close()
            self._listener.close()
            self._router.close()
            self._tcp.close(200 if self._gone else 0)
            self._context.term()
            self._ring.close()
            self._spare.close()

    def _talk(self, channel: Channel) -> bool:
        """Answer a connection; False once it has ended."""
        try:
            for data, _ in channel.receive():
                message = decode_session_request(data)
                if isinstance(message, Ping):
                    channel.post(encode(self._pong()))
                    continue
                self.hellos.append(message)
                for answer in self._answers():
                    channel.post(encode(answer))
                if self._refuse is None and self._indexing is not None:
                    self._welcome(channel, message.transport)
        except Closed:
            return False
        return True

    def _answers(self) -> list[Message]:
        """To Hello, but for Welcome."""
        total = self._indexing or 0
        answers: list[Message] = [Indexing(stream="train", unit="files", done=n, total=total) for n in range(total)]
        return answers if self._refuse is None else [*answers, self._refuse]

    def _about_session(self, token: bytes, transport: str, endpoint: str) -> Welcome:
        return Welcome(
            pid=os.getpid(), token=token, endpoint=endpoint, transport=transport, stream="train",
            layout=self.layout, slots=self._ring.slots, render_id=self.render_id, window=self._window,
            in_flight=self._in_flight, **self._about,
        )  # fmt: skip

    def _welcome(self, channel: Channel, transport: str) -> None:
        token = self.sessions[channel] = secrets.token_bytes(16)
        if transport == "tcp":
            self.remote[token] = Remote(None)
            channel.post(encode(self._about_session(token, "tcp", self.tcp_address)))
            return
        fd = self._ring.read_only_fd()
        try:
            channel.post(encode(self._about_session(token, "shm", f"{self.address}.zmq")), [fd])
        finally:
            os.close(fd)

    def _pong(self) -> Pong:
        return Pong(
            pid=os.getpid(), version="0", workers=[], deaths=0, uptime=0.0, stages={}, worker_seconds=0.0, streams={},
            sessions=len(self.sessions), clients=[], address=self.unix_address, instance=self.instance, notices=[],
        )  # fmt: skip

    def _end(self, channel: Channel) -> None:
        token = self.sessions.pop(channel, b"")
        self.remote.pop(token, None)
        for key in [key for key in self.leases if key[0] == token]:
            self._free.append(self.leases.pop(key))
        self._waiting = [waiting for waiting in self._waiting if waiting[1].token != token]
        channel.close()
        self._deliver_waiting()  # what the others wait for: no message of theirs has to come first

    def _hear(self, identity: bytes, data: bytes) -> None:
        message = decode_client(data)
        if message.token not in self.sessions.values():
            self._send(identity, Unknown(token=message.token))
        elif isinstance(message, Release):
            self._free.append(self.leases.pop((message.token, message.request)))
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Report):
            self.reports.append(message)
        else:
            self.gets.append(message)
            do = self.behave(message)
            if not self._act(lambda answer: self._send(identity, answer), message, do) and do is not Do.NOTHING:
                if do is Do.GARBAGE:
                    self._router.send_multipart([identity, bytes([VERSION]) + b"\x81\xa4type\xa5Hello"])
                else:
                    self._waiting.append((identity, message, do))
        self._deliver_waiting()

    def _cancel(self, message: Cancel) -> None:
        self.cancelled.append(message.request)
        self._waiting = [w for w in self._waiting if w[1].token != message.token or w[1].request > message.request]

    def _act(self, answer: Callable[[Message], None], get: Get, do: Do) -> bool:
        """What is the same for both transports; whether it was that."""
        if do is Do.FAIL:
            answer(Failed(request=get.request, kind="DatasetError", text=f"chunk {get.chunk}: EIO"))
        elif do is Do.UNKNOWN:
            answer(Unknown(token=get.token))
        elif do is Do.VANISH:
            self._gone = True
        elif do is Do.GOODBYE:
            for channel in self._channels.values():
                channel.post(encode(Goodbye(reason="maintenance")))
            for remote in self.remote.values():
                if remote.control is not None:
                    self._tcp.send_multipart([remote.control, encode(Goodbye(reason="maintenance"))])
            self._gone = True
        else:
            return False
        return True

    def _text(self, index: int) -> bytes:
        return msgspec.msgpack.encode(text_of(index, self._labels, self._columns))

    def _fill(self, view: SlotView, get: Get) -> list[RowReject]:
        rejects, end = [], 0
        for row in range(self.layout.chunk):
            position = get.chunk * self.layout.chunk + row
            if position < self._samples:
                index = index_of(position, self._samples)
                view.indices[row] = index
                view.labels[row] = 0 if self._labels == "text" else label_of(index, self.layout)
                view.status[row], view.images[row] = Status.OK, level(get.epoch, position)
                if position in self.bad:
                    view.status[row], view.images[row] = Status.REJECTED, 0
                    path = f"/data/{position}.jpg"
                    rejects.append(RowReject(row=row, index=index, path=path, stage="decode", reason="cut short"))
                if self.layout.text:
                    text = self._text(index)
                    view.text[end : end + len(text)] = np.frombuffer(text, np.uint8)
                    end += len(text)
            else:
                view.status[row] = Status.PENDING
            view.ends[row] = end
        return rejects

    def _spoil(self, view: SlotView, get: Get, do: Do) -> None:
        if do is Do.WRONG_STATUS:
            view.status[get.first] = Status.RENDERING
        if do is Do.WRONG_TEXT:
            view.text[...] = 0xC1  # no MessagePack begins with it

    def _deliver_waiting(self) -> None:
        while self._free and self._waiting:
            self._deliver(*self._waiting.pop(0))

    def _deliver(self, identity: bytes, get: Get, do: Do) -> None:
        slot = self._free.pop()
        view = self._ring.views[slot]
        self._ring.generation[slot] += 1
        rejects = self._fill(view, get)
        self._spoil(view, get, do)
        self.leases[get.token, get.request] = slot
        generation = int(self._ring.generation[slot])
        if do is Do.OLD_GENERATION:
            generation -= 1
            view.images[...] = 255
        self._send(
            identity,
            Chunk(
                request=get.request, slot=self._ring.slots if do is Do.NO_SLOT else slot, generation=generation,
                render_id=self.render_id, window=self._window, rejects=rejects,
            ),
        )  # fmt: skip

    def _send(self, identity: bytes, message: Message) -> None:
        self._router.send_multipart([identity, encode(message)])

    # -- tcp ------------------------------------------------------------------------------------------------

    def _hear_remote(self, identity: bytes, message: Message) -> None:
        def answer(reply: Message) -> None:
            self._tcp.send_multipart([identity, encode(reply)])

        match message:
            case Ping():
                answer(self._pong())
            case Hello():
                self.hellos.append(message)
                for reply in self._answers():
                    answer(reply)
                if self._refuse is None and self._indexing is not None:
                    token = secrets.token_bytes(16)
                    self.remote[token] = Remote(identity)
                    answer(self._about_session(token, "tcp", ""))
            case Attach() | Leave() | Get() | Cancel() | Report():
                remote = self.remote.get(message.token)
                if remote is None:
                    answer(Unknown(token=message.token))
                else:
                    self._in_session(identity, remote, message, answer)
            case _:
                raise AssertionError(message)

    def _in_session(
        self,
        identity: bytes,
        remote: Remote,
        message: Attach | Leave | Get | Cancel | Report,
        answer: Callable[[Message], None],
    ) -> None:
        match message:
            case Attach():
                if message.lane:
                    remote.lanes.append(identity)
                else:
                    remote.control = identity
                answer(Alive())
                answer(Attached(lane=message.lane))
            case Leave():
                self.left.append(message.token)
                del self.remote[message.token]
            case Cancel():
                self._cancel(message)
            case Report():
                self.reports.append(message)
            case Get():
                assert identity == remote.control
                self.gets.append(message)
                do = self.behave(message)
                if not self._act(answer, message, do):
                    for _ in range(2 if do is Do.TWICE else do is not Do.NOTHING):
                        self._tcp.send_multipart([remote.next_lane(), *self._rows(message, do)])

    def _rows(self, get: Get, do: Do) -> list[bytes]:
        """The frames of an answer."""
        view = self._spare.views[0]
        rejects = self._fill(view, get)
        self._spoil(view, get, do)
        here = self.layout.rows(self._samples, get.chunk)
        first, count = (0, here) if do is Do.WHOLE_CHUNK or not get.count else (get.first, get.count)
        rows = slice(first, first + count)
        ends, start = view.ends[rows].copy(), int(view.ends[first - 1]) if first else 0
        text = view.text[start : ends[-1]].tobytes()
        ends -= start
        if do is Do.FALLING_ENDS:
            ends[0] = ends[-1] + 1
        frames = [view.images[rows][row : row + self._split].tobytes() for row in range(0, count, self._split)]
        frames += [view.labels[rows].tobytes(), view.indices[rows].tobytes(), view.status[rows].tobytes()]
        if self.layout.text:
            frames += [ends.tobytes(), text + b"\xc0" * (do is Do.MORE_TEXT)]
        message = Rows(
            request=get.request + (1000 if do is Do.OTHER_REQUEST else 0), first=first, count=count,
            split=self._split, render_id=self.render_id, window=self._window,
            rejects=[reject for reject in rejects if first <= reject.row < first + count],
        )  # fmt: skip
        change = msgspec.structs.replace
        match do:
            case Do.GARBAGE:
                return [bytes([VERSION]) + b"\x81\xa4type\xa5Hello"]
            case Do.SHORT_FRAME:
                frames[0] = frames[0][:-1]
            case Do.LONG_FRAME:
                frames[-1] += b"x"
            case Do.FRAME_LESS:
                frames.pop()
            case Do.FRAME_MORE:
                frames.append(b"")
            case Do.OTHER_ROWS:
                message = change(message, first=first + 1)
            case Do.BEYOND:
                message = change(message, first=self.layout.chunk)
            case Do.STRANGE_REJECT:
                reject = RowReject(row=self.layout.chunk, index=0, path="/x", stage="decode", reason="cut")
                message = change(message, rejects=[reject])
            case Do.BEHIND_FAILED:
                return [encode(Failed(request=get.request, kind="DatasetError", text="x")), *frames]
        return [encode(message), *frames]
