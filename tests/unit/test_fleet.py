"""Which server is asked for which chunk: homes, shares, and requests that move."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace import fleet as module
from headrace.fleet import BACKOFF, Ask, Fleet, Member

NAMES = ["tcp://a:1", "tcp://b:1", "tcp://c:1"]


def fleet(count: int = 3, *, timeout: float = 60.0, names: list[str] | None = None) -> Fleet:
    """All of them up, at time 0."""
    made = Fleet((names or NAMES)[:count], timeout)
    made.stream = "pixels"
    for member in made.to_open(0.0):
        assert made.joined(member, "shm", 4, 0.0) == []
    return made


def homes(made: Fleet, chunks: int = 2000, epoch: int = 3) -> list[str]:
    return [next(m.address for m in made.rank(epoch, chunk) if m.up) for chunk in range(chunks)]


# -- homes ----------------------------------------------------------------------------------------------------


def test_trainers_that_name_the_servers_in_any_order_ask_the_same_one() -> None:
    assert homes(fleet()) == homes(fleet(names=NAMES[::-1]))


def test_who_goes_takes_only_its_own_chunks_along_and_they_are_divided() -> None:
    made = fleet()
    before = homes(made)
    made.lost(made.members[1], "killed", 1.0)
    after = homes(made)
    assert [b for b, a in zip(before, after, strict=True) if b != NAMES[1]] == [
        a for b, a in zip(before, after, strict=True) if b != NAMES[1]
    ]
    moved = Counter(a for b, a in zip(before, after, strict=True) if b == NAMES[1])
    assert min(moved[NAMES[0]], moved[NAMES[2]]) > 0.4 * moved.total()


@pytest.mark.parametrize("steps", [(0, 0, 0), (0, 1, 2), (4, 0, 1)])
def test_shares_follow_the_weights(steps: tuple[int, ...]) -> None:
    made = fleet()
    for member, step in zip(made.members, steps, strict=True):
        member.step = step
    found = Counter(homes(made, 8000))
    weights = [2.0**-step for step in steps]
    for member, weight in zip(made.members, weights, strict=True):
        share = weight / sum(weights)
        assert abs(found[member.address] / 8000 - share) < 4 * math.sqrt(share * (1 - share) / 8000)


def test_another_stream_or_epoch_has_other_homes() -> None:
    made, other = fleet(), fleet()
    other.stream = "others"
    for others in (homes(other), homes(made, epoch=4)):
        same = sum(a == b for a, b in zip(homes(made), others, strict=True)) / 2000
        assert 0.28 < same < 0.39


# -- weights --------------------------------------------------------------------------------------------------


class Run:
    """A trainer that takes chunks in order, and servers that each bring so many a second, one after another."""

    def __init__(self, made: Fleet, seed: int = 0) -> None:
        self._fleet = made
        self._now = 100.0
        self._done = 0
        self._random = random.Random(seed)

    def go(
        self, speeds: Sequence[float], chunks: int, *, ahead: int = 12, pause: float = 0.0, noise: float = 0.0
    ) -> float:
        """Chunks a second.

        Args:
            speeds: of the members; `noise`: by how much a chunk varies (sigma), and one in 300 takes a second more.
            ahead: chunks that the trainer has asked for at most; it does `pause` seconds of work for each.
        """
        now = start = self._now
        free = dict.fromkeys(self._fleet.members, now)
        pace = dict(zip(self._fleet.members, speeds, strict=True))
        coming: list[tuple[float, int, Member]] = []
        here: set[int] = set()
        asked = due = self._done
        last = due + chunks
        while due < last:
            for new in range(asked, min(last, due + ahead)):
                for member, request in self._fleet.ask(new, 0, new, now):
                    took = self._random.lognormvariate(0, noise) / pace[member]
                    hitch = noise > 0 and self._random.random() < 1 / 300
                    free[member] = max(now, free[member]) + took + hitch
                    heapq.heappush(coming, (free[member], request, member))
            asked = min(last, due + ahead)
            if due in here:
                due += 1
                now += pause
            else:
                now = coming[0][0]
            while coming and coming[0][0] <= now:
                when, request, member = heapq.heappop(coming)
                assert self._fleet.answered(member, request, when) == (True, [])
                here.add(request)
        self._now, self._done = now, last
        return chunks / (now - start)


def steps(made: Fleet) -> list[int]:
    return [member.step for member in made.members]


def test_a_slow_server_gets_the_fewer_chunks_the_slower_it_is_and_the_trainer_more() -> None:
    made = fleet()
    run = Run(made)
    before = run.go([80, 20, 80], 200)
    run.go([80, 20, 80], 2000)
    assert steps(made) == [0, 2, 0]
    assert run.go([80, 20, 80], 1000) > 1.5 * before


@pytest.mark.parametrize("seed", range(4))
def test_servers_that_are_about_equally_fast_keep_equal_weights_with_every_trainer(seed: int) -> None:
    made = fleet()
    run = Run(made, seed)
    for _ in range(10):
        run.go([30, 38, 33], 300, noise=0.5)
        assert steps(made) == [0, 0, 0]


def test_a_server_that_has_recovered_gets_its_share_again() -> None:
    made = fleet()
    run = Run(made)
    run.go([80, 10, 80], 1500)
    assert steps(made)[1] >= 2
    run.go([80, 80, 80], 3000)
    assert steps(made) == [0, 0, 0]


def test_a_trainer_that_waits_for_nobody_changes_no_weight() -> None:
    made = fleet()
    Run(made).go([400, 100, 400], 1000, pause=0.02)
    assert steps(made) == [0, 0, 0]


def test_weights_never_leave_their_bounds() -> None:
    made = fleet(2)
    Run(made).go([1000, 1], 3000)
    assert steps(made) == [0, 4]


# -- late, gone, back -----------------------------------------------------------------------------------------


def ask(made: Fleet, count: int, now: float, first: int = 0) -> list[Ask]:
    return [a for request in range(first, first + count) for a in made.ask(request, 0, request, now)]


def test_what_a_dead_server_owes_goes_to_the_next_and_what_comes_after_to_its_home_when_it_is_back() -> None:
    made = fleet()
    asks = ask(made, 30, 0.0)
    dead = made.members[0]
    owed = [a.request for a in asks if a.member is dead]
    moved = made.lost(dead, "killed", 1.0)
    assert [a.request for a in moved] == owed
    assert dead.moved == len(owed)
    assert [a.member for a in moved] == [next(m for m in made.rank(0, r) if m is not dead) for r in owed]
    assert dead not in {a.member for a in ask(made, 30, 1.0, 30)}
    assert made.to_open(1.0 + BACKOFF[0]) == [dead]
    assert made.joined(dead, "shm", 4, 1.2) == []  # what has been moved stays
    again = ask(made, 30, 1.2, 60)
    assert [a.member for a in again] == [made.rank(0, a.request)[0] for a in again]


def test_a_late_server_is_no_longer_asked_until_it_answers() -> None:
    made = fleet(2)
    slow, other = made.members
    asks = ask(made, 20, 0.0)
    owed = [a.request for a in asks if a.member is slow]
    assert made.overdue(14.9) == ([], [])
    for request in [a.request for a in asks if a.member is other]:
        made.answered(other, request, 14.9)
    assert made.due(14.9) == pytest.approx(0.1)
    late, moved = made.overdue(15.0)
    assert late == [slow] and slow.lates == 1
    assert moved == [Ask(other, request) for request in owed]
    assert slow.moved == len(owed)
    assert {a.member for a in ask(made, 20, 15.0, 20)} == {other}
    assert made.answered(other, owed[0], 15.1)[0]
    first, asks = made.answered(slow, owed[0], 15.2)
    assert (first, asks, slow.state) == (False, [], "up")
    assert made.answered(slow, owed[1], 15.3)[0]
    assert not made.answered(other, owed[1], 15.3)[0]
    assert slow in {a.member for a in ask(made, 20, 15.3, 40)}


def test_what_has_moved_from_a_late_server_does_not_move_again_when_it_dies() -> None:
    made = fleet(2)
    asks = ask(made, 20, 0.0)
    slow, other = made.members
    for request in [a.request for a in asks if a.member is other]:
        made.answered(other, request, 14.9)
    (_, moved), before = made.overdue(15.0), slow.moved
    assert before == len(moved) == len(slow.owed)
    assert made.lost(slow, "killed", 16.0) == []
    assert slow.moved == before


def test_a_server_whose_answers_lay_close_together_is_late_sooner() -> None:
    made = fleet(2)
    now = 0.0
    for request in range(60):
        (asked,) = made.ask(request, 0, request, now)
        now += 0.01
        made.answered(asked.member, request, now)
    ask(made, 10, now, 100)
    assert made.overdue(now + 1.9)[0] == []
    assert made.overdue(now + 2.0)[0] == made.members
    assert made.due(now + 2.0) is None  # nobody is better: each keeps what it has


def test_a_late_server_that_owes_nothing_is_tried_with_one_request_at_a_time_which_another_has_too() -> None:
    made = fleet(2)
    slow, other = made.members
    ask(made, 20, 0.0)
    for request in list(other.owed):
        made.answered(other, request, 14.9)
    made.overdue(15.0)
    made.cancel(19)
    asks = ask(made, 20, 16.0, 20)
    assert Counter(a.member for a in asks) == {other: 20, slow: 1}
    tried = next(a.request for a in asks if a.member is slow)
    assert made.rank(0, tried)[0] is slow
    assert made.answered(slow, tried, 16.1)[0] and slow.state == "up"


def test_one_request_that_is_stuck_goes_to_another_server_too_and_its_server_is_not_late() -> None:
    made = fleet(2)
    asks = ask(made, 20, 0.0)
    stuck, *rest = (a for a in asks if a.member is made.members[0])
    for asked in rest:
        made.answered(asked.member, asked.request, 14.0)
    for request in list(made.members[1].owed):
        made.answered(made.members[1], request, 14.0)
    assert made.overdue(15.0) == ([], [Ask(made.members[1], stuck.request)])
    assert made.overdue(15.0) == ([], [])


def test_a_trainer_that_was_stopped_itself_blames_nobody() -> None:
    made = fleet(2)
    asks = ask(made, 10, 0.0)
    for each in asks:  # all of it had arrived, and is taken first
        made.answered(each.member, each.request, 1000.0)
    ask(made, 10, 1000.0, 10)
    assert made.overdue(1000.0) == ([], [])


def test_a_chunk_that_one_server_cannot_bring_is_asked_for_at_each_other_once() -> None:
    made = fleet()
    (asked,) = made.ask(0, 0, 0, 0.0)
    order = made.rank(0, 0)
    assert asked.member is order[0]
    assert made.failed(order[0], 0, 1.0) == (False, [Ask(order[1], 0)])
    assert made.failed(order[1], 0, 1.0) == (False, [Ask(order[2], 0)])
    assert made.failed(order[2], 0, 1.0) == (True, [])
    assert made.failed(order[2], 0, 1.0) == (False, [])  # nobody waits for it any more


def test_requests_wait_while_nobody_is_there() -> None:
    made = Fleet(NAMES, 60.0)
    assert ask(made, 3, 0.0) == []
    member = made.to_open(0.0)[1]
    assert made.joined(member, "tcp", 4, 5.0) == [Ask(member, 0), Ask(member, 1), Ask(member, 2)]


def test_requests_for_which_no_server_has_room_are_asked_for_when_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTSTANDING", 2)
    made = fleet(2)
    coming = ask(made, 10, 0.0)
    assert len(coming) == 4
    ended = []
    while coming:
        member, request = coming.pop(0)
        over, asks = (made.failed if request % 3 == 0 else made.answered)(member, request, 1.0)
        ended += [request] * over
        coming += asks
        assert all(len(member.owed) <= 2 for member in made.members)
    assert sorted(ended) == list(range(10))


def test_attempts_to_join_come_later_each_time_until_it_works_and_brings_something() -> None:
    made = Fleet(NAMES[:1], 60.0)
    (member,) = made.members
    now, pauses = 0.0, []
    for _ in range(8):
        assert made.to_open(now) == [member]
        assert made.to_open(now) == []  # somebody is at it
        assert made.due(now) is None
        assert made.missing(member, "no daemon", now) is (now == 0.0)
        pauses.append(made.due(now))
        now += pauses[-1] or 0.0
    assert pauses[:3] == [pytest.approx(BACKOFF[0] * 2**n) for n in range(3)]
    assert pauses[-1] == pytest.approx(BACKOFF[1])
    made.to_open(now)
    made.joined(member, "shm", 4, now)
    made.lost(member, "killed", now)
    assert made.due(now) == pytest.approx(BACKOFF[1])  # one that is killed at once is not greeted at once
    made.to_open(now + 5)
    made.joined(member, "shm", 4, now + 5)
    made.ask(1, 0, 0, now + 5)
    made.answered(member, 1, now + 5)
    made.lost(member, "killed", now + 5)
    assert made.due(now + 5) == pytest.approx(BACKOFF[0])


# -- whatever happens -------------------------------------------------------------------------------------------


class Storm(RuleBasedStateMachine):
    """Servers that answer, fail, vanish, return and fall silent in any order. What was asked for ends just once."""

    @initialize(count=st.integers(2, 4), up=st.sets(st.integers(0, 3)))
    def begin(self, count: int, up: set[int]) -> None:
        self.fleet = Fleet([f"tcp://h{n}:1" for n in range(count)], 60.0)
        self.now = 0.0
        self.request = 0
        self.owed: dict[Member, list[int]] = {member: [] for member in self.fleet.members}
        self.ended: Counter[int] = Counter()
        self.open: set[int] = set()
        for member in self.fleet.to_open(0.0):
            if self.fleet.members.index(member) in up:
                self.take(self.fleet.joined(member, "shm", 3, 0.0))
            else:
                self.fleet.missing(member, "no daemon", 0.0)

    def take(self, asks: list[Ask]) -> None:
        for member, request in asks:
            assert member.up
            assert request in self.open
            assert request not in self.owed[member]  # nobody is asked twice for one thing
            self.owed[member].append(request)

    def some(self, data: Any, *, up: bool) -> Member:
        found = [member for member in self.fleet.members if member.up is up]
        assume(found)
        return data.draw(st.sampled_from(found))  # type: ignore[no-any-return]

    @rule(chunk=st.integers(0, 50))
    def ask(self, chunk: int) -> None:
        self.request += 1
        self.open.add(self.request)
        self.take(self.fleet.ask(self.request, 0, chunk, self.now))

    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: Any, fails: bool) -> None:
        member = self.some(data, up=True)
        assume(self.owed[member])
        request = data.draw(st.sampled_from(self.owed[member]))
        self.owed[member].remove(request)
        over, asks = (self.fleet.failed if fails else self.fleet.answered)(member, request, self.now)
        if over:
            self.ended[request] += 1
            self.open.remove(request)
        self.take(asks)

    @rule(data=st.data())
    def vanish(self, data: Any) -> None:
        member = self.some(data, up=True)
        self.owed[member] = []
        self.take(self.fleet.lost(member, "killed", self.now))

    @rule(seconds=st.sampled_from([0.05, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        _, asks = self.fleet.overdue(self.now)
        self.take(asks)
        assert self.fleet.overdue(self.now) == ([], [])
        due = self.fleet.due(self.now)
        assert due is None or due > 0 or any(not m.up and m.due <= self.now for m in self.fleet.members)

    @rule(data=st.data(), works=st.booleans())
    def join(self, data: Any, works: bool) -> None:
        waiting = self.fleet.to_open(self.now)
        for member in waiting:
            if works:
                self.take(self.fleet.joined(member, "tcp", 3, self.now))
            else:
                self.fleet.missing(member, "no daemon", self.now)

    @precondition(lambda self: self.request)
    @rule(back=st.integers(0, 5))
    def cancel(self, back: int) -> None:
        last = self.request - back
        self.fleet.cancel(last)
        self.open = {request for request in self.open if request > last}
        for member in self.owed:
            self.owed[member] = [request for request in self.owed[member] if request > last]

    @invariant()
    def somebody_has_each(self) -> None:
        if not hasattr(self, "fleet"):
            return
        good = {member for member in self.fleet.members if member.up and not member.late}
        for request in self.open:
            holders = {member for member in self.owed if request in self.owed[member]}
            assert holders or not self.fleet.up
            if not holders & good:
                assert all(member in self.refused(request) for member in good)
        for member, owed in self.owed.items():
            assert list(member.owed) == owed or sorted(member.owed) == sorted(owed)

    def refused(self, request: int) -> list[Member]:
        return self.fleet._open[request].refused

    def teardown(self) -> None:
        """At last all come back and answer."""
        if not hasattr(self, "fleet"):
            return
        for _ in range(3):
            self.now += 10
            for member in self.fleet.to_open(self.now):
                self.take(self.fleet.joined(member, "shm", 3, self.now))
            for member in self.fleet.members:
                while self.owed[member]:
                    request = self.owed[member].pop()
                    over, asks = self.fleet.answered(member, request, self.now)
                    self.take(asks)
                    self.ended[request] += over
                    if over:
                        self.open.remove(request)
        assert not self.open
        assert not self.ended or set(self.ended.values()) <= {1, 0}


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=80, stateful_step_count=40)
