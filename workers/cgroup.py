"""What the control groups of this process allow: memory and CPU time, by cgroup v1, v2, or both side by side.

A limit holds for a group and everything below it, so each question goes to the process's own group and to every
ancestor that can be seen; the tightest answer counts. See proc_pid_mountinfo(5), cgroups(7), and the kernel's
admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# v1 says "no limit" by the largest number of pages that fits 63 bits, which depends on the page size.
_UNLIMITED = 1 << 62
# As in the host's MemAvailable. A file that is read a second time becomes active, which is every file from the second
# epoch on. Not `file` or `cache`: they contain shared memory, and so the rings.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_MEMBERSHIP = re.compile(r"\d+:([^:]*):(/.*)")  # no controllers: v2
_CGROUP_MOUNT = re.compile(r"[^ ]+ [^ ]+ [^ ]+ ([^ ]+) ([^ ]+) .*? - (cgroup2?) [^ ]* ([^ ]+)")


class _Mount(NamedTuple):
    """A mounted hierarchy: `top` is the group that is seen at `folder`."""

    top: PurePosixPath
    folder: Path
    version: int
    options: frozenset[str]  # names the controllers of a v1 hierarchy


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that may still be allocated; None where no group has a limit.

    Page cache and slabs that the kernel gives up on demand count as free.

    Args:
        root: the folder in which `proc` and the mount points are looked up.
    """
    lefts = (_memory_left_in(group) for group in _groups("memory", root))
    return min((left for left in lefts if left is not None), default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time per period, such as 2.5; None where no group has a quota.

    Args:
        root: the folder in which `proc` and the mount points are looked up.
    """
    quotas = (_cpu_quota_of(group) for group in _groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _memory_left_in(group: Path) -> int | None:
    limit = _number(group, "memory.max", "memory.limit_in_bytes")
    if limit is None or not 0 <= limit < _UNLIMITED:
        return None
    used = _number(group, "memory.current", "memory.usage_in_bytes") or 0
    return max(0, limit - max(0, used - _reclaimable(group)))


def _reclaimable(group: Path) -> int:
    """Bytes of a group and its descendants that the kernel takes back rather than exceed a limit."""
    pairs = (line.split() for line in _lines(group / "memory.stat"))
    stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    # In v1 only the numbers named total_* contain the descendants.
    return sum(stat.get(f"total_{key}", stat.get(key, 0)) for key in _RECLAIMABLE)


def _cpu_quota_of(group: Path) -> float | None:
    words = _text(group / "cpu.max") or f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
    try:
        quota, period = (int(word) for word in words.split())
    except ValueError:  # "max", or missing
        return None
    return quota / period if quota > 0 and period > 0 else None  # v1 says "no quota" by -1


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the groups that may limit this process, its own first."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        if (found := _MEMBERSHIP.fullmatch(line)) is None:
            continue
        controllers, own = found[1].split(","), PurePosixPath(found[2])
        if controllers == [""]:
            candidates = [mount for mount in mounts if mount.version == 2]
        elif controller in controllers:
            candidates = [mount for mount in mounts if mount.version == 1 and controller in mount.options]
        else:
            continue
        holding = [mount for mount in candidates if _holds(mount, own)]
        for mount in holding:
            # In a container the path may be one of the host: what does not exist here is passed over on the way up.
            below = own.relative_to(mount.top)
            yield from (mount.folder / group for group in (below, *below.parents))
        if not holding:
            yield from (mount.folder for mount in candidates[:1])


def _holds(mount: _Mount, group: PurePosixPath) -> bool:
    # In a cgroup namespace ".." stands for groups above the namespace's, whose names are not told.
    return group.is_relative_to(mount.top) and ".." not in group.relative_to(mount.top).parts


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        if found := _CGROUP_MOUNT.fullmatch(line):
            top, folder, kind, options = found.groups()
            yield _Mount(
                PurePosixPath(_unescaped(top)),
                root / _unescaped(folder).lstrip("/"),
                2 if kind == "cgroup2" else 1,
                frozenset(options.split(",")),
            )


def _unescaped(path: str) -> str:
    """Blanks and backslashes, which mountinfo writes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _number(folder: Path, *names: str) -> int | None:
    """The number in the first of these files that has one."""
    for name in names:
        try:
            return int(_text(folder / name))
        except ValueError:  # "max", or missing
            continue
    return None


def _lines(file: Path) -> list[str]:
    return _text(file).split("\n")  # splitlines() would also split at characters that a path may contain


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # missing, not allowed, or the group has just been removed
        return ""
