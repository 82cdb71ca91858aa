"""The order of an epoch: position → line of the listing, for any position without building the whole.

A keyed permutation of `0 .. samples - 1`: an unbalanced Feistel network over a rectangle `a * b >= samples` (Black
and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). A round turns each column of the rectangle by its
own amount, the next one each row; what falls outside the listing goes through the network again (cycle walking),
which is rare as the rectangle is hardly larger than the listing.

- *Both sides may be small*, so a round function cannot be a few bits of a product: it is the 64-bit finaliser of
  MurmurHash3 over side and round key.
- *`a` is even*: turning a column by one is then an odd permutation. Were both sides odd, or were the network the usual
  one on pairs of bits, every shuffle would be an even permutation, and half of all orders would never come up.
- *24 rounds*: pairs of positions need few, but all the orders of a handful of samples are equally likely only after
  some 16 (seen by counting them: of 6 samples, 12 rounds still show a bias of 4 sigma); each costs some microseconds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace.draws import table_key

_ROUNDS = 24
_NAME = "order"


def order(seed: int, epoch: int, samples: int, first: int, count: int, *, shuffle: bool) -> NDArray[np.int64]:
    """Lines of the listing at the positions `first` to `first + count - 1` of an epoch.

    Args:
        seed: of the stream.
        epoch: each has an order of its own.
        samples: lines of the listing, below 2**60.
        first: first position.
        count: positions, all of them below `samples`.
        shuffle: False is the identity.

    Returns:
        int64, shape (count,). Over all positions, each line once.

    Raises:
        ValueError: a position is outside the epoch.
    """
    if not (0 <= first and 0 <= count and first + count <= samples < 1 << 60):
        raise ValueError(f"positions {first} to {first + count - 1} are not all in an epoch of {samples} samples")
    if not shuffle or samples < 2:
        return np.arange(first, first + count, dtype=np.int64)
    columns, rows = _rectangle(samples)
    keys = _round_keys(seed, epoch)
    place = np.arange(first, first + count, dtype=np.uint64)
    outside = np.arange(count)
    while len(outside):
        place[outside] = _network(place[outside], columns, rows, keys)
        outside = outside[place[outside] >= samples]
    return place.astype(np.int64)


def _rectangle(samples: int) -> tuple[int, int]:
    columns = math.isqrt(samples - 1) + 1
    columns += columns % 2
    return columns, -(-samples // columns)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    parts = (table_key(seed, epoch, f"{_NAME}.{i}", 64) for i in range(_ROUNDS // 8))
    return np.frombuffer(b"".join(parts), "<u8").astype(np.uint64)


def _network(place: NDArray[np.uint64], a: int, b: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    left, right = np.divmod(place, np.uint64(b))
    sides = np.uint64(a), np.uint64(b)
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + _mix(right ^ key) % sides[0]) % sides[0]
        else:
            right = (right + _mix(left ^ key) % sides[1]) % sides[1]
    return left * np.uint64(b) + right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))
