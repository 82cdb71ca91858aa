"""`headrace demo`: real photos through a daemon into a network that learns."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EPOCH = re.compile(r"epoch (\d): +(\d+) images/s, trainer waited +(\d+)%, loss (\d+\.\d{3}), right +(\d+)%")
OTHER_HOST = re.compile(r"and from another host: .*|two hosts cannot be played on this machine: .*")


def demo(*arguments: str) -> list[str]:
    """The lines it prints, all of it having gone well."""
    command = [sys.executable, "-m", "headrace.server", "demo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def epochs(lines: list[str]) -> list[re.Match[str]]:
    matches = [match for line in lines if (match := EPOCH.fullmatch(line))]
    assert [int(match[1]) for match in matches] == list(range(1, len(matches) + 1))
    return matches


def parts(lines: list[str]) -> tuple[list[str], list[str]]:
    """What it says of the trainer beside the daemon, and of the one on another host, if that can be on this machine."""
    (border,) = (i for i, line in enumerate(lines) if OTHER_HOST.fullmatch(line))
    return lines[:border], lines[border + 1 :]


def test_it_trains_on_a_folder_of_ones_own_here_and_from_another_host(photos: Path) -> None:
    here, there = parts(demo("--data", str(photos)))
    assert here[0].startswith("48 photos in 3 classes from a private daemon, transport shm; ")
    found = epochs(here)
    assert len(found) == 4
    assert all(int(match[2]) > 0 and 0 <= int(match[3]) <= 100 for match in found)
    if not there:
        pytest.skip("two hosts cannot be played on this machine")
    assert re.match(r"48 photos in 3 classes from the daemon at tcp://[0-9.]+:\d+, transport tcp; ", there[0])
    assert epochs(there)[0][4] == found[0][4]  # the same pictures, so the same loss


@pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="scikit-image is not installed")
def test_it_cuts_photos_of_its_own_learns_from_them_and_leaves_nothing_behind(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # on a machine without the tools to play two hosts
    out, there = parts(demo())
    assert not there
    assert out[0].startswith("cut 960 JPEGs from the 8 photos")
    losses = [float(match[4]) for match in epochs(out)]
    assert losses[-1] < losses[0] / 2
    # torch makes folders of its own there.
    assert [name for name in os.listdir(home / "tmp") if name.startswith("headrace")] == []
    assert not (home / "cache" / "headrace").exists()


def test_a_folder_that_does_not_exist_is_an_error_by_name(home: Path) -> None:
    command = [sys.executable, "-m", "headrace.server", "demo", "--data", str(home / "missing")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "missing: cannot list the data set" in done.stderr and "Traceback" not in done.stderr
