"""A session with several servers at once, put together from a session with each.

`fleet.py` decides whom to ask; here it is done. Requests of the engine keep their numbers; each server gets numbers of
its own, which grow as it wants them to, also where a request moves from one server to another. Of what comes twice the
first is handed on, the other one given back unread.

A handshake may take long, with a server that lists its data or has been stopped. So each attempt to join one is made in
a thread of its own, and never holds up the others; the finished session is handed over to the engine's thread, which
alone uses it from then on.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from headrace.bell import Bell
from headrace.errors import (
    ConnectionLost,
    DeadlineError,
    HeadraceError,
    ProtocolError,
    RenderMismatch,
    StateError,
)
from headrace.fleet import Ask, Fleet, Member
from headrace.pace import Pace
from headrace.protocol import Chunk, Failed, Rows, Welcome
from headrace.session import LONGEST_POLL, Delivery, Events, Interrupted, Part, Refusal, differences

log = logging.getLogger(__name__)

#: Seconds that the other servers are given to answer too, once the first one has, before a Loader begins without them.
_GRACE = 2.0

#: Seconds that threads which are joining servers have to notice that they are to end; more than they need.
_ENDING = 1.0

#: What servers say of a stream that makes no difference once a Loader is made.
_DEFAULTS = ("output", "on_bad_sample", "max_bad")

#: Chunks that a server cannot bring which are logged, for each session with it.
_LOGGED = 10

#: Opens a session at an address; a descriptor that becomes readable interrupts it.
Connect = Callable[[str, int], Part]


class Servers:
    """The servers of a Loader, for all its life. Sessions with them come and go, what was learnt of them stays.

    Args:
        addresses: at least two, all different.
        timeout: seconds without progress that the Loader allows.
        exact: whether all must render alike to the byte.
    """

    def __init__(self, addresses: Sequence[str], *, timeout: float, exact: bool) -> None:
        self.fleet = Fleet(addresses, timeout)
        self.exact = exact
        #: What the first of them said. The others, whenever they come, must serve the same.
        self.truth: Welcome | None = None

    @property
    def address(self) -> str:
        return "one of " + ", ".join(member.address for member in self.fleet.members)

    def open(self, connect: Connect, stop: int) -> SeveralSession:
        """Join all that answer; the first answer, and a moment for the others, is enough.

        Args:
            stop: a descriptor; when it becomes readable, `Interrupted` is raised.

        Raises:
            StateError: two of them serve different pictures, or have other defaults for a Loader that is being made.
            RenderMismatch: two of them render differently, likewise, and `exact`.
            HeadraceError: none of them can be joined; says why, of each.
        """
        session = SeveralSession(self, connect)
        try:
            session.begin(stop)
        except BaseException:
            session.close()
            raise
        return session

    def unlike(self, address: str, welcome: Welcome, *, first: bool) -> HeadraceError | None:
        """Why this server cannot be asked beside the others.

        Args:
            first: whether the Loader is being made, and takes what it was not told from any of them.
        """
        truth = self.truth
        if truth is None:
            return None
        what = differences(truth, welcome)
        if first:
            what += [name for name in _DEFAULTS if getattr(truth, name) != getattr(welcome, name)]
        if what:
            return StateError(
                f"the server at {address} does not serve the same stream {welcome.stream!r} as the others: "
                f"{', '.join(what)} differ"
            )
        if self.exact and welcome.render_id != truth.render_id:
            return RenderMismatch(
                f"exact=True, and the server at {address} renders by {welcome.render_id}, others by {truth.render_id}"
            )
        return None


class _Joined:
    """A session with one server.

    Attributes:
        asked: the engine's requests by this server's numbers, unless they were taken back.
        numbers: the next ones.
        lent: deliveries that the engine has and not released yet.
        failed: chunks that it could not bring.
    """

    def __init__(self, member: Member, session: Part) -> None:
        self.member = member
        self.session = session
        self.asked: dict[int, int] = {}
        self.numbers = itertools.count(1)
        self.lent = 0
        self.failed = 0


class _Renumbered:
    """A delivery under the engine's number for it."""

    def __init__(self, delivery: Delivery, message: Chunk | Rows) -> None:
        self._delivery = delivery
        self.message = message
        self.first = delivery.first
        self.labels: NDArray[Any] = delivery.labels
        self.indices: NDArray[np.int64] = delivery.indices
        self.status: NDArray[np.uint8] = delivery.status

    def images(self, first: int, size: int) -> Iterable[NDArray[np.uint8]]:
        return self._delivery.images(first, size)

    def texts(self, first: int, size: int) -> list[bytes]:
        return self._delivery.texts(first, size)

    def sound(self) -> bool:
        return self._delivery.sound()


class SeveralSession:
    """Make it with `Servers.open`. It is never over by itself: while no server is there, requests wait for the next.
    Only where all were reached, and none will do, `wait` says so.

    Attributes:
        welcome: of the first server, with what all of them together take.
    """

    welcome: Welcome

    def __init__(self, servers: Servers, connect: Connect) -> None:
        self._servers = servers
        self._fleet = servers.fleet
        self._fleet.reset()
        self._connect = connect
        self._joined: dict[Member, _Joined] = {}
        self._welcomes: dict[Member, Welcome] = {}
        #: Why those that were reached last time cannot be asked; trying again gives the same until somebody mends it.
        self._unfit: dict[Member, HeadraceError] = {}
        #: Sessions that are over, and may have brought what the engine still reads.
        self._gone: list[_Joined] = []
        #: What each request that has no answer yet is for: epoch, chunk, first, count. Who brought it, once it has.
        self._wanted: dict[int, tuple[int, int, int, int]] = {}
        self._lent: dict[int, tuple[_Joined, int]] = {}
        # Shared with the threads that join servers:
        self._arrived: deque[tuple[Member, Part | HeadraceError]] = deque()
        self._bell, self._stop = Bell(), Bell()
        self._lock = threading.Lock()
        self._closed = False
        #: Whether the Loader is being made.
        self._first = servers.truth is None
        self._threads: set[threading.Thread] = set()

    # -- as the engine sees it ----------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._servers.address

    @property
    def connected(self) -> bool:
        return bool(self._fleet.up)

    def describe(self) -> str:
        return "the servers " + "; ".join(
            f"{m.address}, {m.state}{m.trouble and f': {m.trouble}'}" for m in self._fleet.members
        )

    def get(self, request: int, epoch: int, chunk: int, first: int, count: int) -> None:
        self._wanted[request] = epoch, chunk, first, count
        self._ask(self._fleet.ask(request, epoch, chunk, time.monotonic()))

    def release(self, request: int) -> None:
        lent = self._lent.pop(request, None)
        if lent is not None:
            joined, number = lent
            joined.lent -= 1
            joined.session.release(number)

    def cancel(self, request: int) -> None:
        self._fleet.cancel(request)
        self._wanted = {number: what for number, what in self._wanted.items() if number > request}
        for joined in self._joined.values():
            kept = {number: whose for number, whose in joined.asked.items() if whose > request}
            # A server forgets all up to a number. What that leaves because something before it stays is given back
            # when it comes.
            last = max((n for n in joined.asked if n < min(kept, default=n + 1)), default=0)
            joined.asked = kept
            if last:
                joined.session.cancel(last)

    def report(self, pace: Pace) -> None:
        for joined in self._joined.values():
            joined.session.report(pace)

    def wait(self, wake: int) -> Events:
        self._close_gone()
        self._open_due()
        poller = zmq.Poller()
        for joined in self._joined.values():
            for each in joined.session.watched():
                poller.register(each, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        due = self._fleet.due(time.monotonic())
        ready = dict(poller.poll(None if due is None else int(1000 * min(due, LONGEST_POLL)) + 1))
        answers: list[Delivery | Failed] = []
        for joined in list(self._joined.values()):
            self._take(joined, ready, answers)
        if self._bell.fd in ready:
            for joining in self._arrivals():
                self._join(*joining)
            if len(self._unfit) == len(self._fleet.members):
                raise _none(self._unfit)
        self._move_overdue()
        return Events(answers, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._stop.ring()
        for joined in [*self._joined.values(), *self._gone]:
            joined.session.close()
        self._joined.clear()
        self._gone.clear()
        deadline = time.monotonic() + _ENDING
        for thread in list(self._threads):
            # One that is held up by the system's resolver has no socket yet, and finds later that it is to end.
            thread.join(max(0.0, deadline - time.monotonic()))
        for _, session in self._arrivals():
            if not isinstance(session, HeadraceError):
                session.close()
        self._lent.clear()
        self._fleet.reset()

    def abandon(self) -> None:
        for joined in list(self._joined.values()) + list(self._gone):
            joined.session.abandon()

    # -- joining ------------------------------------------------------------------------------------------------

    def begin(self, stop: int) -> None:
        """See `Servers.open`."""
        fleet = self._fleet
        failures: dict[Member, HeadraceError] = {}
        enough = None
        while True:
            self._open_due()
            now = time.monotonic()
            if fleet.up and enough is None:
                enough = now + _GRACE
            waiting = [m for m in fleet.members if m.opening and m not in failures]
            if enough is not None and (not waiting or now >= enough):
                break
            if len(failures) == len(fleet.members) and not fleet.up:
                raise _none(failures)
            times = [t for t in (None if enough is None else enough - now, fleet.due(now)) if t is not None]
            poller = zmq.Poller()
            poller.register(stop, zmq.POLLIN)
            poller.register(self._bell.fd, zmq.POLLIN)
            ready = dict(poller.poll(int(1000 * min([*times, LONGEST_POLL])) + 1))
            if stop in ready:
                raise Interrupted
            for member, outcome in self._arrivals():
                error = self._join(member, outcome)
                if error is not None:
                    failures[member] = error
                    # While it is not settled yet which pictures these are, nobody may go on with either.
                    if self._first and isinstance(error, (StateError, RenderMismatch)):
                        raise error
        self._first = False
        for member in waiting:
            log.warning("going on without the server at %s, which has not answered yet", member.address)

    def _open_due(self) -> None:
        """Begin to join those that are to be joined now."""
        for member in self._fleet.to_open(time.monotonic()):
            thread = threading.Thread(target=self._open, args=(member,), name="headrace-join", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many
                self._threads.discard(thread)
                self._fleet.missing(member, str(error), time.monotonic())

    def _open(self, member: Member) -> None:
        """The thread of one attempt."""
        outcome: Part | HeadraceError
        try:
            outcome = self._connect(member.address, self._stop.fd)
        except Interrupted:
            outcome = ConnectionLost("the Loader is being closed")
        except Refusal as refusal:
            outcome = refusal.error
        except HeadraceError as error:
            outcome = error.with_traceback(None)
        except Exception as error:
            outcome = HeadraceError(f"{type(error).__name__}: {error}")
        with self._lock:
            if not self._closed:
                self._arrived.append((member, outcome))
                self._bell.ring()
                return
        if not isinstance(outcome, HeadraceError):
            outcome.close()

    def _arrivals(self) -> list[tuple[Member, Part | HeadraceError]]:
        self._bell.clear()
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        arrivals = []
        while self._arrived:
            arrivals.append(self._arrived.popleft())
        return arrivals

    def _join(self, member: Member, outcome: Part | HeadraceError) -> HeadraceError | None:
        """Take this server in, or say why not."""
        now, servers = time.monotonic(), self._servers
        self._unfit.pop(member, None)
        if isinstance(outcome, HeadraceError):
            if not isinstance(outcome, (ConnectionLost, DeadlineError)):
                self._unfit[member] = outcome
            if self._fleet.missing(member, str(outcome), now):
                log.warning("the server at %s cannot be joined: %s", member.address, str(outcome))
            return outcome
        error = servers.unlike(member.address, outcome.welcome, first=self._first)
        if error is not None:
            outcome.close()
            self._unfit[member] = error
            if self._fleet.missing(member, str(error), now):
                log.error("%s; it is not asked for anything", str(error))
            return error
        welcome = outcome.welcome
        if servers.truth is None:
            servers.truth = welcome
            self._fleet.stream = welcome.fingerprints.pixels
        self._joined[member] = _Joined(member, outcome)
        self._welcomes[member] = welcome
        asks = self._fleet.joined(member, welcome.transport, welcome.window, now)
        self._sum_up()
        log.info("joined the server at %s (pid %d) over %s", member.address, welcome.pid, welcome.transport)
        self._ask(asks)
        return None

    def _sum_up(self) -> None:
        """What the engine is to know of all together."""
        here = [self._welcomes[member] for member in self._joined]
        if here:
            self.welcome = msgspec.structs.replace(
                self._servers.truth or here[0],
                transport=" + ".join(sorted({welcome.transport for welcome in here})),
                window=self._fleet.window,
                in_flight=sum(welcome.in_flight for welcome in here),
                notices=list(dict.fromkeys(notice for welcome in here for notice in welcome.notices)),
            )

    # -- asking and taking --------------------------------------------------------------------------------------

    def _ask(self, asks: Iterable[Ask]) -> None:
        for member, request in asks:
            joined = self._joined[member]
            number = next(joined.numbers)
            joined.asked[number] = request
            joined.session.get(number, *self._wanted[request])

    def _take(self, joined: _Joined, ready: dict[Any, int], answers: list[Delivery | Failed]) -> None:
        """What this server has brought."""
        member = joined.member
        try:
            events = joined.session.take(ready)
        except ProtocolError as error:
            trouble = str(error)  # in the log too: a record of the error would keep this thread's frames
            log.error("the server at %s: %s; the session with it is given up", member.address, trouble)
            self._lose(joined, trouble)
            return
        for answer in events.answers:
            late = member.late
            self._hear(joined, answer, answers)
            if late and not member.late:
                log.info("the server at %s answers again", member.address)
                self._spare(joined)
        if events.lost is not None:
            log.warning(
                "%s (%s); asking others for %d chunks of it",
                events.lost, member.address, sum(request in self._wanted for request in joined.asked.values()),
            )  # fmt: skip
            self._lose(joined, events.lost)

    def _hear(self, joined: _Joined, answer: Delivery | Failed, answers: list[Delivery | Failed]) -> None:
        member, now = joined.member, time.monotonic()
        failed = isinstance(answer, Failed)
        number = answer.request if isinstance(answer, Failed) else answer.message.request
        request = joined.asked.pop(number, None)
        if request is None:  # it was taken back while it was on its way
            if not failed:
                joined.session.release(number)
            return
        if isinstance(answer, Failed):
            over, asks = self._fleet.failed(member, request, now)
            if over:
                del self._wanted[request]
                answers.append(msgspec.structs.replace(answer, request=request))
            else:
                joined.failed += 1
                if joined.failed <= _LOGGED:
                    rest = "; more such are not logged" * (joined.failed == _LOGGED)
                    log.warning("the server at %s cannot bring a chunk, another one is asked: %s%s", member.address,
                                answer.text, rest)  # fmt: skip
            self._ask(asks)
            return
        member.window = answer.message.window
        first, asks = self._fleet.answered(member, request, now)
        if first:
            del self._wanted[request]
            joined.lent += 1
            self._lent[request] = joined, number
            message = msgspec.structs.replace(answer.message, request=request, window=self._fleet.window)
            answers.append(_Renumbered(answer, message))
        else:  # another server was faster
            joined.session.release(number)
        self._ask(asks)

    def _spare(self, joined: _Joined) -> None:
        """Others brought what this server owes: let it come to what is still wanted, instead of to that first."""
        stale = list(itertools.takewhile(lambda number: joined.asked[number] not in self._wanted, joined.asked))
        if stale:
            self._fleet.spare(joined.member, [joined.asked.pop(number) for number in stale], time.monotonic())
            joined.session.cancel(stale[-1])

    def _lose(self, joined: _Joined, reason: str) -> None:
        member = joined.member
        del self._joined[member]
        # What it brought just now is read by the engine after this: its memory stays until that is over.
        self._gone.append(joined)
        asks = self._fleet.lost(member, reason, time.monotonic())
        self._sum_up()
        self._ask(asks)

    def _close_gone(self) -> None:
        over = [joined for joined in self._gone if not joined.lent]
        self._gone = [joined for joined in self._gone if joined.lent]
        for joined in over:
            joined.session.close()

    def _move_overdue(self) -> None:
        late, asks = self._fleet.overdue(time.monotonic())
        for member in late:
            log.warning(
                "the server at %s has answered nothing for too long: others are asked for the %d chunks that it owes",
                member.address, len(member.owed),
            )  # fmt: skip
        self._ask(asks)


def _none(failures: dict[Member, HeadraceError]) -> HeadraceError:
    """The error that says why none of them can be joined: of their kind, if that is one."""
    kinds = {type(error) for error in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else ConnectionLost
    why = "; ".join(f"{member.address}: {error}" for member, error in failures.items())
    return kind(f"none of {len(failures)} servers can be joined: {why}")
