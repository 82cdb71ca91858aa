"""Steps: the cut of an epoch into batches, over all ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.steps import LastBatch, Steps

numbers = st.integers(1, 60)
worlds = st.integers(1, 9)
modes: st.SearchStrategy[LastBatch] = st.sampled_from(["drop", "partial", "pad"])


def every_rank(samples: int, batch_size: int, world: int, mode: LastBatch) -> list[Steps]:
    return [Steps(samples, batch_size, rank, world, mode) for rank in range(world)]


@given(numbers, numbers, worlds, modes, st.data())
def test_the_ranks_together_get_each_position_once_and_as_many_steps_each(
    samples: int, batch_size: int, world: int, mode: LastBatch, data: st.DataObject
) -> None:
    assume(mode != "drop" or samples >= batch_size * world)
    ranks = every_rank(samples, batch_size, world, mode)
    start = data.draw(st.integers(0, samples - 1))
    assert len({r.count(start) for r in ranks}) == 1
    blocks = [r.block(start, s) for s in range(ranks[0].count(start)) for r in ranks]
    got = [p for block in blocks for p in block if p < samples]
    dropped = sum(r.dropped(start) for r in ranks)
    assert got == list(range(start, samples - dropped))
    assert sum(r.positions(start) for r in ranks) == len(got)
    if mode == "drop":
        assert dropped < batch_size * world
    else:
        assert dropped == 0


@given(numbers, numbers, worlds, modes)
def test_what_a_rank_is_given_is_what_its_blocks_hold(
    samples: int, batch_size: int, world: int, mode: LastBatch
) -> None:
    assume(mode != "drop" or samples >= batch_size * world)
    for r in every_rank(samples, batch_size, world, mode):
        rows = [p for s in range(r.count(0)) for p in r.block(0, s)]
        assert r.positions(0) == sum(p < samples for p in rows)


@given(numbers, numbers, worlds, modes)
def test_every_batch_is_full_but_a_partial_last_one_which_is_never_empty(
    samples: int, batch_size: int, world: int, mode: LastBatch
) -> None:
    assume(mode != "drop" or samples >= batch_size * world)
    for r in every_rank(samples, batch_size, world, mode):
        sizes = [len(r.block(0, s)) for s in range(r.count(0))]
        if mode != "partial":
            assert set(sizes) == {batch_size}
        else:
            assert set(sizes[:-1]) <= {batch_size}
            assert 1 <= sizes[-1] <= batch_size


@given(numbers, numbers, worlds, worlds, st.data())
def test_a_state_taken_on_one_world_size_goes_on_without_gap_on_another(
    samples: int, batch_size: int, before: int, after: int, data: st.DataObject
) -> None:
    first = every_rank(samples, batch_size, before, "partial")
    done = data.draw(st.integers(0, first[0].count(0)))
    states = {r.after(7, 0, done) for r in first}
    assert len(states) == 1
    ((epoch, position),) = states
    seen = Counter(p for r in first for s in range(done) for p in r.block(0, s) if p < samples)
    if epoch == 7:
        second = every_rank(samples, batch_size, after, "pad")
        steps = range(second[0].count(position))
        seen.update(p for r in second for s in steps for p in r.block(position, s) if p < samples)
    assert seen == Counter(range(samples))


def test_after_the_last_step_the_state_is_the_next_epochs_beginning() -> None:
    steps = Steps(10, 3, 0, 1, "partial")
    assert [steps.after(2, 0, done) for done in range(5)] == [(2, 0), (2, 3), (2, 6), (2, 9), (3, 0)]
    dropping = Steps(10, 3, 0, 1, "drop")
    assert dropping.after(2, 0, 3) == (3, 0)


def test_a_state_that_leaves_drop_no_whole_step_ends_the_epoch_at_once() -> None:
    steps = Steps(100, 8, 0, 8, "drop")
    assert steps.count(64) == 0
    assert steps.after(0, 64, 0) == (1, 0)


def test_partial_gives_a_rank_without_a_share_one_row_beyond_the_end() -> None:
    assert list(Steps(26, 6, 3, 4, "partial").block(0, 1)) == [42]
    assert list(Steps(26, 6, 0, 4, "partial").block(0, 1)) == [24, 25]


def test_drop_that_leaves_no_step_names_samples_ranks_and_batch_size() -> None:
    with pytest.raises(ConfigError, match=r"10 samples \(N\).* 4 ranks \(R\).* batch_size 3 \(B\)"):
        Steps(10, 3, 0, 4, "drop")


@pytest.mark.parametrize(
    ("batch_size", "rank", "world", "mode", "named"),
    [(0, 0, 1, "pad", "batch_size"), (1, 2, 2, "pad", "rank"), (1, -1, 2, "pad", "rank"), (1, 0, 1, "wrap", "wrap")],
)
def test_a_number_out_of_range_is_named(batch_size: int, rank: int, world: int, mode: LastBatch, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Steps(10, batch_size, rank, world, mode)
