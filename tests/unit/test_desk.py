"""Who gets which chunk, what is computed next; also by a state machine that plays all parties."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.protocol import MAX_COUNT
from headrace.server.cache import Slot, State
from headrace.server.desk import Delivery, Desk, Session

CHUNKS = 12


def desk(slots: int = 4, in_flight: int = 2) -> Desk:
    return Desk(slots, in_flight, CHUNKS)


def join(at: Desk, name: str, home: int | None = None) -> Session:
    session = Session(name, home)
    at.join(session)
    return session


def compute(at: Desk) -> tuple[int, int] | None:
    task = at.next_fill()
    if task is None:
        return None
    address = task.slot.address
    at.filled(task.slot, [], "fake")
    return address


def test_fewer_slots_than_one_more_than_in_flight_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        Desk(2, 2, CHUNKS)


def test_a_chunk_that_several_ask_for_is_computed_once() -> None:
    at = desk()
    sessions = [join(at, str(i)) for i in range(3)]
    for session in sessions:
        at.get(session, 1, (0, 7))
    assert compute(at) == (0, 7)
    assert {d.session for d in at.deliveries()} == set(sessions)
    assert compute(at) is None and at.counters.computed == 1


def test_a_hit_is_a_delivery_of_what_was_computed_for_an_earlier_request() -> None:
    at = desk()
    first, second = join(at, "first"), join(at, "second")
    at.get(first, 1, (0, 7))
    at.get(first, 2, (0, 8))
    assert (compute(at), at.waiting, at.leased) == ((0, 7), 2, 0)
    [delivery] = at.deliveries()
    assert (first.delivered, first.hits, at.waiting, at.leased) == (1, 0, 1, 1)
    at.get(second, 1, (0, 7))
    assert len(at.deliveries()) == 1
    assert (second.delivered, second.hits, second.recomputed, at.leased) == (1, 1, 0, 1)
    at.release(first, delivery.request)
    at.release(second, 1)
    assert (at.counters.delivered, at.counters.hits, at.leased) == (2, 1, 0)
    assert (at.cache.ready, at.cache.filling) == (1, 0)


def test_a_straggler_is_known_by_what_was_computed_again_for_it_and_how_far_it_lags() -> None:
    at = desk(slots=3, in_flight=2)
    leader, straggler = join(at, "leader"), join(at, "straggler")
    for chunk in range(CHUNKS):
        at.get(leader, chunk, (0, chunk))
        compute(at)
        [delivery] = at.deliveries()
        at.release(leader, delivery.request)
    assert at.lags() == {leader: 0, straggler: 0}  # it has not begun
    at.get(straggler, 0, (0, 2))
    assert (compute(at), at.cache.filling) == ((0, 2), 0)
    assert len(at.deliveries()) == 1
    assert (straggler.delivered, straggler.hits, straggler.recomputed) == (1, 0, 1)
    assert at.lags() == {leader: 0, straggler: CHUNKS - 3}
    at.get(leader, CHUNKS, (1, 0))
    compute(at)
    at.deliveries()
    assert at.lags() == {leader: 0, straggler: CHUNKS - 2}  # epochs follow one another
    at.leave(leader)
    assert at.lags() == {straggler: 0}
    assert (leader.hits, leader.recomputed) == (0, 0)


def test_a_session_that_asks_for_the_last_of_all_epochs_leaves_lags_that_can_be_said() -> None:
    at = desk(slots=3, in_flight=1)
    first, stranger = join(at, "first"), join(at, "stranger")
    for session, epoch in ((first, 0), (stranger, MAX_COUNT)):
        at.get(session, 1, (epoch, CHUNKS - 1))
        compute(at)
        assert len(at.deliveries()) == 1
    assert at.lags() == {first: MAX_COUNT, stranger: 0}


def test_sessions_take_turns_each_with_its_oldest_request() -> None:
    at = desk(slots=12)
    a, b = join(at, "a"), join(at, "b")
    for n, k in enumerate((0, 1, 2)):
        at.get(a, n, (0, k))
    at.get(b, 0, (0, 9))
    assert [compute(at) for _ in range(4)] == [(0, 0), (0, 9), (0, 1), (0, 2)]


def test_a_session_holds_at_most_its_share_and_the_rest_is_delivered_when_it_releases() -> None:
    at = desk(slots=4, in_flight=2)
    a, b = join(at, "a"), join(at, "b")
    assert at.share == 1
    at.get(a, 1, (0, 0))
    at.get(a, 2, (0, 1))
    compute(at), compute(at)
    assert [d.request for d in at.deliveries()] == [1]
    assert at.deliveries() == []
    at.release(a, 1)
    assert [d.request for d in at.deliveries()] == [2]
    at.leave(b)
    assert at.share == 2


def test_a_reader_that_stopped_causes_no_more_work_and_blocks_nobody() -> None:
    at = desk(slots=4, in_flight=2)
    stopped, live = join(at, "stopped"), join(at, "live")
    for k in range(4):
        at.get(stopped, k, (0, k))
    compute(at)
    assert [d.session for d in at.deliveries()] == [stopped]
    for k in range(4, CHUNKS):
        at.get(live, k, (0, k))
        assert compute(at) == (0, k)
        [delivery] = at.deliveries()
        assert delivery.session is live
        at.release(live, k)
    assert at.next_fill() is None


def test_what_a_dead_session_held_is_free_and_what_it_wanted_is_forgotten() -> None:
    at = desk(slots=3, in_flight=2)
    dead = join(at, "dead")
    at.get(dead, 1, (0, 0))
    at.get(dead, 2, (0, 1))
    compute(at)
    at.deliveries()
    at.leave(dead)
    assert at.next_fill() is None
    other = join(at, "other")
    at.get(other, 1, (0, 5))
    assert compute(at) == (0, 5)


def test_a_session_that_has_ended_counts_until_its_last_lease_has_ended() -> None:
    at = desk(slots=4, in_flight=2)
    gone, other = join(at, "gone"), join(at, "other")
    at.get(gone, 1, (0, 0))
    compute(at)
    [delivery] = at.deliveries()
    at.get(gone, 2, (0, 1))
    at.end(gone)
    assert delivery.slot.leases and set(at.sessions) == {gone, other} and at.share == 1
    assert at.next_fill() is None and at.deliveries() == []
    at.release(gone, 1)
    assert not delivery.slot.leases and at.sessions == [other] and at.share == 2


def test_a_session_that_ends_and_reads_nothing_is_gone_at_once() -> None:
    at = desk()
    session = join(at, "a")
    at.get(session, 1, (0, 0))
    at.end(session)
    assert at.sessions == [] and at.next_fill() is None


def test_a_delivery_says_which_rows_were_asked_for() -> None:
    at = desk()
    a, b = join(at, "a"), join(at, "b")
    at.get(a, 1, (0, 0), first=1, rows=2)
    at.get(b, 1, (0, 0))
    compute(at)
    assert sorted((d.session.name, d.first, d.rows) for d in at.deliveries()) == [("a", 1, 2), ("b", 0, 0)]


def test_a_cancelled_request_is_not_computed_and_a_delivered_one_must_still_be_released() -> None:
    at = desk()
    a = join(at, "a")
    at.get(a, 1, (0, 0))
    compute(at)
    [delivery] = at.deliveries()
    at.get(a, 2, (0, 1))
    at.cancel(a, 2)
    assert at.next_fill() is None and delivery.slot.leases
    at.release(a, 1)
    assert not delivery.slot.leases


def test_a_failed_chunk_is_told_to_all_that_wait_for_it_and_is_tried_again_when_asked_again() -> None:
    at = desk()
    a, b = join(at, "a"), join(at, "b")
    at.get(a, 1, (0, 0))
    at.get(b, 7, (0, 0))
    task = at.next_fill()
    assert task is not None
    assert sorted((s.name, n) for s, n in at.failed(task.slot)) == [("a", 1), ("b", 7)]
    assert at.next_fill() is None
    at.get(a, 2, (0, 0))
    assert compute(at) == (0, 0)


def test_a_request_number_in_use_is_refused() -> None:
    at = desk()
    a = join(at, "a")
    at.get(a, 1, (0, 0))
    with pytest.raises(ValueError, match="in use"):
        at.get(a, 1, (0, 1))


def test_a_chunk_computed_twice_is_counted_as_recomputed() -> None:
    at = desk(slots=3, in_flight=2)
    a = join(at, "a")
    for n, k in enumerate((0, 1, 2, 3, 0)):
        at.get(a, n, (0, k))
        compute(at)
        at.deliveries()
        at.release(a, n)
    assert (at.counters.computed, at.counters.recomputed) == (5, 1)


def test_who_is_at_home_at_a_gpu_without_room_is_passed_over_keeps_its_turn_and_is_served_in_the_end() -> None:
    at = desk(slots=12)
    sessions = join(at, "a", 0), join(at, "b", 1), join(at, "c")
    for first, session in zip((0, 4, 8), sessions, strict=True):
        for n in range(3):
            at.get(session, n, (0, first + n))

    def next_of(*passed: int) -> tuple[int, int | None] | None:
        task = at.next_fill(passed)
        if task is None:
            return None
        assert task.slot.address is not None
        return task.slot.address[1], task.home

    assert [next_of(0) for _ in range(3)] == [(4, 1), (8, None), (5, 1)]
    assert next_of(1) == (0, 0)  # it was its turn all the time
    assert next_of() == (9, None)
    assert [next_of(0) for _ in range(3)] == [(6, 1), (10, None), None]  # nothing but what is for the full one
    assert [next_of() for _ in range(3)] == [(1, 0), (2, 0), None]


def test_a_chunk_for_gpus_of_several_is_for_that_of_whose_turn_it_was() -> None:
    at = desk()
    for name, home in (("a", 1), ("b", 0)):
        at.get(join(at, name, home), 1, (0, 7))
    task = at.next_fill([1])
    assert task is not None and (task.slot.address, task.home) == ((0, 7), 0)
    at.filled(task.slot, [], "fake")
    assert {delivery.session.name for delivery in at.deliveries()} == {"a", "b"}


def test_who_just_missed_a_chunk_is_no_straggler_and_has_its_turn() -> None:
    at = desk(slots=4, in_flight=1)
    first, second = join(at, "first"), join(at, "second")
    for chunk in range(6):  # of which the first ones have gone
        at.get(first, chunk, (0, chunk))
        compute(at)
        for delivery in at.deliveries():
            at.release(first, delivery.request)
    for n in range(2):
        at.get(first, 10 + n, (0, 6 + n))
        at.get(second, 10 + n, (0, 1 + n))
    assert [compute(at) for _ in range(3)] == [(0, 1), (0, 6), (0, 7)]  # it was its turn; 2 is there still


@dataclass
class Job:
    """A trainer that takes a chunk every `pace` ticks, from `begin` to `end`, with two requests outstanding."""

    begin: int
    end: int
    start: int = 0
    pace: int = 1

    def __post_init__(self) -> None:
        self.session = Session("")
        self.asked = self.taken = self.begin

    def ask(self, at: Desk) -> None:
        while self.asked < min(self.end, self.taken + 2):
            at.get(self.session, self.asked, divmod(self.asked, CHUNKS))
            self.asked += 1

    def take(self, tick: int) -> None:
        self.taken += tick % self.pace == 0 and self.taken < self.asked and self.taken not in self.session.pending


def play(at: Desk, jobs: list[Job], *, per_tick: int = 99) -> int:
    """Ticks until all jobs are done; the workers compute so many chunks in each."""
    for tick in range(2000):
        live = [job for job in jobs if tick >= job.start and job.taken < job.end]
        if all(job.taken == job.end for job in jobs):
            return tick
        for job in live:
            if job.session not in at.sessions:
                at.join(job.session)
            job.ask(at)
        for _ in range(per_tick):
            if compute(at) is None:
                break
        for delivery in at.deliveries():
            at.release(delivery.session, delivery.request)
        for job in live:
            job.take(tick)
            if job.taken == job.end:
                at.leave(job.session)
    raise AssertionError([(job.taken, job.end) for job in jobs])


def test_trainers_near_each_other_share_be_they_the_first_or_others_have_been_there_before() -> None:
    at = desk(slots=8)
    for _ in range(3):
        computed = at.counters.computed
        first, second = Job(0, 5 * CHUNKS), Job(0, 5 * CHUNKS, start=3)
        play(at, [first, second])
        assert at.counters.computed - computed == 5 * CHUNKS
        assert first.session.hits + second.session.hits == 5 * CHUNKS


def test_two_that_are_behind_a_third_share_too() -> None:
    at = desk(slots=12)
    leader = Job(0, 500)
    behind = [Job(0, 150, start=200), Job(0, 150, start=203)]
    play(at, [leader, *behind])
    assert leader.session.recomputed == 0
    assert sum(job.session.recomputed for job in behind) <= 150 + 12  # once, but for what goes while they make room


@pytest.mark.parametrize("pace", [1, 3])
def test_a_straggler_takes_nothing_from_what_the_others_share(pace: int) -> None:
    at = desk(slots=10)
    leaders = [Job(0, 400), Job(0, 400, start=3)]
    straggler = Job(0, 60, start=100, pace=pace)
    play(at, [*leaders, straggler])
    assert [job.session.recomputed for job in leaders] == [0, 0]
    assert sum(job.session.hits for job in leaders) == 400
    assert straggler.session.recomputed == 60 == at.counters.recomputed


def test_on_saturated_workers_a_straggler_costs_the_others_no_more_than_its_own_chunks() -> None:
    at = desk(slots=10)
    leaders = [Job(0, 200), Job(0, 200, start=2)]
    straggler = Job(0, 30, start=50)
    ticks = play(at, [*leaders, straggler], per_tick=1)
    assert straggler.session.recomputed == 30
    assert ticks <= 200 + 30 + 3  # no more than the time that its own chunks need
    alone = play(desk(slots=10), [Job(0, 200), Job(0, 200, start=2)], per_tick=1)
    assert alone <= 203


def test_a_straggler_is_passed_over_three_times_in_a_row_and_no_more() -> None:
    at = desk(slots=3, in_flight=2)
    late, live = join(at, "late"), join(at, "live")

    def next_one() -> str:
        address = compute(at)
        for delivery in at.deliveries():
            at.release(delivery.session, delivery.request)
        return "none" if address is None else ("late", "live")[address[0]]

    for chunk in range(8):
        at.get(late, chunk, (0, chunk))
    assert [next_one() for _ in range(9)] == ["late"] * 8 + ["none"]  # and each of them but the last has gone since
    for chunk in range(5):
        at.get(late, 10 + chunk, (0, chunk))
        at.get(live, 10 + chunk, (1, chunk))
    order = [next_one() for _ in range(11)]
    assert order == ["live", "late", "live", "live", "live", "late", "live", "late", "late", "late", "none"]


class Parties(RuleBasedStateMachine):
    """Readers, workers and deaths in any order; every slot's content is checked from lease to release."""

    @initialize(slots=st.integers(2, 6), in_flight=st.integers(1, 3))
    def begin(self, slots: int, in_flight: int) -> None:
        self.in_flight = in_flight
        self.desk = Desk(max(slots, in_flight + 1), in_flight, CHUNKS)
        self.live: list[Session] = []
        self.reading: list[tuple[Delivery, tuple[int, int]]] = []
        self.writing: list[Slot] = []
        self.asked: dict[tuple[Session, int], tuple[int, int]] = {}
        self.content: dict[int, tuple[int, int]] = {}
        self.number = 0

    @rule()
    def join(self) -> None:
        if len(self.live) < 4:
            self.live.append(join(self.desk, f"s{self.number}"))
            self.number += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), epoch=st.integers(0, 1), chunk=st.integers(0, CHUNKS - 1))
    def ask(self, data: st.DataObject, epoch: int, chunk: int) -> None:
        session = data.draw(st.sampled_from(self.live))
        self.number += 1
        self.desk.get(session, self.number, (epoch, chunk))
        self.asked[session, self.number] = (epoch, chunk)

    @rule()
    def deliver(self) -> None:
        for delivery in self.desk.deliveries():
            address = self.asked.pop((delivery.session, delivery.request))
            assert delivery.slot.address == address == self.content[delivery.slot.number]
            assert len(delivery.session.leases) <= self.desk.share
            self.reading.append((delivery, address))

    @rule(passed=st.sets(st.integers(0, 1)))
    def work(self, passed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        if len(self.writing) >= self.in_flight:
            return
        task = self.desk.next_fill(passed)
        if task is None:
            return
        assert task.home not in passed
        slot = task.slot
        assert not slot.leases and slot.state is State.FILLING
        assert slot.number not in {d.slot.number for d, _ in self.reading}
        assert slot.number not in {s.number for s in self.writing}
        self.content.pop(slot.number, None)
        self.writing.append(slot)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.booleans())
    def answer(self, data: st.DataObject, good: bool) -> None:
        slot = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        assert slot.address is not None
        if good:
            self.content[slot.number] = slot.address
            self.desk.filled(slot, [], "fake")
        else:
            for told in self.desk.failed(slot):
                assert self.asked.pop(told)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        delivery, address = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        assert self.content[delivery.slot.number] == address  # nobody wrote while it was read
        self.desk.release(delivery.session, delivery.request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.live))
        self.desk.cancel(session)
        self.asked = {k: v for k, v in self.asked.items() if k[0] is not session}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        session = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.desk.leave(session)
        self.reading = [r for r in self.reading if r[0].session is not session]
        self.asked = {k: v for k, v in self.asked.items() if k[0] is not session}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """It wants nothing more; what it has goes on being read."""
        session = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.desk.end(session)
        self.asked = {k: v for k, v in self.asked.items() if k[0] is not session}
        assert (session in self.desk.sessions) == any(d.session is session for d, _ in self.reading)

    @precondition(lambda self: self.live)
    @rule()
    def everybody_keeps_going(self) -> None:
        """While all read and answer, everything asked for arrives in a bounded number of rounds."""
        for _ in range(4 * (len(self.asked) + 1)):
            while self.reading:
                delivery, _ = self.reading.pop()
                self.desk.release(delivery.session, delivery.request)
            self.deliver()
            self.work()
            while self.writing:
                slot = self.writing.pop()
                assert slot.address is not None
                self.content[slot.number] = slot.address
                self.desk.filled(slot, [], "fake")
            self.deliver()
        assert not self.asked

    @invariant()
    def what_is_wanted_is_what_is_pending(self) -> None:
        if hasattr(self, "desk"):
            pending = {(s, n): w.address for s in self.desk.sessions for n, w in s.pending.items()}
            assert pending == self.asked

    @invariant()
    def what_is_counted_is_what_there_is(self) -> None:
        if not hasattr(self, "desk"):
            return
        cache, counters = self.desk.cache, self.desk.counters
        states = [slot.state for slot in cache.slots]
        assert (cache.ready, cache.filling) == (states.count(State.READY), states.count(State.FILLING))
        assert self.desk.leased == sum(bool(slot.leases) for slot in cache.slots)
        assert self.desk.waiting == len(self.asked)
        # Who computed a chunk may never have handed it out; the first who gets it is no hit.
        assert counters.delivered - counters.computed <= counters.hits <= counters.delivered


TestParties = Parties.TestCase
TestParties.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
