"""How chunks go to a session: as the number of a slot that is mapped on both sides, or as rows over tcp.

Above it nobody knows which. Both answer to a session's control connection, and never wait: what cannot be sent ends
the session, because a lost answer would leave its client waiting and a lost session makes it ask again.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import zmq
from numpy.typing import NDArray

from headrace.protocol import Chunk, Message, Rows
from headrace.server.desk import Delivery, Desk, Session
from headrace.server.network import Lane, Network, Timings, send
from headrace.server.streams import OpenStream
from headrace.slots import SlotView

#: Bytes of a frame of images, unless a single row has more. Frames of 38 MB were seen to move less than half of what
#: those of 5 MB do; among smaller ones the size made no difference that stood out.
_FRAME = 8 << 20


class Transport(Protocol):
    """
    Attributes:
        name: for the handshake.
        endpoint: where its client connects to; empty if it is there already.
        attached: whether chunks can go out by now.
    """

    @property
    def name(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def attached(self) -> bool: ...

    def begin(self, at: OpenStream) -> list[int]:
        """The session begins: new descriptors that the client gets with its `Welcome`.

        Raises:
            OSError: (EMFILE) none are left.
        """

    def hears(self, via: object, identity: bytes) -> bool:
        """Whether what came from there, a peer of this socket or network, may speak for the session."""

    def answer(self, message: Message) -> bool:
        """Whether the message is on its way to the client."""

    def deliver(self, delivery: Delivery, at: OpenStream) -> bool:
        """Whether the chunk that was leased is on its way."""

    def over(self, now: float) -> str | None:
        """Why the session is over, if that has to be found out."""

    def expel(self, desk: Desk, session: Session) -> bool:
        """The session asks for nothing any more; whether a reader may be in the middle of a copy in the ring."""

    def leave(self, desk: Desk, session: Session) -> None:
        """The client is gone."""


class SharedMemory:
    """Over the ring itself. A lease ends by `Release`, or with the client's Unix connection.

    Args:
        router: ZeroMQ's socket beside the Unix socket.
        endpoint: where that is.
    """

    name = "shm"
    attached = True

    def __init__(self, router: zmq.Socket[bytes], endpoint: str) -> None:
        self.endpoint = endpoint
        self._router = router
        self._identity = b""

    def begin(self, at: OpenStream) -> list[int]:
        return [at.ring.read_only_fd()]

    def hears(self, via: object, identity: bytes) -> bool:
        if via is not self._router:
            return False
        self._identity = identity  # answers go to where the last message came from
        return True

    def answer(self, message: Message) -> bool:
        return send(self._router, self._identity, message)

    def deliver(self, delivery: Delivery, at: OpenStream) -> bool:
        slot = delivery.slot
        return self.answer(
            Chunk(
                request=delivery.request,
                slot=slot.number,
                generation=slot.generation,
                render_id=slot.render_id,
                window=at.desk.window,
                rejects=slot.rejects,
            )
        )

    def over(self, now: float) -> str | None:
        return None  # the Unix connection's end says so

    def expel(self, desk: Desk, session: Session) -> bool:
        desk.cancel(session)
        return bool(session.leases)

    def leave(self, desk: Desk, session: Session) -> None:
        desk.leave(session)


class Tcp:
    """Over connections to a `Network`: rows on the data connections in turn, all else on the control connection.

    A lease ends when the frames have left, also where the session has ended before.

    Args:
        control: the connection that the client is known by already; empty: one will be attached.
    """

    name = "tcp"

    def __init__(self, network: Network, endpoint: str, timings: Timings, control: bytes = b"") -> None:
        self.network = network
        self.endpoint = endpoint
        self.control = control
        self._timings = timings
        self._since = self._probed = time.monotonic()
        self._lanes: dict[int, Lane] = {}
        self._turn = 0

    @property
    def attached(self) -> bool:
        """Once there is a data connection."""
        return bool(self._lanes)

    def attach(self, lane: int, identity: bytes) -> str | None:
        """Take in a connection; or why not."""
        if lane == 0 and not self.control:
            self.control = identity
        elif lane == 0 or lane in self._lanes:
            return f"lane {lane} of the session is attached already"
        else:
            self._lanes[lane] = Lane(identity)
        return None

    def over(self, now: float) -> str | None:
        if not self._lanes:
            late = now - self._since > self._timings.attach
            return f"it attached no data connection within {self._timings.attach:g} s" if late else None
        if now - self._probed < self._timings.probe:
            return None
        self._probed = now
        return "it is gone" if self.network.gone(self.control) else None

    def begin(self, at: OpenStream) -> list[int]:
        self._since = time.monotonic()
        return []

    def hears(self, via: object, identity: bytes) -> bool:
        return via is self.network and identity == self.control

    def answer(self, message: Message) -> bool:
        return self.network.send(self.control, message)

    def deliver(self, delivery: Delivery, at: OpenStream) -> bool:
        slot, first, count = delivery.slot, delivery.first, delivery.rows
        view, layout, desk = at.ring.views[slot.number], at.ring.layout, at.desk
        split = min(count, max(1, _FRAME // (layout.height * layout.width * 3)))
        head = Rows(
            request=delivery.request,
            first=first,
            count=count,
            split=split,
            render_id=slot.render_id,
            window=desk.window,
            rejects=[reject for reject in slot.rejects if first <= reject.row < first + count],
        )
        fields: list[NDArray[Any]] = [
            view.images[row : min(row + split, first + count)] for row in range(first, first + count, split)
        ]
        fields += [array[first : first + count] for array in (view.labels, view.indices, view.status)]
        if layout.text:
            fields += _text(view, first, count)
        self._turn += 1
        lane = list(self._lanes.values())[self._turn % len(self._lanes)]
        return self.network.ship(lane, head, fields, lambda: desk.release(delivery.session, delivery.request))

    def expel(self, desk: Desk, session: Session) -> bool:
        desk.end(session)
        return False

    def leave(self, desk: Desk, session: Session) -> None:
        desk.end(session)


def _text(view: SlotView, first: int, count: int) -> list[NDArray[Any]]:
    """Where the texts of these rows end, counted from the first one's beginning, and the texts."""
    begin = int(view.ends[first - 1]) if first else 0
    ends = view.ends[first : first + count] - begin
    return [ends, view.text[begin : begin + int(ends[-1])]]
