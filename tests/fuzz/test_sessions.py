"""The daemon's loop under clients that say anything at all, in any order, while two others get their epochs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from barrage import Barrage, framed, received, welcome_in
from hall import CHUNKS, FAILING, Hall, Network, rows_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from headrace import protocol
from headrace.protocol import Attach, Cancel, Chunk, Failed, Get, Goodbye, Hello, Leave, Message, Refused, Release, Rows
from headrace.server.cache import Cache, Slot
from headrace.server.desk import Desk
from headrace.server.transport import Tcp

#: Without making a failing example smaller, which takes minutes: they are short.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
#: Of the long run, in all.
SOAK = int(os.environ.get("HEADRACE_FUZZ_MESSAGES", 10_000_000))


@settings(max_examples=12, phases=PHASES)
@given(seed=st.integers(0, (1 << 32) - 1))
def test_nothing_that_clients_say_disturbs_the_daemon_or_another_trainer(seed: int) -> None:
    """The barrage itself looks at every picture, at what the daemon keeps and opens, and at its log."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        barrage = Barrage(Path(folder), seed)
        try:
            barrage.fire(5000)
        finally:
            barrage.close()
        for honest in barrage.honest:
            assert honest.chunks > barrage.turns / 10


def early(patch: pytest.MonkeyPatch) -> None:
    """A slot is given back before its rows have left."""
    ship = Network.ship

    def ships(network: Network, lane: Any, head: Any, fields: Any, done: Callable[[], None]) -> bool:
        sent = ship(network, lane, head, fields, lambda: None)
        done()
        return sent

    patch.setattr(Network, "ship", ships)


def unheld(patch: pytest.MonkeyPatch) -> None:
    """A leased slot is as free as another."""
    lease = Cache.lease

    def leases(cache: Cache, slot: Slot, reader: Any) -> None:
        lease(cache, slot, reader)
        slot.leases.clear()

    patch.setattr(Cache, "lease", leases)
    patch.setattr(Cache, "release", lambda cache, slot, reader: slot.leases.discard(reader))


def open_to_all(patch: pytest.MonkeyPatch) -> None:
    """Who knows a token speaks for its session."""
    patch.setattr(Tcp, "hears", lambda transport, via, identity: True)


def unnoticed(patch: pytest.MonkeyPatch) -> None:
    """A message fails in the loop, which catches it."""
    patch.setattr(Desk, "cancel", lambda desk, session, request=None: 1 // 0)


@pytest.mark.parametrize("fault", [early, unheld, open_to_all, unnoticed])
def test_the_barrage_finds_what_it_is_for(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    fault(monkeypatch)
    barrage = Barrage(home, 1)
    try:
        with pytest.raises((AssertionError, KeyError, ZeroDivisionError)):
            barrage.fire(20_000)
    finally:
        barrage.abandon()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_million_messages_leave_the_daemon_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    processes = len(os.sched_getaffinity(0))
    program = str(Path(__file__).parents[1] / "barrage.py")
    running = [
        subprocess.Popen(
            [sys.executable, program, str(seed), str(SOAK // processes)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for seed in range(processes)
    ]
    for process in running:
        out, err = process.communicate(timeout=3500)
        assert process.returncode == 0, err.decode()
        told = json.loads(out)
        with capsys.disabled():
            sys.stdout.write(f"\n{told}")
        assert told["messages"] >= SOAK // processes
        assert told["grown_mib"] < 8
        assert told["honest_chunks"] > told["turns"] / 5


# -- the same step by step, against a model ---------------------------------------------------------------------


class Session:
    """What the model knows of one."""

    def __init__(self, number: int, kind: str) -> None:
        self.control = b"\0" + number.to_bytes(3, "big") + b"\0"
        self.kind = kind
        self.token = b""
        self.socket: Any = None
        self.connection: Any = None
        self.lanes: set[int] = set()
        self.alive = True
        self.next = 0
        self.asked: dict[int, tuple[int, int, int]] = {}
        self.held: list[int] = []


class Conversations(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp")
        self.hall = Hall(Path(self._folder.name))
        self.all: list[Session] = []
        self.answered = 0

    # -- what is said -----------------------------------------------------------------------------------------------

    @rule(target=sessions, kind=st.sampled_from(["shm", "tcp"]), stream=st.sampled_from(["train", "val"]))
    def join(self, kind: str, stream: str) -> Any:
        if sum(session.alive for session in self.all) >= 5:  # fewer than there are slots to spare
            return multiple()
        session = Session(len(self.all) + 1, kind)
        hello = protocol.encode(Hello(stream=stream, transport=kind))
        if kind == "shm":
            session.socket, session.connection = self.hall.connect()
            session.socket.sendall(framed(hello))
            self.hall.hear_unix(session.connection)
        else:
            self.hall.hear_remote(session.control, hello)
        for _ in range(4):
            self.hall.turn()
        said = received(session.socket) if kind == "shm" else [*self.hall.remote.said[session.control]]
        welcome = welcome_in(said)
        assert welcome is not None and welcome.stream == stream
        session.token = welcome.token
        self.all.append(session)
        if kind == "tcp":
            self.attach(session, 1)
        return session

    @rule(session=sessions, lane=st.integers(1, 3))
    def attach(self, session: Session, lane: int) -> None:
        if session.kind == "shm":
            return
        identity = session.control[:4] + bytes([lane])
        if lane not in session.lanes and session.alive:
            self._say(session, Attach(token=session.token, lane=lane), identity)
            session.lanes.add(lane)

    @rule(
        session=sessions,
        chunk=st.sampled_from([*range(CHUNKS)] * 3 + [CHUNKS, protocol.MAX_COUNT]),
        epoch=st.sampled_from([0, 0, 1, FAILING, protocol.MAX_COUNT]),
        rows=st.sampled_from([(0, 0)] * 5 + [(1, 1), (0, 2), (1, 0), (2, 2), (4, 0), (0, 5), (protocol.MAX_COUNT, 1)]),
        again=st.integers(0, 15),
    )
    def get(self, session: Session, chunk: int, epoch: int, rows: tuple[int, int], again: int) -> None:
        session.next += 1
        number = session.next if again else session.next - 1
        first, count = rows
        self.hall.wants(session.control, number, epoch, chunk) if number not in session.asked else None
        in_use = number in session.asked or number in session.held
        self._say(session, Get(token=session.token, request=number, epoch=epoch, chunk=chunk, first=first, count=count))
        whole = rows_of(chunk) if chunk < CHUNKS else 0
        if in_use or not 0 < (count or whole - first) <= whole - first:
            self._over(session)
        elif session.alive:
            session.asked[number] = epoch, chunk, count

    @rule(session=sessions, back=st.integers(0, 3))
    def cancel(self, session: Session, back: int) -> None:
        number = max(0, session.next - back)
        self._say(session, Cancel(token=session.token, request=number))
        session.asked = {request: what for request, what in session.asked.items() if request > number}

    @rule(session=sessions, which=st.integers(0, 5))
    def release(self, session: Session, which: int) -> None:
        """Of what was delivered, or of what was not."""
        number = session.held.pop(which % len(session.held)) if session.held and which < 4 else which
        if session.kind == "shm" and number not in session.held:
            self._say(session, Release(token=session.token, request=number))
        elif session.kind == "tcp" and which == 5:
            self._say(session, Release(token=session.token, request=number))
            self._over(session)

    @rule(session=sessions)
    def greet_again(self, session: Session) -> None:
        hello = protocol.encode(Hello(stream="train", transport=session.kind))
        if session.kind == "tcp":
            self.hall.hear_remote(session.control, hello)
        else:
            with contextlib.suppress(BrokenPipeError):  # it is over, and the daemon has hung up
                session.socket.sendall(framed(hello))
            self.hall.hear_unix(session.connection)
        self._over(session)

    @rule(session=sessions, other=sessions)
    def speak_for_another(self, session: Session, other: Session) -> None:
        """Over tcp a token alone is not enough."""
        if session.kind == other.kind == "tcp" and session is not other:
            for message in (Cancel(token=other.token, request=99), Leave(token=other.token)):
                self._say(session, message)

    @rule(session=consumes(sessions), politely=st.booleans())
    def leave(self, session: Session, politely: bool) -> None:
        if session.kind == "shm":
            session.socket.close()
            while session.connection in self.hall.service._connections:
                self.hall.hear_unix(session.connection)
        elif politely:
            self._say(session, Leave(token=session.token))
        else:
            self.hall.remote.end(session.control[:4] + bytes([lane]) for lane in range(5))
            if session.alive:
                self.hall.service.expel(self.hall.service.find(session.token), "it is gone")
        self._over(session)
        session.held.clear()

    @rule(finished=st.integers(0, 3))
    def turn(self, finished: int) -> None:
        self.hall.turn(finished)
        self.hall.turn(0)
        self._read()

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def all_is_in_order(self) -> None:
        self.hall.check()
        for session in self.all:
            assert (self.hall.service.find(session.token) is not None) == session.alive

    def teardown(self) -> None:
        """Who kept the rules gets what was asked for, whatever the others did."""
        for session in self.all:  # of those put out whose mapping may still be read nothing comes back before their end
            if session.kind == "shm" and not session.alive:
                session.socket.close()
                while session.connection in self.hall.service._connections:
                    self.hall.hear_unix(session.connection)
        for _ in range(400):
            self.turn(3)
            for session in self.all:
                while session.alive and session.held:
                    self.release(session, 0)
            if not any(session.asked for session in self.all):
                break
        assert not [session.asked for session in self.all if session.alive and session.asked]
        for session in self.all:
            if session.kind == "shm":
                session.socket.close()
        self.hall.close()
        self._folder.cleanup()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _say(self, session: Session, message: Message, identity: bytes = b"") -> None:
        hear = self.hall.hear_shared if session.kind == "shm" else self.hall.hear_remote
        hear(identity or session.control, protocol.encode(message))

    def _over(self, session: Session) -> None:
        session.alive = False
        session.asked.clear()

    def _read(self) -> None:
        for session in self.all:
            mail = self.hall.shared if session.kind == "shm" else self.hall.remote
            for lane in range(4):
                said = mail.said.get(session.control[:4] + bytes([lane]))
                while said:
                    message = said.popleft()
                    if isinstance(message, Chunk | Rows | Failed):
                        self._answered(session, message)
                    else:
                        assert not isinstance(message, Goodbye | Refused) or not session.alive

    def _answered(self, session: Session, message: Chunk | Rows | Failed) -> None:
        wanted = session.asked.pop(message.request, None)
        self.answered += 1
        if isinstance(message, Rows) and wanted is not None:
            assert message.count == (wanted[2] or message.count)
        if isinstance(message, Chunk):
            session.held.append(message.request)


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=30, stateful_step_count=40, phases=PHASES)
