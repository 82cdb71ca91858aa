"""Which chunk lies in which slot, and who still reads or writes it. Plain state: no sockets, no memory, no clock.

A slot goes round `FREE → FILLING → READY → FILLING …`:

    claim    a free slot, else of the ready ones that nobody has leased that which is needed last; its generation grows
    fill     its writer has answered: the chunk is ready
    free     its writer has answered with a failure, or has been killed *and reaped*
    lease    a reader may read until `release`; a leased slot is never claimed

So a slot is written again only when every reader and the writer before are known to be done.

What is needed last. An epoch is a line of chunks, epochs follow one another, and readers go along it: where each stands
says when it comes to what lies before it. Behind all readers nothing is needed any more; neither is what lies between
two readers that are more chunks apart than there are slots, because the one behind, if it moves at all, has most of
that computed again anyway. Of this the lowest goes first. Then comes what its nearest reader has the longest way to.
So the chunks of a straggler, computed again for it alone, go as soon as it has read them, and take no room from what
others are about to share; and any trainers that are near each other share, be they a daemon's first ones or later ones.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import compress, pairwise

from headrace.protocol import RowReject

#: `(epoch, chunk)` within a stream.
Address = tuple[int, int]


class State(enum.Enum):
    FREE = enum.auto()
    FILLING = enum.auto()
    READY = enum.auto()


@dataclass(eq=False, slots=True)
class Slot:
    """One slot of the ring.

    Attributes:
        number: its place in the ring.
        generation: grows with each claim; 0 means never filled.
        leases: who reads it now.
        rejects, render_id: of the chunk in it, once ready.
        again: it had been computed before.
        fresh: nobody has got it yet.
    """

    number: int
    generation: int = 0
    state: State = State.FREE
    address: Address | None = None
    leases: set[Hashable] = field(default_factory=set)
    rejects: list[RowReject] = field(default_factory=list)
    render_id: str = ""
    again: bool = False
    fresh: bool = False


class Cache:
    """The slots of one stream's ring.

    Args:
        slots: how many there are.
        chunks: of an epoch.
        wanted: says whether somebody waits for an address; such a chunk is evicted only if nothing else is left.
        readers: says where readers stand: the address of the chunk that each got last.
    """

    def __init__(
        self,
        slots: int,
        chunks: int,
        wanted: Callable[[Address], bool] = lambda address: False,
        readers: Callable[[], Collection[Address]] = tuple,
    ) -> None:
        self.slots = [Slot(number) for number in range(slots)]
        self._free = list(reversed(self.slots))
        self._by_address: dict[Address, Slot] = {}
        self._ready: list[int] = []  # where the ready chunks lie on the line of all epochs, in order
        self._chunks = chunks
        self._wanted = wanted
        self._readers = readers

    def find(self, address: Address) -> Slot | None:
        """The slot that holds the chunk or is being filled with it."""
        return self._by_address.get(address)

    @property
    def ready(self) -> int:
        """Slots that hold a chunk."""
        return len(self._ready)

    @property
    def filling(self) -> int:
        """Slots that have a writer."""
        return len(self.slots) - len(self._free) - len(self._ready)

    def claim(self, address: Address) -> Slot | None:
        """A slot to fill with a chunk that is not in the cache; None while each is being filled or leased."""
        if address in self._by_address:
            raise ValueError(f"{address} is in the cache already")
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return None
        slot.state, slot.address, slot.generation = State.FILLING, address, slot.generation + 1
        self._by_address[address] = slot
        return slot

    def fill(self, slot: Slot, rejects: list[RowReject], render_id: str, *, again: bool = False) -> None:
        """The writer is done: the chunk is ready, and may be evicted."""
        self._expect(slot, State.FILLING)
        assert slot.address is not None
        slot.state, slot.rejects, slot.render_id, slot.again = State.READY, rejects, render_id, again
        slot.fresh = True
        insort(self._ready, self._line(slot.address))

    def free(self, slot: Slot) -> None:
        """The chunk will not come, and nobody writes to the slot any more."""
        self._expect(slot, State.FILLING)
        self._forget(slot)
        self._free.append(slot)

    def lease(self, slot: Slot, reader: Hashable) -> None:
        """`reader` reads the slot until it is released."""
        self._expect(slot, State.READY)
        if reader in slot.leases:
            raise ValueError(f"{reader} has leased slot {slot.number} already")
        slot.leases.add(reader)
        slot.fresh = False

    def release(self, slot: Slot, reader: Hashable) -> None:
        """`reader` is done."""
        slot.leases.remove(reader)

    def _evict(self) -> Slot | None:
        victim = self._needed_last(spare=True) or self._needed_last(spare=False)
        if victim is not None:
            assert victim.address is not None
            del self._ready[bisect_left(self._ready, self._line(victim.address))]
            self._forget(victim)
        return victim

    def _needed_last(self, *, spare: bool) -> Slot | None:
        """Of the ready slots that nobody has leased; None if there is none.

        Args:
            spare: pass over what somebody waits for.
        """
        at = sorted({self._line(address) for address in self._readers()})
        ends = [*(bisect_right(self._ready, line) for line in at), len(self._ready)]
        stretches = [range(*between) for between in pairwise(ends)]
        far = [ahead - line > len(self.slots) for line, ahead in pairwise(at)] + [False]
        for needless in (range(ends[0]), *compress(stretches, far)):
            if (slot := self._first(needless, spare)) is not None:
                return slot
        found, longest = None, 0
        for line, stretch in zip(at, stretches, strict=True):
            slot = self._first(reversed(stretch), spare)
            if slot is not None and slot.address is not None and (way := self._line(slot.address) - line) > longest:
                found, longest = slot, way
        return found

    def _first(self, places: Iterable[int], spare: bool) -> Slot | None:
        for place in places:
            address = divmod(self._ready[place], self._chunks)
            slot = self._by_address[address]
            if not slot.leases and not (spare and self._wanted(address)):
                return slot
        return None

    def _line(self, address: Address) -> int:
        epoch, chunk = address
        return epoch * self._chunks + chunk

    def _forget(self, slot: Slot) -> None:
        if slot.address is not None:
            del self._by_address[slot.address]
        slot.state, slot.address, slot.rejects, slot.render_id = State.FREE, None, [], ""

    @staticmethod
    def _expect(slot: Slot, state: State) -> None:
        if slot.state is not state:
            raise ValueError(f"slot {slot.number} is {slot.state.name}, not {state.name}")


class History:
    """Which chunks were computed before, of the epochs touched last: a bit each.

    Args:
        chunks: of an epoch.
        epochs: how many to know; by default 1024, and of large ones as many as a mebibyte holds, but 8 at least.
    """

    def __init__(self, chunks: int, epochs: int | None = None) -> None:
        self._bytes = -(-chunks // 8)
        self._epochs = epochs or max(8, min(1024, (1 << 20) // self._bytes))
        self._bits: OrderedDict[int, bytearray] = OrderedDict()

    def __contains__(self, address: Address) -> bool:
        epoch, chunk = address
        bits = self._bits.get(epoch)
        return bits is not None and bool(bits[chunk >> 3] & 1 << (chunk & 7))

    def add(self, address: Address) -> bool:
        """Note that the chunk is computed; whether it had been before."""
        epoch, chunk = address
        bits = self._bits.setdefault(epoch, bytearray(self._bytes))
        self._bits.move_to_end(epoch)
        if len(self._bits) > self._epochs:
            self._bits.popitem(last=False)
        byte, mask = chunk >> 3, 1 << (chunk & 7)
        before = bool(bits[byte] & mask)
        bits[byte] |= mask
        return before
