"""The daemon's loop: turns GETs into tasks and slots into leases. It touches no sample bytes.

One thread, one poll loop over the Unix listeners and their connections, ZeroMQ's ROUTER, the workers and signals.
What is decided lives in `desk` and `cache`; here is only the I/O around it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from headrace import __version__, protocol
from headrace.channel import Closed
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
from headrace.server import ring_size
from headrace.server.connection import Connection
from headrace.server.desk import Session
from headrace.server.listener import Listener
from headrace.server.signals import Signals
from headrace.server.streams import Listing, OpenStream, open_stream
from headrace.workers import cpus, supervisor
from headrace.workers.loop import Loop
from headrace.workers.supervisor import Broken, Convicted, Finished, Job, Report, Started, Supervisor

log = logging.getLogger(__name__)

#: Seconds between two looks at what only time brings, and between two at whether the address is still ours.
_TICK = 1.0
_TOUCH = 3600.0
#: Seconds that a connection may stay without a Hello, and a private daemon without a session after its start.
_HELLO_TIMEOUT = 10.0
_FIRST_SESSION = 30.0
#: Seconds that clients get to release what they are copying when the daemon stops.
_DRAIN = 2.0
#: Messages that are taken in one turn of the loop: one client's flood must not keep the others waiting.
_TURN = 256
#: Bytes that a client may leave unread on its connection.
_UNREAD = 1 << 20
#: Bytes of a ring that are reserved in one turn, some 20 ms.
_RESERVE = 64 << 20
#: Descriptors that a connection takes: its own, its process's, ZeroMQ's. And what is kept for everything else.
_PER_CONNECTION = 3
_KEPT = 64


@dataclass(eq=False, slots=True)
class _Host:
    """A stream of the configuration. It is closed; then listed; then its memory is reserved; then it is open.

    Attributes:
        number: its place in the configuration, by which workers call it.
        at: from the listing's end on; clients are welcome once its ring is reserved.
        waiting: who has said Hello and is not welcome yet.
    """

    number: int
    name: str
    spec: Stream
    listing: Listing | None = None
    at: OpenStream | None = None
    waiting: list[Connection] = field(default_factory=list)

    @property
    def ready(self) -> OpenStream | None:
        return self.at if self.at is not None and self.at.reserved else None


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
        self._hosts = [_Host(i, name, spec) for i, (name, spec) in enumerate(config.streams.items())]
        self._turns = deque(self._hosts)
        self._memory = ring_size.available_bytes()
        self._connections: set[Connection] = set()
        self._by_token: dict[bytes, Connection] = {}
        self._by_session: dict[Session, Connection] = {}
        self._supervisor = Supervisor(
            self._loop,
            cpus.worker_count(config.workers.processes, private=private),
            config.workers.backend,
            self._reported,
        )
        self._most_connections = _descriptors(self._supervisor.count, len(self._hosts))
        self._render_id: str | None = None
        self._broken: str | None = None
        self._nonsense = 0
        self._stop_signals = 0
        self._stopped_by: signal.Signals | None = None
        self._served = False
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it a message that does not fit vanishes
        self._router.setsockopt(zmq.SNDHWM, 0)  # a session's answers are bounded by its requests
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, protocol.CLIENT_LIMIT)
        self._instance = secrets.token_bytes(16)
        self._started = self._touched = time.monotonic()

    # -- life ---------------------------------------------------------------------------------------------------

    def run(self, ready: Callable[[list[str]], None]) -> signal.Signals | None:
        """Serve until SIGTERM, SIGINT or, if private, the end of the last session.

        Args:
            ready: called with the addresses when clients can come.

        Returns:
            The signal that stopped it, if one did.
        """
        signals = Signals(self._signalled)
        try:
            self._startup(signals)
            ready([listener.address for listener in self._listeners])
            self._main_loop()
        finally:
            self._shutdown()
            signals.restore()
        return self._stopped_by

    def _startup(self, signals: Signals) -> None:
        self._loop.watch(signals.fileno(), signals.drain)
        for listener in self._listeners:
            listener.bind_zmq(self._router)
            self._loop.watch(listener.socket, lambda listener=listener: self._accept(listener))  # type: ignore[misc]
        self._loop.watch(self._router, self._router_readable)
        self._supervisor.start()

    def _main_loop(self) -> None:
        ticked = 0.0
        while not self._stop_signals and not self._deserted():
            self._loop.run_once(0.0 if self._reserve() else _TICK)
            self._pump()
            if time.monotonic() - ticked >= _TICK:
                ticked = time.monotonic()
                self._tick()

    def _deserted(self) -> bool:
        if not self._private or self._connections:
            return False
        return self._served or time.monotonic() - self._started > _FIRST_SESSION

    def _tick(self) -> None:
        self._supervisor.tick()
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.stream is None and now - connection.since > _HELLO_TIMEOUT:
                log.info("%s said no Hello", connection.name)
                self._end(connection)
        if self._nonsense:
            log.warning("%d messages were none", self._nonsense)
            self._nonsense = 0
        if now - self._touched > _TOUCH:
            self._touched = now
            for listener in self._listeners:
                listener.touch()

    def _shutdown(self) -> None:
        """Three phases: no new clients; those who copy may finish; everything ends. A second signal forces."""
        log.info("stopping: no new clients")
        for listener in self._listeners:
            self._loop.unwatch(listener.socket)
            listener.stop()
        for connection in list(self._connections):
            self._say(connection, Goodbye(reason="the daemon is stopping"))
        log.info("stopping: clients finish their copies")
        deadline = time.monotonic() + _DRAIN
        try:
            while self._stop_signals < 2 and time.monotonic() < deadline and self._leased():
                self._loop.run_once(0.05)
        except Exception:
            log.exception("stopping goes on")
        log.info("stopping: workers")
        for host in self._hosts:
            if host.listing is not None:
                host.listing.stop()
        self._supervisor.stop(force=self._stop_signals >= 2)
        for connection in list(self._connections):
            self._end(connection)
        self._router.close()
        self._context.term()
        for host in self._hosts:
            if host.at is not None:
                host.at.close()
        for listener in self._listeners:
            listener.close()
        log.info("stopped")

    def _leased(self) -> bool:
        return any(session.leases for session in self._by_session)

    def _signalled(self, number: int) -> None:
        self._stop_signals += 1
        self._stopped_by = self._stopped_by or signal.Signals(number)
        log.info("got %s%s", signal.Signals(number).name, ", again: forced" if self._stop_signals > 1 else "")

    # -- connections --------------------------------------------------------------------------------------------

    def _accept(self, listener: Listener) -> None:
        for sock, pid, uid in listener.accept():
            if len(self._connections) >= self._most_connections:
                log.warning("%d connections are the most, one more was closed; see ulimit -n", self._most_connections)
                sock.close()
                continue
            connection = Connection.accepted(sock, pid, uid, listener)
            self._connections.add(connection)
            self._watch(connection)
            if connection.pidfd >= 0:
                self._loop.watch(connection.pidfd, lambda c=connection: self._end(c))  # type: ignore[misc]

    def _watch(self, connection: Connection) -> None:
        channel = connection.channel
        self._loop.watch(channel, lambda: self._heard(connection), write=channel.pending)

    def _heard(self, connection: Connection) -> None:
        try:
            connection.channel.flush()
            self._watch(connection)
            for frame, _ in connection.channel.receive():
                if connection.expelled:
                    continue
                self._session_message(connection, protocol.decode_session_request(frame))
                if connection not in self._connections:
                    return
        except Closed:
            self._end(connection)
        except ProtocolError as error:
            self._expel(connection, str(error), Refused(kind="ProtocolError", text=str(error)))
        except Exception as error:  # one client's trouble, whatever it is, is not the others'
            log.exception("%s", connection.name)
            self._expel(connection, str(error), Refused(kind="HeadraceError", text=f"the daemon failed: {error}"))

    def _say(self, connection: Connection, message: protocol.Message, *fds: int) -> None:
        try:
            if connection.channel.queued_bytes > _UNREAD:
                log.warning("%s does not read what it is told", connection.name)
                raise Closed
            connection.channel.post(protocol.encode(message), fds)
        except (Closed, OSError) as error:
            if not isinstance(error, Closed):
                log.error("%s: %s", connection.name, error)
            self._end(connection)
        else:
            self._watch(connection)

    def _refuse(self, connection: Connection, kind: str, text: str) -> None:
        self._say(connection, Refused(kind=kind, text=text))
        self._end(connection)

    def _expel(self, connection: Connection, reason: str, message: protocol.Message | None = None) -> None:
        """The session is over for a reason of ours. Its reader may be in the middle of a copy: leases stay."""
        log.warning("%s: expelled: %s", connection.name, reason)
        connection.expelled = True
        self._by_token.pop(connection.token, None)
        self._say(connection, message or Goodbye(reason=reason))
        host = self._host(connection)
        if connection.session is None or host is None or host.at is None or not connection.session.leases:
            self._end(connection)
        else:
            host.at.desk.cancel(connection.session)

    def _end(self, connection: Connection) -> None:
        """The connection is over. Its process is dead or has closed the mapping, so its leases end with it."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._loop.unwatch(connection.channel)
        if connection.pidfd >= 0:
            self._loop.unwatch(connection.pidfd)
        connection.close()
        host = self._host(connection)
        if host is not None and connection in host.waiting:
            host.waiting.remove(connection)
        if connection.session is not None and host is not None and host.at is not None:
            host.at.desk.leave(connection.session)
            self._by_token.pop(connection.token, None)
            del self._by_session[connection.session]
            log.info("%s left stream %s", connection.name, host.name)

    def _host(self, connection: Connection) -> _Host | None:
        return next((host for host in self._hosts if host.name == connection.stream), None)

    def _session_message(self, connection: Connection, message: Hello | Ping) -> None:
        if isinstance(message, Ping):
            self._say(connection, self._pong())
            return
        if connection.stream is not None:
            raise ProtocolError("a second Hello on one connection")
        self._served = True
        names = ", ".join(host.name for host in self._hosts)
        name = message.stream if message.stream is not None or len(self._hosts) > 1 else self._hosts[0].name
        host = next((host for host in self._hosts if host.name == name), None)
        if message.transport != "shm":
            self._refuse(connection, "ConfigError", f"transport {message.transport!r} is not offered here, only 'shm'")
        elif name is None:
            self._refuse(connection, "ConfigError", f"stream: this daemon has several, name one of: {names}")
        elif host is None:
            self._refuse(connection, "ConfigError", f"stream: there is no {name!r} here, only: {names}")
        else:
            connection.stream = name
            connection.name += f" {message.client}" if message.client else ""
            host.waiting.append(connection)
            self._open(host)

    def _pong(self) -> Pong:
        return Pong(
            pid=os.getpid(),
            version=__version__,
            workers=self._supervisor.pids,
            deaths=self._supervisor.deaths,
            seconds=self._supervisor.seconds,
            streams={host.name: host.ready.status() if host.ready else None for host in self._hosts},
            sessions=len(self._by_token),
            address=self._listeners[0].address,
            instance=self._instance,
        )

    # -- streams ------------------------------------------------------------------------------------------------

    def _open(self, host: _Host) -> None:
        """Bring a stream that somebody waits for one step further."""
        if self._broken is not None:
            self._refuse_waiting(host, "HeadraceError", self._broken)
        elif host.at is None and host.listing is None:
            self._list(host)
        elif host.ready is not None and self._render_id is not None:
            for connection in list(host.waiting):
                self._welcome(host, host.ready, connection, self._render_id)
            host.waiting.clear()

    def _list(self, host: _Host) -> None:
        log.info("stream %s: listing %s", host.name, host.spec.dataset.place)
        try:
            host.listing = Listing(
                self._loop,
                host.spec,
                self._config.cache_folder,
                lambda done, total: self._progress(host, "files", done, total),
                lambda result: self._listed(host, result),
            )
        except (OSError, Closed) as error:
            log.error("stream %s: the indexer cannot be started: %s", host.name, error)
            self._refuse_waiting(host, "DatasetError", f"the indexer cannot be started: {error}")

    def _refuse_waiting(self, host: _Host, kind: str, text: str) -> None:
        for connection in list(host.waiting):
            self._refuse(connection, kind, text)
        host.waiting.clear()

    def _progress(self, host: _Host, unit: str, done: int, total: int) -> None:
        for connection in list(host.waiting):
            if not connection.channel.pending:  # who does not read does not need older news
                self._say(connection, Indexing(stream=host.name, unit=unit, done=done, total=total))

    def _listed(self, host: _Host, result: Index | tuple[str, str]) -> None:
        host.listing = None
        if isinstance(result, tuple):
            self._not_opened(host, *result)
            return
        try:
            host.at = open_stream(self._config, host.name, result, self._supervisor.in_flight, self._memory)
        except HeadraceError as error:
            self._not_opened(host, *to_wire(error))

    def _not_opened(self, host: _Host, kind: str, text: str) -> None:
        log.error("stream %s: %s", host.name, text)
        self._refuse_waiting(host, kind, text)

    def _reserve(self) -> bool:
        """Go on with reserving memory for streams that are being opened; whether there is more to do."""
        for host in self._hosts:
            if host.at is None or host.at.reserved:
                continue
            try:
                host.at.reserve(_RESERVE)
            except HeadraceError as error:
                host.at.close()
                host.at = None
                self._not_opened(host, *to_wire(error))
                continue
            ring = host.at.ring
            self._progress(host, "MiB", ring.reserved >> 20, ring.nbytes >> 20)
            if not host.at.reserved:
                return True
            self._opened(host, host.at)
        return False

    def _opened(self, host: _Host, at: OpenStream) -> None:
        for notice in at.index.notices:
            log.info("stream %s: %s", host.name, notice)
        for index, reason in at.ledger.convicted.items():
            log.warning("stream %s: %s is not rendered: %s", host.name, at.index.shown_full(index), reason)
        self._supervisor.open_stream(host.number, host.spec, at.ring, at.index, at.ledger.convicted)
        self._open(host)

    def _welcome(self, host: _Host, at: OpenStream, connection: Connection, render_id: str) -> None:
        try:
            ring_fd = at.ring.read_only_fd()
        except OSError as error:
            self._refuse(connection, "HeadraceError", f"the daemon has no descriptor left for one more client: {error}")
            return
        connection.token = secrets.token_bytes(16)
        connection.session = Session(connection.name)
        at.desk.join(connection.session)
        self._by_token[connection.token] = connection
        self._by_session[connection.session] = connection
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
            labels="text" if at.index.labels_text else "numbers",
            columns=at.index.columns,
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
        for _ in range(_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                self._request(frames[0], frames[1])
            else:
                self._nonsense += 1

    def _request(self, identity: bytes, data: bytes) -> None:
        try:
            message = protocol.decode_client(data)
        except ProtocolError as error:
            log.debug("a message that is none: %s", error)
            self._nonsense += 1
            return
        connection = self._by_token.get(message.token)
        if connection is None:
            self._answer(identity, Unknown(token=message.token))
            return
        connection.identity = identity
        host = self._host(connection)
        assert host is not None and host.at is not None and connection.session is not None
        match message:
            case Get():
                self._get(connection, host.at, connection.session, message)
            case Release(request=request):
                host.at.desk.release(connection.session, request)
            case Cancel(request=request):
                host.at.desk.cancel(connection.session, request)

    def _get(self, connection: Connection, at: OpenStream, session: Session, get: Get) -> None:
        if get.chunk >= at.chunks:
            self._expel(connection, f"it asked for chunk {get.chunk}, an epoch has the chunks 0 to {at.chunks - 1}")
        elif len(session.pending) + len(session.leases) >= protocol.MAX_OUTSTANDING:
            self._expel(connection, f"more than {protocol.MAX_OUTSTANDING} requests outstanding")
        elif self._broken is not None:
            self._tell(connection, Failed(request=get.request, kind="HeadraceError", text=self._broken))
        else:
            try:
                at.desk.get(session, get.request, (get.epoch, get.chunk))
            except ValueError as error:
                self._expel(connection, str(error))

    def _answer(self, identity: bytes, message: protocol.Message) -> bool:
        try:
            self._router.send_multipart([identity, protocol.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("an answer could not be sent: %s", error)
            return False
        return True

    def _tell(self, connection: Connection, message: protocol.Message) -> None:
        if not connection.expelled and not self._answer(connection.identity, message):
            # A lost answer would leave the client waiting; a lost session makes it ask again.
            self._expel(connection, "an answer could not be sent")

    # -- chunks -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Deliver what is ready, then give the workers what is wanted next."""
        for host in self._hosts:
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
                if (connection := self._by_session.get(delivery.session)) is not None:
                    self._tell(connection, chunk)
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
                for host in self._hosts:
                    if host.waiting:
                        self._open(host)
            case Broken(text=text):
                self._broken = text
                for host in self._hosts:
                    self._refuse_waiting(host, "HeadraceError", text)
                    if host.at is not None:
                        self._fail(host.at.desk.give_up(), "HeadraceError", text)
            case Convicted(stream=number, index=index, reason=reason):
                at = self._stream(number)
                log.error("%s is not rendered any more: %s", at.index.shown_full(index), reason)
                at.ledger.convict(index, reason)
            case Finished(job=job, rejects=rejects, render_id=render_id):
                desk = self._stream(job.stream).desk
                desk.filled(desk.cache.slots[job.slot], rejects, render_id)
            case supervisor.Failed(job=job, kind=kind, text=text):
                log.error("chunk %d of epoch %d failed: %s", job.chunk, job.epoch, text)
                desk = self._stream(job.stream).desk
                self._fail(desk.failed(desk.cache.slots[job.slot]), kind, text)

    def _fail(self, requests: list[tuple[Session, int]], kind: str, text: str) -> None:
        for session, request in requests:
            if (connection := self._by_session.get(session)) is not None:
                self._tell(connection, Failed(request=request, kind=kind, text=text))

    def _stream(self, number: int) -> OpenStream:
        at = self._hosts[number].at
        assert at is not None
        return at


def _descriptors(workers: int, streams: int) -> int:
    """How many connections there may be; the process's limit is raised as far as it goes.

    A daemon without a descriptor left could not even say so: libzmq ends a process whose accept fails for that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(1, (soft - _KEPT - 4 * workers - 8 * streams) // _PER_CONNECTION)
