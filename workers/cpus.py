"""How many CPUs this process may use, and so how many workers to start; and what these CPUs are."""

from __future__ import annotations

import math
import os
from pathlib import Path

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


def cores(root: Path = Path("/")) -> int:
    """How many cores the CPUs belong to that this process may use; where nobody says, as many as these are.

    Args:
        root: the folder in which `sys` is looked up.
    """
    found = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        found.add(siblings)
    return min(len(found), usable_cpus())


def virtual(root: Path = Path("/")) -> bool:
    """Whether a hypervisor gives these CPUs, as far as it says so.

    Args:
        root: the folder in which `proc` is looked up.
    """
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return "hypervisor" in flags.split()
