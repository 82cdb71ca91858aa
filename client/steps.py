"""Which positions make up which batch of which rank: pure arithmetic, the same on every rank.

An epoch is taken up at position P (0, or a state's). Step s of rank r of R is the block
[P + (s·R + r)·B, P + (s·R + r + 1)·B) of positions; a position p >= N stands for p mod N and is not valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headrace.errors import ConfigError

LastBatch = Literal["drop", "partial", "pad"]


@dataclass(frozen=True, slots=True)
class Steps:
    """The cut of an epoch into batches.

    Attributes:
        samples: N, positions of an epoch, at least 1.
        batch_size: B, rows of a batch.
        rank: r, of the process that asks.
        world_size: R, processes that share the epoch.
        last_batch: `drop` leaves out the last step unless every rank has B positions; `partial` shortens it, and
            gives a rank that would get nothing one row that is not valid; `pad` fills it with rows that are not valid.

    Raises:
        ConfigError: a number out of range, or `drop` leaves no step at all.
    """

    samples: int
    batch_size: int
    rank: int
    world_size: int
    last_batch: LastBatch

    def __post_init__(self) -> None:
        if self.last_batch not in get_args(LastBatch):
            raise ConfigError(f"last_batch: {self.last_batch!r} is not one of {', '.join(get_args(LastBatch))}")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size: {self.batch_size} must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank: {self.rank} must be at least 0 and below the world size, {self.world_size}")
        if self.count(0) == 0:
            raise ConfigError(
                f"last_batch='drop' leaves no step: {self.samples} samples (N) are fewer than one step of "
                f"{self.world_size} ranks (R) times batch_size {self.batch_size} (B); use a smaller batch, "
                "or last_batch='partial' or 'pad'"
            )

    @property
    def stride(self) -> int:
        """Positions of one step over all ranks, R·B."""
        return self.world_size * self.batch_size

    def count(self, start: int) -> int:
        """Steps from position `start` to the epoch's end; the same on every rank."""
        left = self.samples - start
        return left // self.stride if self.last_batch == "drop" else -(-left // self.stride)

    def block(self, start: int, step: int) -> range:
        """The positions of this rank's batch; those from N on are copies of p mod N and not valid."""
        first = start + step * self.stride + self.rank * self.batch_size
        if self.last_batch == "partial":
            return range(first, max(first + 1, min(first + self.batch_size, self.samples)))
        return range(first, first + self.batch_size)

    def after(self, epoch: int, start: int, done: int) -> tuple[int, int]:
        """`(epoch, position)` at which to go on after `done` steps from `start`; the next epoch's 0 after the last."""
        if done >= self.count(start):
            return epoch + 1, 0
        return epoch, start + done * self.stride

    def positions(self, start: int) -> int:
        """Positions (below N) that this rank is given from `start` to the epoch's end."""
        whole, rest = divmod(self.samples - start, self.stride)
        mine = whole * self.batch_size
        return mine if self.last_batch == "drop" else mine + self._share(rest)

    def dropped(self, start: int) -> int:
        """Positions of the tail that `drop` leaves out, as far as they would have been this rank's."""
        return self._share((self.samples - start) % self.stride) if self.last_batch == "drop" else 0

    def _share(self, rest: int) -> int:
        """This rank's part of a last step that has only `rest` positions for all ranks."""
        return max(0, min(self.batch_size, rest - self.rank * self.batch_size))
