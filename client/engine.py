"""The fetching thread of a Loader: asks for chunks, copies them out, and keeps batches ready.

Two threads share an `Assembly` under one lock: this one feeds it, the consumer's `next` empties it. Everything else
here, sessions and sockets, belongs to this thread alone. The thread refers to nothing of the Loader's, so a Loader
that is dropped ends it.

The consumer may be interrupted anywhere by a signal's handler that raises (Ctrl-C) or closes the Loader. So it holds
a plain lock, whose `with` is safe from that (a `threading.Condition`'s is not), and only briefly: it waits outside,
at a bell. The handler itself may run while the consumer holds the lock: nothing but `take` and `begin` needs it there.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace.assembly import Assembly, Piece, Want
from headrace.batch import Batch
from headrace.bell import Bell
from headrace.errors import (
    ConnectionLost,
    DeadlineError,
    HeadraceError,
    ProtocolError,
    RenderMismatch,
    StateError,
    from_wire,
)
from headrace.form import Form
from headrace.keys import Keys
from headrace.pace import Pace
from headrace.protocol import IMPURE, MAX_OUTSTANDING, Failed, RowReject, Welcome
from headrace.session import Delivery, Interrupted, Part, Refusal, Session, differences
from headrace.several import Servers
from headrace.slots import Status
from headrace.stages import Clock, Lap, unmeasured
from headrace.transport import Transport, open_session

log = logging.getLogger(__name__)

#: Seconds between attempts to reach a daemon that is gone: the first pause, and the longest.
_BACKOFF = (0.05, 1.0)

#: Seconds that a wait adds to the waiting time at most: a process that was stopped meanwhile has not waited.
_SLICE = 1.0

#: Seconds that `close` gives the thread, which is never in a longer call than one copy.
_CLOSE = 10.0


#: Seconds after which the thread looks whether the Loader was closed while the lock is held elsewhere.
_HELD = 0.1

#: Why an iterator gives nothing any more.
ENDED = "this iterator was ended by set_epoch, load_state_dict or another one: use a new one"


class Locate(Protocol):
    """Gives the daemon's address, and starts the daemon where that is the Loader's task."""

    def __call__(self, *, timeout: float, stop: int) -> str: ...


class Engine:
    """
    Args:
        locate: finds the daemon; called again when it is lost. Or several servers.
        stream: name, or None where there is just one.
        transport: `shm`, `tcp`, or `auto` for what suits the address.
        timeout: seconds without progress after which a wait ends with an error.
        exact: whether every chunk must be rendered by what `Welcome` said.
        device: PCI bus id of the GPU that batches go to; "": none.
        keys: for a daemon at a `tcp://` address that wants some.

    Attributes:
        welcome: the first session's; later ones must agree with it.
        transport: how rows come, or came last.
        render_ids: of what has rendered so far.
        pace: how this is served.
    """

    welcome: Welcome
    transport: str
    render_ids: set[str]

    def __init__(
        self,
        locate: Locate | Servers,
        stream: str | None,
        transport: Transport,
        *,
        timeout: float,
        exact: bool,
        device: str = "",
        keys: Keys | None = None,
    ) -> None:
        self._locate = locate
        self._stream = stream
        self._transport = transport
        self._timeout = timeout
        self._exact = exact
        self._device = device
        self._keys = keys
        self.pace = Pace()
        self._pid = os.getpid()
        # The thread is rung at `wake`, and at `stop` in a handshake; the consumer at `ready`.
        self._wake, self._stop, self._ready = Bell(), Bell(), Bell()
        self._opened = False
        self._refused: BaseException | None = None
        self._closing = False
        self._current: tuple[tuple[Assembly, ...], Form] | None = None
        self._lock = threading.Lock()
        # Under the lock, as is what is in the assembly:
        self._assemblies: tuple[Assembly, ...] = ()  # one epoch's, and that of the next
        self._form: Form | None = None
        self._progress = 0
        self._failure: tuple[Assembly | None, HeadraceError] | None = None

        self._session: Session | None = None
        self._request = 0
        self._outstanding: dict[int, tuple[Assembly, Want]] = {}
        #: Whether anything was asked for the next epoch; and what the consumer wanted when that was given up.
        self._ahead = False
        self._given_up: object = None
        self._pause = _BACKOFF[0]
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="headrace-fetch", daemon=True)

    # -- the consumer's side --------------------------------------------------------------------------------

    def open(self) -> None:
        """Find the daemon and begin a session, in the thread: there no interrupt can leave a socket half open.

        Raises:
            HeadraceError: what is wrong with the configuration, or the daemon cannot be reached.
        """
        _engines.add(self)
        # Not by this thread: `Thread.start` waits, too, and an interrupt there tears the lock that both threads need.
        _thread.start_new_thread(self._start, ())
        while not self._opened and self._refused is None:
            self._ready.wait(_SLICE)
        if self._refused is not None:
            self._join()
            raise self._refused

    def begin(self, assembly: Assembly, form: Form, following: Assembly | None = None) -> None:
        """Fetch for this assembly from now on, and for no other but the one that follows it. May be said again.

        Args:
            following: of the next epoch, whose first batches count among those that are kept ready.
        """
        self._check_open()
        self._current = ((assembly,) if following is None else (assembly, following), form)
        with self._lock:
            self._failure = None  # of before: what is wrong may have been mended, and else it is said again
        self._wake.ring()

    def end(self, assembly: Assembly) -> None:
        """Fetch no more for this assembly. Takes no lock: it is also called when garbage is collected, anywhere."""
        assembly.ended = True
        self._wake.ring()
        self._ready.ring()

    def take(self, assembly: Assembly) -> Batch | None:
        """The batch that is due, as soon as it is ready; None when every batch was handed out.

        Raises:
            DeadlineError: nothing moved for `timeout` seconds.
            ConnectionLost: the daemon is gone for as long.
            StateError: the assembly was ended, or this is closed.
            HeadraceError: as `Assembly.take`, or the daemon that came back is another one.
        """
        ready = self._ready
        waited, seen, asked = 0.0, -1, False
        while True:
            self._check_open()
            if assembly.done:
                return None
            if assembly.ended:
                raise StateError(ENDED)
            batch = self._look(assembly)
            if batch is not None:
                self._wake.ring()  # there is room for another
                if assembly.taken == assembly.count:
                    ready.ring()  # for another thread that waits for one more
                return batch
            if self._progress != seen:
                waited, seen = 0.0, self._progress
            if waited >= self._timeout:
                raise self._late(assembly)
            if not asked:  # what failed in the `next` before is tried again now
                asked = True
                self._wake.ring()
            before = time.monotonic()
            ready.wait(min(_SLICE, self._timeout - waited))
            waited += min(_SLICE, time.monotonic() - before)

    def epoch_over(self) -> None:
        """The trainer has the last batch: tell the daemon how it was."""
        self.pace.epoch_over()
        self._wake.ring()

    def _look(self, assembly: Assembly) -> Batch | None:
        """As `Assembly.take`, or what else has failed."""
        with self._lock:
            batch = assembly.take()
            if batch is None and self._failure is not None and self._failure[0] is assembly:
                error = self._failure[1]
                self._failure = None
                raise error
            return batch

    def close(self) -> None:
        """Leave the daemon and end the thread. May be called twice, from any thread or a signal's handler; does
        nothing in a forked child."""
        if os.getpid() != self._pid or self._closing:
            return
        self._closing = True
        self._stop.ring()
        self._wake.ring()
        self._ready.ring()
        if threading.current_thread() is self._thread:
            return  # garbage is collected in any thread
        self._join()
        if self._thread.is_alive():
            log.error("the fetching thread does not end")

    def stopped(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many
            self._refused = error
            self._ready.ring()

    def _join(self) -> None:
        try:
            self._thread.join(_CLOSE)
        except RuntimeError:
            pass  # it was not started, or not yet: then it finds that it is to end

    def abandon(self) -> None:
        """In a forked child: whatever keeps the parent's session open there must not be kept here."""
        if self._session is not None:
            self._session.abandon()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StateError("this Loader was made before a fork and its thread is not in the child: make one there")
        if self._closing:
            raise StateError("this Loader is closed")

    def _late(self, assembly: Assembly) -> HeadraceError:
        where = f"batch {assembly.taken} of epoch {assembly.epoch}"
        session = self._session
        if session is None or not session.connected:
            trouble = self._trouble if session is None else session.describe()
            return ConnectionLost(
                f"the daemon at {self._address} is gone and could not be reached again for {self._timeout:g} s "
                f"({trouble}); {where} is waiting for it"
            )
        outstanding = list(self._outstanding.values())
        chunks = sorted(want.chunk for whose, want in outstanding if whose is assembly and assembly.waiting(want))
        return DeadlineError(
            f"nothing came from {session.describe()} for {self._timeout:g} s; "
            f"{where} waits for chunk{'s' * (len(chunks) != 1)} {', '.join(map(str, chunks)) or 'none'}"
        )

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._context = zmq.Context()
        try:
            self._begin()
            while self._opened and not self._closing:
                if (error := self._attempt()) is not None:
                    self._fail(error)
        except Interrupted:
            pass
        finally:
            if self._session is not None:
                self._session.close()
            self._context.term()
            if self._form is not None:
                self._form.close()
            self._ready.ring()

    def _begin(self) -> None:
        """The first session, or why there is none."""
        try:
            try:
                session = self._open()
            except ConnectionLost:
                if isinstance(self._locate, Servers):
                    raise
                # A private daemon may be found in the moment in which it ends with its last session.
                session = self._open()
        except Interrupted:
            raise
        except Refusal as refusal:
            self._refused = refusal.error
        except BaseException as error:
            self._refused = error
        else:
            self.welcome = session.welcome
            self.render_ids = {session.welcome.render_id}
            self._take_up(session)
            self._opened = True
            self._ready.ring()

    def _attempt(self) -> HeadraceError | None:
        """A turn, or what went wrong in it."""
        try:
            self._turn()
        except HeadraceError as error:
            return error
        except Refusal as refusal:
            return refusal.error
        except MemoryError as error:
            return HeadraceError(str(error) or "no memory for a batch")
        except Interrupted:
            raise
        except Exception as error:
            log.exception("the fetching thread failed")
            return HeadraceError(f"the fetching thread failed: {type(error).__name__}: {error}")
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Have the lock. The consumer may be closing this in a signal's handler while it holds it.

        Raises:
            Interrupted: so it is.
        """
        while not self._lock.acquire(timeout=_HELD):
            if self._closing:
                raise Interrupted
        try:
            yield
        finally:
            self._lock.release()

    def _turn(self) -> None:
        self._switch()
        if self._session is None:
            if self._assemblies and self._failure is None:
                self._return()
            else:
                self._wake.wait(None)
            return
        self._ask()
        now = time.perf_counter()
        self.pace.asked(len(self._outstanding), now)
        if self.pace.due(now):
            self._session.report(self.pace)
        answers, lost = self._session.wait(self._wake.fd)
        self._wake.clear()
        self._learn(self._session.welcome)
        for answer in answers:
            if isinstance(answer, Failed):
                self._refuse(answer)
            else:
                self._deliver(answer)
        if lost is not None:
            self._leave(lost)

    def _switch(self) -> None:
        """Take up the assemblies that the consumer wants, and take back what was asked for others."""
        current = self._current
        wanted, form = current or ((), None)
        if current is self._given_up:
            wanted = wanted[:1]
        wanted = tuple(assembly for assembly in wanted if not assembly.ended)
        if wanted == self._assemblies:
            return
        dropped = [assembly for assembly in self._assemblies if assembly not in wanted]
        if any(whose in dropped for whose, _ in self._outstanding.values()):
            dropped = [*self._assemblies]  # requests are taken back all together
            if self._session is not None:
                self._session.cancel(self._request)
            self._outstanding.clear()
        with self._locked():
            for assembly in dropped:
                assembly.discard()
            self._assemblies, self._form = wanted, form
            self._failure = None
        self._ahead = any(whose is not wanted[0] for whose, _ in self._outstanding.values())

    def _ask(self) -> None:
        session = self._session
        if session is None or self._failure is not None:
            return
        while len(self._outstanding) < min(self._window, MAX_OUTSTANDING):
            with self._locked():
                asked = self._next()
            if asked is None:
                return
            assembly, want = asked
            self._ahead = self._ahead or assembly is not self._assemblies[0]
            self._request += 1
            self._outstanding[self._request] = asked
            rows = want.rows
            session.get(self._request, assembly.epoch, want.chunk, rows.start, len(rows))

    def _next(self) -> tuple[Assembly, Want] | None:
        """What to ask for next, and for whom."""
        before = 0
        for assembly in self._assemblies:
            try:
                want = assembly.want(before)
            except Exception:
                self._ahead = self._ahead or assembly is not self._assemblies[0]
                raise
            if want is not None:
                return assembly, want
            before += assembly.count - assembly.taken
        return None

    def _deliver(self, delivery: Delivery) -> None:
        session, message = self._session, delivery.message
        assert session is not None
        self._window = message.window
        asked, form = self._outstanding.get(message.request), self._form
        if asked is None or form is None:
            session.release(message.request)  # it was taken back while it was on its way
            return
        assembly, want = asked
        bad = {reject.row: reject for reject in message.rejects}
        error: HeadraceError | None = self._check_render(message.render_id)
        copied = False
        clock = Clock(self.pace.stages)
        try:
            if error is None:
                copied = _copy(delivery, want, bad, form, clock.lap)
        except ProtocolError as problem:
            error = problem
        session.release(message.request)
        del self._outstanding[message.request]  # only now: what fails on the way is asked for again
        if error is not None:
            with self._locked():
                assembly.failed(want, error)
                self._moved()
            return
        if not copied:
            log.warning("the slot of chunk %d was reused while it was copied; it is asked for again", want.chunk)
            with self._locked():
                assembly.again([want])
            return
        with self._locked():
            complete = assembly.arrived(want, bad)
        clock.lap("copy")
        try:
            made = []
            for draft in complete:
                if form.make_way():
                    clock.lap("device")
                made.append((draft, form.make(draft, assembly.epoch)))
                clock.lap("finish", 0)
        except BaseException:
            with self._locked():
                for each in self._assemblies:
                    each.discard()  # a draft is made up in place, and just once
            self._outstanding.clear()
            raise
        with self._locked():
            for draft, batch in made:
                draft.batch = batch
            self._moved()

    def _check_render(self, render_id: str) -> RenderMismatch | None:
        if self._exact and IMPURE in render_id:
            return RenderMismatch(
                f"exact=True, and a chunk was rendered by {render_id}: with a share of pictures for the JPEG engine of "
                "the GPU, each depends a little on those beside it. Set workers.hw_decoder_load to 0 or 1"
            )
        if render_id == self.welcome.render_id:
            return None
        if self._exact:
            return RenderMismatch(
                f"exact=True, and a chunk was rendered by {render_id} instead of {self.welcome.render_id}"
            )
        # A chunk that several have put together names them all.
        if new := set(render_id.split(" + ")) - self.render_ids:
            self.render_ids |= new
            log.warning(
                "pictures come from %s as well as %s: equal within the tolerance, not byte for byte; exact=True "
                "would refuse them",
                " + ".join(sorted(new)),
                self.welcome.render_id,
            )
        return None

    def _refuse(self, message: Failed) -> None:
        asked = self._outstanding.pop(message.request, None)
        if asked is not None:
            assembly, want = asked
            with self._locked():
                assembly.failed(want, from_wire(message.kind, message.text))
                self._moved()

    # -- losing the daemon and finding it again -------------------------------------------------------------

    def _open(self) -> Session:
        locate = self._locate
        if isinstance(locate, Servers):
            return locate.open(self._connect, self._stop.fd)
        return self._connect(locate(timeout=self._timeout, stop=self._stop.fd), self._stop.fd)

    def _connect(self, address: str, stop: int) -> Part:
        return open_session(
            address, self._stream, self._transport, self._context, timeout=self._timeout, stop=stop,
            device=self._device, keys=self._keys,
        )  # fmt: skip

    def _take_up(self, session: Session) -> None:
        self._session, self._address, self._window = session, session.address, session.welcome.window
        self._learn(session.welcome)
        self.pace.anew()

    def _learn(self, welcome: Welcome) -> None:
        """Of several servers they are not always the same ones."""
        self.transport = welcome.transport
        self.pace.serves(welcome.in_flight)

    def _leave(self, reason: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
        if reason:
            log.warning("%s (%s); asking again for %d chunks", reason, self._address, len(self._outstanding))
            self._trouble = reason
        with self._locked():
            for assembly, want in self._outstanding.values():
                assembly.again([want])
            self._outstanding.clear()
        self.pace.asked(0, time.perf_counter())

    def _return(self) -> None:
        """One attempt to get a session again; after a failed one, a pause."""
        try:
            session = self._open()
        except (ConnectionLost, DeadlineError) as error:
            self._trouble = str(error)
            self._wake.wait(self._pause)
            self._pause = min(2 * self._pause, _BACKOFF[1])
            return
        try:
            _check_same(self.welcome, session.welcome)
        except BaseException:
            session.close()
            raise
        log.info("connected to the daemon at %s again (pid %d)", session.address, session.welcome.pid)
        self._take_up(session)
        self._pause = _BACKOFF[0]

    def _fail(self, error: HeadraceError) -> None:
        """Something is wrong that is no batch's own fault: the consumer hears it, and then it is tried anew.

        But not in this epoch what may be wrong with the next one: this one goes on alone, and finds out.
        """
        self._leave("")
        if self._ahead:
            # As text: a record of the error would keep this thread's frames.
            log.warning("the next epoch is not fetched ahead: %s", str(error))
            with self._locked():
                for following in self._assemblies[1:]:
                    following.discard()
                self._assemblies = self._assemblies[:1]
            self._ahead, self._given_up = False, self._current
            return
        with self._locked():
            # Without the frames of this thread, which refer to the ring.
            self._failure = next(iter(self._assemblies), None), error.with_traceback(None)
        self._ready.ring()

    def _moved(self) -> None:
        """A chunk came, or is known not to come. Nothing else is progress: a daemon may crash and return for ever."""
        self._progress += 1
        self._ready.ring()


def _copy(delivery: Delivery, want: Want, bad: dict[int, RowReject], form: Form, lap: Lap = unmeasured) -> bool:
    """Copy the rows of a chunk to where they go; False if the slot was reused meanwhile.

    Args:
        lap: called after `finish`ing some rows, and before that after the `copy` of what lies beside the pictures.

    Raises:
        ProtocolError: the rows are not what the message says.
    """
    if not delivery.sound():
        return False
    first = delivery.first
    expected: NDArray[np.uint8] = np.full(len(delivery.status), Status.OK, np.uint8)
    expected[[row - first for row in bad if row - first < len(expected)]] = Status.REJECTED
    pictures = True
    texts: list[tuple[Piece, list[bytes]]] = []
    try:
        for piece in want.pieces:
            draft, target = piece.draft, piece.target
            if piece.tries and piece.first in bad:
                continue
            source = slice(piece.first - first, piece.first - first + piece.size)
            pictures = pictures and np.array_equal(delivery.status[source], expected[source])
            row = piece.row
            lap("copy", 0)
            for levels in delivery.images(piece.first, piece.size):
                form.finish(levels, draft.images[row : row + len(levels)])
                row += len(levels)
            lap("finish", piece.size, draft.images[target].nbytes)
            draft.labels[target] = delivery.labels[source]
            draft.indices[target] = delivery.indices[source]
            if draft.texts:
                texts.append((piece, delivery.texts(piece.first, piece.size)))
    except ProtocolError:
        if delivery.sound():
            raise
    if not delivery.sound():
        return False
    if not pictures:
        raise ProtocolError(f"chunk {want.chunk} was delivered with rows that are neither pictures nor rejects")
    for piece, rows in texts:
        piece.draft.texts[piece.target] = form.read(rows)
    return True


def _check_same(first: Welcome, now: Welcome) -> None:
    """The daemon that came back must serve the same pictures, labels and columns."""
    what = differences(first, now)
    if what:
        raise StateError(
            f"the daemon came back with another stream {now.stream!r}: {', '.join(what)} changed in the middle of a "
            "run; make a new Loader to go on with it"
        )


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.abandon()


os.register_at_fork(after_in_child=_after_fork)
