"""How many CPUs this process may use, and so how many workers to start."""

from __future__ import annotations

import math
import os

from headrace.workers.cgroup import cpu_quota


def usable_cpus() -> int:
    """By affinity, and by the quota of the cgroups where they have one (rounded up)."""
    count = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return count if quota is None else min(count, math.ceil(quota))


def worker_count(processes: int | str, *, private: bool) -> int:
    """Workers to start for `workers.processes`.

    Args:
        private: the trainer runs on the same CPUs; `auto` leaves it one.
    """
    if isinstance(processes, int):
        return processes
    return max(1, usable_cpus() - private)
