"""Slots: written only when nobody reads or writes them."""

from __future__ import annotations

import pytest

from headrace.server.cache import Address, Cache, History, Slot, State


def ready(cache: Cache, address: Address, *, cold: bool = False) -> Slot:
    slot = cache.claim(address)
    assert slot is not None
    cache.fill(slot, [], "fake", cold=cold)
    return slot


def test_a_chunk_is_found_from_its_claim_on() -> None:
    cache = Cache(2)
    slot = cache.claim((0, 5))
    assert slot is not None and cache.find((0, 5)) is slot and slot.state is State.FILLING
    cache.fill(slot, [], "fake")
    assert cache.find((0, 5)) is slot and slot.state is State.READY


def test_each_claim_gives_the_slot_a_new_generation() -> None:
    cache = Cache(1)
    generations = [ready(cache, (0, k)).generation for k in range(4)]
    assert generations == [1, 2, 3, 4]


def test_the_coldest_chunk_goes_first() -> None:
    cache = Cache(3)
    for k in range(3):
        ready(cache, (0, k))
    slot = cache.find((0, 0))
    assert slot is not None
    cache.lease(slot, "a")  # it was read, so it is warm
    cache.release(slot, "a")
    ready(cache, (0, 3))
    assert cache.find((0, 1)) is None and cache.find((0, 0)) is not None


def test_a_stragglers_chunk_goes_before_all_others_even_when_it_was_read() -> None:
    cache = Cache(3)
    ready(cache, (0, 8))
    ready(cache, (0, 9))
    straggler = ready(cache, (0, 1), cold=True)
    cache.lease(straggler, "slow")
    cache.release(straggler, "slow")
    ready(cache, (0, 10))
    assert cache.find((0, 1)) is None and cache.find((0, 8)) is not None and cache.find((0, 9)) is not None


def test_a_leased_or_filling_slot_is_never_claimed() -> None:
    cache = Cache(2)
    slot = ready(cache, (0, 0))
    cache.lease(slot, "reader")
    cache.claim((0, 1))
    assert cache.claim((0, 2)) is None
    cache.release(slot, "reader")
    assert cache.claim((0, 2)) is slot


def test_a_chunk_that_somebody_waits_for_is_evicted_last() -> None:
    wanted = {(0, 0)}
    cache = Cache(2, wanted=wanted.__contains__)
    ready(cache, (0, 0))
    ready(cache, (0, 1))
    ready(cache, (0, 2))
    assert cache.find((0, 0)) is not None and cache.find((0, 1)) is None
    wanted.add((0, 2))
    assert cache.claim((0, 3)) is not None  # but it is evicted when nothing else is left


def test_a_failed_chunk_leaves_nothing() -> None:
    cache = Cache(1)
    slot = cache.claim((0, 0))
    assert slot is not None
    cache.free(slot)
    assert cache.find((0, 0)) is None and cache.claim((0, 1)) is slot


@pytest.mark.parametrize(
    "misuse",
    [
        lambda cache, slot: cache.claim((0, 0)),
        lambda cache, slot: cache.free(slot),
        lambda cache, slot: cache.fill(slot, [], ""),
        lambda cache, slot: (cache.lease(slot, "a"), cache.lease(slot, "a")),
    ],
)
def test_misuse_is_an_error_and_not_a_wrong_picture(misuse) -> None:  # type: ignore[no-untyped-def]
    cache = Cache(1)
    slot = ready(cache, (0, 0))
    with pytest.raises(ValueError):
        misuse(cache, slot)


def test_history_knows_what_was_computed_in_the_epochs_touched_last() -> None:
    history = History(chunks=20, epochs=2)
    assert not history.add((0, 19)) and history.add((0, 19)) and not history.add((0, 18))
    assert not history.add((1, 19)) and not history.add((2, 0))
    assert not history.add((0, 19))  # epoch 0 was forgotten
