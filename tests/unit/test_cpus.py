"""How many workers a machine gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.workers import cpus


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    monkeypatch.setattr(cpus, "_QUOTA", Path("/nonexistent"))
    assert cpus.usable_cpus() == 3


@pytest.mark.parametrize(
    ("text", "count"), [("max 100000\n", 8), ("250000 100000\n", 3), ("10000 100000\n", 1), ("nonsense\n", 8)]
)
def test_the_cgroups_quota_counts(home: Path, monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    (home / "cpu.max").write_text(text)
    monkeypatch.setattr(cpus, "_QUOTA", home / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpus.usable_cpus() == count


def test_a_private_daemon_leaves_the_trainer_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 4)
    assert cpus.worker_count("auto", private=False) == 4
    assert cpus.worker_count("auto", private=True) == 3
    assert cpus.worker_count(9, private=True) == 9
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 1)
    assert cpus.worker_count("auto", private=True) == 1
