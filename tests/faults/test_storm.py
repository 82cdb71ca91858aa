"""Everything fails at random while several trainers run: nothing is lost, repeated or wrong, nothing grows or stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).with_name("storm.py")
#: What a storm takes beside itself: quiet before and after it, and comparing every picture.
AROUND = 240


def storm(capsys: pytest.CaptureFixture[str], seconds: int, *options: str) -> None:
    line = [sys.executable, str(STORM), f"--seconds={seconds}", "--trainers=3", "--servers=2", *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=2 * seconds + AROUND, check=False)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    with capsys.disabled():
        print(f"\n{done.stdout}", end="  ")  # noqa: T201


@pytest.mark.timeout(400)
def test_a_minute_of_storm(capsys: pytest.CaptureFixture[str]) -> None:
    storm(capsys, 30, "--seed=7")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1])
def test_ten_minutes_of_storm(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    storm(capsys, 600, f"--seed={seed}")


@pytest.mark.soak
@pytest.mark.timeout(800)
@pytest.mark.parametrize("seed", [1])
def test_two_minutes_of_storm_between_two_hosts_with_keys(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    storm(capsys, 120, f"--seed={seed}", "--cable", "--keys")
