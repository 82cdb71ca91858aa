"""How many workers a machine gets."""

from __future__ import annotations

import os

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
