"""How many workers a machine gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.workers import cpus


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    monkeypatch.setattr(cpus, "cpu_quota", lambda: None)
    assert cpus.usable_cpus() == 3


@pytest.mark.parametrize(("quota", "count"), [(None, 8), (2.5, 3), (3.0, 3), (0.1, 1), (64.0, 8)])
def test_the_cgroups_quota_counts(monkeypatch: pytest.MonkeyPatch, quota: float | None, count: int) -> None:
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpus.usable_cpus() == count


def test_a_private_daemon_leaves_the_trainer_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 4)
    assert cpus.worker_count("auto", private=False) == 4
    assert cpus.worker_count("auto", private=True) == 3
    assert cpus.worker_count(9, private=True) == 9
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 1)
    assert cpus.worker_count("auto", private=True) == 1


def test_threads_of_a_core_are_one_core(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for cpu in range(3):  # of CPU 3 nobody says anything
        folder = home / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n" if cpu < 2 else "2,6\n")
    assert cpus.cores(home) == 3
    monkeypatch.setattr(cpus, "cpu_quota", lambda: 1.5)
    assert cpus.cores(home) == 2  # and no more than may be used


def test_a_hypervisor_is_seen_by_its_flag(home: Path) -> None:
    assert not cpus.virtual(home)
    (home / "proc").mkdir()
    for flags, virtual in (("fpu sse2", False), ("fpu hypervisor sse2", True)):
        (home / "proc" / "cpuinfo").write_text(f"processor : 0\nmodel name : hypervisor\nflags : {flags}\n")
        assert cpus.virtual(home) is virtual
