"""The daemon's loop: turns GETs into tasks and slots into leases. It touches no sample bytes.

One thread, one poll loop over the Unix listeners and their connections, ZeroMQ's ROUTER, the workers and signals.
What is decided lives in `desk` and `cache`; here is only the I/O around it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

import zmq

from headrace import __version__, protocol
from headrace.channel import Channel, Closed
from headrace.errors import HeadraceError, ProtocolError, to_wire
from headrace.pipeline.index import Index
from headrace.pipeline.spec import Config, Stream
from headrace.protocol import (
    Cancel,
    Chunk,
    Failed,
    Get,
    Goodbye,
    Hello,
    Indexing,
    Ping,
    Pong,
    Refused,
    Release,
    Unknown,
    Welcome,
)
from headrace.server.desk import Session
from headrace.server.listener import Listener
from headrace.server.streams import Listing, OpenStream, open_stream
from headrace.workers import cpus, supervisor
from headrace.workers.loop import Loop
from headrace.workers.supervisor import Broken, Convicted, Finished, Job, Report, Started, Supervisor

log = logging.getLogger(__name__)

#: Seconds between two looks at what only time brings.
_TICK = 1.0
#: Seconds that a connection may stay without a Hello, and a private daemon without a session after its start.
_HELLO_TIMEOUT = 10.0
_FIRST_SESSION = 30.0
#: Seconds that clients get to release what they are copying when the daemon stops.
_DRAIN = 2.0
_MAX_CONNECTIONS = 4096


@dataclass(eq=False, slots=True)
class _Host:
    """A stream of the configuration; `at` once it is open, `listing` while it is being listed."""

    number: int
    name: str
    spec: Stream
    at: OpenStream | None = None
    listing: Listing | None = None
    waiting: list[_Connection] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Connection:
    """A Unix connection, and the session that it carries once there was a Hello."""

    channel: Channel
    listener: Listener
    pid: int
    pidfd: int
    since: float
    name: str
    host: _Host | None = None
    session: Session | None = None
    token: bytes = b""
    identity: bytes = b""  # at the ROUTER; known from the session's first message on


class Service:
    """
    Args:
        config: all of it.
        listeners: where clients come; owned from now on.
        private: end with the last session.
    """

    def __init__(self, config: Config, listeners: Sequence[Listener], *, private: bool = False) -> None:
        self._config = config
        self._listeners = list(listeners)
        self._private = private
        self._loop = Loop()
        self._hosts = {name: _Host(i, name, spec) for i, (name, spec) in enumerate(config.streams.items())}
        self._turns = deque(self._hosts.values())
        self._connections: set[_Connection] = set()
        self._sessions: dict[bytes, _Connection] = {}
        self._supervisor = Supervisor(
            self._loop,
            cpus.worker_count(config.workers.processes, private=private),
            config.workers.backend,
            self._reported,
        )
        self._render_id: str | None = None
        self._broken: str | None = None
        self._stop_signals = 0
        self._stopped_by: signal.Signals | None = None
        self._served = False
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it a message that does not fit vanishes
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, protocol.CLIENT_LIMIT)
        self._started = time.monotonic()

    # -- life ---------------------------------------------------------------------------------------------------

    def run(self, ready: Callable[[list[str]], None]) -> signal.Signals | None:
        """Serve until SIGTERM, SIGINT or, if private, the end of the last session.

        Args:
            ready: called with the addresses when clients can come.

        Returns:
            The signal that stopped it, if one did.
        """
        signals = _Signals(self._signalled)
        try:
            self._startup(signals)
            ready([listener.address for listener in self._listeners])
            self._main_loop()
        finally:
            self._shutdown()
            signals.restore()
        return self._stopped_by

    def _startup(self, signals: _Signals) -> None:
        self._loop.watch(signals.fileno(), signals.drain)
        for listener in self._listeners:
            with listener.private_files():
                self._router.bind(listener.zmq_endpoint)
            listener.admit(listener.zmq_path)
            self._loop.watch(listener.socket, lambda listener=listener: self._accept(listener))  # type: ignore[misc]
        self._loop.watch(self._router, self._router_readable)
        self._supervisor.start()

    def _main_loop(self) -> None:
        ticked = 0.0
        while not self._stop_signals and not self._deserted():
            self._loop.run_once(_TICK)
            self._pump()
            if time.monotonic() - ticked >= _TICK:
                ticked = time.monotonic()
                self._supervisor.tick()
                self._expire()

    def _deserted(self) -> bool:
        if not self._private or self._connections:
            return False
        return self._served or time.monotonic() - self._started > _FIRST_SESSION

    def _shutdown(self) -> None:
        """Three phases: no new clients; those who copy may finish; everything ends. A second signal forces."""
        log.info("stopping: no new clients")
        for listener in self._listeners:
            self._loop.unwatch(listener.socket.fileno()) if listener.socket.fileno() >= 0 else None
            listener.stop()
        for connection in list(self._connections):
            self._say(connection, Goodbye(reason="the daemon is stopping"))
        log.info("stopping: clients finish their copies")
        deadline = time.monotonic() + _DRAIN
        while self._stop_signals < 2 and time.monotonic() < deadline and self._leased():
            self._loop.run_once(0.05)
        log.info("stopping: workers")
        for host in self._hosts.values():
            if host.listing is not None:
                host.listing.stop()
        self._supervisor.stop(force=self._stop_signals >= 2)
        for connection in list(self._connections):
            self._end(connection)
        self._router.close()
        self._context.term()
        for host in self._hosts.values():
            if host.at is not None:
                host.at.close()
        for listener in self._listeners:
            listener.close()
        log.info("stopped")

    def _leased(self) -> bool:
        return any(c.session is not None and c.session.leases for c in self._connections)

    def _signalled(self, number: int) -> None:
        self._stop_signals += 1
        self._stopped_by = self._stopped_by or signal.Signals(number)
        log.info("got %s%s", signal.Signals(number).name, ", again: forced" if self._stop_signals > 1 else "")

    def _expire(self) -> None:
        for connection in list(self._connections):
            if connection.host is None and time.monotonic() - connection.since > _HELLO_TIMEOUT:
                log.info("%s said no Hello", connection.name)
                self._end(connection)

    # -- connections --------------------------------------------------------------------------------------------

    def _accept(self, listener: Listener) -> None:
        for sock, pid, uid in listener.accept():
            if len(self._connections) >= _MAX_CONNECTIONS:
                log.warning("%d connections are the most; one more was closed", _MAX_CONNECTIONS)
                sock.close()
                continue
            connection = _Connection(
                Channel(sock, limit=protocol.CLIENT_LIMIT),
                listener,
                pid,
                _pidfd(pid),
                time.monotonic(),
                f"client {pid} (uid {uid})",
            )
            self._connections.add(connection)
            self._watch(connection)
            if connection.pidfd >= 0:
                self._loop.watch(connection.pidfd, lambda c=connection: self._end(c))  # type: ignore[misc]

    def _watch(self, connection: _Connection) -> None:
        channel = connection.channel
        self._loop.watch(channel, lambda: self._heard(connection), write=channel.pending)

    def _heard(self, connection: _Connection) -> None:
        try:
            connection.channel.flush()
            self._watch(connection)
            for frame, _ in connection.channel.receive():
                self._session_message(connection, protocol.decode_session_request(frame))
                if connection not in self._connections:
                    return
        except Closed:
            self._end(connection)
        except ProtocolError as error:
            log.warning("%s: %s", connection.name, error)
            self._refuse(connection, *to_wire(error))

    def _say(self, connection: _Connection, message: protocol.Message, *fds: int) -> None:
        try:
            connection.channel.post(protocol.encode(message), fds)
        except Closed:
            self._end(connection)
        else:
            self._watch(connection)

    def _refuse(self, connection: _Connection, kind: str, text: str) -> None:
        self._say(connection, Refused(kind=kind, text=text))
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """The connection is over. Its process is dead or has closed the mapping, so its leases end with it."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._loop.unwatch(connection.channel)
        if connection.pidfd >= 0:
            self._loop.unwatch(connection.pidfd)
            os.close(connection.pidfd)
        connection.channel.close()
        host = connection.host
        if host is not None and connection in host.waiting:
            host.waiting.remove(connection)
        if connection.session is not None and host is not None and host.at is not None:
            host.at.desk.leave(connection.session)
            del self._sessions[connection.token]
            log.info("%s left stream %s", connection.name, host.name)

    def _session_message(self, connection: _Connection, message: Hello | Ping) -> None:
        if isinstance(message, Ping):
            self._say(connection, self._pong())
            return
        if connection.host is not None:
            raise ProtocolError("a second Hello on one connection")
        self._served = True
        names = ", ".join(self._hosts)
        name = message.stream if message.stream is not None or len(self._hosts) > 1 else next(iter(self._hosts))
        if message.transport != "shm":
            self._refuse(connection, "ConfigError", f"transport {message.transport!r} is not offered here, only 'shm'")
        elif name is None:
            self._refuse(connection, "ConfigError", f"stream: this daemon has several, name one of: {names}")
        elif name not in self._hosts:
            self._refuse(connection, "ConfigError", f"stream: there is no {name!r} here, only: {names}")
        else:
            connection.host = self._hosts[name]
            connection.name += f" {message.client}" if message.client else ""
            connection.host.waiting.append(connection)
            self._open(connection.host)

    def _pong(self) -> Pong:
        return Pong(
            pid=os.getpid(),
            version=__version__,
            workers=self._supervisor.pids,
            streams={name: host.at.status() if host.at else None for name, host in self._hosts.items()},
            sessions=len(self._sessions),
        )

    # -- streams ------------------------------------------------------------------------------------------------

    def _open(self, host: _Host) -> None:
        """Bring a stream that somebody waits for one step further."""
        if self._broken is not None:
            self._refuse_waiting(host, "HeadraceError", self._broken)
        elif host.at is None and host.listing is None:
            self._list(host)
        elif host.at is not None and self._render_id is not None:
            for connection in list(host.waiting):
                self._welcome(host, host.at, connection, self._render_id)
            host.waiting.clear()

    def _list(self, host: _Host) -> None:
        log.info("stream %s: listing %s", host.name, host.spec.dataset.folder)
        try:
            host.listing = Listing(
                self._loop,
                host.spec,
                self._config.cache_folder,
                lambda done, total: self._listing(host, done, total),
                lambda result: self._listed(host, result),
            )
        except OSError as error:
            log.error("stream %s: the indexer cannot be started: %s", host.name, error)
            self._refuse_waiting(host, "DatasetError", f"the indexer cannot be started: {error}")

    def _refuse_waiting(self, host: _Host, kind: str, text: str) -> None:
        for connection in list(host.waiting):
            self._refuse(connection, kind, text)
        host.waiting.clear()

    def _listing(self, host: _Host, done: int, total: int) -> None:
        for connection in list(host.waiting):
            if not connection.channel.pending:  # who does not read does not need older news
                self._say(connection, Indexing(stream=host.name, done=done, total=total))

    def _listed(self, host: _Host, result: Index | tuple[str, str]) -> None:
        host.listing = None
        try:
            if isinstance(result, tuple):
                kind, text = result
                log.error("stream %s: %s", host.name, text)
                self._refuse_waiting(host, kind, text)
                return
            host.at = open_stream(self._config, host.name, result, self._supervisor.in_flight)
        except (HeadraceError, OSError) as error:
            log.error("stream %s: %s", host.name, error)
            assert isinstance(result, Index)
            result.close()
            self._refuse_waiting(host, *to_wire(error))
            return
        at = host.at
        for notice in at.index.notices:
            log.info("stream %s: %s", host.name, notice)
        for index, reason in at.ledger.convicted.items():
            log.warning("stream %s: %s is not rendered: %s", host.name, at.index.shown_full(index), reason)
        self._supervisor.open_stream(host.number, host.spec, at.ring, at.index, at.ledger.convicted)
        self._open(host)

    def _welcome(self, host: _Host, at: OpenStream, connection: _Connection, render_id: str) -> None:
        connection.token = secrets.token_bytes(16)
        connection.session = Session(connection.name)
        at.desk.join(connection.session)
        self._sessions[connection.token] = connection
        ring_fd = at.ring.read_only_fd()
        spec = host.spec
        welcome = Welcome(
            pid=os.getpid(),
            token=connection.token,
            endpoint=connection.listener.zmq_endpoint,
            transport="shm",
            stream=host.name,
            layout=at.ring.layout,
            slots=at.ring.slots,
            samples=len(at.index),
            seed=spec.seed,
            classes=at.index.classes,
            fingerprints=at.fingerprints,
            output=spec.output,
            on_bad_sample=spec.on_bad_sample,
            max_bad=spec.max_bad,
            render_id=render_id,
            window=at.desk.window,
            notices=at.index.notices,
        )
        log.info("%s joined stream %s over shm, window %d", connection.name, host.name, at.desk.window)
        self._say(connection, welcome, ring_fd)
        os.close(ring_fd)

    # -- requests -----------------------------------------------------------------------------------------------

    def _router_readable(self) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:  # anything else is none of ours
                self._request(frames[0], frames[1])

    def _request(self, identity: bytes, data: bytes) -> None:
        try:
            message = protocol.decode_client(data)
        except ProtocolError as error:
            log.warning("a message that is none: %s", error)
            return
        connection = self._sessions.get(message.token)
        if connection is None:
            self._answer(identity, Unknown(token=message.token[:16]))
            return
        connection.identity = identity
        assert connection.host is not None and connection.host.at is not None and connection.session is not None
        desk = connection.host.at.desk
        match message:
            case Get():
                self._get(connection, connection.host.at, connection.session, message)
            case Release(request=request):
                desk.release(connection.session, request)
            case Cancel(request=request):
                desk.cancel(connection.session, request)

    def _get(self, connection: _Connection, at: OpenStream, session: Session, get: Get) -> None:
        if not (0 <= get.chunk < at.chunks and 0 <= get.epoch < 1 << 63):
            text = f"epoch {get.epoch}, chunk {get.chunk}: an epoch of this stream has chunks 0 to {at.chunks - 1}"
            self._answer(connection.identity, Failed(request=get.request, kind="ProtocolError", text=text))
        elif len(session.pending) >= protocol.MAX_OUTSTANDING:
            self._expel(connection, f"more than {protocol.MAX_OUTSTANDING} requests outstanding")
        else:
            try:
                at.desk.get(session, get.request, (get.epoch, get.chunk))
            except ValueError as error:
                self._expel(connection, str(error))

    def _expel(self, connection: _Connection, reason: str) -> None:
        log.warning("%s: session ended: %s", connection.name, reason)
        self._say(connection, Goodbye(reason=reason))
        self._end(connection)

    def _answer(self, identity: bytes, message: protocol.Message) -> bool:
        try:
            self._router.send_multipart([identity, protocol.encode(message)], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError) as error:
            log.debug("an answer could not be sent: %s", error)
            return False
        return True

    def _tell(self, connection: _Connection, message: protocol.Message) -> None:
        if not self._answer(connection.identity, message):
            # A lost answer would leave the client waiting; a lost session makes it ask again.
            self._expel(connection, "an answer could not be sent")

    # -- chunks -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Deliver what is ready, then give the workers what is wanted next."""
        by_session = {c.session: c for c in self._connections if c.session is not None}
        for host in self._hosts.values():
            if host.at is None:
                continue
            for delivery in host.at.desk.deliveries():
                slot = delivery.slot
                chunk = Chunk(
                    request=delivery.request,
                    slot=slot.number,
                    generation=slot.generation,
                    render_id=slot.render_id,
                    window=host.at.desk.window,
                    rejects=slot.rejects,
                )
                self._tell(by_session[delivery.session], chunk)
        while self._supervisor.idle and self._submit_one():
            pass

    def _submit_one(self) -> bool:
        for _ in range(len(self._turns)):
            host = self._turns[0]
            self._turns.rotate(-1)
            if host.at is None or (slot := host.at.desk.next_fill()) is None:
                continue
            assert slot.address is not None
            epoch, chunk = slot.address
            host.at.ring.generation[slot.number] = slot.generation
            self._supervisor.submit(Job(host.number, epoch, chunk, slot.number, host.at.rows(chunk)))
            return True
        return False

    def _reported(self, report: Report) -> None:
        match report:
            case Started(render_id=render_id):
                self._render_id, self._broken = render_id, None
                for host in self._hosts.values():
                    if host.waiting:
                        self._open(host)
            case Broken(text=text):
                self._broken = text
                for host in self._hosts.values():
                    self._refuse_waiting(host, "HeadraceError", text)
            case Convicted(stream=number, index=index, reason=reason):
                at = self._by_number(number)
                log.error("%s is not rendered any more: %s", at.index.shown_full(index), reason)
                at.ledger.convict(index, reason)
            case Finished(job=job, rejects=rejects, render_id=render_id):
                desk = self._by_number(job.stream).desk
                desk.filled(desk.cache.slots[job.slot], rejects, render_id)
            case supervisor.Failed(job=job, kind=kind, text=text):
                desk = self._by_number(job.stream).desk
                told = desk.failed(desk.cache.slots[job.slot])
                log.error("chunk %d of epoch %d failed: %s", job.chunk, job.epoch, text)
                for connection in list(self._connections):
                    for session, request in told:
                        if connection.session is session:
                            self._tell(connection, Failed(request=request, kind=kind, text=text))

    def _by_number(self, number: int) -> OpenStream:
        at = next(host.at for host in self._hosts.values() if host.number == number)
        assert at is not None
        return at


class _Signals:
    """SIGTERM and SIGINT as something to poll; the handlers before are put back at the end."""

    def __init__(self, called: Callable[[int], None]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._called = called
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}

    def fileno(self) -> int:
        return self._reader.fileno()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._called(number)

    def drain(self) -> None:
        self._reader.recv(4096)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()


def _pidfd(pid: int) -> int:
    """Of a client; -1 where its PID means nothing here (another PID namespace): then its connection's end must do."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1
