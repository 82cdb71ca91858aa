"""Rank discovery: arguments, torch.distributed, torchrun, Slurm; never rank 0 of 1 by accident."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from headrace.errors import ConfigError, StateError
from headrace.rank import resolve

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


@pytest.fixture(autouse=True)
def no_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)


def distributed(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, *, initialised: bool = True) -> None:
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialised,
        get_rank=lambda: rank,
        get_world_size=lambda: world,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", module)


def test_without_any_source_there_is_one_rank() -> None:
    assert resolve(None, None, {}) == (0, 1)


def test_arguments_win_over_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, 0, 2)
    assert resolve(5, 6, TORCHRUN | SLURM) == (5, 6)


def test_torch_distributed_counts_once_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, 3, 8, initialised=False)
    assert resolve(None, None, {}) == (0, 1)
    distributed(monkeypatch, 3, 8)
    assert resolve(None, None, {}) == (3, 8)
    assert resolve(None, None, TORCHRUN) == (3, 8)


def test_torch_distributed_is_not_imported_to_be_asked() -> None:
    resolve(None, None, {})
    assert "torch.distributed" not in sys.modules


def test_the_environment_of_torchrun_and_of_slurm() -> None:
    assert resolve(None, None, TORCHRUN) == (3, 8)
    assert resolve(None, None, SLURM) == (1, 4)


def test_torchrun_started_by_slurm_tasks_counts_more_ranks_than_tasks() -> None:
    assert resolve(None, None, TORCHRUN | SLURM) == (3, 8)


def test_slurm_with_more_tasks_than_ranks_is_a_contradiction() -> None:
    with pytest.raises(StateError, match="torchrun says rank 0 of 1, Slurm says rank 1 of 4"):
        resolve(None, None, {"RANK": "0", "WORLD_SIZE": "1"} | SLURM)


def test_torch_distributed_and_torchrun_that_disagree_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, 0, 1)
    with pytest.raises(StateError, match=r"torch\.distributed says rank 0 of 1, torchrun says rank 3 of 8"):
        resolve(None, None, TORCHRUN)


@pytest.mark.parametrize(("rank", "world"), [(1, None), (None, 2), (0, None), (None, 1)])
def test_half_an_argument_pair_is_an_error(rank: int | None, world: int | None) -> None:
    with pytest.raises(ConfigError, match=r"rank.*world_size|world_size.*rank"):
        resolve(rank, world, {})


@pytest.mark.parametrize("half", ["RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"])
def test_half_an_environment_pair_is_an_error_that_names_both(half: str) -> None:
    with pytest.raises(ConfigError, match=rf"{half}=\d is in the environment .* without [A-Z_]+"):
        resolve(None, None, {half: (TORCHRUN | SLURM)[half]})


@pytest.mark.parametrize("rank", ["8", "-1", "first"])
def test_an_impossible_rank_in_the_environment_is_an_error(rank: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i)rank.*{rank}"):
        resolve(None, None, {"RANK": rank, "WORLD_SIZE": "8"})


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_rank_in_the_arguments_is_an_error(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="below the world size"):
        resolve(rank, world, {})
