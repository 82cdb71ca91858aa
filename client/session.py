"""A session with a daemon, as the Loader's thread sees it: the same for every transport.

`shm.py` and `tcp.py` implement it; here is what they share. `transport.py` chooses. `several.py` puts one together from
those with several servers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace.errors import ConnectionLost, DeadlineError, HeadraceError, ProtocolError, from_wire
from headrace.pace import Pace
from headrace.protocol import Chunk, Failed, Goodbye, Indexing, Message, Refused, Report, Rows, Welcome

log = logging.getLogger(__name__)

#: Messages that are taken of a connection at once: who sends without end must not keep this side from its other work.
TURN = 1024

#: Seconds of the longest single wait in a poll, which counts milliseconds in 32 bits.
LONGEST_POLL = 3600.0

_LOG_EVERY = 5.0


class Interrupted(Exception):
    """The Loader was closed during a wait."""


class Refusal(Exception):
    """The daemon answered, and the answer is no. Trying again would give the same.

    Args:
        error: what the caller is to be told.
    """

    def __init__(self, error: HeadraceError) -> None:
        super().__init__(str(error))
        self.error = error


class Delivery(Protocol):
    """Rows of a chunk that can be read now, and no longer than until `release`.

    Rows are numbered within the chunk; `labels`, `indices` and `status` begin with row `first`.
    """

    @property
    def message(self) -> Chunk | Rows: ...
    @property
    def first(self) -> int: ...
    @property
    def labels(self) -> NDArray[Any]: ...
    @property
    def indices(self) -> NDArray[np.int64]: ...
    @property
    def status(self) -> NDArray[np.uint8]: ...

    def images(self, first: int, size: int) -> Iterable[NDArray[np.uint8]]:
        """The levels of these rows, in arrays (n, H, W, 3) that follow each other."""

    def texts(self, first: int, size: int) -> list[bytes]:
        """A copy of each row's text.

        Raises:
            ProtocolError: what should say where they end does not.
        """

    def sound(self) -> bool:
        """Whether all that was read so far was what the message says."""


class Events(NamedTuple):
    """What `Session.wait` saw: answers, and why the session is over if it is."""

    answers: Sequence[Delivery | Failed]
    lost: str | None


class Session(Protocol):
    """One session. Everything but `abandon` is for one thread.

    Attributes:
        address: where the daemon is.
        welcome: what it said.
        connected: whether anybody is at the other end; False only for a session with several servers.
    """

    @property
    def address(self) -> str: ...
    @property
    def welcome(self) -> Welcome: ...
    @property
    def connected(self) -> bool: ...

    def describe(self) -> str:
        """Whom this is with, and how that stands."""

    def get(self, request: int, epoch: int, chunk: int, first: int, count: int) -> None:
        """Ask for at least these rows of a chunk."""

    def release(self, request: int) -> None:
        """What was delivered for this request has been copied."""

    def cancel(self, request: int) -> None:
        """Take back every request up to this one."""

    def report(self, pace: Pace) -> None:
        """Say how this client is served."""

    def wait(self, wake: int) -> Events:
        """Everything that has arrived; waits until something has, or the descriptor `wake` is readable.

        Raises:
            ProtocolError: something that this version cannot take.
        """

    def close(self) -> None:
        """Leave; the daemon takes back what this session still held. May be called twice."""

    def abandon(self) -> None:
        """For a forked child: keep nothing that keeps the parent's session open."""


#: What a poll found readable: sockets and descriptors.
Ready = Mapping[Any, int]


class Part(Session, Protocol):
    """A session with one daemon, which can be waited for together with others."""

    def watched(self) -> Iterable[zmq.Socket[Any] | int]:
        """What becomes readable when something has arrived, in the order in which it is to be looked at."""

    def take(self, ready: Ready) -> Events:
        """Everything that has arrived, as `wait`, which may be nothing."""


def wait_for(part: Part, wake: int) -> Events:
    """`Session.wait` of one that is waited for alone."""
    poller = zmq.Poller()
    for each in part.watched():
        poller.register(each, zmq.POLLIN)
    poller.register(wake, zmq.POLLIN)
    return part.take(dict(poller.poll()))


class Opening:
    """How a handshake goes on: what was said, and whether it still moves. No I/O.

    Args:
        address: of the daemon.
        timeout: seconds that may pass without progress.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._moved = self._logged = time.monotonic()
        self._done = ("", 0)

    def heard(self, message: Message) -> Welcome | None:
        """The daemon said this; the session's `Welcome` once it comes.

        Raises:
            Refusal: the daemon says no.
            ConnectionLost: it is stopping.
            ProtocolError: this is no answer to `Hello`.
        """
        match message:
            case Welcome():
                if bool(message.layout.text) != bool(message.columns or message.labels == "text"):
                    raise ProtocolError(f"{self._address}: columns and texts of the stream do not agree")
                return message
            case Refused():
                raise Refusal(from_wire(message.kind, message.text))
            case Goodbye():
                raise ConnectionLost(f"the daemon at {self._address} is stopping: {message.reason}")
            case Indexing():
                self._progress(message)
            case _:
                raise ProtocolError(f"{self._address}: {type(message).__name__} is no answer to Hello")
        return None

    def left(self) -> float:
        """Seconds until it is late.

        Raises:
            DeadlineError: it is.
        """
        left = self._moved + self._timeout - time.monotonic()
        if left <= 0:
            doing = "goes on no more with opening the stream" if self._done[0] else "does not answer"
            raise DeadlineError(f"the daemon at {self._address} {doing}: no progress for {self._timeout:g} s")
        return left

    def _progress(self, message: Indexing) -> None:
        if (message.unit, message.done) == self._done:
            return
        self._done, self._moved = (message.unit, message.done), time.monotonic()
        if self._moved - self._logged < _LOG_EVERY:
            return
        self._logged = self._moved
        far = f"{message.done:,} {message.unit} so far"
        if message.total:
            share = 100 * message.done // message.total
            far = f"{message.done:,} of {message.total:,} {message.unit} ({share} %)"
        log.warning("stream %s is being opened: %s", message.stream, far)


def differences(first: Welcome, other: Welcome) -> list[str]:
    """What keeps two streams from being the same pictures, labels and columns, by name."""
    return [
        name
        for name, before, after in (
            ("number of samples", first.samples, other.samples),
            ("files or labels", first.fingerprints.data, other.fingerprints.data),
            ("order (seed or shuffle)", first.fingerprints.order, other.fingerprints.order),
            ("pixels (decode, transforms or chunk)", first.fingerprints.pixels, other.fingerprints.pixels),
            # Which the digests should cover; but NumPy would stretch a picture of one row or column over a larger one.
            ("chunk or size of the pictures", first.layout.image_shape, other.layout.image_shape),
            ("kind of label", _kind(first), _kind(other)),
            ("columns", first.columns, other.columns),
        )
        if before != after
    ]


def _kind(welcome: Welcome) -> tuple[Any, ...]:
    return welcome.labels, welcome.layout.label_dtype, welcome.layout.label_width


def report(token: bytes, pace: Pace) -> Report:
    """The message of `Session.report`."""
    return Report(
        token=token,
        batches=pace.batches,
        images=pace.images,
        waited=pace.waited,
        spent=pace.spent,
        stages=pace.stages.status(),
    )


def cut(ends: NDArray[np.int64], text: NDArray[np.uint8], first: int, size: int) -> list[bytes]:
    """The texts of `size` rows from row `first` on, as bytes of their own.

    Args:
        ends: where the text of each row ends in `text`; it begins at the end of the row before.

    Raises:
        ProtocolError: the ends fall, or lie beyond the text.
    """
    edges = [0 if first == 0 else int(ends[first - 1]), *ends[first : first + size].tolist()]
    if edges != sorted(edges) or edges[0] < 0 or edges[-1] > text.size:
        raise ProtocolError("texts that end before they begin, or beyond their field")
    start = edges[0]
    whole = text[start : edges[-1]].tobytes()
    return [whole[a - start : b - start] for a, b in zip(edges, edges[1:], strict=False)]
