"""Who gets which chunk, and what is computed next, for one stream. Plain state: no sockets, no clock.

A session's request is *pending* until its chunk is delivered, which is a lease, which ends with its release. A session
whose rows were sent away may end before they have left: it asks for nothing any more, and stays until its last lease
has ended, so that what a reader holds who came, took and went is counted.

Windows. With `spare` = slots less the chunks that can be in flight at the workers, each session may hold
max(1, spare // sessions) leases: a reader that has stopped in the middle of a copy keeps those slots, and as long as
there are no more sessions than spare slots the workers still have somewhere to write. A session that holds its share
gets no further delivery and causes no further computation until it releases one.

Order. Sessions take turns, each with its oldest request; a chunk asked for by several is computed once. Who wants one
that had been computed before, and is more chunks behind than there are slots, is a straggler: it is passed over while
others want theirs, until `PASSED` of these have been computed since the last one for a straggler; then it has its turn
as they have. Who is nearer is none, or a chunk that it just missed would cost it the company of the others for good. A
session may be at home at a GPU, where its batches go: while that has no room, and another one has, those of the other
come first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.protocol import MAX_COUNT, MAX_OUTSTANDING, RowReject
from headrace.server.cache import Address, Cache, History, Slot, State

#: Chunks for others that go before one for a straggler, and no more.
PASSED = 3


class Wanted(NamedTuple):
    """What a request is for: so many rows of a chunk, from `first` on."""

    address: Address
    first: int
    rows: int


@dataclass(eq=False, slots=True)
class Session:
    """One reader of the stream.

    Attributes:
        home: number of the GPU that is to compute for it first, or None.
        pending: by request, oldest first.
        ready: of these, the ones whose chunk was there when it was looked at last.
        leases: request → slot.
        ended: it stays only for its leases.
        delivered: chunks that it got; hits: of these, those that were computed for an earlier request; recomputed:
            those that were computed for it and had been before.
        last: the address of the one that it got last; None before the first.
    """

    name: str
    home: int | None = None
    pending: OrderedDict[int, Wanted] = field(default_factory=OrderedDict)
    ready: set[int] = field(default_factory=set)
    leases: dict[int, Slot] = field(default_factory=dict)
    ended: bool = False
    delivered: int = 0
    hits: int = 0
    recomputed: int = 0
    last: Address | None = None


class Task(NamedTuple):
    """A slot that is to be filled, and the home of the session whose turn it was."""

    slot: Slot
    home: int | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A chunk that was leased to a session, which asked for so many rows from `first` on."""

    session: Session
    request: int
    slot: Slot
    first: int
    rows: int


@dataclass(slots=True)
class Counters:
    """Since the stream was opened; `computed` includes `recomputed`, and `delivered` the `hits`."""

    computed: int = 0
    recomputed: int = 0
    delivered: int = 0
    failed: int = 0
    hits: int = 0


class Desk:
    """
    Args:
        slots: of the ring.
        in_flight: chunks that can be at the workers at once.
        chunks: of an epoch.

    Raises:
        ValueError: fewer than `in_flight + 1` slots.
    """

    def __init__(self, slots: int, in_flight: int, chunks: int) -> None:
        if slots < in_flight + 1:
            raise ValueError(f"{slots} slots; {in_flight} chunks in flight need at least {in_flight + 1}")
        self.cache = Cache(slots, chunks, wanted=lambda address: address in self._waiters, readers=self._readers)
        self.counters = Counters()
        self._in_flight = in_flight
        self._spare = slots - in_flight
        self._chunks = chunks
        self._history = History(chunks)
        self._sessions: OrderedDict[Session, None] = OrderedDict()  # whose turn it is comes first
        self._waiters: dict[Address, set[tuple[Session, int]]] = {}
        self._passed = 0  # chunks since the last one for a straggler

    @property
    def sessions(self) -> list[Session]:
        return list(self._sessions)

    @property
    def share(self) -> int:
        """Leases that each session may hold now."""
        return max(1, self._spare // max(1, len(self._sessions)))

    @property
    def window(self) -> int:
        """Requests that a session is told to keep outstanding: its leases, and enough to keep the workers busy."""
        return min(self.share + self._in_flight, MAX_OUTSTANDING)

    def join(self, session: Session) -> None:
        self._sessions[session] = None

    def leave(self, session: Session) -> None:
        """The session's end is proved: its reader is dead or has closed the mapping."""
        self.end(session)
        for request in list(session.leases):
            self.release(session, request)

    def end(self, session: Session) -> None:
        """The session wants nothing any more; what it has leased is released one by one."""
        self.cancel(session)
        session.ended = True
        self._drop_ended(session)

    def get(self, session: Session, request: int, address: Address, first: int = 0, rows: int = 0) -> None:
        """Note a request.

        Raises:
            ValueError: the number is in use.
        """
        if request in session.pending or request in session.leases:
            raise ValueError(f"request {request} is in use")
        session.pending[request] = Wanted(address, first, rows)
        self._waiters.setdefault(address, set()).add((session, request))
        if (slot := self.cache.find(address)) is not None and slot.state is State.READY:
            session.ready.add(request)

    def cancel(self, session: Session, request: int | None = None) -> None:
        """Forget pending requests up to and including this one (None: all)."""
        for number in [n for n in session.pending if request is None or n <= request]:
            self._done(session, number)

    def release(self, session: Session, request: int) -> None:
        """The reader is done with a delivery. An unknown number is ignored: the session may have been reset."""
        if (slot := session.leases.pop(request, None)) is not None:
            self.cache.release(slot, (session, request))
            self._drop_ended(session)

    def deliveries(self) -> list[Delivery]:
        """Lease every ready chunk that somebody waits for and may hold."""
        found = []
        share = self.share
        for session in self._sessions:
            for request in sorted(session.ready):
                if len(session.leases) >= share:
                    break
                session.ready.discard(request)
                wanted = session.pending[request]
                slot = self.cache.find(wanted.address)
                if slot is None or slot.state is not State.READY:
                    continue  # evicted meanwhile; it is ready again when it was computed again
                self._count(session, slot)
                self.cache.lease(slot, (session, request))
                session.leases[request] = slot
                self._done(session, request)
                found.append(Delivery(session, request, slot, wanted.first, wanted.rows))
        return found

    def next_fill(self, passed: Collection[int] = ()) -> Task | None:
        """Claim a slot for the chunk that is to be computed next; None if there is none to compute or no room.

        Args:
            passed: GPUs; sessions that are at home there are passed over, and keep their turn.
        """
        furthest = max((self._line(address) for address in self._readers()), default=0)
        straggler: tuple[Session, Address] | None = None
        chosen: tuple[Session, Address] | None = None
        for session in self._sessions:
            address = None if session.home in passed else self._next_address(session)
            if address is None:
                continue
            if self._passed < PASSED and self._straggles(address, furthest):
                straggler = straggler or (session, address)
                continue
            chosen = session, address
            break
        turn = chosen or straggler
        if turn is None or (slot := self.cache.claim(turn[1])) is None:
            return None
        self._passed = 0 if self._straggles(turn[1], furthest) else self._passed + 1
        self._sessions.move_to_end(turn[0])
        return Task(slot, turn[0].home)

    def filled(self, slot: Slot, rejects: list[RowReject], render_id: str) -> None:
        """A worker has answered."""
        assert slot.address is not None
        recomputed = self._history.add(slot.address)
        self.counters.computed += 1
        self.counters.recomputed += recomputed
        self.cache.fill(slot, rejects, render_id, again=recomputed)
        for session, request in self._waiters.get(slot.address, ()):
            session.ready.add(request)

    def failed(self, slot: Slot) -> list[tuple[Session, int]]:
        """The chunk cannot be had; whom to tell. The slot's writer is done."""
        assert slot.address is not None
        address = slot.address
        self.cache.free(slot)
        told = sorted(self._waiters.get(address, ()), key=lambda waiter: waiter[1])
        for session, request in told:
            self._done(session, request)
        self.counters.failed += 1
        return told

    def give_up(self) -> list[tuple[Session, int]]:
        """Nothing is computed any more: every request whose chunk is not there; whom to tell."""
        told = []
        for session in self._sessions:
            for request, wanted in list(session.pending.items()):
                slot = self.cache.find(wanted.address)
                if slot is None or slot.state is not State.READY:
                    self._done(session, request)
                    told.append((session, request))
        return told

    @property
    def leased(self) -> int:
        """Slots that somebody reads."""
        return sum(bool(slot.leases) for slot in self.cache.slots)

    @property
    def wanted(self) -> bool:
        """Whether there is a request without an answer."""
        return bool(self._waiters)

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return sum(map(len, self._waiters.values()))

    def lags(self) -> dict[Session, int]:
        """Chunks by which each session is behind the one that is furthest; 0 before it has got any.

        Which epochs there are is the sessions' word, so a lag may be more than a message can say: it is cut to that.
        """
        at = {session: self._line(session.last) for session in self._sessions if session.last is not None}
        furthest = max(at.values(), default=0)
        return {session: min(furthest - at.get(session, furthest), MAX_COUNT) for session in self._sessions}

    def _line(self, address: Address) -> int:
        epoch, chunk = address
        return epoch * self._chunks + chunk

    def _straggles(self, address: Address, furthest: int) -> bool:
        return furthest - self._line(address) > len(self.cache.slots) and address in self._history

    def _readers(self) -> list[Address]:
        return [session.last for session in self._sessions if session.last is not None and not session.ended]

    def _count(self, session: Session, slot: Slot) -> None:
        assert slot.address is not None
        session.last = slot.address
        session.delivered += 1
        session.hits += not slot.fresh
        session.recomputed += slot.fresh and slot.again
        self.counters.delivered += 1
        self.counters.hits += not slot.fresh

    def _next_address(self, session: Session) -> Address | None:
        if len(session.leases) >= self.share:
            return None
        room = self.window - len(session.leases)
        for under_way, wanted in enumerate(session.pending.values()):
            if under_way >= room:
                return None
            if self.cache.find(wanted.address) is None:
                return wanted.address
        return None

    def _drop_ended(self, session: Session) -> None:
        if session.ended and not session.leases:
            self._sessions.pop(session, None)

    def _done(self, session: Session, request: int) -> None:
        address = session.pending.pop(request).address
        session.ready.discard(request)
        waiters = self._waiters[address]
        waiters.remove((session, request))
        if not waiters:
            del self._waiters[address]
