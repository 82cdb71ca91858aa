"""How many slots a ring gets."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.pipeline.spec import Memory
from headrace.server.ring_size import Need, available_bytes, slots
from headrace.slots import SlotLayout

LAYOUT = SlotLayout(32, 224, 224)
GIB = 1 << 30


def need(in_flight: int = 2, chunks: int = 1000, streams: int = 1) -> Need:
    return Need(LAYOUT, in_flight, chunks, streams)


def test_by_default_a_quarter_of_what_is_left() -> None:
    assert slots("s", None, need(), 4 * GIB, 4 * GIB) == GIB // LAYOUT.stride


def test_streams_share_equally() -> None:
    assert slots("s", Memory(bytes=GIB), need(streams=2), 8 * GIB, 8 * GIB) == GIB // 2 // LAYOUT.stride


def test_never_more_than_two_epochs_of_bytes_are_reserved() -> None:
    assert slots("s", Memory(bytes=GIB), need(chunks=4), 8 * GIB, 8 * GIB) == 8
    assert slots("s", None, need(chunks=1), 8 * GIB, 8 * GIB) == 4  # but always one to spare


def test_a_number_of_slots_is_taken_as_it_is() -> None:
    assert slots("s", Memory(slots=3), need(), 8 * GIB, 8 * GIB) == 3


@pytest.mark.parametrize("memory", [Memory(slots=2), Memory(bytes=2 * LAYOUT.stride)])
def test_too_little_says_how_much_is_needed(memory: Memory) -> None:
    with pytest.raises(ConfigError, match=r"'s' gets 2 slots .* at least 3, .* set memory to 13\.\d+ MiB or more"):
        slots("s", memory, need(), 8 * GIB, 8 * GIB)


def test_more_than_the_machine_has_is_refused_before_it_kills_somebody() -> None:
    with pytest.raises(ConfigError, match=r"leaves 1 GiB: make `memory` smaller"):
        slots("s", Memory(slots=400), need(), GIB, GIB)


def test_this_machine_leaves_something() -> None:
    assert available_bytes() > 1 << 20
