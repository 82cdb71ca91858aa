"""The daemon's loop: turns GETs into tasks and slots into leases. It touches no sample bytes.

One thread, one poll loop over the Unix listeners and their connections, ZeroMQ's ROUTERs, the workers and signals.
What is decided lives in `desk` and `cache`; here is only the I/O around it. Where a client comes from is its
`Connection`'s matter, and how it gets its chunks that of the `Transport` it asked for.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import resource
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import zmq

from headrace import __version__, protocol
from headrace.channel import Closed
from headrace.errors import HeadraceError, ProtocolError, to_wire
from headrace.pipeline.index import Index
from headrace.pipeline.spec import Config, Stream
from headrace.protocol import (
    Cancel,
    Failed,
    Get,
    Goodbye,
    Hello,
    Indexing,
    Ping,
    Pong,
    Refused,
    Release,
    RowReject,
    Unknown,
    Welcome,
)
from headrace.server import ring_size
from headrace.server.connection import Connection, Gone, UnixConnection
from headrace.server.desk import Session
from headrace.server.exporter import Exporter
from headrace.server.keys import ServerKeys
from headrace.server.listener import Listener
from headrace.server.measures import Measures
from headrace.server.network import TIMINGS, Timings, make_router, send
from headrace.server.quiet import BOUNDED
from headrace.server.remote import Remote
from headrace.server.signals import Signals
from headrace.server.streams import Listing, OpenStream, open_stream
from headrace.server.transport import SharedMemory, Transport
from headrace.workers import cpus, supervisor
from headrace.workers.crew import crew
from headrace.workers.loop import Loop
from headrace.workers.member import Job
from headrace.workers.supervisor import Broken, Convicted, Finished, Report, Started, Supervisor

log = logging.getLogger(__name__)

#: Seconds between two looks at what only time brings, and between two at whether the address is still ours.
_TICK = 1.0
_TOUCH = 3600.0
#: Seconds that a connection may stay without a Hello, and a private daemon without a session after its start.
_HELLO_TIMEOUT = 10.0
_FIRST_SESSION = 30.0
#: Seconds that clients get to release what they are copying when the daemon stops.
_DRAIN = 2.0
#: Frames that are taken in one turn of the loop, and connections: one client's flood must not keep the others waiting.
_TURN = 256
#: Bytes of a ring that are reserved in one turn, some 20 ms.
_RESERVE = 64 << 20
#: Descriptors that are kept for all but clients.
_KEPT = 64
#: Bad pictures of a stream that the log names.
_NAMED = 100


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
        listeners: where clients of this host come; owned from now on.
        endpoints: where others come, `tcp://ADDRESS:PORT` in numbers; with keys, if the configuration has any.
        private: end with the last session.
        exporter: of metrics; owned from now on.
    """

    def __init__(
        self,
        config: Config,
        listeners: Sequence[Listener],
        endpoints: Sequence[str] = (),
        *,
        private: bool = False,
        exporter: Exporter | None = None,
        timings: Timings = TIMINGS,
    ) -> None:
        keys = ServerKeys.load(config.curve) if endpoints else None
        self._config = config
        self._listeners = list(listeners)
        self._endpoints = list(endpoints)
        self._private = private
        self._exporter = exporter
        self._loop = Loop()
        self._hosts = [_Host(i, name, spec) for i, (name, spec) in enumerate(config.streams.items())]
        self._turns = deque(self._hosts)
        self._memory = ring_size.available_bytes()
        self._connections: set[Connection] = set()
        self._by_token: dict[bytes, Connection] = {}
        self._by_session: dict[Session, Connection] = {}
        self._supervisor = Supervisor(self._loop, crew(config.workers, private=private), self._reported)
        self._measures = Measures(self._supervisor)
        self._descriptors = _descriptors(self._supervisor.crew.workers, len(self._hosts))
        self._broken: str | None = None
        self._nonsense = 0
        self._stop_signals = 0
        self._stopped_by: signal.Signals | None = None
        self._served = False
        self._stopping = False
        # Small messages to this host have a thread of their own, so that they never wait behind somebody's megabytes.
        threads = max(1, min(4, cpus.usable_cpus() // 2))
        self._context = zmq.Context(1 + threads)
        self._router = make_router(self._context, threads=range(1))
        self._remote = Remote(
            self._context,
            self._loop,
            self,
            self._descriptors // 2,
            threads=range(1, 1 + threads),
            timings=timings,
            keys=keys,
        )
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
        gc.freeze()  # what is imported stays: no collection need look through it, least of all the one at the end
        signals = Signals(self._signalled)
        try:
            ready(self._startup(signals))
            self._main_loop()
        finally:
            self._shutdown()
            signals.restore()
        return self._stopped_by

    def _startup(self, signals: Signals) -> list[str]:
        self._loop.watch(signals.fileno(), signals.drain)
        for listener in self._listeners:
            listener.bind_zmq(self._router)
            self._loop.watch(listener.socket, lambda listener=listener: self._accept(listener))  # type: ignore[misc]
        self._loop.watch(self._router, self._router_readable)
        endpoints = [self._remote.listen(endpoint) for endpoint in self._endpoints]
        self._supervisor.start()
        if self._exporter is not None:
            self._exporter.start()
            log.info("metrics at %s/metrics", self._exporter.address)
        return [*(listener.address for listener in self._listeners), *endpoints]

    def _main_loop(self) -> None:
        ticked = 0.0
        while not self._stop_signals and not self._deserted():
            self._loop.run_once(0.0 if self._reserve() else min(_TICK, self._remote.patience))
            self._remote.sweep()
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
        if self._exporter is not None:
            self._exporter.publish(self.pong(detail=True), self._broken)
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.stream is None and now - connection.since > _HELLO_TIMEOUT:
                log.info("%s said no Hello", connection.name)
                self.end(connection)
            elif connection.session is not None and connection.transport is not None and not connection.expelled:
                if (why := connection.transport.over(now)) is not None:
                    self.expel(connection, why)
        self._nonsense += self._remote.tick()
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
        self._stopping = True
        if self._exporter is not None:
            self._exporter.close()
        for listener in self._listeners:
            self._loop.unwatch(listener.socket)
            listener.stop()
        for connection in list(self._connections):
            self._say(connection, Goodbye(reason="the daemon is stopping"))
        log.info("stopping: clients finish their copies")
        deadline = time.monotonic() + _DRAIN
        try:
            while self._stop_signals < 2 and time.monotonic() < deadline and self._leased():
                self._loop.run_once(min(0.05, self._remote.patience))
                self._remote.sweep()
        except Exception:
            log.exception("stopping goes on")
        log.info("stopping: workers")
        for host in self._hosts:
            if host.listing is not None:
                host.listing.stop()
        self._supervisor.stop(force=self._stop_signals >= 2)
        for connection in list(self._connections):
            self.end(connection)
        self._remote.close()
        self._router.close()
        self._context.term()  # and with it every frame that has not left
        for host in self._hosts:
            if host.at is not None:
                host.at.close()
        for listener in self._listeners:
            listener.close()
        log.info("stopped")

    def _leased(self) -> bool:
        return any(session.leases for host in self._hosts if host.at is not None for session in host.at.desk.sessions)

    def _signalled(self, number: int) -> None:
        self._stop_signals += 1
        self._stopped_by = self._stopped_by or signal.Signals(number)
        log.info("got %s%s", signal.Signals(number).name, ", again: forced" if self._stop_signals > 1 else "")

    # -- connections --------------------------------------------------------------------------------------------

    def _accept(self, listener: Listener) -> None:
        for sock, pid, uid in itertools.islice(listener.accept(), _TURN):
            taken = sum(connection.descriptors for connection in self._connections) + self._remote.connections
            if taken + UnixConnection.descriptors > self._descriptors:
                log.warning("%d descriptors are taken, one more client was sent away; see ulimit -n", taken)
                sock.close()
                continue
            offers: dict[str, Callable[[], Transport]] = {
                "shm": lambda: SharedMemory(self._router, listener.zmq_endpoint),
                "tcp": self._remote.offer,
            }
            self.come(UnixConnection(sock, pid, uid, offers, self._loop, self._heard, self.end))

    def come(self, connection: Connection) -> None:
        """A client is there."""
        self._connections.add(connection)

    def find(self, token: bytes) -> Connection | None:
        """Whose session that is."""
        return self._by_token.get(token)

    def _heard(self, connection: UnixConnection) -> None:
        try:
            for frame in connection.receive():
                if connection.expelled:
                    continue
                message = protocol.decode_session_request(frame)
                if isinstance(message, Ping):
                    self._say(connection, self.pong(detail=message.detail))
                else:
                    self.greeted(connection, message)
                if connection not in self._connections:
                    return
        except Gone:
            self.end(connection)
        except ProtocolError as error:
            self.expel(connection, str(error), Refused(kind="ProtocolError", text=str(error)))
        except Exception as error:  # one client's trouble, whatever it is, is not the others'
            log.exception("%s", connection.name)
            self.expel(connection, str(error), Refused(kind="HeadraceError", text=f"the daemon failed: {error}"))

    def _say(self, connection: Connection, message: protocol.Message, *fds: int) -> None:
        try:
            connection.say(message, *fds)
        except Gone as error:
            log.info("%s: %s", connection.name, error)
            self.end(connection)

    def _refuse(self, connection: Connection, kind: str, text: str) -> None:
        self._say(connection, Refused(kind=kind, text=text))
        self.end(connection)

    def expel(self, connection: Connection, reason: str, message: protocol.Message | None = None) -> None:
        """The session is over for a reason of ours. Where its reader may be in the middle of a copy, leases stay."""
        log.warning("%s: its session is ended: %s", connection.name, reason)
        connection.expelled = True
        self._by_token.pop(connection.token, None)
        self._say(connection, message or Goodbye(reason=reason))
        at, session, transport = self._at(connection), connection.session, connection.transport
        if at is None or session is None or transport is None or not transport.expel(at.desk, session):
            self.end(connection)

    def end(self, connection: Connection) -> None:
        """The client is gone. On this host it is dead or has closed the mapping, so that its leases end with it."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        connection.close()
        self._remote.forget(connection)
        host, at = self._host(connection), self._at(connection)
        if host is not None and connection in host.waiting:
            host.waiting.remove(connection)
        if at is not None and connection.session is not None and connection.transport is not None:
            connection.transport.leave(at.desk, connection.session)
            self._by_token.pop(connection.token, None)
            del self._by_session[connection.session]
            log.info("%s left stream %s", connection.name, connection.stream)

    def _at(self, connection: Connection) -> OpenStream | None:
        host = self._host(connection)
        return host.at if host is not None else None

    def _host(self, connection: Connection) -> _Host | None:
        return next((host for host in self._hosts if host.name == connection.stream), None)

    def greeted(self, connection: Connection, hello: Hello) -> None:
        """A client says which stream it wants, and how."""
        if connection.stream is not None:
            raise ProtocolError("a second Hello on one connection")
        if self._stopping:
            self._say(connection, Goodbye(reason="the daemon is stopping"))
            self.end(connection)
            return
        self._served = True
        names = ", ".join(host.name for host in self._hosts)
        name = hello.stream if hello.stream is not None or len(self._hosts) > 1 else self._hosts[0].name
        host = next((host for host in self._hosts if host.name == name), None)
        offer = connection.offers.get(hello.transport)
        if offer is None:
            here = " and ".join(map(repr, connection.offers))
            self._refuse(connection, "ConfigError", f"transport {hello.transport!r} is not offered here, only {here}")
        elif name is None:
            self._refuse(connection, "ConfigError", f"stream: this daemon has several, name one of: {names}")
        elif host is None:
            self._refuse(connection, "ConfigError", f"stream: there is no {name!r} here, only: {names}")
        else:
            try:
                connection.transport = offer()
            except HeadraceError as error:
                self._refuse(connection, *to_wire(error))
                return
            connection.introduce(hello, name)
            host.waiting.append(connection)
            self._open(host)

    def pong(self, *, detail: bool) -> Pong:
        """How it goes."""
        return Pong(
            pid=os.getpid(),
            version=__version__,
            workers=self._supervisor.pids,
            deaths=self._supervisor.deaths,
            uptime=self._measures.uptime,
            stages=self._measures.stages() if detail else {},
            worker_seconds=self._measures.worker_seconds,
            streams={host.name: host.ready.status() if host.ready else None for host in self._hosts},
            sessions=len(self._by_token),
            clients=self._measures.clients(
                (connection, session, at.desk)
                for session, connection in self._by_session.items()
                if not connection.expelled and (at := self._at(connection)) is not None
            )
            if detail
            else [],
            address=self._listeners[0].address,
            instance=self._instance,
            notices=self._supervisor.notices,
        )

    # -- streams ------------------------------------------------------------------------------------------------

    def _open(self, host: _Host) -> None:
        """Bring a stream that somebody waits for one step further."""
        if self._broken is not None:
            self._refuse_waiting(host, "HeadraceError", self._broken)
        elif host.at is None and host.listing is None:
            self._list(host)
        elif host.ready is not None and (render_id := self._supervisor.render_id) is not None:
            for connection in list(host.waiting):
                self._welcome(host, host.ready, connection, render_id)
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
            if not connection.behind:  # who does not read does not need older news
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
                self._close(host, host.at, *to_wire(error))
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
        try:
            self._supervisor.open_stream(host.number, host.spec, at.ring, at.index, at.ledger.convicted)
        except OSError as error:
            self._close(host, at, "HeadraceError", f"the workers cannot share its state: {error}")
            return
        self._open(host)

    def _close(self, host: _Host, at: OpenStream, kind: str, text: str) -> None:
        at.close()
        host.at = None
        self._not_opened(host, kind, text)

    def _welcome(self, host: _Host, at: OpenStream, connection: Connection, render_id: str) -> None:
        transport = connection.transport
        assert transport is not None
        try:
            fds = transport.begin(at)
        except OSError as error:
            self._refuse(connection, "HeadraceError", f"the daemon has no descriptor left for one more client: {error}")
            return
        connection.token = secrets.token_bytes(16)
        # A GPU of another host may have the same place on its bus.
        home = self._supervisor.crew.home(connection.device) if connection.here else None
        connection.session = Session(connection.name, home)
        at.desk.join(connection.session)
        self._by_token[connection.token] = connection
        self._by_session[connection.session] = connection
        spec = host.spec
        welcome = Welcome(
            pid=os.getpid(),
            token=connection.token,
            endpoint=transport.endpoint,
            transport=transport.name,
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
            in_flight=self._supervisor.in_flight,
            notices=[*at.index.notices, *self._supervisor.notices],
        )
        log.info("%s joined stream %s over %s, window %d", connection.name, host.name, transport.name, at.desk.window)
        self._say(connection, welcome, *fds)
        for fd in fds:
            os.close(fd)

    # -- requests -----------------------------------------------------------------------------------------------

    def _router_readable(self) -> None:
        taken = 0
        while taken < _TURN:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            taken += len(frames)
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
        connection = self.find(message.token)
        transport = connection.transport if connection is not None else None
        if connection is None or transport is None or not transport.hears(self._router, identity):
            send(self._router, identity, Unknown(token=message.token))
        elif isinstance(message, Release):
            at = self._at(connection)
            assert at is not None and connection.session is not None
            at.desk.release(connection.session, message.request)
        elif isinstance(message, protocol.Report):
            connection.reported(message)
        else:
            self.requested(connection, message)

    def requested(self, connection: Connection, message: Get | Cancel) -> None:
        """A session asks for a chunk, or takes that back."""
        at, session = self._at(connection), connection.session
        assert at is not None and session is not None
        if isinstance(message, Get):
            self._get(connection, at, session, message)
        else:
            at.desk.cancel(session, message.request)

    def _get(self, connection: Connection, at: OpenStream, session: Session, get: Get) -> None:
        if get.chunk >= at.chunks:
            self.expel(connection, f"it asked for chunk {get.chunk}, an epoch has the chunks 0 to {at.chunks - 1}")
            return
        rows = at.rows(get.chunk)
        count = get.count or rows - get.first
        if count < 1 or get.first + count > rows:
            self.expel(
                connection,
                f"it asked for {get.count or 'all'} rows from row {get.first} on, chunk {get.chunk} has the rows "
                f"0 to {rows - 1}",
            )
        elif len(session.pending) >= protocol.MAX_OUTSTANDING:
            self.expel(connection, f"more than {protocol.MAX_OUTSTANDING} requests outstanding")
        elif self._broken is not None:
            self._tell(connection, Failed(request=get.request, kind="HeadraceError", text=self._broken))
        else:
            try:
                at.desk.get(session, get.request, (get.epoch, get.chunk), get.first, count)
            except ValueError as error:
                self.expel(connection, str(error))

    def _tell(self, connection: Connection, message: protocol.Message) -> None:
        if connection.expelled or connection.transport is None:
            return
        if not connection.transport.answer(message):
            self.expel(connection, "an answer could not be sent: it is gone, or takes nothing")

    # -- chunks -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Deliver what is ready, then give the workers what is wanted next."""
        clock = self._measures.sending()
        for host in self._hosts:
            if host.at is None:
                continue
            for delivery in host.at.desk.deliveries():
                connection = self._by_session.get(delivery.session)
                if connection is None or connection.transport is None or connection.expelled:
                    host.at.desk.release(delivery.session, delivery.request)  # it ended in this very turn
                elif not connection.transport.deliver(delivery, host.at):
                    self.expel(connection, "a chunk could not be sent: it is gone, or takes nothing")
                clock.lap("send", nbytes=delivery.rows * host.at.ring.layout.image_bytes)
        while self._wanting() and self._supervisor.idle and self._submit_one():
            pass

    def _wanting(self) -> bool:
        """Whether anybody waits for anything; it is asked for in every turn."""
        return any(host.at.desk.wanted for host in self._hosts if host.at is not None)

    def _submit_one(self) -> bool:
        # A GPU that has room serves those at home there first, then the others.
        full = self._supervisor.full
        return self._submit_next(full) or (bool(full) and self._submit_next())

    def _submit_next(self, passed: Collection[int] = ()) -> bool:
        for _ in range(len(self._turns)):
            host = self._turns[0]
            self._turns.rotate(-1)
            if host.at is None or (task := host.at.desk.next_fill(passed)) is None:
                continue
            slot, home = task
            assert slot.address is not None
            epoch, chunk = slot.address
            host.at.ring.generation[slot.number] = slot.generation
            self._supervisor.submit(Job(host.number, epoch, chunk, slot.number, host.at.rows(chunk), home=home))
            return True
        return False

    def _reported(self, report: Report) -> None:
        match report:
            case Started():
                self._broken = None
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
                self._name(job.stream, rejects)
                at = self._stream(job.stream)
                at.images += job.rows
                at.rejected += len(rejects)
                desk = self._stream(job.stream).desk
                desk.filled(desk.cache.slots[job.slot], rejects, render_id)
            case supervisor.Failed(job=job, kind=kind, text=text):
                log.error("chunk %d of epoch %d failed: %s", job.chunk, job.epoch, text)
                desk = self._stream(job.stream).desk
                self._fail(desk.failed(desk.cache.slots[job.slot]), kind, text)

    def _name(self, stream: int, rejects: Sequence[RowReject]) -> None:
        """Bad pictures in the log, each once."""
        name, named = self._hosts[stream].name, self._stream(stream).named
        for reject in rejects:
            if reject.index in named or len(named) > _NAMED:
                continue
            named.add(reject.index)
            if len(named) > _NAMED:
                log.warning("stream %s: more bad pictures are not named here; `headrace verify` lists them", name)
            else:
                what = reject.path, reject.index, reject.stage, reject.reason
                log.warning("stream %s: bad picture: %s (index %d): %s: %s", name, *what, extra=BOUNDED)

    def _fail(self, requests: list[tuple[Session, int]], kind: str, text: str) -> None:
        for session, request in requests:
            if (connection := self._by_session.get(session)) is not None:
                self._tell(connection, Failed(request=request, kind=kind, text=text))

    def _stream(self, number: int) -> OpenStream:
        at = self._hosts[number].at
        assert at is not None
        return at


def _descriptors(workers: int, streams: int) -> int:
    """How many are left for clients; the process's limit is raised as far as it goes.

    A daemon without a descriptor left could not even say so: libzmq ends a process whose accept fails for that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(UnixConnection.descriptors, soft - _KEPT - 4 * workers - 8 * streams)
