"""Which chunk lies in which slot, and who still reads or writes it. Plain state: no sockets, no memory, no clock.

A slot goes round `FREE → FILLING → READY → FILLING …`:

    claim    a free slot, else the coldest ready one that nobody has leased; its generation grows
    fill     its writer has answered: the chunk is ready
    free     its writer has answered with a failure, or has been killed *and reaped*
    lease    a reader may read until `release`; a leased slot is never claimed

So a slot is written again only when every reader and the writer before are known to be done.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

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
        cold: a straggler's chunk, computed again: it is evicted before those that the leaders share.
        fresh: nobody has got it yet.
    """

    number: int
    generation: int = 0
    state: State = State.FREE
    address: Address | None = None
    leases: set[Hashable] = field(default_factory=set)
    rejects: list[RowReject] = field(default_factory=list)
    render_id: str = ""
    cold: bool = False
    fresh: bool = False


class Cache:
    """The slots of one stream's ring.

    Args:
        slots: how many there are.
        wanted: says whether somebody waits for an address; such a chunk is evicted only if nothing else is left.
    """

    def __init__(self, slots: int, wanted: Callable[[Address], bool] = lambda address: False) -> None:
        self.slots = [Slot(number) for number in range(slots)]
        self._free = list(reversed(self.slots))
        self._by_address: dict[Address, Slot] = {}
        self._ready: OrderedDict[int, Slot] = OrderedDict()  # coldest first
        self._wanted = wanted

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

    def fill(self, slot: Slot, rejects: list[RowReject], render_id: str, *, cold: bool = False) -> None:
        """The chunk is there."""
        self._expect(slot, State.FILLING)
        slot.state, slot.rejects, slot.render_id, slot.cold = State.READY, rejects, render_id, cold
        slot.fresh = True
        self._ready[slot.number] = slot
        if cold:
            self._ready.move_to_end(slot.number, last=False)

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
        if not slot.cold:
            self._ready.move_to_end(slot.number)

    def release(self, slot: Slot, reader: Hashable) -> None:
        """`reader` is done."""
        slot.leases.remove(reader)

    def _evict(self) -> Slot | None:
        idle = [slot for slot in self._ready.values() if not slot.leases]
        victim = next((s for s in idle if s.address and not self._wanted(s.address)), idle[0] if idle else None)
        if victim is not None:
            del self._ready[victim.number]
            self._forget(victim)
        return victim

    def _forget(self, slot: Slot) -> None:
        if slot.address is not None:
            del self._by_address[slot.address]
        slot.state, slot.address, slot.rejects, slot.render_id = State.FREE, None, [], ""

    @staticmethod
    def _expect(slot: Slot, state: State) -> None:
        if slot.state is not state:
            raise ValueError(f"slot {slot.number} is {slot.state.name}, not {state.name}")


class History:
    """Which chunks were computed before, of the epochs touched last: a bit each."""

    def __init__(self, chunks: int, epochs: int = 8) -> None:
        self._bytes = -(-chunks // 8)
        self._epochs = epochs
        self._bits: OrderedDict[int, bytearray] = OrderedDict()

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
