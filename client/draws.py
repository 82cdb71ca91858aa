"""The endless table of uniform numbers that every random decision reads.

A table has a key, `(seed, epoch, name)`, and row `p` of it belongs to position `p` of that epoch. Nothing is
drawn in sequence and there is no state: whoever asks for a row, in whatever order, gets the same numbers.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

_BLOCK = 4  # 64-bit words that Philox makes from one value of its counter
_U64 = 1 << 64


def uniforms(seed: int, epoch: int, name: str, first: int, count: int, width: int) -> NDArray[np.float64]:
    """Rows `first` to `first + count - 1` of the table `(seed, epoch, name)`.

    The generator is Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed
    with BLAKE2b. Each row begins at a block of its counter, so any range is reached by one jump. Only raw words are
    used, `(w >> 11) * 2**-53`: NumPy keeps its bit generators the same for ever, its distributions not.

    Args:
        seed: of the stream, 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.
        name: who draws, such as "random_resized_crop"; other names are independent tables.
        first: first row, not negative.
        count: rows.
        width: numbers per row. A row is not the beginning of a wider one: the width belongs to the name.

    Returns:
        float64, shape (count, width), each at least 0 and below 1.

    Raises:
        ValueError: an argument is out of range.
    """
    for what, value in (("seed", seed), ("epoch", epoch), ("first", first), ("count", count), ("width", width)):
        if not 0 <= value < _U64:
            raise ValueError(f"{what}: {value} is not in 0 to 2**64 - 1")
    blocks = -(-width // _BLOCK)
    bits = Philox(key=np.frombuffer(table_key(seed, epoch, name), "<u8").astype(np.uint64))
    bits.advance(first * blocks)
    words: NDArray[np.uint64] = bits.random_raw(count * blocks * _BLOCK).reshape(count, blocks * _BLOCK)
    return (words[:, :width] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def table_key(seed: int, epoch: int, name: str, size: int = 16) -> bytes:
    """`size` bytes (1 to 64) that stand for `(seed, epoch, name)`."""
    head = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    return blake2b(head + name.encode(), digest_size=size).digest()
