"""Which part of an epoch this process takes: its rank, and how many ranks there are.

Arguments come first, then `torch.distributed` if it is initialised, then the environment of torchrun, then Slurm's.
A source that is half there, or that contradicts another, is an error: a process that wrongly believes to be rank 0
of 1 trains on everything, and nobody notices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from headrace.errors import ConfigError, StateError

_ENVIRONMENTS = (("torchrun", "RANK", "WORLD_SIZE"), ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"))


class Rank(NamedTuple):
    """`rank` of `world_size`."""

    rank: int
    world_size: int


def resolve(rank: int | None, world_size: int | None, environment: Mapping[str, str] | None = None) -> Rank:
    """The rank of this process.

    Args:
        rank, world_size: the caller's word, both or none. It wins: data-parallel ranks are not the global ones
            where a model is itself spread over ranks.
        environment: `os.environ` unless given.

    Raises:
        ConfigError: half given, not a number, or out of range.
        StateError: two sources contradict each other.
    """
    if rank is not None and world_size is not None:
        return _checked(Rank(rank, world_size), "the arguments")
    if rank is not None or world_size is not None:
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ConfigError(f"the argument {given} is given without {missing}: give both, or none")
    environment = os.environ if environment is None else environment
    found = {"torch.distributed": _distributed()}
    found |= {source: _from_environment(environment, source, *keys) for source, *keys in _ENVIRONMENTS}
    said = {source: value for source, value in found.items() if value is not None}
    if not said:
        return Rank(0, 1)
    (source, chosen), *others = said.items()
    for other, value in others:
        # Slurm counts tasks, each of which may start several ranks: it contradicts only when it promises more.
        if value.world_size > chosen.world_size if other == "Slurm" else value != chosen:
            raise StateError(
                f"{source} says rank {chosen.rank} of {chosen.world_size}, {other} says rank {value.rank} of "
                f"{value.world_size}: give rank= and world_size= to say which is meant"
            )
    return chosen


def _from_environment(environment: Mapping[str, str], name: str, rank_key: str, size_key: str) -> Rank | None:
    given = {key: environment[key] for key in (rank_key, size_key) if environment.get(key, "") != ""}
    if not given:
        return None
    if len(given) == 1:
        (key,) = given
        missing = size_key if key == rank_key else rank_key
        raise ConfigError(f"{key}={given[key]} is in the environment ({name}) without {missing}: set both, or none")
    try:
        found = Rank(int(given[rank_key]), int(given[size_key]))
    except ValueError:
        raise ConfigError(
            f"{rank_key}={given[rank_key]}, {size_key}={given[size_key]} in the environment ({name}) are not numbers"
        ) from None
    return _checked(found, f"{rank_key} and {size_key} in the environment ({name})")


def _distributed() -> Rank | None:
    """From `torch.distributed`, which is not imported for that: whoever initialised it has done so."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return Rank(module.get_rank(), module.get_world_size())


def _checked(found: Rank, source: str) -> Rank:
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        raise ConfigError(
            f"{source}: rank {found.rank} of {found.world_size}; a rank is at least 0 and below the world size"
        )
    return found
