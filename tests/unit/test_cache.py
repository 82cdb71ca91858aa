"""Slots: written only when nobody reads or writes them."""

from __future__ import annotations

import pytest

from headrace.server.cache import Address, Cache, History, Slot, State

CHUNKS = 20


def ready(cache: Cache, address: Address) -> Slot:
    slot = cache.claim(address)
    assert slot is not None
    cache.fill(slot, [], "fake")
    return slot


def test_a_chunk_is_found_from_its_claim_on() -> None:
    cache = Cache(2, CHUNKS)
    slot = cache.claim((0, 5))
    assert slot is not None and cache.find((0, 5)) is slot and slot.state is State.FILLING
    cache.fill(slot, [], "fake")
    assert cache.find((0, 5)) is slot and slot.state is State.READY


def test_each_claim_gives_the_slot_a_new_generation() -> None:
    cache = Cache(1, CHUNKS)
    generations = [ready(cache, (0, k)).generation for k in range(4)]
    assert generations == [1, 2, 3, 4]


def held(cache: Cache) -> list[Address]:
    return sorted(slot.address for slot in cache.slots if slot.address is not None)


def test_what_lies_behind_all_readers_goes_first_and_of_that_the_lowest() -> None:
    cache = Cache(4, CHUNKS, readers=lambda: [(0, 7), (0, 9)])
    for chunk in (8, 6, 5, 9):
        ready(cache, (0, chunk))
    ready(cache, (0, 10))
    assert held(cache) == [(0, 6), (0, 8), (0, 9), (0, 10)]
    ready(cache, (0, 11))
    assert held(cache) == [(0, 8), (0, 9), (0, 10), (0, 11)]


def test_without_readers_the_lowest_goes_first() -> None:
    cache = Cache(2, CHUNKS)
    for address in ((0, 19), (1, 0), (0, 18)):
        ready(cache, address)
    assert held(cache) == [(0, 18), (1, 0)]


def test_then_goes_what_its_nearest_reader_has_the_longest_way_to() -> None:
    cache = Cache(4, CHUNKS, readers=lambda: [(0, 18), (1, 2)])
    for address in ((0, 19), (1, 0), (1, 2), (1, 5)):  # 1, 2 and 4 before the one, 3 before the other
        ready(cache, address)
    ready(cache, (1, 3))
    assert held(cache) == [(0, 19), (1, 0), (1, 3), (1, 5)]
    ready(cache, (1, 4))
    assert held(cache) == [(0, 19), (1, 0), (1, 3), (1, 4)]


def test_between_readers_further_apart_than_there_are_slots_nothing_is_kept_for_the_one_behind() -> None:
    at = [(0, 1), (0, 6), (0, 8)]
    cache = Cache(4, CHUNKS, readers=lambda: at)
    for chunk in (2, 3, 7, 8):
        ready(cache, (0, chunk))
    ready(cache, (0, 9))  # the first reader has five chunks to go to the second
    assert held(cache) == [(0, 3), (0, 7), (0, 8), (0, 9)]
    at[0] = (0, 2)
    ready(cache, (0, 10))  # now four, and may get there
    assert held(cache) == [(0, 3), (0, 7), (0, 9), (0, 10)]


def test_what_a_straggler_has_read_goes_before_what_others_share() -> None:
    cache = Cache(3, CHUNKS, readers=lambda: [(0, 1), (0, 7), (0, 9)])
    for chunk in (8, 9, 1):
        ready(cache, (0, chunk))
    ready(cache, (0, 2))
    assert held(cache) == [(0, 2), (0, 8), (0, 9)]


def test_a_leased_or_filling_slot_is_never_claimed() -> None:
    cache = Cache(2, CHUNKS)
    slot = ready(cache, (0, 0))
    cache.lease(slot, "reader")
    cache.claim((0, 1))
    assert cache.claim((0, 2)) is None
    cache.release(slot, "reader")
    assert cache.claim((0, 2)) is slot


def test_a_chunk_that_somebody_waits_for_is_evicted_last() -> None:
    wanted = {(0, 0)}
    cache = Cache(2, CHUNKS, wanted=wanted.__contains__)
    ready(cache, (0, 0))
    ready(cache, (0, 1))
    ready(cache, (0, 2))
    assert cache.find((0, 0)) is not None and cache.find((0, 1)) is None
    wanted.add((0, 2))
    assert cache.claim((0, 3)) is not None  # but it is evicted when nothing else is left


def test_a_failed_chunk_leaves_nothing() -> None:
    cache = Cache(1, CHUNKS)
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
    cache = Cache(1, CHUNKS)
    slot = ready(cache, (0, 0))
    with pytest.raises(ValueError):
        misuse(cache, slot)


def test_history_knows_what_was_computed_in_the_epochs_touched_last() -> None:
    history = History(chunks=20, epochs=2)
    assert (0, 19) not in history
    assert not history.add((0, 19)) and history.add((0, 19)) and not history.add((0, 18))
    assert (0, 19) in history and (0, 17) not in history and (1, 19) not in history
    assert not history.add((1, 19)) and not history.add((2, 0))
    assert not history.add((0, 19))  # epoch 0 was forgotten
