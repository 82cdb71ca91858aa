"""What a trainer got, held against what it must have got. Plain state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Accounts:
    """Of one trainer of world size 1 that keeps every row (`on_bad_sample: mask`).

    Args:
        samples: positions of an epoch.
        truth: index, label and digest of each position of an epoch; of a bad picture the digest is empty.

    Attributes:
        at: the position in the line of all epochs up to which everything was looked at.
        pictures, rejected: rows that were compared and are right: good ones, bad ones.
        lost, repeated: positions.
        wrong: rows that are another picture's, label's or sample's, or were judged otherwise.
        first: what was wrong first.
    """

    samples: int
    truth: Callable[[int], list[tuple[int, Any, str]]]
    at: int = 0
    batches: int = 0
    pictures: int = 0
    rejected: int = 0
    lost: int = 0
    repeated: int = 0
    wrong: int = 0
    first: str = ""

    def batch(self, batch: Mapping[str, Any]) -> None:
        """The next one, as a trainer describes it, with its state after that."""
        rows = len(batch["indices"])
        state = batch["state"]
        after = state["epoch"] * self.samples + state["position"]
        start = after - rows
        self._step(start)
        self.batches += 1
        epoch, first = divmod(start, self.samples)
        expected = self.truth(epoch)[first : first + rows]
        if batch["epoch"] != epoch or len(expected) != rows or not len(batch["valid"]) == len(batch["labels"]) == rows:
            self._note(f"a batch of epoch {batch['epoch']} and {rows} rows ends at {state}", rows)
        else:
            for i, row in enumerate(expected):
                self._compare(epoch, first + i, row, batch, i)
            self._rejects(epoch, first, expected, batch)
        self.at = max(self.at, after)

    @property
    def epochs(self) -> int:
        """That are over."""
        return self.at // self.samples

    @property
    def sound(self) -> bool:
        return not (self.lost or self.repeated or self.wrong)

    def _step(self, start: int) -> None:
        """Rows follow each other, over the ends of epochs and of the trainer's lives too."""
        if start > self.at:
            self.lost += start - self.at
        elif start < self.at:
            self.repeated += self.at - start
        if start != self.at:
            self._note(f"position {start} of the line follows {self.at - 1}", 0)

    def _compare(self, epoch: int, position: int, row: tuple[int, Any, str], batch: Mapping[str, Any], i: int) -> None:
        digest = batch["pictures"][i] if batch["valid"][i] else ""
        got = batch["indices"][i], batch["labels"][i], digest
        if got != row:
            self._note(f"epoch {epoch}, position {position}: {got} instead of {row}", 1)
        elif digest:
            self.pictures += 1
        else:
            self.rejected += 1

    def _rejects(self, epoch: int, first: int, expected: list[tuple[int, Any, str]], batch: Mapping[str, Any]) -> None:
        bad = [(row[0], first + i) for i, row in enumerate(expected) if not row[2]]
        named = [(index, position) for index, position, _ in batch["rejects"]]
        if named != bad:
            self._note(f"epoch {epoch}: rejects {named} are named instead of {bad}", 1)

    def _note(self, what: str, wrong: int) -> None:
        self.wrong += wrong
        self.first = self.first or what
