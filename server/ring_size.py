"""How many slots a stream's ring gets: what is configured, what is there, what is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.pipeline.spec import Memory
from headrace.slots import SlotLayout
from headrace.workers.cgroup import memory_left


@dataclass(frozen=True, slots=True)
class Need:
    """What a stream's ring must hold.

    Attributes:
        in_flight: chunks that can be at the workers at once.
        chunks: of an epoch.
        streams: of the daemon; they share the memory equally.
    """

    layout: SlotLayout
    in_flight: int
    chunks: int
    streams: int

    @property
    def fewest(self) -> int:
        """One slot more than chunks can be in flight: one to read while the others are written."""
        return self.in_flight + 1

    @property
    def most(self) -> int:
        """Two epochs: every trainer that keeps pace finds everything; more would never be read."""
        return max(2 * self.chunks, self.fewest + 1)


def slots(name: str, memory: Memory | None, need: Need, left: int, available: int) -> int:
    """Slots for the ring of stream `name`.

    Args:
        memory: `memory:` of the configuration; None for a quarter of what was left.
        left: bytes that host and cgroup left when the daemon started, see `available_bytes`.
        available: bytes that they leave now.

    Raises:
        ConfigError: fewer slots than needed, or more memory than there is; says how much is needed.
    """
    stride = need.layout.stride
    if memory is not None and memory.slots is not None:
        count = memory.slots
    else:
        total = left // 4 if memory is None or memory.bytes is None else memory.bytes
        count = min(total // need.streams // stride, need.most)
    if count < need.fewest:
        raise ConfigError(
            f"memory: stream {name!r} gets {count} slots of {_size(stride)} (a chunk of {need.layout.chunk} pictures), "
            f"and needs at least {need.fewest}, one more than the {need.in_flight} chunks that can be in flight: "
            f"set memory to {_size(need.fewest * stride * need.streams)} or more, or `chunk`, "
            "`workers.processes` or `workers.in_flight` to less"
        )
    if count * stride > available:
        raise ConfigError(
            f"memory: {count} slots of stream {name!r} take {_size(count * stride)}, and this machine (or its cgroup) "
            f"leaves {_size(available)}: make `memory` smaller"
        )
    return count


def available_bytes() -> int:
    """What the host, and the cgroups where they have a limit, still leave."""
    meminfo = Path("/proc/meminfo").read_text()
    host = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    group = memory_left()
    return host if group is None else min(host, group)


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"
