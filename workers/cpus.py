"""How many CPUs this process may use, and so how many workers to start."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> int:
    """By affinity, and by the quota of the cgroup where it has one (rounded up)."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            count = min(count, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup, or no limit
        pass
    return count


def worker_count(processes: int | str, *, private: bool) -> int:
    """Workers to start for `workers.processes`.

    Args:
        private: the trainer runs on the same CPUs; `auto` leaves it one.
    """
    if isinstance(processes, int):
        return processes
    return max(1, usable_cpus() - private)
