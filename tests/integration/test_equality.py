"""An epoch is the same bytes however it is computed, joined and interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from service import Daemon, Trainer, Truth, merged, stream, until

ENTRIES = 300


@pytest.fixture
def folder(many: Callable[[int], Path]) -> Path:
    return many(ENTRIES)


@pytest.mark.parametrize("workers", [1, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_any_number_of_workers_gives_the_same_batches(folder: Path, home: Path, workers: int) -> None:
    with Daemon(home, {"train": stream(folder)}, workers=workers, slots=workers + 2) as daemon:
        with Trainer(daemon.address, home / "a.jsonl", epochs=2) as trainer:
            trainer.wait()
    truth = Truth(daemon.config, home / "cache")
    assert trainer.rows() == truth.rows(0) + truth.rows(1)


def test_a_daemon_that_restarts_in_the_middle_changes_nothing(folder: Path, home: Path) -> None:
    with (
        Daemon(home, {"train": stream(folder)}, workers=2, slots=4) as daemon,
        Trainer(daemon.address, home / "a.jsonl", pause=0.03) as trainer,
    ):
        until(lambda: len(trainer.batches) >= 8, "8 batches")
        assert daemon.stop() == 0
        daemon.start()
        trainer.wait()
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)


@pytest.mark.parametrize("steps", [1, pytest.param(7, marks=pytest.mark.soak), 18])
def test_a_resumed_trainer_goes_on_with_the_very_next_batch(folder: Path, home: Path, steps: int) -> None:
    with Daemon(home, {"train": stream(folder)}, workers=2, slots=4) as daemon:
        with Trainer(daemon.address, home / "a.jsonl", epochs=2, steps=steps) as trainer:
            trainer.wait()
        assert len(trainer.batches) == steps
        with Trainer(daemon.address, home / "a.jsonl", epochs=2) as trainer:
            trainer.wait()
    truth = Truth(daemon.config, home / "cache")
    assert trainer.rows() == truth.rows(0) + truth.rows(1)


@pytest.mark.parametrize("ranks", [2, 5, pytest.param(8, marks=pytest.mark.soak)])
def test_any_number_of_ranks_together_get_the_same_epoch(folder: Path, home: Path, ranks: int) -> None:
    with Daemon(home, {"train": stream(folder)}, workers=2, slots=4) as daemon:
        trainers = [
            Trainer(daemon.address, home / f"{r}.jsonl", rank=r, world_size=ranks, batch_size=7).start()
            for r in range(ranks)
        ]
        for trainer in trainers:
            trainer.wait()
    assert merged(trainers) == Truth(daemon.config, home / "cache").rows(0)


def test_the_defaults_give_the_same_batches_as_the_smallest_ring(folder: Path, home: Path) -> None:
    records = []
    for name, options in (("default", {}), ("small", {"slots": 3})):
        with Daemon(home, {"train": stream(folder)}, name=name, workers=2, **options) as daemon:
            with Trainer(daemon.address, home / f"{name}.jsonl", batch_size=50) as trainer:
                trainer.wait()
        records.append(trainer.rows())
    assert records[0] == records[1]
