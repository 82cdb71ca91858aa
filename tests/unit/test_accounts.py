"""The accounts find what they are there to find."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from accounts import Accounts

SAMPLES = 10
BAD = 3


def truth(epoch: int) -> list[tuple[int, Any, str]]:
    return [((7 * p + epoch) % SAMPLES, p % 3, "" if p == BAD else f"{epoch}:{p}") for p in range(SAMPLES)]


def line(size: int = 4, batches: int = 8) -> list[dict[str, Any]]:
    """What a trainer got that got everything."""
    made = []
    epoch = position = 0
    for _ in range(batches):
        rows = truth(epoch)[position : position + size]
        rejects = [[index, position + i, "decode"] for i, (index, _, digest) in enumerate(rows) if not digest]
        batch = {
            "epoch": epoch,
            "indices": [index for index, _, _ in rows],
            "labels": [label for _, label, _ in rows],
            "pictures": [digest or "black" for _, _, digest in rows],
            "valid": [bool(digest) for _, _, digest in rows],
            "rejects": rejects,
        }
        position += len(rows)
        if position == SAMPLES:
            epoch, position = epoch + 1, 0
        made.append(batch | {"state": {"epoch": epoch, "position": position}})
    return made


def judged(batches: list[dict[str, Any]]) -> Accounts:
    accounts = Accounts(SAMPLES, truth)
    for batch in batches:
        accounts.batch(batch)
    return accounts


def test_a_whole_line_is_sound_over_the_ends_of_epochs() -> None:
    accounts = judged(line())
    assert accounts.sound and not accounts.first
    assert (accounts.batches, accounts.epochs, accounts.at) == (8, 2, 28)
    assert (accounts.pictures, accounts.rejected) == (25, 3)


@pytest.mark.parametrize("which", range(7))
def test_a_batch_that_is_not_there_is_lost(which: int) -> None:
    batches = line()
    gone = batches.pop(which)
    accounts = judged(batches)
    assert (accounts.lost, accounts.repeated, accounts.wrong) == (len(gone["indices"]), 0, 0)
    assert accounts.first


@pytest.mark.parametrize("which", range(8))
def test_a_batch_that_is_there_twice_is_repeated(which: int) -> None:
    batches = line()
    batches.insert(which, batches[which])
    accounts = judged(batches)
    assert (accounts.lost, accounts.repeated, accounts.wrong) == (0, len(batches[which]["indices"]), 0)


def swap(batch: dict[str, Any], key: str) -> None:
    batch[key][0], batch[key][1] = batch[key][1], batch[key][0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: swap(batch, "indices"),
        lambda batch: swap(batch, "labels"),
        lambda batch: swap(batch, "pictures"),
        lambda batch: batch["valid"].__setitem__(0, False),
        lambda batch: batch["valid"].__setitem__(3, True),
        lambda batch: batch["rejects"].clear(),
        lambda batch: batch["rejects"].append([0, 1, "decode"]),
        lambda batch: batch.__setitem__("epoch", 1),
        lambda batch: batch["valid"].pop(),
    ],
)
def test_what_is_another_picture_label_sample_or_verdict_is_wrong(spoil: Callable[[dict[str, Any]], Any]) -> None:
    batches = copy.deepcopy(line())
    spoil(batches[0])
    accounts = judged(batches)
    assert accounts.wrong and not accounts.sound and accounts.first
    assert (accounts.lost, accounts.repeated) == (0, 0)
