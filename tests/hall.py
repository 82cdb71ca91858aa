"""The daemon's loop in this process, turned by hand: what clients say is handed to it, and what it says is kept.

Its sockets, its workers, its indexer and ZeroMQ are stood in for; all that decides is the daemon's own. A picture has
one level everywhere, `level(epoch, position)`, and is looked at whenever a chunk is handed out, however it goes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import zmq
from numpy.typing import NDArray

from headrace import protocol
from headrace.pipeline.dataset import open_index
from headrace.pipeline.spec import Config
from headrace.protocol import Chunk, Failed, Message, Rows
from headrace.server import remote, service
from headrace.server.connection import UnixConnection
from headrace.server.listener import Listener
from headrace.server.network import Lane, Timings
from headrace.server.service import Service
from headrace.slots import Ring, Status
from headrace.stages import Stages
from headrace.workers import supervisor
from headrace.workers.member import Job
from headrace.workers.supervisor import Finished

SAMPLES, CHUNK, SIDE, SLOTS, IN_FLIGHT = 22, 4, 4, 9, 2
CHUNKS = -(-SAMPLES // CHUNK)
#: From this epoch on some chunks cannot be had: honest trainers do not come so far.
FAILING = 1 << 20
#: Messages that a peer which does not read lets wait.
QUEUE = 2560
#: Ended connections that are remembered, and seconds between two looks of the daemon's whether they have.
REMEMBERED, PROBE = 5_000, 0.2
#: What a client's message may make the daemon do: its own ring's descriptor is opened for each session.
_ALLOWED = ("/proc/self/fd/",)
_WATCHED = {"open", "exec", "compile", "import", "os.system", "subprocess.Popen", "socket.connect", "pickle.find_class"}


def level(epoch: int, position: int) -> int:
    """Never black."""
    return 1 + (epoch * 31 + position * 7) % 255


def rows_of(chunk: int) -> int:
    return min(CHUNK, SAMPLES - chunk * CHUNK)


def owner(identity: bytes) -> bytes:
    """Whose connection that is: the last byte says which of its connections."""
    return identity[:4]


class Workers:
    """Stands for the supervisor: chunks that were given to it are done when `finish` is called."""

    render_id = "arithmetic"
    in_flight = IN_FLIGHT
    deaths = 0
    worker_seconds = waited = staticmethod(lambda now: 0.0)

    def __init__(self, loop: object, crew: Any, report: Callable[[Any], None]) -> None:
        self.crew = crew
        self.stages = Stages()
        self.pids: list[int] = []
        self.notices: list[str] = []
        self.full: set[int] = set()
        self.jobs: deque[Job] = deque()
        self._report = report
        self._rings: dict[int, Ring] = {}

    @property
    def idle(self) -> bool:
        return len(self.jobs) < self.in_flight

    def open_stream(self, number: int, spec: object, ring: Ring, index: object, convicted: object) -> None:
        self._rings[number] = ring

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def finish(self) -> None:
        """The oldest of the chunks."""
        job = self.jobs.popleft()
        if job.epoch >= FAILING and job.chunk % 3 == 1:
            self._report(supervisor.Failed(job, "DatasetError", "the disk does not answer"))
            return
        view = self._rings[job.stream].views[job.slot]
        for row in range(job.rows):
            position = job.chunk * CHUNK + row
            view.images[row] = level(job.epoch, position)
            view.indices[row] = view.labels[row] = position
            view.status[row] = Status.OK
        self._report(Finished(job, [], self.render_id))

    def tick(self) -> None:
        pass

    def stop(self, *, force: bool) -> None:
        self.jobs.clear()


class Listing:
    """Stands for the indexer: it is done when `finish` is called."""

    waiting: list[Callable[[], None]] = []

    def __init__(self, loop: object, spec: Any, cache: Path, progress: object, done: Callable[[Any], None]) -> None:
        self.waiting.append(lambda: done(open_index(spec.dataset, cache)))

    def stop(self) -> None:
        pass


class Mail:
    """What was said to peers, by identity; `deaf` ones take nothing of it, `gone` ones have ended."""

    def __init__(self, look: Callable[[bytes, Message, list[NDArray[Any]]], None]) -> None:
        self.look = look
        self.deaf: set[bytes] = set()
        self.gone: dict[bytes, None] = {}
        self.waiting: Counter[bytes] = Counter()
        self.said: dict[bytes, deque[Message]] = {}

    def end(self, identities: Iterable[bytes]) -> None:
        """They are gone. Of those before them it is forgotten again, once the daemon has forgotten them."""
        for identity in identities:
            self.gone[identity] = None
            self.deaf.discard(identity)
            self.said.pop(identity, None)
            self.waiting.pop(identity, None)
        while len(self.gone) > REMEMBERED:
            del self.gone[next(iter(self.gone))]

    def put(self, identity: bytes, message: Message, fields: Sequence[NDArray[Any]] = ()) -> bool:
        if identity in self.gone or self.waiting[identity] >= QUEUE:
            return False
        if identity in self.deaf:
            self.waiting[identity] += 1
        self.look(identity, message, [*fields])
        self.said.setdefault(identity, deque(maxlen=64)).append(message)
        return True


class Router:
    """Stands for the ROUTER beside the Unix socket."""

    def __init__(self, mail: Mail) -> None:
        self.mail = mail

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        identity, data = frames
        if not self.mail.put(identity, protocol.decode_daemon(data)):
            raise zmq.Again

    def setsockopt(self, option: int, value: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Network:
    """Stands for the ROUTER for tcp."""

    connections = 0
    patience = 1.0
    gate = None

    def __init__(self, mail: Mail, *, public: bool) -> None:
        self.public = public
        self.nonsense = 0
        self.mail = mail
        self.muted: set[bytes] = set()
        self._leaving: list[tuple[bytes, list[tuple[NDArray[Any], bytes]], Callable[[], None]]] = []

    def bind(self, endpoint: str) -> str:
        return endpoint.replace("*", "1")

    def send(self, identity: bytes, message: Message) -> bool:
        # What is sent is what can be read.
        assert protocol.decode_remote_reply(protocol.encode(message)) == message
        return self.mail.put(identity, message)

    def send_one(self, identity: bytes, make: Callable[[], Message]) -> bool:
        return self.send(identity, make())

    def mute(self, identity: bytes) -> None:
        self.muted.add(identity)

    def gone(self, identity: bytes) -> bool:
        return identity in self.mail.gone

    def forget_the_gone(self) -> None:
        self.muted -= self.mail.gone.keys()

    def ship(self, lane: Lane, head: Rows, fields: Sequence[NDArray[Any]], done: Callable[[], None]) -> bool:
        if not self.mail.put(lane.identity, head, fields):
            done()
            return False
        self._leaving.append((lane.identity, [(field, field.tobytes()) for field in fields], done))
        return True

    def sweep(self) -> None:
        """What has left is done: until then nobody may have written to it."""
        left, self._leaving = self._leaving, []
        for identity, fields, done in left:
            for field, before in fields:
                assert field.tobytes() == before, "rows were written over on their way"
            if identity in self.mail.deaf and identity not in self.mail.gone:
                self._leaving.append((identity, fields, done))
            else:
                done()

    def close(self) -> None:
        for _, _, done in self._leaving:
            done()


class Hall:
    """
    Attributes:
        service: the daemon.
        opened: what was opened, imported or run while messages were handled, but for what each session may have.
    """

    def __init__(self, folder: Path) -> None:
        pictures = folder / "pictures" / "class"
        pictures.mkdir(parents=True)
        for i in range(SAMPLES):
            (pictures / f"{i:03}.jpg").write_bytes(b"never read")
        self.config = Config.load(
            {
                "memory": f"{SLOTS} slots",
                "cache_dir": str(folder / "cache"),
                "workers": {"backend": "pillow", "processes": IN_FLIGHT},
                "streams": {
                    name: {
                        "dataset": {"folder": str(pictures.parent)},
                        "chunk": CHUNK,
                        "transforms": [{"resize": {"size": [SIDE, SIDE]}}],
                    }
                    for name in ("train", "val")
                },
            }
        )
        self.opened: list[str] = []
        self.chunks = 0
        self._wanted: dict[bytes, dict[int, tuple[int, int]]] = {}
        self._watching = False
        self.shared, self.remote, self.private = (Mail(self._look) for _ in range(3))
        networks = {True: self.remote, False: self.private}
        listener = Listener(folder / "hall.sock")
        with (
            mock.patch.object(service, "Supervisor", Workers),
            mock.patch.object(service, "make_router", lambda context, threads: Router(self.shared)),
        ):
            self.service: Any = Service(self.config, [listener], timings=Timings(probe=PROBE))
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.object(service, "Listing", Listing))
        made = mock.patch.object(remote, "Network", lambda *_, public, **__: Network(networks[public], public=public))
        self._patches.enter_context(made)
        self.service._remote.listen("tcp://127.0.0.1:1")
        self.workers: Workers = self.service._supervisor
        sys.addaudithook(self._audit)

    # -- what is said to it -----------------------------------------------------------------------------------------

    def connect(self) -> tuple[socket.socket, UnixConnection]:
        """A connection to its Unix socket: the client's end, and the daemon's."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        offers = {
            "shm": lambda: service.SharedMemory(self.service._router, "ipc:///hall.sock.zmq"),
            "tcp": self.service._remote.offer,
        }
        connection = UnixConnection(
            theirs, os.getpid(), os.getuid(), offers, self.service._loop, self.service._heard, self.service.end
        )
        self.service.come(connection)
        return ours, connection

    def hear_unix(self, connection: UnixConnection) -> None:
        """Something may have come over it."""
        if connection in self.service._connections:
            with self._watched():
                self.service._heard(connection)

    def hear_shared(self, identity: bytes, data: bytes) -> None:
        with self._watched():
            self.service._request(identity, data)

    def hear_remote(self, identity: bytes, data: bytes, *, public: bool = True) -> None:
        network = self.service._remote._public if public else self.service._remote._private
        if network is not None and identity not in network.muted:
            with self._watched():
                self.service._remote._heard(network, identity, Frame(data))

    def wants(self, identity: bytes, request: int, epoch: int, chunk: int) -> None:
        """What an answer to this request must show."""
        self._wanted.setdefault(owner(identity), {})[request] = epoch, chunk

    def forget(self, identity: bytes) -> None:
        """Whose identity that is, is no more."""
        self._wanted.pop(owner(identity), None)

    # -- what it does -----------------------------------------------------------------------------------------------

    def turn(self, finish: int = 1) -> None:
        """A turn of its loop, in which the workers have done so many chunks."""
        with self._watched():
            self.service._reserve()
            self.service._remote.sweep()
            self.service._pump()
        while Listing.waiting:
            Listing.waiting.pop()()
        for _ in range(min(finish, len(self.workers.jobs))):
            self.workers.finish()

    def tick(self) -> None:
        self.service._tick()

    def check(self) -> None:
        """What the daemon keeps is bounded by its sessions, and agrees with itself."""
        daemon = self.service
        assert not self.opened, self.opened
        sessions = list(daemon._by_session)
        assert all(daemon._by_session[daemon._by_token[token].session].token == token for token in daemon._by_token)
        assert len(daemon._by_token) <= len(sessions) <= len(daemon._connections)
        members = daemon._remote._members.values()
        assert set(members) <= daemon._connections
        assert len(members) <= (protocol.MAX_LANES + 1) * len(daemon._connections)
        for host in daemon._hosts:
            assert set(host.waiting) <= daemon._connections
            if host.at is None:
                continue
            desk, slots = host.at.desk, host.at.desk.cache.slots
            for session in desk.sessions:
                assert len(session.pending) <= protocol.MAX_OUTSTANDING and session.ready <= session.pending.keys()
                assert len(session.leases) <= SLOTS
            assert desk.waiting == sum(len(session.pending) for session in desk.sessions)
            assert {slot.number for slot in slots if slot.leases} == {
                slot.number for session in desk.sessions for slot in session.leases.values()
            }
            assert desk.cache.filling == sum(job.stream == host.number for job in self.workers.jobs)

    def close(self) -> None:
        self._watching = False
        self.check()
        while self.workers.jobs:
            self.workers.finish()
        self.remote.deaf.clear()
        self.private.deaf.clear()
        self.service._shutdown()
        self._patches.close()

    def abandon(self) -> None:
        """Close what is open, whatever state the daemon is in."""
        self._watching = False
        for connection in self.service._connections:
            connection.close()
        for host in self.service._hosts:
            if host.at is not None:
                host.at.close()
        for listener in self.service._listeners:
            listener.close()
        self.service._context.term()
        self._patches.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _look(self, identity: bytes, message: Message, fields: list[NDArray[Any]]) -> None:
        """Whatever is handed out, to whomever: it is what was asked for."""
        if isinstance(message, Chunk):
            epoch, chunk = self._wanted[owner(identity)].pop(message.request)
            at = next(host.at for host in self.service._hosts if host.at is not None)
            for host in self.service._hosts:
                if host.at is not None and self._is_of(host.at, message, epoch, chunk):
                    at = host.at
            view, first, count = at.ring.views[message.slot], 0, rows_of(chunk)
            assert int(at.ring.generation[message.slot]) == message.generation
            images, indices = view.images[:count], view.indices[:count]
        elif isinstance(message, Rows):
            epoch, chunk = self._wanted[owner(identity)].pop(message.request)
            first, count = message.first, message.count
            assert 0 <= first < first + count <= rows_of(chunk)
            images, indices = fields[0], fields[2]
        elif isinstance(message, Failed):
            epoch, chunk = self._wanted[owner(identity)].pop(message.request)
            assert epoch >= FAILING and chunk % 3 == 1
            return
        else:
            return
        self.chunks += 1
        positions = range(chunk * CHUNK + first, chunk * CHUNK + first + count)
        assert indices.tolist() == [*positions]
        assert (images[:, 0, 0, 0] == [level(epoch, position) for position in positions]).all()
        assert (images == images[:, :1, :1, :1]).all()

    def _is_of(self, at: Any, message: Chunk, epoch: int, chunk: int) -> bool:
        slot = at.desk.cache.slots[message.slot]
        return slot.address == (epoch, chunk) and slot.generation == message.generation

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._watching and event in _WATCHED and not str(args[0]).startswith(_ALLOWED):
            self.opened.append(f"{event} {args!r:.200}")


class Frame:
    """Stands for ZeroMQ's."""

    def __init__(self, data: bytes) -> None:
        self.buffer = memoryview(data)

    def get(self, name: object) -> str:
        return "127.0.0.1"
