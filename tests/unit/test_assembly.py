"""The assembly: chunks in any order become batches in order, and every position is accounted for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.assembly import REPLACEMENTS, TOLERATED, Assembly, Counts, OnBadSample, Want, ready
from headrace.batch import Batch
from headrace.errors import DatasetError, HeadraceError, SampleError, TooManyRejects
from headrace.form import Form
from headrace.output import Output
from headrace.protocol import RowReject
from headrace.slots import SlotLayout
from headrace.steps import LastBatch, Steps

BLACK = 0.0


def index_of(position: int, samples: int) -> int:
    """Some order that is not the identity."""
    return (position * 7 + 3) % samples if samples % 7 else samples - 1 - position


@dataclass
class Driver:
    """Plays the engine: asks, copies, reports; a picture's pixel is its position plus one.

    Its label is a vector and it has a column, both of which name the index.
    """

    steps: Steps
    chunk: int = 4
    start: int = 0
    epoch: int = 2
    prefetch: int = 2
    busy: int = 1
    window: int = 3
    policy: OnBadSample = "skip"
    max_bad: float = 1.0
    bad: frozenset[int] = frozenset()
    seed: int = 0
    counts: Counts = field(default_factory=Counts)
    asked: list[int] = field(default_factory=list)
    outstanding: list[Want] = field(default_factory=list)
    lent: int = 0
    most_lent: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.form = Form("numpy", Output("float32", "NHWC"), height=1, width=1,
                         batch_size=self.steps.batch_size, prefetch=self.prefetch, columns=["name"])  # fmt: skip
        self.assembly = Assembly(
            epoch=self.epoch, start=self.start, steps=self.steps, layout=SlotLayout(self.chunk, 1, 1, "float32", 2, 9),
            prefetch=self.prefetch, on_bad_sample=self.policy, max_bad=self.max_bad, allocate=self.allocate,
            uniforms=self.uniforms, counts=self.counts, busy=self.busy,
        )  # fmt: skip

    def allocate(self, rows: int) -> NDArray[Any]:
        self.lent += rows
        self.most_lent = max(self.most_lent, self.lent)
        return np.full((rows, 1, 1, 3), np.nan, np.float32)

    def uniforms(self, position: int) -> NDArray[np.float64]:
        return np.random.default_rng([self.epoch, position]).random(REPLACEMENTS)

    def ask(self) -> None:
        while len(self.outstanding) < self.window and (want := self.assembly.want()) is not None:
            self.asked.append(want.chunk)
            self.outstanding.append(want)

    def arrive(self, want: Want) -> None:
        """The chunk of an outstanding want is there."""
        self.outstanding.remove(want)
        samples = self.steps.samples
        positions = [p for p in range(want.chunk * self.chunk, (want.chunk + 1) * self.chunk) if p < samples]
        bad = {
            row: RowReject(row=row, index=index_of(p, samples), path=f"/data/{p}.jpg", stage="decode", reason="cut")
            for row, p in enumerate(positions)
            if p in self.bad
        }
        for piece in want.pieces:
            assert piece.first + piece.size <= len(positions)
            for i in range(piece.size):
                row, target = piece.first + i, piece.row + i
                if piece.tries and row in bad:
                    continue
                piece.draft.images[target] = BLACK if row in bad else positions[row] + 1
                index = index_of(positions[row], samples)
                piece.draft.labels[target] = index / 2, -index
                piece.draft.indices[target] = index
                piece.draft.texts[target] = (f"name {index}",)
        for draft in self.assembly.arrived(want, bad):
            assert draft.missing == 0
            draft.batch = self.form.make(draft, self.epoch)

    def next(self) -> Batch:
        """As the Loader's, with arrivals in random order."""
        while True:
            self.ask()
            batch = self.assembly.take()
            if batch is not None:
                self.assembly.handed = None
                self.lent -= len(self.steps.block(self.start, batch.step))
                return batch
            self.ask()  # what failed before is wanted again from now on
            assert self.outstanding, "nothing is outstanding and no batch is ready: it would wait for ever"
            self.arrive(self.random.choice(self.outstanding))

    def epoch_of(self) -> list[Batch]:
        batches = []
        while not self.assembly.done:
            batches.append(self.next())
        return batches


def pixels(batch: Batch) -> list[float]:
    assert (batch.images == batch.images[:, :, :, :1]).all()
    return [float(v) for v in batch.images[:, 0, 0, 0]]


def check_labels(batch: Batch) -> None:
    """Each row has the label and the column of the sample that it says it shows."""
    assert batch.labels.dtype == np.float32
    assert batch.labels.tolist() == [[i / 2, -i] for i in batch.indices]
    assert batch.extra == {"name": [f"name {i}" for i in batch.indices]}


def plain_rows(batch: Batch) -> list[int]:
    """Positions of the valid rows, by their pixels."""
    return [int(v) - 1 for v, valid in zip(pixels(batch), batch.valid, strict=True) if valid]


policies: st.SearchStrategy[OnBadSample] = st.sampled_from(["skip", "replace", "mask"])
modes: st.SearchStrategy[LastBatch] = st.sampled_from(["drop", "partial", "pad"])


@settings(max_examples=150)
@given(st.data(), st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), modes, policies)
def test_every_position_is_delivered_rejected_or_dropped_once_over_all_ranks(
    data: st.DataObject, samples: int, batch_size: int, world: int, chunk: int, mode: LastBatch, policy: OnBadSample
) -> None:
    assume(mode != "drop" or samples >= batch_size * world)
    good = data.draw(st.integers(0, samples - 1))
    bad = frozenset(data.draw(st.sets(st.integers(0, samples - 1)))) - {good}
    start = data.draw(st.integers(0, samples - 1))
    delivered: list[int] = []
    rejected: list[int] = []
    dropped = 0
    for rank in range(world):
        driver = Driver(
            Steps(samples, batch_size, rank, world, mode), chunk, start, policy=policy, bad=bad, seed=rank,
            prefetch=data.draw(st.integers(0, 3)), window=data.draw(st.integers(1, 5)),
        )  # fmt: skip
        try:
            batches = driver.epoch_of()
        except TooManyRejects:  # this rank's last batch, and not one valid row before it
            assert not driver.counts.delivered
            assume(False)
        assert [b.step for b in batches] == list(range(driver.steps.count(start)))
        for batch in batches:
            positions = driver.steps.block(start, batch.step)
            assert 1 <= len(batch.indices) <= batch_size
            assert plain_rows(batch) == [p for p in positions if p < samples and p not in bad]
            assert [r.position for r in batch.rejects] == [p for p in positions if p < samples and p in bad]
            assert all(r.index == index_of(r.position, samples) for r in batch.rejects)
            check_labels(batch)
            if policy != "skip":
                assert len(batch.indices) == len(positions)
            delivered += plain_rows(batch)
            rejected += [r.position for r in batch.rejects]
        counts = driver.counts
        assert counts.delivered == sum(int(b.valid.sum()) for b in batches)
        assert counts.extra == sum(int((~b.valid).sum()) for b in batches)
        assert counts.rejected == sum(len(b.rejects) for b in batches)
        dropped += counts.dropped
    assert len(set(delivered)) == len(delivered)
    assert len(delivered) + len(rejected) + dropped == samples - start
    assert sorted(delivered + rejected) == list(range(start, samples - dropped))


@given(st.data(), st.integers(17, 60), st.integers(1, 12), st.integers(1, 9), policies, st.floats(0, 1))
def test_an_epoch_either_ends_or_says_that_too_many_were_bad_and_never_waits_for_ever(
    data: st.DataObject, samples: int, batch_size: int, chunk: int, policy: OnBadSample, max_bad: float
) -> None:
    bad = frozenset(data.draw(st.sets(st.integers(0, samples - 1), min_size=samples // 3)))
    driver = Driver(
        Steps(samples, batch_size, 0, 1, "pad"), chunk, policy=policy, bad=bad, max_bad=max_bad,
        prefetch=data.draw(st.integers(0, 3)), window=data.draw(st.integers(1, 5)), seed=data.draw(st.integers(0, 9)),
    )  # fmt: skip
    try:
        driver.epoch_of()
    except TooManyRejects:
        assert len(bad) == samples or len(bad) > max(TOLERATED, max_bad * samples)
    else:
        assert driver.counts.rejected == len(bad) <= max(TOLERATED, max_bad * samples)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 4), st.integers(1, 9), modes, st.integers(0, 3))
def test_each_chunk_is_fetched_once_unless_padding_wraps_around(
    samples: int, batch_size: int, world: int, chunk: int, mode: LastBatch, prefetch: int
) -> None:
    assume(mode != "drop" or samples >= batch_size * world)
    for rank in range(world):
        driver = Driver(Steps(samples, batch_size, rank, world, mode), chunk, prefetch=prefetch, seed=rank)
        driver.epoch_of()
        own = {p // chunk for s in range(driver.steps.count(0)) for p in driver.steps.block(0, s) if p < samples}
        copies = {
            p % samples // chunk for s in range(driver.steps.count(0)) for p in driver.steps.block(0, s) if p >= samples
        }
        assert own <= set(driver.asked) <= own | copies
        assert len(driver.asked) <= len(own) + len(copies)


@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 4))
def test_memory_is_held_for_the_prefetched_batches_and_for_what_their_chunks_touch(
    batch_size: int, chunk: int, prefetch: int
) -> None:
    driver = Driver(Steps(200, batch_size, 0, 1, "partial"), chunk, prefetch=prefetch, window=50)
    driver.epoch_of()
    ahead = max((prefetch + 1) * batch_size, prefetch * (2 * chunk + batch_size))
    assert driver.most_lent <= ahead + chunk + batch_size


@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 4), st.integers(1, 3), st.integers(0, 20))
def test_no_more_batches_are_made_up_and_not_taken_than_is_said(
    batch_size: int, chunk: int, prefetch: int, world: int, start: int
) -> None:
    steps = Steps(120, batch_size, world - 1, world, "pad")
    driver = Driver(steps, chunk, start, prefetch=prefetch, window=50)
    following = Driver(steps, chunk, epoch=3, prefetch=prefetch, window=50)
    most = 0
    for assembly in (driver.assembly, following.assembly):
        while not assembly.done:
            for each, before in ((driver, 0), (following, driver.assembly.count - driver.assembly.taken)):
                while (want := each.assembly.want(before)) is not None:
                    each.outstanding.append(want)
                while each.outstanding:
                    each.arrive(each.outstanding[0])
            made = [d for each in (driver, following) for d in each.assembly._drafts.values() if d.batch is not None]
            taken = {id(d) for d in driver.assembly._drafts.values() if d.step < driver.assembly.taken}
            taken |= {id(d) for d in following.assembly._drafts.values() if d.step < following.assembly.taken}
            most = max(most, len([d for d in made if id(d) not in taken]))
            assert assembly.take() is not None
            assembly.handed = None
    assert most <= ready(prefetch, chunk, steps.stride, batch_size)


@given(st.integers(1, 10), st.integers(1, 10), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_all_ranks_together_ask_for_as_many_chunks_as_can_be_worked_at(
    batch_size: int, chunk: int, prefetch: int, world: int, busy: int
) -> None:
    asked: set[int] = set()
    for rank in range(world):
        steps = Steps(4000, batch_size, rank, world, "pad")
        driver = Driver(steps, chunk, prefetch=prefetch, busy=busy, window=1000)
        driver.ask()
        asked.update(driver.asked)
        assert len(driver.outstanding) <= busy + (prefetch + 2) * (2 + -(-batch_size * world // chunk))
    assert len(asked) >= busy


def test_batches_smaller_than_a_chunk_keep_several_chunks_asked_for() -> None:
    driver = Driver(Steps(1000, 1, 0, 1, "partial"), chunk=8, window=100, prefetch=2)
    driver.ask()
    assert driver.asked == [0, 1, 2, 3]
    without = Driver(Steps(1000, 1, 0, 1, "partial"), chunk=8, window=100, prefetch=0)
    without.ask()
    assert without.asked == [0]


def test_what_is_needed_first_is_asked_for_first() -> None:
    driver = Driver(Steps(40, 10, 0, 1, "partial"), chunk=4, window=100, prefetch=1)
    driver.ask()
    assert driver.asked == [0, 1, 2, 3, 4]


def test_batches_of_the_epoch_before_count_among_those_that_are_kept_ready() -> None:
    steps = Steps(40, 10, 0, 1, "partial")  # a batch is five chunks, and two batches are kept ready beside one more
    for before, chunks in ((4, 0), (3, 0), (2, 5), (1, 10), (0, 15)):
        assembly = Driver(steps, chunk=2).assembly
        asked = 0
        while assembly.want(before) is not None:
            asked += 1
        assert asked == chunks, before


def test_the_window_bounds_what_is_outstanding() -> None:
    driver = Driver(Steps(40, 10, 0, 1, "partial"), chunk=2, window=2)
    driver.ask()
    assert len(driver.outstanding) == 2


def test_a_batch_is_taken_only_in_its_turn() -> None:
    driver = Driver(Steps(12, 4, 0, 1, "partial"), chunk=4, window=9)
    driver.ask()
    second = next(w for w in driver.outstanding if w.chunk == 1)
    driver.arrive(second)
    assert driver.assembly.take() is None
    assert driver.next().step == 0
    assert driver.next().step == 1


def test_a_lost_request_is_asked_again_before_later_ones() -> None:
    driver = Driver(Steps(40, 4, 0, 1, "partial"), chunk=4, window=2, prefetch=5)
    driver.ask()
    first = driver.outstanding.pop(0)
    driver.assembly.again([first])
    driver.ask()
    assert driver.asked == [0, 1, 0]
    assert [plain_rows(b) for b in driver.epoch_of()] == [list(range(4 * s, 4 * s + 4)) for s in range(10)]


def test_state_moves_with_each_batch_and_ends_at_the_next_epoch() -> None:
    driver = Driver(Steps(10, 4, 1, 2, "pad"), epoch=5)
    states = [driver.assembly.state]
    while not driver.assembly.done:
        driver.next()
        states.append(driver.assembly.state)
    assert states == [(5, 0), (5, 8), (6, 0)]


def test_skip_closes_up_the_rows_and_keeps_their_order() -> None:
    driver = Driver(Steps(10, 10, 0, 1, "partial"), bad=frozenset({0, 3, 4, 9}))
    batch = driver.next()
    assert plain_rows(batch) == [1, 2, 5, 6, 7, 8]
    assert batch.valid.all()
    assert batch.images.shape == (6, 1, 1, 3)


def test_a_batch_of_which_nothing_survives_carries_one_masked_row() -> None:
    driver = Driver(Steps(12, 4, 0, 1, "partial"), bad=frozenset(range(4, 8)))
    driver.next()
    batch = driver.next()
    assert pixels(batch) == [BLACK]
    assert list(batch.valid) == [False]
    assert list(batch.indices) == [index_of(4, 12)]
    check_labels(batch)
    assert [r.position for r in batch.rejects] == [4, 5, 6, 7]
    driver.next()
    assert driver.counts == Counts(delivered=8, rejected=4, dropped=0, extra=1)


def test_mask_is_black_with_the_listed_label_and_not_valid() -> None:
    driver = Driver(Steps(8, 8, 0, 1, "partial"), policy="mask", bad=frozenset({2}))
    batch = driver.next()
    assert pixels(batch)[2] == BLACK
    assert list(np.flatnonzero(~batch.valid)) == [2]
    assert list(batch.indices) == [index_of(p, 8) for p in range(8)]
    check_labels(batch)


def test_replace_takes_the_position_that_the_table_names_and_says_so() -> None:
    driver = Driver(Steps(40, 8, 0, 1, "partial"), policy="replace", bad=frozenset({2}))
    batch = driver.next()
    expected = next(p for p in (int(u * 40) for u in driver.uniforms(2)) if p != 2)
    assert pixels(batch)[2] == expected + 1
    assert batch.indices[2] == index_of(expected, 40)
    check_labels(batch)
    assert list(np.flatnonzero(~batch.valid)) == [2]
    assert [r.position for r in batch.rejects] == [2]


def test_replace_goes_on_to_the_next_number_while_the_replacement_is_bad_too() -> None:
    tries = [int(u * 40) for u in Driver(Steps(40, 8, 0, 1, "partial")).uniforms(2)]
    driver = Driver(Steps(40, 8, 0, 1, "partial"), policy="replace", bad=frozenset({2, *tries[:5]}) - {tries[5]})
    assert pixels(driver.next())[2] == tries[5] + 1


def test_replace_masks_after_sixteen_bad_replacements() -> None:
    tries = {int(u * 400) for u in Driver(Steps(400, 8, 0, 1, "partial")).uniforms(2)}
    driver = Driver(Steps(400, 8, 0, 1, "partial"), policy="replace", bad=frozenset({2, *tries}))
    batch = driver.next()
    assert pixels(batch)[2] == BLACK
    assert batch.indices[2] == index_of(2, 400)
    check_labels(batch)
    assert not batch.valid[2]


@pytest.mark.parametrize("policy", ["skip", "mask", "replace"])
def test_what_a_batch_holds_does_not_depend_on_the_order_of_arrival(policy: OnBadSample) -> None:
    def run(seed: int, window: int) -> list[tuple[list[float], list[int], list[bool]]]:
        driver = Driver(Steps(50, 7, 0, 1, "pad"), policy=policy, bad=frozenset({0, 5, 6, 20, 21, 22, 49}), seed=seed,
                        window=window)  # fmt: skip
        return [(pixels(b), b.indices.tolist(), b.valid.tolist()) for b in driver.epoch_of()]

    first = run(0, 1)
    assert all(run(seed, window) == first for seed in range(5) for window in (2, 9))


def test_the_rows_of_a_resumed_epoch_are_those_of_the_whole_one() -> None:
    bad = frozenset({1, 17, 18, 30})
    whole = Driver(Steps(36, 4, 0, 1, "partial"), policy="replace", bad=bad).epoch_of()
    rest = Driver(Steps(36, 4, 0, 1, "partial"), start=12, policy="replace", bad=bad).epoch_of()
    assert [pixels(b) for b in rest] == [pixels(b) for b in whole[3:]]
    assert [b.step for b in rest] == list(range(6))


def test_raise_names_the_first_bad_picture_of_the_batch_each_time_it_is_asked() -> None:
    driver = Driver(Steps(8, 4, 0, 1, "partial"), policy="raise", bad=frozenset({6, 7}))
    assert plain_rows(driver.next()) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(SampleError, match=r"/data/6\.jpg.*position 6.*decode: cut") as caught:
            driver.next()
        assert caught.value.reject is not None
        assert caught.value.reject.position == 6
    assert driver.assembly.state == (2, 4)


def test_padded_copies_of_a_bad_picture_are_not_counted_twice() -> None:
    driver = Driver(Steps(6, 4, 0, 1, "pad"), policy="mask", bad=frozenset({1}))
    first, second = driver.epoch_of()
    assert [r.position for r in first.rejects] == [1]
    assert second.rejects == ()
    assert pixels(second) == [5, 6, 1, BLACK]
    assert list(second.valid) == [True, True, False, False]
    assert driver.counts == Counts(delivered=5, rejected=1, dropped=0, extra=3)


def test_max_bad_needs_more_than_sixteen_rejects() -> None:
    tolerated = Driver(Steps(100, 10, 0, 1, "partial"), max_bad=0.01, bad=frozenset(range(TOLERATED)))
    tolerated.epoch_of()
    assert tolerated.counts.rejected == TOLERATED
    with pytest.raises(TooManyRejects, match="17 bad pictures in epoch 2.*max_bad=0.01 of the 100 positions"):
        Driver(Steps(100, 10, 0, 1, "partial"), max_bad=0.01, bad=frozenset(range(17))).epoch_of()


def test_max_bad_needs_more_than_its_share_of_this_ranks_positions() -> None:
    Driver(Steps(1000, 10, 0, 1, "partial"), max_bad=0.02, bad=frozenset(range(20))).epoch_of()
    with pytest.raises(TooManyRejects, match="21 bad"):
        Driver(Steps(1000, 10, 0, 1, "partial"), max_bad=0.02, bad=frozenset(range(21))).epoch_of()


def test_max_bad_of_one_never_ends_an_epoch_that_has_a_valid_row() -> None:
    driver = Driver(Steps(100, 10, 0, 1, "partial"), max_bad=1.0, bad=frozenset(range(99)))
    driver.epoch_of()
    assert driver.counts.rejected == 99


@pytest.mark.parametrize("policy", ["skip", "mask", "replace"])
def test_too_many_rejects_come_before_the_batch_that_exceeds_the_limit(policy: OnBadSample) -> None:
    driver = Driver(Steps(100, 10, 0, 1, "partial"), policy=policy, max_bad=0.0, bad=frozenset(range(13, 100)))
    assert [driver.next().step, driver.next().step] == [0, 1]
    for _ in range(2):
        with pytest.raises(TooManyRejects):
            driver.next()
    assert driver.assembly.state == (2, 20)


def test_nothing_is_replaced_for_a_batch_that_will_not_be_handed_out() -> None:
    driver = Driver(Steps(1200, 100, 0, 1, "partial"), policy="replace", max_bad=0.0, bad=frozenset(range(1200)))
    with pytest.raises(TooManyRejects):
        driver.next()
    assert len(driver.asked) < 100


@pytest.mark.parametrize("policy", ["skip", "mask", "replace"])
def test_an_epoch_without_a_valid_row_ends_with_an_error_in_place_of_its_last_batch(policy: OnBadSample) -> None:
    driver = Driver(Steps(10, 4, 0, 1, "partial"), policy=policy, bad=frozenset(range(10)))
    driver.next()
    driver.next()
    with pytest.raises(TooManyRejects, match=r"no valid picture.*/data/8\.jpg"):
        driver.next()
    assert driver.assembly.state == (2, 8)


def test_a_rank_that_got_nothing_but_copies_of_good_pictures_has_no_error() -> None:
    (batch,) = Driver(Steps(3, 3, 2, 3, "pad")).epoch_of()
    assert list(batch.valid) == [False] * 3
    assert pixels(batch) == [1, 2, 3]


def test_an_epoch_whose_only_pictures_were_bad_before_its_last_batch_is_an_error_too() -> None:
    driver = Driver(Steps(10, 4, 1, 2, "partial"), bad=frozenset(range(4, 8)))
    assert list(driver.next().valid) == [False]
    with pytest.raises(TooManyRejects, match=r"no valid picture for rank 1: /data/7\.jpg"):
        driver.next()  # a copy of a good picture, which does not count


def test_too_many_rejects_name_the_latest() -> None:
    with pytest.raises(TooManyRejects, match=r"the latest is /data/19\.jpg"):
        Driver(Steps(100, 20, 0, 1, "partial"), max_bad=0.0, bad=frozenset(range(20))).next()


def test_a_batch_that_was_taken_but_not_handed_out_is_still_due() -> None:
    driver = Driver(Steps(4, 4, 0, 1, "partial"))
    batch = driver.next()
    driver.assembly.handed = batch
    assert driver.assembly.take() is batch
    assert driver.assembly.state == (2, 0)
    assert not driver.assembly.done
    driver.assembly.handed = None
    assert driver.assembly.state == (3, 0)
    assert driver.assembly.done


def test_a_chunk_that_failed_is_told_when_its_batch_is_due_and_then_tried_again() -> None:
    driver = Driver(Steps(12, 4, 0, 1, "partial"), chunk=4, window=9)
    driver.ask()
    want = next(w for w in driver.outstanding if w.chunk == 1)
    driver.outstanding.remove(want)
    error: HeadraceError = DatasetError("/data/5.jpg: Input/output error")
    driver.assembly.failed(want, error)
    assert driver.next().step == 0
    with pytest.raises(DatasetError, match=r"5\.jpg"):
        driver.next()
    assert driver.assembly.state == (2, 4)
    driver.ask()
    assert 1 not in {w.chunk for w in driver.outstanding}, "whoever was told can mend it before it is tried again"
    assert [plain_rows(b) for b in driver.epoch_of()] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_all_chunks_that_failed_are_tried_again_once_one_of_them_was_told() -> None:
    driver = Driver(Steps(16, 8, 0, 1, "partial"), chunk=2, window=9)
    driver.ask()
    for want in [w for w in driver.outstanding if w.chunk in (1, 2, 5)]:
        driver.outstanding.remove(want)
        driver.assembly.failed(want, DatasetError(f"/data/{want.chunk}.jpg: Stale file handle"))
    with pytest.raises(DatasetError, match=r"[12]\.jpg"):
        driver.next()
    assert [plain_rows(b) for b in driver.epoch_of()] == [list(range(8)), list(range(8, 16))]


def test_memory_that_cannot_be_had_changes_nothing() -> None:
    driver = Driver(Steps(12, 4, 0, 1, "partial"), chunk=4)
    allocate, driver.assembly._allocate = driver.assembly._allocate, lambda rows: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(MemoryError):
        driver.assembly.want()
    driver.assembly._allocate = allocate
    assert [plain_rows(b) for b in driver.epoch_of()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_drop_counts_the_tail_that_a_state_leaves() -> None:
    driver = Driver(Steps(100, 8, 3, 8, "drop"), start=64)
    assert driver.assembly.done
    assert driver.assembly.state == (3, 0)
    assert driver.counts == Counts(dropped=8)


def test_discarding_keeps_the_state_drops_the_memory_and_can_be_taken_up_again() -> None:
    driver = Driver(Steps(100, 8, 0, 1, "partial"))
    driver.next()
    driver.outstanding.clear()
    driver.assembly.discard()
    assert driver.assembly.state == (2, 8)
    assert driver.assembly.take() is None
    assert [b.step for b in driver.epoch_of()] == list(range(1, 13))


@pytest.mark.parametrize(
    ("layout", "shape", "dtype"),
    [
        (SlotLayout(4, 1, 1), (6,), np.int64),
        (SlotLayout(4, 1, 1, "float32"), (6,), np.float32),
        (SlotLayout(4, 1, 1, "int64", 1), (6, 1), np.int64),
        (SlotLayout(4, 1, 1, "float32", 5), (6, 5), np.float32),
    ],
)
def test_labels_are_laid_out_as_the_stream_has_them(layout: SlotLayout, shape: tuple[int, ...], dtype: Any) -> None:
    driver = Driver(Steps(6, 6, 0, 1, "partial"))
    driver.assembly._layout = layout
    want = driver.assembly.want()
    assert want is not None
    draft = want.pieces[0].draft
    assert (draft.labels.shape, draft.labels.dtype) == (shape, dtype)
    assert draft.texts == []


def test_a_request_names_the_rows_from_the_first_to_the_last_that_are_needed() -> None:
    driver = Driver(Steps(64, 6, 1, 3, "partial"), chunk=16, window=9)
    driver.ask()
    assert [(w.chunk, w.rows) for w in driver.outstanding] == [
        (0, range(6, 12)), (1, range(8, 14)), (2, range(10, 16)), (3, range(12, 16)),
    ]  # fmt: skip
    two = Driver(Steps(80, 3, 1, 3, "partial"), chunk=16, window=1)
    two.ask()
    assert two.outstanding[0].rows == range(3, 15)  # two steps of this rank, and another's between them
