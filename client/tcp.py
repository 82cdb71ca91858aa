"""A session over tcp: a control connection for small messages, and data connections over which rows come.

Each connection is a DEALER that connects once and not again by itself: a connection that ended may have taken
answers with it, so the session is over with it, and a new one asks again for what is missing. That it ended is
heard from ZeroMQ's monitor. ZeroMQ's heartbeats find a peer that vanished; they are answered by its own thread, so
a Python that is busy or held up for minutes does not look dead.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from socket import gethostname
from typing import Any, NamedTuple, cast

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace import protocol
from headrace.connect import reach
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, ProtocolError, from_wire
from headrace.keys import OVERHEAD, Keys
from headrace.lifeline import Lifeline
from headrace.pace import Pace
from headrace.protocol import (
    Alive,
    Attach,
    Attached,
    Cancel,
    Failed,
    Get,
    Goodbye,
    Hello,
    Leave,
    Message,
    Ping,
    Refused,
    RemoteReply,
    Rows,
    Unknown,
    Welcome,
    decode_remote_reply,
    encode,
)
from headrace.session import (
    LONGEST_POLL,
    TURN,
    Delivery,
    Events,
    Interrupted,
    Opening,
    Ready,
    Refusal,
    cut,
    report,
    wait_for,
)
from headrace.slots import SlotLayout

#: Data connections of a session at most. Each is one stream of bytes, and one of ZeroMQ's threads at a time.
LANES = 4

#: Milliseconds between two heartbeats, and of silence after which either side holds a connection for ended: for the
#: control connection, and for those on which an answer to a heartbeat may have to wait behind megabytes.
HEARTBEAT = 3_000
CONTROL_SILENCE = 15_000
DATA_SILENCE = 60_000

#: Milliseconds for ZeroMQ's own handshake, and for the last message to leave when a session is closed.
_HANDSHAKE = 10_000
_LINGER = 500

#: Milliseconds until ZeroMQ would connect again, 24 days. With -1, its word for never, it throws away what arrived
#: just before a connection's end: a Goodbye, for one.
_NEVER = (1 << 31) - 1

#: Not the event of a handshake that failed by the protocol: with keys it comes for any later message that is damaged,
#: too, and libzmq loses the error's number in saying so, goes on, and ends the process at the connection's end.
_ENDS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

#: An event of ZeroMQ's monitor: its number, and a value.
_EVENT = struct.Struct("=HI")

#: Where a session may go on that began on a Unix socket.
_HERE = re.compile(r"tcp://(127\.0\.0\.1|\[::1\]):[0-9]{1,5}")

_numbers = itertools.count()

Context = zmq.Context[zmq.Socket[bytes]]


class End(enum.Enum):
    """How a connection has ended."""

    CLOSED = enum.auto()
    IN_HANDSHAKE = enum.auto()  # ZeroMQ's own, in which keys are looked at
    UNKNOWN_KEY = enum.auto()  # so says the other side

    @classmethod
    def of(cls, event: int) -> End:
        """By ZeroMQ's event."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return cls.UNKNOWN_KEY
        return cls.CLOSED if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED) else cls.IN_HANDSHAKE


class Lane:
    """One connection, and what tells of its end.

    Args:
        silence: milliseconds after which a silent peer is held for gone.
        limit: bytes of the largest frame taken; a larger one ends the connection.
        keys: to encrypt with, and to know the other side by.
    """

    def __init__(self, context: Context, endpoint: str, *, silence: int, limit: int, keys: Keys | None = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.monitor = self.socket
        try:
            self.monitor = context.socket(zmq.PAIR)
            self.socket.linger = self.monitor.linger = 0
            # What was asked for is the bound; a full queue would block or lose a message.
            self.socket.sndhwm = self.socket.rcvhwm = 0
            self.socket.maxmsgsize = limit
            if keys is not None:
                keys.secure(self.socket)
                self.socket.maxmsgsize = limit + OVERHEAD
            self.socket.ipv6 = "[" in endpoint
            self.socket.reconnect_ivl = _NEVER
            self.socket.handshake_ivl = _HANDSHAKE
            self.socket.heartbeat_ivl = HEARTBEAT
            self.socket.heartbeat_timeout = self.socket.heartbeat_ttl = silence
            place = f"inproc://lane-{next(_numbers)}"
            self.socket.monitor(place, _ENDS)
            self.monitor.connect(place)
            self._connect(endpoint)
        except BaseException:
            self.close()
            raise

    def _connect(self, endpoint: str) -> None:
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ProtocolError(f"the daemon names the endpoint {endpoint}: {error}") from None

    def send(self, message: Message) -> None:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the connection has ended, and the monitor says so

    def received(self) -> Iterator[list[zmq.Frame]]:
        """Messages, each as its frames, of which one at least is there."""
        for _ in range(TURN):
            yield self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            # Asking for the state keeps the interpreter lock, a receive gives it up, and getting it back may take long.
            if not cast(int, self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break

    def end(self) -> End:
        """How the connection has ended, as its monitor says."""
        return End.of(_EVENT.unpack_from(self.monitor.recv_multipart(zmq.NOBLOCK)[0])[0])

    def close(self, *, linger: int = 0) -> None:
        """May be called twice."""
        if not self.socket.closed:
            self.socket.monitor(None, 0)
        self.monitor.close()
        self.socket.close(linger)


class Heard(NamedTuple):
    """What `Lanes.wait` brings: messages with the frames that follow them; how a connection has ended, if one has."""

    messages: Sequence[tuple[RemoteReply, list[zmq.Frame]]]
    ended: End | None


class Lanes:
    """The connections of a session, and one wait for all of them."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []
        self._poller = zmq.Poller()
        self._also: set[int] = set()

    def add(self, lane: Lane) -> Lane:
        """This one too; it is closed with the others."""
        self._lanes.append(lane)
        self._poller.register(lane.monitor, zmq.POLLIN)  # looked at first, so that nothing arrives after it
        self._poller.register(lane.socket, zmq.POLLIN)
        return lane

    def wait(self, seconds: float | None, *fds: int) -> tuple[Heard, set[int]]:
        """What has arrived, and which of the descriptors are readable; waits until there is something.

        Raises:
            ProtocolError: what came is no message.
        """
        for fd in set(fds) - self._also:
            self._poller.register(fd, zmq.POLLIN)
            self._also.add(fd)
        ready = dict(self._poller.poll(None if seconds is None else int(1000 * min(seconds, LONGEST_POLL)) + 1))
        return self.take(ready), {fd for fd in ready if isinstance(fd, int)}

    def watched(self) -> Iterator[zmq.Socket[bytes]]:
        """What becomes readable, in the order in which it is to be looked at."""
        for lane in self._lanes:
            yield lane.monitor
            yield lane.socket

    def take(self, ready: Ready) -> Heard:
        """What has arrived.

        Args:
            ready: which of `watched` are readable.

        Raises:
            ProtocolError: what came is no message.
        """
        ended = None
        messages = []
        for lane in self._lanes:
            if lane.monitor in ready:
                ended = lane.end()
            if lane.socket not in ready:
                continue
            for head, *frames in lane.received():
                message = decode_remote_reply(bytes(head.buffer))
                if frames and not isinstance(message, Rows):
                    raise ProtocolError(f"{type(message).__name__} with {len(frames)} frames behind it")
                messages.append((message, frames))
        return Heard(messages, ended)

    def close(self, *, linger: int = 0) -> None:
        for lane in self._lanes:
            lane.close(linger=linger)


class RowsDelivery:
    """Rows of a chunk, read out of the frames in which they came.

    Raises:
        ProtocolError: the frames are not what layout and message say.
    """

    def __init__(self, layout: SlotLayout, message: Rows, frames: Sequence[zmq.Frame]) -> None:
        self.message = message
        self.first = message.first
        size, split = message.count, message.split
        _, height, width, _ = layout.image_shape
        label = np.dtype(layout.label_dtype).itemsize * max(1, layout.label_width)
        expected = [min(split, size - row) * height * width * 3 for row in range(0, size, split)]
        parts = len(expected)
        expected += [label * size, 8 * size, size]
        if layout.text:
            expected.append(8 * size)
        found = [len(frame) for frame in frames]
        if layout.text:
            expected += found[-1:]  # its length is what `ends` says
        if found != expected:
            raise ProtocolError(f"{size} rows came in frames of {found} bytes instead of {expected}")
        arrays = [np.frombuffer(frame.buffer, np.uint8) for frame in frames]
        self._images = [part.reshape(-1, height, width, 3) for part in arrays[:parts]]
        self.labels: NDArray[Any] = arrays[parts].view(layout.label_dtype).reshape(size, *layout.label_shape[1:])
        self.indices: NDArray[np.int64] = arrays[parts + 1].view(np.int64)
        self.status: NDArray[np.uint8] = arrays[parts + 2]
        self._ends, self._text = np.empty(0, np.int64), arrays[-1]
        if layout.text:
            self._ends = arrays[parts + 3].view(np.int64)
            if self._text.size != self._ends[-1] or self._text.size > layout.text:
                raise ProtocolError(f"{self._text.size} bytes of text came instead of {self._ends[-1]}")

    def images(self, first: int, size: int) -> Iterable[NDArray[np.uint8]]:
        row = first - self.first
        while size:
            part, start = divmod(row, self.message.split)
            levels = self._images[part][start : start + size]
            yield levels
            row += len(levels)
            size -= len(levels)

    def texts(self, first: int, size: int) -> list[bytes]:
        return cut(self._ends, self._text, first - self.first, size)

    def sound(self) -> bool:
        """Always: nobody else writes into a frame that has arrived."""
        return True


class RemoteSession:
    """Make it with `open` or `open_here`."""

    connected = True

    def __init__(
        self, address: str, welcome: Welcome, lanes: Lanes, control: Lane, lifeline: Lifeline | None = None
    ) -> None:
        self.address = address
        self.welcome = welcome
        self._lanes = lanes
        self._control = control
        self._lifeline = lifeline
        #: Which rows each request is to bring; the largest number that was taken back.
        self._asked: dict[int, range] = {}
        self._cancelled = -1
        self._over = False

    @classmethod
    def open(
        cls,
        address: str,
        stream: str | None,
        context: Context,
        *,
        timeout: float,
        stop: int,
        keys: Keys | None = None,
    ) -> RemoteSession:
        """As `open_session`, at an address `tcp://HOST:PORT`."""
        endpoint = reach(address, timeout=timeout, stop=stop, keys=keys is not None)
        context.set(zmq.IO_THREADS, lanes_wanted())  # counts if this is the context's first socket
        lanes = Lanes()
        try:
            control = Lane(context, endpoint, silence=CONTROL_SILENCE, limit=protocol.DAEMON_LIMIT, keys=keys)
            lanes.add(control)
            control.send(Hello(stream=stream, transport="tcp", client=f"pid {os.getpid()} on {gethostname()}"))
            welcome = _handshake(address, lanes, Opening(address, timeout), stop, keys)
            _expect_tcp(address, welcome)
        except BaseException:
            lanes.close()
            raise
        session = cls(address, welcome, lanes, control)
        try:
            session._attach(context, endpoint, range(1, lanes_wanted() + 1), timeout, stop, keys)
        except BaseException:
            session.close()
            raise
        return session

    @classmethod
    def open_here(
        cls, address: str, stream: str | None, context: Context, *, timeout: float, stop: int, device: str = ""
    ) -> RemoteSession:
        """As `open_session`, at an address `ipc://PATH`: the session begins and ends on the Unix socket."""
        lifeline = Lifeline.open(address, stream, "tcp", timeout=timeout, stop=stop, device=device)
        context.set(zmq.IO_THREADS, lanes_wanted())
        lanes = Lanes()
        try:
            welcome = lifeline.welcome
            _expect_tcp(address, welcome)
            if not _HERE.fullmatch(welcome.endpoint):  # to libzmq, "tcp://127.0.0.1:0;HOST:PORT" is at HOST
                raise ProtocolError(f"the daemon at {address} names the endpoint {welcome.endpoint}, not one here")
            control = Lane(context, welcome.endpoint, silence=CONTROL_SILENCE, limit=protocol.DAEMON_LIMIT)
            session = cls(address, welcome, lanes, lanes.add(control), lifeline)
            control.send(Attach(token=welcome.token, lane=0))
            session._attach(context, welcome.endpoint, range(lanes_wanted() + 1), timeout, stop)
        except BaseException:
            lanes.close()
            lifeline.hang_up()
            raise
        return session

    def get(self, request: int, epoch: int, chunk: int, first: int, count: int) -> None:
        self._asked[request] = range(first, first + count)
        token = self.welcome.token
        self._control.send(Get(token=token, request=request, epoch=epoch, chunk=chunk, first=first, count=count))

    def release(self, request: int) -> None:
        """Nothing to do: the rows are this side's own."""

    def cancel(self, request: int) -> None:
        self._cancelled = max(self._cancelled, request)
        self._asked = {number: rows for number, rows in self._asked.items() if number > request}
        self._control.send(Cancel(token=self.welcome.token, request=request))

    def report(self, pace: Pace) -> None:
        self._control.send(report(self.welcome.token, pace))

    def describe(self) -> str:
        return f"the daemon at {self.address} (pid {self.welcome.pid})"

    def wait(self, wake: int) -> Events:
        return wait_for(self, wake)

    def watched(self) -> Iterator[zmq.Socket[bytes] | int]:
        yield from self._lanes.watched()
        if self._lifeline is not None:
            yield self._lifeline.fileno()

    def take(self, ready: Ready) -> Events:
        heard = self._lanes.take(ready)
        lost = None if heard.ended is None else "the connection to the daemon ended"
        answers: list[Delivery | Failed] = []
        for message, frames in heard.messages:
            match message:
                case Rows() | Failed():
                    wanted = self._wanted(message.request)
                    if wanted is not None:
                        answers.append(message if isinstance(message, Failed) else self._take(message, frames, wanted))
                case Goodbye():
                    lost = f"the daemon ended the session: {message.reason}"
                case Unknown():
                    if message.token == self.welcome.token:
                        lost = "the daemon does not know this session"
                case Alive():
                    pass
                case _:
                    raise ProtocolError(f"{type(message).__name__} in the middle of a session")
        if self._lifeline is not None and self._lifeline.fileno() in ready:
            lost = self._lifeline.over() or lost
        self._over = self._over or lost is not None
        return Events(answers, lost)

    def close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.hang_up()
        elif not self._over:
            self._control.send(Leave(token=self.welcome.token))
            self._control.close(linger=_LINGER)
        self._over = True
        self._lanes.close()

    def abandon(self) -> None:
        """The connections themselves are ZeroMQ's; a parent that ends without a word is found by heartbeats."""
        if self._lifeline is not None:
            self._lifeline.abandon()

    def _attach(
        self, context: Context, endpoint: str, numbers: range, timeout: float, stop: int, keys: Keys | None = None
    ) -> None:
        """Open the data connections and wait until all of `numbers` belong to the session."""
        for number in numbers:
            if number:
                lane = Lane(context, endpoint, silence=DATA_SILENCE, limit=_largest(self.welcome), keys=keys)
                self._lanes.add(lane)
                lane.send(Attach(token=self.welcome.token, lane=number))
        missing = set(numbers)
        deadline = time.monotonic() + timeout
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"the daemon at {self.address} does not take connections into the session: no answer for "
                    f"{timeout:g} s"
                )
            heard, ready = self._lanes.wait(left, stop)
            if stop in ready:
                raise Interrupted
            for message, _ in heard.messages:
                match message:
                    case Attached():
                        missing.discard(message.lane)
                    case Alive():
                        pass
                    case Refused():
                        raise Refusal(from_wire(message.kind, message.text))
                    case Unknown() | Goodbye():
                        raise ConnectionLost(f"the daemon at {self.address} ended the session before it was ready")
                    case _:
                        raise ProtocolError(f"{self.address}: {type(message).__name__} is no answer to Attach")
            if heard.ended is not None:
                raise _ended(self.address, heard.ended, keys, "closed a connection before it was ready")

    def _wanted(self, request: int) -> range | None:
        """The rows that this request was for, or None if it was taken back. It is answered now."""
        wanted = self._asked.pop(request, None)
        if wanted is None and request > self._cancelled:
            raise ProtocolError(f"an answer to request {request}, which is not open")
        return wanted

    def _take(self, message: Rows, frames: list[zmq.Frame], wanted: range) -> RowsDelivery:
        first, last = message.first, message.first + message.count
        if not first <= wanted.start < wanted.stop <= last <= self.welcome.layout.chunk:
            raise ProtocolError(
                f"rows {first} to {last - 1} came for request {message.request}, which asked for {wanted.start} to "
                f"{wanted.stop - 1}"
            )
        if any(not first <= reject.row < last for reject in message.rejects):
            raise ProtocolError(f"rejects in other rows than {first} to {last - 1}, which came")
        return RowsDelivery(self.welcome.layout, message, frames)


def ask_there(address: str, question: Ping, *, timeout: float, stop: int, keys: Keys | None = None) -> Message:
    """The answer to `Ping` at `tcp://HOST:PORT`.

    Raises:
        as `ping`, and Interrupted.
    """
    deadline = time.monotonic() + timeout
    endpoint = reach(address, timeout=timeout, stop=stop, keys=keys is not None)
    lanes = Lanes()
    context: Context = zmq.Context()
    try:
        lane = Lane(context, endpoint, silence=CONTROL_SILENCE, limit=protocol.DAEMON_LIMIT, keys=keys)
        lanes.add(lane)
        lane.send(question)
        while (left := deadline - time.monotonic()) > 0:
            heard, ready = lanes.wait(left, stop)
            if stop in ready:
                raise Interrupted
            for message, _ in heard.messages:
                return message
            if heard.ended is not None:
                raise _ended(address, heard.ended, keys, "ended the connection without an answer")
        raise DeadlineError(f"{address}: the daemon does not answer within {timeout:g} s")
    finally:
        lanes.close()
        context.destroy(0)


def lanes_wanted() -> int:
    """Data connections of a session: one for two cores that this process may use."""
    return max(1, min(LANES, len(os.sched_getaffinity(0)) // 2))


def _handshake(address: str, lanes: Lanes, opening: Opening, stop: int, keys: Keys | None) -> Welcome:
    while True:
        heard, ready = lanes.wait(opening.left(), stop)
        if stop in ready:
            raise Interrupted
        for message, _ in heard.messages:
            welcome = opening.heard(message)
            if welcome is not None:
                return welcome
        if heard.ended is not None:
            raise _ended(address, heard.ended, keys, "closed the connection before it was ready")


def _ended(address: str, how: End, keys: Keys | None, otherwise: str) -> HeadraceError:
    """What a connection's end is to be called, if it came before all was ready."""
    if keys is not None and how is End.UNKNOWN_KEY:
        return ConfigError(
            f"the daemon at {address} does not let in the key of {keys.own.file}: its `curve.clients` must name the "
            f"public key that belongs to it, {keys.own.public.decode()}, and the daemon be started again then"
        )
    if keys is not None and how is End.IN_HANDSHAKE:
        return ConnectionLost(
            f"the daemon at {address} ended the connection before it was encrypted: {keys.server_file} is not its "
            "public key, or it is just ending"
        )
    return ConnectionLost(f"the daemon at {address} {otherwise}")


def _expect_tcp(address: str, welcome: Welcome) -> None:
    if welcome.transport != "tcp":
        raise ProtocolError(f"the daemon at {address} offers transport {welcome.transport} instead of tcp")


def _largest(welcome: Welcome) -> int:
    """Bytes of the largest frame that may come over a data connection: a slot, or the message before it."""
    return max(welcome.layout.stride, protocol.DAEMON_LIMIT)
