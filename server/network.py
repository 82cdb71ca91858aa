"""The daemon's ROUTER for tcp: who is connected, their messages, and rows that leave without a copy. Decides nothing.

Rows go out of the slot itself: libzmq keeps pointers into it until the kernel has taken the last byte, and says so by
a tracker. Until then the slot is leased, whatever becomes of the session. On one connection frames leave in the order
in which they were sent, so that only the oldest message of each has to be looked at.

How the death of a peer is learned, for a ROUTER is not told of it: a probe that cannot be sent. A connection whose
peer is silent libzmq closes itself (ZMTP heartbeats), and one whose peer takes nothing the kernel does
(TCP_USER_TIMEOUT): no heartbeat goes out behind a frame that is stuck.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import socket
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import zmq
from numpy.typing import NDArray

from headrace import protocol
from headrace.errors import ConfigError
from headrace.keys import OVERHEAD
from headrace.protocol import Alive, Message, Rows
from headrace.server.keys import Gate
from headrace.workers.loop import Loop

#: Frames that are taken in one turn of the loop: one client's flood must not keep the others waiting.
_TURN = 256
#: Messages that wait for one peer: the answers to all that it may have asked for, and some to spare. libzmq learns of
#: what has left only when half of its queue has.
_QUEUE = 2 * (protocol.MAX_OUTSTANDING + 256)
#: Seconds between two looks at frames that have not left, and the latter between two at connections.
_SOONEST, _LATEST = 0.005, 0.25
#: How many times as long as a look at connections takes there is none: a crowd must not keep the daemon at it.
_REST = 20
#: Bytes of a field that is copied: less than what it costs to keep account of it.
_COPIED = 1 << 16
#: Connections that wait to be taken: of more the kernel lets the others try again, a second later.
_BACKLOG = 1024
#: Bytes of an identity that libzmq has given.
_IDENTITY = 5
#: Seconds that last words get when the daemon ends.
_LINGER = 0.5
#: Bytes that the kernel holds for a peer on this host; it grants twice as many, as far as net.core.wmem_max allows. Of
#: the megabytes that it comes to by itself, each is out of the nearer caches before the peer reads it.
_NEAR = 256 << 10
#: Bytes that a peer may have sent without a message coming of them: more than all that a session may ask for at once;
#: and in a second, for heartbeats.
_UNHEARD, _BEATS = 256 << 10, 256

_HINTS = {
    errno.EADDRINUSE: "another program, or another daemon, listens there: take another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.ENODEV: "this machine has no such address",
    errno.EACCES: "this user may not listen there; ports from 1024 on are for everybody",
}
#: Numbers, because two flags put together are an object that Python code makes anew, every time.
_NOBLOCK, _MORE, _POLLIN = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
_ALIVE = protocol.encode(Alive())
_EVENT = struct.Struct("=hi")
#: Where `struct tcp_info` of Linux has the bytes received, a uint64, and where that ends.
_RECEIVED = slice(128, 136)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds.

    Attributes:
        heartbeat: between two pings to each peer.
        silence: after which a peer that answers none is gone.
        stuck: after which a peer that takes nothing of what was sent is gone.
        probe: between two looks whether the peers of sessions are still there.
        attach: that a session may be without a data connection at its beginning, and a connection without a session.
    """

    heartbeat: float = 5.0
    silence: float = 30.0
    stuck: float = 60.0
    probe: float = 10.0
    attach: float = 10.0


TIMINGS = Timings()


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection: since when, and how many bytes of it were messages that we have taken."""

    since: float
    heard: int = 0


@dataclass(eq=False, slots=True)
class _Shipment:
    """Rows that have not left yet; `done` is called once they have."""

    trackers: Sequence[zmq.MessageTracker]
    done: Callable[[], None]
    since: float

    @property
    def left(self) -> bool:
        return all(tracker.done for tracker in self.trackers)


@dataclass(eq=False, slots=True)
class Lane:
    """One peer's connection; `shipments` is what has not left on it, oldest first."""

    identity: bytes
    shipments: deque[_Shipment] = field(default_factory=deque)


class Network:
    """
    Args:
        context: of ZeroMQ.
        loop: calls back for what arrives.
        heard: called with this network, the identity of a peer and the frame that came from it.
        public: whether it takes in strangers, or only further connections of sessions that began elsewhere.
        crowded: says whether there are too many connections by now; then the oldest is cut off of those that belong to
            no session, so that who comes with a purpose finds room among those that come without one.
        known: called with this network and the identity of a peer, says whether its connection belongs to a session;
            one that belongs to none for too long is cut off.
        gate: lets in those who have keys, and encrypts; None: anybody comes in.
        threads: of ZeroMQ, among which connections are dealt out.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: Loop,
        heard: Callable[[Network, bytes, zmq.Frame], None],
        *,
        public: bool,
        crowded: Callable[[], bool],
        known: Callable[[Network, bytes], bool],
        gate: Gate | None = None,
        threads: range = range(1),
        timings: Timings = TIMINGS,
    ) -> None:
        self.public = public
        self.nonsense = 0
        self._loop = loop
        self._heard = heard
        self._crowded = crowded
        self._known = known
        self._attach = timings.attach
        self.gate = gate
        self._muted: dict[bytes, float] = {}  # since when
        self._large: dict[bytes, zmq.MessageTracker] = {}  # what was sent last with `send_one`
        self._busy: set[Lane] = set()
        self._ports: set[int] = set()
        self._connections: dict[int, _Peer] = {}  # by libzmq's descriptor
        self._cut_off: dict[int, _Peer] = {}  # those of which libzmq has not told yet
        self._spoke: dict[bytes, tuple[int, float]] = {}  # over which descriptor a peer has spoken last, and when
        self._looked = time.monotonic()
        self._pause = _LATEST
        self._router = make_router(context, threads=threads)
        router = self._router
        if gate is not None:
            gate.guard(router)
            router.setsockopt(zmq.MAXMSGSIZE, protocol.CLIENT_LIMIT + OVERHEAD)
        router.setsockopt(zmq.HEARTBEAT_IVL, _ms(timings.heartbeat))
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(timings.silence))
        router.setsockopt(zmq.HEARTBEAT_TTL, _ms(timings.silence))
        router.setsockopt(zmq.HANDSHAKE_IVL, _ms(timings.attach))
        router.setsockopt(zmq.TCP_MAXRT, _ms(timings.stuck))
        name = f"inproc://headrace-network-{next(_numbers)}"
        # Never the event of a handshake that failed by the protocol: with keys it comes for any later message that is
        # damaged, too, and libzmq loses the error's number in saying so, goes on, and ends the process with the peer.
        hung_up = 0 if gate is None else zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        router.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | hung_up)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop libzmq's thread
        self._monitor.connect(name)
        loop.watch(router, self._readable)
        loop.watch(self._monitor, self._changed)

    # -- connections --------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """That there are now, whoever it is."""
        return len(self._connections)

    def bind(self, endpoint: str) -> str:
        """Listen on `tcp://ADDRESS:PORT`, an address of this machine in numbers; returns it with the real port.

        Raises:
            ConfigError: it cannot be had.
        """
        self._router.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            hint = _HINTS.get(error.errno or 0, error.strerror)
            raise ConfigError(f"listen: {endpoint}: {hint}") from None
        real = bytes(self._router.last_endpoint).decode()  # type: ignore[arg-type]
        self._ports.add(int(real.rpartition(":")[2]))
        return real

    def _changed(self) -> None:
        """Connections have come or gone. libzmq takes as many as there are descriptors, and cannot go on then."""
        known: set[int] | None = None
        for _ in range(_TURN):
            try:
                event, fd = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                peer = self._connections.pop(fd, None) or self._cut_off.pop(fd, None)
                if self.gate is not None and peer is not None and not peer.heard:
                    self.gate.ended()
                continue
            if event != zmq.EVENT_ACCEPTED:  # its value is no descriptor
                if self.gate is not None:
                    self.gate.hung_up()
                continue
            self._cut_off.pop(fd, None)
            self._connections[fd] = _Peer(time.monotonic())
            self._borrow(fd, _keep_near)
            if self._crowded():
                known = self._of_sessions() if known is None else known
                self._cut(next((other for other in self._connections if other not in known), fd))

    def _cut_the_useless(self) -> None:
        """End connections over which bytes come and no messages, and those that belong to no session for too long.

        libzmq keeps the frames of a message until the last one has come. It bounds each, but not how many there are: of
        frames of a byte it makes twenty times as much memory. And a peer that says nothing, or does not go when it was
        refused, answers heartbeats for ever.
        """
        self._changed()
        now = time.monotonic()
        known = self._of_sessions()
        muted = {self._spoke[identity][0]: at for identity, at in self._muted.items() if identity in self._spoke}
        for fd, peer in list(self._connections.items()):
            # To who is heard no more last words must get out.
            if fd not in known and now - max(peer.since, muted.get(fd, 0.0)) > self._attach:
                self._cut(fd)
            elif self._borrow(fd, _received) > peer.heard + _UNHEARD + _BEATS * (now - peer.since):
                self.nonsense += 1
                self._cut(fd)
        self._large = {identity: tracker for identity, tracker in self._large.items() if not tracker.done}
        # A message may be here before the news of its connection. Of those that are nobody's, the descriptor may be
        # another's by now, and so on: they would be more and more.
        self._spoke = {
            identity: (fd, at)
            for identity, (fd, at) in self._spoke.items()
            if now - at < self._attach
            or (fd in self._connections and (identity in self._muted or self._known(self, identity)))
        }

    def _of_sessions(self) -> set[int]:
        """The descriptors of connections that belong to sessions."""
        return {fd for identity, (fd, _) in self._spoke.items() if self._known(self, identity)}

    def _cut(self, fd: int) -> None:
        self._borrow(fd, _shut_down)
        if (peer := self._connections.pop(fd, None)) is not None:
            self._cut_off[fd] = peer

    def _borrow(self, fd: int, use: Callable[[socket.socket], int]) -> int:
        """What `use` makes of a connection of libzmq's; 0 if it is none any more, as it may be at any moment."""
        # The descriptor is libzmq's, so it is not closed here, and by now it may be somebody else's: only a connection
        # to us is touched. A duplicate would be safer, but there may be no descriptor left for it.
        with contextlib.suppress(OSError, IndexError):  # the latter where it has no address by now
            connection = socket.socket(fileno=fd)
            try:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and connection.getsockname()[1] in self._ports:
                    return use(connection)
            finally:
                connection.detach()
        return 0

    # -- messages -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        router, taken = self._router, 0
        while taken < _TURN:
            if not cast(int, router.getsockopt(zmq.EVENTS)) & _POLLIN:  # cheaper than to hear it by exception
                return
            identity = router.recv(_NOBLOCK, copy=False).bytes
            frame = router.recv(_NOBLOCK, copy=False)
            single = not frame.more
            while frame.more:
                frame = router.recv(_NOBLOCK, copy=False)
                taken += 1
            taken += 1
            # Identities that libzmq gave are a zero and a number; one that a peer has chosen could be another's later.
            chosen = len(identity) != _IDENTITY or not identity.startswith(b"\0")
            if not single or chosen or (fd := _source(frame)) is None:
                self.nonsense += 1
                continue
            # The connection may have ended, and the descriptor be another's by now: then that one is given credit.
            self._spoke[identity] = fd, time.monotonic()
            if (peer := self._connections.get(fd)) is not None:
                peer.heard += _wire_bytes(len(frame) + (0 if self.gate is None else OVERHEAD))
            if identity not in self._muted:
                self._heard(self, identity, frame)

    def send(self, identity: bytes, message: Message) -> bool:
        """Whether the message is on its way; if not, the peer is gone, or takes nothing."""
        return send(self._router, identity, message)

    def send_one(self, identity: bytes, make: Callable[[], Message]) -> bool:
        """As `send`, but nothing is made before the last message that went this way has left: of what costs something
        and may be asked for again and again, a peer that does not read keeps one waiting, and no more.
        """
        if (last := self._large.get(identity)) is not None and not last.done:
            return False
        frame = zmq.Frame(protocol.encode(make()), track=True, copy=False)
        try:
            self._router.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        self._router.send(frame, zmq.NOBLOCK, copy=False)  # a message is refused at its beginning or not at all
        self._large[identity] = frame.tracker
        return True

    def mute(self, identity: bytes) -> None:
        """Hear nothing more of this peer. Its connection ends soon, by its own doing or by ours."""
        self._muted.setdefault(identity, time.monotonic())

    def gone(self, identity: bytes) -> bool:
        """Whether the peer's connection has ended; asked by sending something."""
        try:
            self._router.send_multipart([identity, _ALIVE], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EHOSTUNREACH
        return False

    def forget_the_gone(self) -> None:
        """Of the peers that are not heard."""
        self._muted = {identity: since for identity, since in self._muted.items() if not self.gone(identity)}

    # -- rows ---------------------------------------------------------------------------------------------------

    def ship(self, lane: Lane, head: Rows, fields: Sequence[NDArray[Any]], done: Callable[[], None]) -> bool:
        """Send rows, without copying what is large; whether they are on their way.

        Args:
            fields: contiguous, a frame each behind the head. They must not change until `done` is called.
            done: called by `sweep`, once libzmq has let go of everything; at once if nothing is sent.
        """
        put, trackers = self._router.send, []
        frames: list[zmq.Frame | memoryview] = []
        for array in fields:
            if array.nbytes > _COPIED:
                frame = zmq.Frame(array, track=True, copy=False)
                trackers.append(frame.tracker)
                frames.append(frame)
            else:
                frames.append(array.data)
        try:
            put(lane.identity, _MORE)
        except zmq.ZMQError:
            done()
            return False
        # From here on nothing fails: a message is refused as a whole, at its beginning.
        put(protocol.encode(head), _MORE)
        last = frames.pop()
        for part in frames:
            put(part, _MORE)
        put(last, _NOBLOCK)
        lane.shipments.append(_Shipment(trackers, done, time.monotonic()))
        self._busy.add(lane)
        return True

    def sweep(self) -> None:
        """Say what has left; and look after connections now and then."""
        if (began := time.monotonic()) - self._looked > self._pause:
            self._cut_the_useless()
            self._looked = time.monotonic()
            self._pause = max(_LATEST, _REST * (self._looked - began))
        for lane in list(self._busy):
            while lane.shipments and lane.shipments[0].left:
                lane.shipments.popleft().done()
            if not lane.shipments:
                self._busy.discard(lane)

    @property
    def patience(self) -> float:
        """Seconds after which to sweep again: the longer nothing has been sent to those who wait, the later."""
        if not self._busy:
            return _LATEST
        youngest = max(lane.shipments[-1].since for lane in self._busy)
        return min(max(time.monotonic() - youngest, _SOONEST), _LATEST)

    def close(self) -> None:
        """End all connections. Frames that have not left are let go of when the context ends, at the latest."""
        self._loop.unwatch(self._monitor)
        self._loop.unwatch(self._router)
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(_ms(_LINGER))


def make_router(context: zmq.Context[zmq.Socket[bytes]], *, threads: range) -> zmq.Socket[bytes]:
    """A ROUTER that says when a message cannot be sent, and takes none that is too large."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.AFFINITY, sum(1 << thread for thread in threads))
    router.setsockopt(zmq.BACKLOG, _BACKLOG)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it a message that does not fit vanishes
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, protocol.CLIENT_LIMIT)
    # A session's answers are bounded by its requests, but not what is said to those who have none.
    router.setsockopt(zmq.SNDHWM, _QUEUE)
    # The others wait in the kernel, or where they come from. A session never has so many: libzmq ends the process when
    # a connection breaks while it is full, and a heartbeat is due or waits behind.
    router.setsockopt(zmq.RCVHWM, _QUEUE // 2)
    return router


def send(router: zmq.Socket[bytes], identity: bytes, message: Message) -> bool:
    """Whether the message is on its way: never waits."""
    try:
        router.send_multipart([identity, protocol.encode(message)], zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


def _source(frame: zmq.Frame) -> int | None:
    """The descriptor of the connection over which it came. libzmq knows it of no peer that speaks ZMTP 1 or 2, and of
    none that had ended before it was looked at.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _received(connection: socket.socket) -> int:
    """Bytes that libzmq has taken so far."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
    # What waits in the kernel is no fault of the peer: libzmq takes no more than has been heard, and some to spare.
    waiting = fcntl.ioctl(connection, termios.FIONREAD, bytes(4))
    return int.from_bytes(info[_RECEIVED], sys.byteorder) - int.from_bytes(waiting, sys.byteorder)


def _keep_near(connection: socket.socket) -> int:
    """Hold less for a peer at the same address, which is on this host: nothing is under way for long."""
    if connection.getpeername()[0] == connection.getsockname()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR)
    return 0


def _shut_down(connection: socket.socket) -> int:
    connection.shutdown(socket.SHUT_RDWR)
    return 0


def _wire_bytes(size: int) -> int:
    return size + (2 if size < 256 else 9)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
