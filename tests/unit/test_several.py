"""A session put together from sessions with several servers, which are played by hand here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from scripted import welcome

from headrace.bell import Bell
from headrace.fleet import Member
from headrace.pace import Pace
from headrace.protocol import Chunk, Failed, Get
from headrace.session import Events, Part
from headrace.several import Servers


class Played:
    """A session with one server. `bring` and `fail` are what it answers; what it is told is kept."""

    connected = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.welcome = welcome()
        self.gets: dict[int, Get] = {}
        self.released: list[int] = []
        self.cancelled: list[int] = []
        self.closed = False
        self._bell = Bell()
        self._answers: list[Any] = []

    def describe(self) -> str:
        return self.address

    def get(self, request: int, epoch: int, chunk: int, first: int, count: int) -> None:
        self.gets[request] = Get(token=b"t" * 16, request=request, epoch=epoch, chunk=chunk, first=first, count=count)

    def release(self, request: int) -> None:
        self.released.append(request)

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)
        self.gets = {number: get for number, get in self.gets.items() if number > request}

    def report(self, pace: Pace) -> None: ...

    def watched(self) -> tuple[int, ...]:
        return (self._bell.fd,)

    def take(self, ready: Any) -> Events:
        self._bell.clear()
        answers, self._answers = self._answers, []
        return Events(answers, None)

    def wait(self, wake: int) -> Events:
        raise AssertionError("it is waited for with the others")

    def close(self) -> None:
        self.closed = True

    def abandon(self) -> None: ...

    def bring(self, request: int) -> None:
        """Also what it need not bring any more: it was on its way."""
        self.gets.pop(request, None)
        message = Chunk(request=request, slot=0, generation=1, rejects=[], render_id="r", window=4)
        self._answers.append(SimpleNamespace(message=message, first=0, labels=None, indices=None, status=None))
        self._bell.ring()

    def fail(self, request: int) -> None:
        del self.gets[request]
        self._answers.append(Failed(request=request, kind="DatasetError", text="EIO"))
        self._bell.ring()


class Two:
    """Servers a and b, joined. After each `turn` what came is given back, as the engine does."""

    def __init__(self) -> None:
        self.servers = Servers(["ipc:///a", "ipc:///b"], timeout=60, exact=False)
        self.a, self.b = self.parts = Played("ipc:///a"), Played("ipc:///b")
        self._stop, self._wake = Bell(), Bell()
        there = {part.address: cast(Part, part) for part in self.parts}
        self.session = self.servers.open(lambda address, stop: there[address], self._stop.fd)
        self.asked = 0
        self.had: list[int] = []

    def member(self, part: Played) -> Member:
        return next(member for member in self.servers.fleet.members if member.address == part.address)

    def ask(self, count: int) -> None:
        for _ in range(count):
            self.asked += 1
            self.session.get(self.asked, 0, self.asked, 0, 4)

    def turn(self) -> None:
        self._wake.ring()
        for answer in self.session.wait(self._wake.fd).answers:
            request = answer.request if isinstance(answer, Failed) else answer.message.request
            self.had.append(request)
            self.session.release(request)

    def make_late(self, part: Played) -> None:
        """It has answered nothing for an hour."""
        member = self.member(part)
        member.stirred -= 3600
        self.turn()
        assert member.late


@contextmanager
def two_servers() -> Iterator[Two]:
    two = Two()
    try:
        yield two
    finally:
        two.session.close()
    assert two.a.closed and two.b.closed


def test_a_server_that_answers_again_need_not_do_what_others_have_done_meanwhile() -> None:
    with two_servers() as two:
        two.ask(40)
        a, b = two.parts
        owed = list(a.gets)
        assert 5 < len(owed) < 35
        two.make_late(a)
        for number, get in list(b.gets.items()):
            if get.chunk != a.gets[owed[-1]].chunk:  # one of those is still wanted
                b.bring(number)
        two.turn()
        assert len(two.had) == 39
        a.bring(owed[0])
        two.turn()
        assert a.cancelled == [owed[-2]]
        assert list(a.gets) == [owed[-1]]
        assert len(two.member(a).owed) == 1
        a.bring(owed[1])  # that was on its way
        a.bring(owed[-1])
        two.turn()
        assert sorted(two.had) == list(range(1, 41))
        assert a.released == [owed[0], owed[1], owed[-1]]  # each just once
        assert not two.member(a).owed


def test_what_nobody_else_has_brought_is_left_with_a_server_that_answers_again() -> None:
    with two_servers() as two:
        two.ask(40)
        a, b = two.parts
        owed = list(a.gets)
        two.make_late(a)
        a.bring(owed[0])
        two.turn()
        assert not a.cancelled
        for part in two.parts:
            for number in list(part.gets):
                part.bring(number)
        two.turn()
        assert sorted(two.had) == list(range(1, 41))
        assert len(a.released) + len(b.released) == 40 + len(owed)


def test_a_server_that_answers_again_with_a_failure_is_spared_too() -> None:
    with two_servers() as two:
        two.ask(40)
        a, b = two.parts
        owed = list(a.gets)
        two.make_late(a)
        for number in list(b.gets):
            b.bring(number)
        two.turn()
        a.fail(owed[0])
        two.turn()
        assert a.cancelled == [owed[-1]] and not two.member(a).owed
        assert sorted(two.had) == list(range(1, 41))


def test_what_was_taken_back_is_given_back_and_never_taken_for_what_was_asked_for_since() -> None:
    with two_servers() as two:
        two.ask(20)
        before = [(part, list(part.gets)) for part in two.parts]
        two.session.cancel(two.asked)
        two.ask(20)
        for part, numbers in before:
            for number in numbers:
                part.bring(number)
        two.turn()
        assert two.had == []
        for part, numbers in before:
            assert part.released == numbers
            for number in list(part.gets):
                part.bring(number)
        two.turn()
        assert sorted(two.had) == list(range(21, 41))
