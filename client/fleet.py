"""Which of several servers is asked for a chunk. Plain state: no sockets, no clock; the caller says what time it is.

Home. Every server can answer for every chunk, but trainers that share a stream should ask the same one, or it is
rendered twice. So each ranks the servers by a hash of server and chunk (rendezvous hashing), and asks the first that
is up. Who goes takes only its own chunks along, and each of the others gets some of them. Shares follow *weights*.

Weights. A server of twice the speed gets twice the chunks. Each trainer measures for itself, and what one finds is not
just what another finds: one gets from the cache what another had to wait for, one has the server's memory at hand and
another a network. With weights that follow such figures closely, each trainer would have homes of its own. So weights
are powers of two, they change one step at a time, after four spans in a row that agree and by a good margin, and only
while servers are what this trainer waits for: else no weight would make it faster.

Lateness. A server that owes something and has answered nothing for much longer than its answers lay apart is *late*,
and what it owes is asked for at the next in rank, too. Whatever it still brings is taken if it is the first; then it
is late no more, and need not bring what others have brought. While it is late it gets one request at a time, and that
is asked for elsewhere as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from headrace.protocol import MAX_OUTSTANDING

#: Seconds between attempts to join a server that is gone: the first pause, and the longest.
BACKOFF = (0.1, 5.0)

#: A server is late after so many times the longest distance of its last answers; seconds of silence that are never
#: late; and the share of the Loader's timeout that always is.
_DISTANCES = 8.0
_PATIENCE = 2.0
_SHARE = 0.25

#: How much of that distance is forgotten with each answer.
_FORGET = 0.1

#: A span of measuring: chunks, seconds at least; the share of it for which a server must have owed something for the
#: trainer to be one that waits for servers.
_SPAN = 64
_LONG = 1.0
_BUSY = 0.5

#: Spans in a row that must point the same way before a weight changes.
_AGREE = 4

#: The least weight is 2 to the minus this. By how many steps a speed must lie beside the present weight; 0.5 would be
#: the border between two.
_STEPS = 4
_MARGIN = 0.75


@dataclass(eq=False, slots=True)
class Member:
    """A server.

    Attributes:
        address: as the caller wrote it, by which trainers agree on it.
        up: there is a session with it; late: see above.
        trouble: why there is none; "" before that was tried.
        transport, window: of the session.
        step: its weight is 2 to the minus this.
        chunks: that it brought first.
        lates: how often it was late.
        moved: requests that were asked for elsewhere because it was late, gone or could not answer.
        owed: requests that it has, and since when; oldest first.
    """

    address: str
    up: bool = False
    late: bool = False
    trouble: str = ""
    transport: str = ""
    window: int = 1
    step: int = 0
    chunks: int = 0
    lates: int = 0
    moved: int = 0
    owed: dict[int, float] = field(default_factory=dict)
    #: When it last answered, or was asked while it owed nothing; the distance of answers.
    stirred: float = 0.0
    distance: float | None = None
    #: Whether somebody is trying to join it, or when that is due, and the pause after it.
    opening: bool = False
    due: float = 0.0
    pause: float = BACKOFF[0]
    #: In this span: answers, and seconds in which it owed something, counted up to a time. Over how many spans in a row
    #: it turned out slower than its weight says, or, below 0, faster.
    got: int = 0
    busy: float = 0.0
    counted: float = 0.0
    tendency: int = 0

    @property
    def weight(self) -> float:
        return 2.0**-self.step

    @property
    def state(self) -> str:
        """`up`, `late` or `down`."""
        return ("late" if self.late else "up") if self.up else "down"


class Ask(NamedTuple):
    """This server is to be asked for this request."""

    member: Member
    request: int


@dataclass(eq=False, slots=True)
class _Request:
    """`rank`: whom to ask, best first; `holders`: who has been asked; `refused`: who has answered that it cannot."""

    rank: list[Member]
    holders: list[Member] = field(default_factory=list)
    refused: list[Member] = field(default_factory=list)


class Fleet:
    """
    Args:
        addresses: of the servers, all different.
        timeout: seconds without progress that the Loader allows.

    Attributes:
        members: in the same order.
        stream: what tells this stream's chunks from another's; set before the first `ask`.
    """

    def __init__(self, addresses: Sequence[str], timeout: float) -> None:
        self.members = [Member(address) for address in addresses]
        self.stream = ""
        self._longest = _SHARE * timeout
        self._open: dict[int, _Request] = {}
        self._span = 0
        self._began = 0.0

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Requests to keep outstanding at all of them together."""
        return min(MAX_OUTSTANDING, max(1, sum(member.window for member in self.members if member.up)))

    @property
    def up(self) -> list[Member]:
        return [member for member in self.members if member.up]

    def rank(self, epoch: int, chunk: int) -> list[Member]:
        """All servers, the chunk's home first."""
        return sorted(self.members, key=lambda member: self._score(member, epoch, chunk), reverse=True)

    def patience(self, member: Member) -> float:
        """Seconds of silence after which it is late."""
        if member.distance is None:
            return self._longest
        return min(self._longest, max(_PATIENCE, _DISTANCES * member.distance))

    def due(self, now: float) -> float | None:
        """Seconds until `to_open` or `overdue` may have something new; None: not before something else happens."""
        times = [member.due for member in self.members if not member.up and not member.opening]
        for member in self.up:
            if member.owed and not member.late:
                times.append(member.stirred + self.patience(member))
                stuck = next((since for request, since in member.owed.items() if self._alone(request)), None)
                if stuck is not None:
                    times.append(stuck + self._longest)
        return max(0.0, min(times) - now) if times else None

    def status(self) -> list[dict[str, Any]]:
        """For people, of each server."""
        return [
            {
                "address": member.address,
                "state": member.state,
                "trouble": member.trouble,
                "transport": member.transport,
                "weight": member.weight,
                "chunks": member.chunks,
                "late": member.lates,
                "moved": member.moved,
            }
            for member in self.members
        ]

    # -- who is there -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Nobody is joined and nothing asked for any more."""
        self._open.clear()
        for member in self.members:
            member.up = member.late = member.opening = False
            member.due, member.pause, member.distance = 0.0, BACKOFF[0], None
            member.owed.clear()

    def to_open(self, now: float) -> list[Member]:
        """Those that are to be joined now; `joined` or `missing` says how it went."""
        found = [m for m in self.members if not m.up and not m.opening and m.due <= now]
        for member in found:
            member.opening = True
        return found

    def missing(self, member: Member, trouble: str, now: float) -> bool:
        """It could not be joined. Whether this is news."""
        news = trouble != member.trouble
        member.opening, member.trouble = False, trouble
        self._later(member, now)
        return news

    def joined(self, member: Member, transport: str, window: int, now: float) -> list[Ask]:
        """There is a session with it."""
        member.up, member.opening, member.late, member.trouble = True, False, False, ""
        member.transport, member.window = transport, window
        member.distance = None
        member.got, member.busy, member.counted = 0, 0.0, now
        return self._settle(self._open, now)

    def lost(self, member: Member, trouble: str, now: float) -> list[Ask]:
        """The session with it is over."""
        owed = list(member.owed)
        self._count(member, now)
        member.up = member.late = False
        member.trouble = trouble
        member.owed.clear()
        self._later(member, now)
        for request in owed:
            if request in self._open:
                opened = self._open[request]
                opened.holders.remove(member)
                member.moved += not opened.holders  # or it has moved before, when this one was late
        return self._settle(owed, now)

    # -- requests -----------------------------------------------------------------------------------------------

    def ask(self, request: int, epoch: int, chunk: int, now: float) -> list[Ask]:
        """A new request. Without anybody to ask it waits for who is joined next."""
        opened = self._open[request] = _Request(self.rank(epoch, chunk))
        asks = self._settle([request], now)
        home = next((member for member in opened.rank if member.up), None)
        if home is not None and home.late and not home.owed:
            asks.append(self._give(request, home, now))  # to see whether it answers again
        return asks

    def answered(self, member: Member, request: int, now: float) -> tuple[bool, list[Ask]]:
        """It has brought what was asked for. Whether that is the first to come, and is to be used."""
        again = self._heard(member, request, now)
        member.got += 1
        first = self._open.pop(request, None) is not None
        if first:
            member.chunks += 1
            member.pause = BACKOFF[0]
            self._span += 1
            if self._span >= _SPAN and now - self._began >= _LONG:
                self._weigh(now)
        return first, self._settle(self._open, now) if again else []

    def failed(self, member: Member, request: int, now: float) -> tuple[bool, list[Ask]]:
        """It cannot bring this one. Whether nobody is left to ask, and the request is over."""
        again = self._heard(member, request, now)
        asks = self._settle(self._open, now) if again else []
        opened = self._open.get(request)
        if opened is None:
            return False, asks
        opened.holders.remove(member)
        opened.refused.append(member)
        if not opened.holders and all(m in opened.refused for m in self.up):
            del self._open[request]
            return True, asks
        member.moved += 1
        return False, asks + self._settle([request], now)

    def cancel(self, request: int) -> None:
        """Every request up to this one is taken back, and no answer to it is of interest."""
        self._open = {number: opened for number, opened in self._open.items() if number > request}
        for member in self.members:
            member.owed = {number: since for number, since in member.owed.items() if number > request}

    def spare(self, member: Member, requests: Iterable[int], now: float) -> None:
        """It has been told that these are not wanted of it any more."""
        self._count(member, now)
        for request in requests:
            del member.owed[request]

    def overdue(self, now: float) -> tuple[list[Member], list[Ask]]:
        """Who is late since a moment ago, and what to do about what takes too long. To be called after everything that
        has arrived was told: a trainer that was stopped meanwhile must not blame its servers.
        """
        late = [
            member
            for member in self.up
            if member.owed and not member.late and now - member.stirred >= self.patience(member)
        ]
        for member in late:
            self._count(member, now)
            member.late = True
            member.lates += 1
        asks = [ask for member in late for ask in self._settle(list(member.owed), now)]
        for member in self.up:  # and single requests that get stuck where others are answered
            if not member.late:
                for request, since in list(member.owed.items()):
                    if now - since < self._longest:
                        break
                    if self._alone(request):
                        asks += self._settle([request], now, beside=True)
        return late, asks

    # -- inside -------------------------------------------------------------------------------------------------

    def _score(self, member: Member, epoch: int, chunk: int) -> float:
        name = f"{member.address}\0{self.stream}\0{epoch}\0{chunk}".encode()
        # 52 bits and a half: neither 0 nor 1, whose logarithms will not do.
        uniform = ((int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 12) + 0.5) * 2.0**-52
        return -member.weight / math.log(uniform)

    def _alone(self, request: int) -> bool:
        """Whether one server has it, another could, and it is still wanted."""
        opened = self._open.get(request)
        return opened is not None and len(opened.holders) == 1 and self._next(opened) is not None

    def _next(self, opened: _Request) -> Member | None:
        """Who is to be asked besides those who were: the best that is not late."""
        return next(
            (
                m
                for m in opened.rank
                if m.up and not m.late and m not in opened.holders and m not in opened.refused and self._room(m)
            ),
            None,
        )

    def _room(self, member: Member) -> bool:
        return len(member.owed) < MAX_OUTSTANDING

    def _settle(self, requests: Iterable[int], now: float, *, beside: bool = False) -> list[Ask]:
        """See that one who is not late has each of these, if there is one; with `beside` one more."""
        asks = []
        for request in requests:
            opened = self._open.get(request)
            if opened is None or (not beside and any(not member.late for member in opened.holders)):
                continue
            member = self._next(opened)
            if member is None and not opened.holders:
                # Nobody good is left. One that is late, or has refused, is better than nobody.
                there = [m for m in opened.rank if m.up and self._room(m)]
                member = next((m for m in there if m not in opened.refused), there[0] if there else None)
            if member is None:
                continue
            for before in opened.holders[-1:]:
                before.moved += 1
            asks.append(self._give(request, member, now))
        return asks

    def _give(self, request: int, member: Member, now: float) -> Ask:
        self._count(member, now)
        if not member.owed:
            member.stirred = now
        member.owed[request] = now
        self._open[request].holders.append(member)
        return Ask(member, request)

    def _heard(self, member: Member, request: int, now: float) -> bool:
        """It answers. Whether it can be asked again, and could not before: it was late, or owed as much as it may."""
        self._count(member, now)
        again, member.late = member.late or not self._room(member), False
        member.owed.pop(request, None)
        passed = min(now - member.stirred, self._longest)
        member.stirred = now
        before = passed if member.distance is None else member.distance
        member.distance = max(passed, before + _FORGET * (passed - before))
        return again

    def _later(self, member: Member, now: float) -> None:
        member.due = now + member.pause
        member.pause = min(2 * member.pause, BACKOFF[1])

    def _count(self, member: Member, now: float) -> None:
        """Before what it owes changes: it has been busy up to now if it owed something. What a late one does is
        unknown."""
        if member.owed and not member.late:
            member.busy += now - member.counted
        member.counted = now

    def _weigh(self, now: float) -> None:
        """A span is over: a step towards the speeds that were seen."""
        passed = now - self._began
        for member in self.up:
            self._count(member, now)
        # Of one that brought little, and had little to do, nothing is known.
        known = [m for m in self.up if m.busy > 0 and (m.got >= 4 or m.busy >= _BUSY * passed)]
        speeds = {m: max(m.got, 0.5) / m.busy for m in known}
        if len(known) > 1 and any(m.busy >= _BUSY * passed for m in known):
            best = max(speeds.values())
            for member, speed in speeds.items():
                beside = math.log2(best / speed) - member.step
                points = 0 if abs(beside) < _MARGIN else int(math.copysign(1, beside))
                member.tendency = points + (member.tendency if member.tendency * points > 0 else 0)
                if abs(member.tendency) >= _AGREE:
                    member.step = min(_STEPS, max(0, member.step + points))
                    member.tendency = 0
        for member in self.members:
            member.got, member.busy = 0, 0.0
        self._span, self._began = 0, now
