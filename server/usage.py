"""What processes and the machine use, by /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads, to a hundredth; 0 of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def own_bytes(pid: int) -> int:
    """Memory that is the process's own (USS), less the clean pages of files; 0 of one that is gone.

    Those belong to the kernel's cache, and count as private whenever no other process has the same library mapped.
    """
    return _mapped(pid, "Private_Dirty:", "Private_Hugetlb:", "Swap:")


def held_bytes(pid: int) -> int:
    """The same with its part of what it shares with others, rings among it: the sum over processes counts each page
    once; 0 of one that is gone.
    """
    return _mapped(pid, "Pss_Anon:", "Pss_Shmem:", "Swap:")


def _mapped(pid: int, *kinds: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))


def machine_seconds() -> tuple[float, float]:
    """CPU time so far, of all CPUs: that somebody here used, and that a hypervisor gave to others while somebody here
    wanted it.
    """
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, _, _, irq, softirq, stolen = (int(field) / _TICKS for field in fields[1:9])
    return user + nice + system + irq + softirq, stolen
