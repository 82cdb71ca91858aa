"""`headrace profile` names what limits, in three cases that are staged: a slow source, large photos, a slow trainer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import photos as samples
import pytest
import yaml
from PIL import Image
from service import Daemon, stream

import headrace
from headrace.errors import ConfigError, HeadraceError
from headrace.pipeline.spec import Config
from headrace.server import profile
from headrace.server.own import serving
from headrace.server.verify import Progress

HEADRACE = [sys.executable, "-m", "headrace.server"]


@contextlib.contextmanager
def quiet(what: str) -> Iterator[Progress]:
    yield lambda done, total, note="": None


def written(home: Path, of: dict[str, Any]) -> Path:
    file = home / "headrace.yaml"
    file.write_text(yaml.safe_dump({"workers": {"processes": 1, "backend": "pillow"}, "streams": {"train": of}}))
    return file


def test_a_throttled_source_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read takes six times as long as to decode, as on a disk far away, and the rest next to none."""
    (home / "photos" / "sea").mkdir(parents=True)
    Image.fromarray(samples.landscape("sea", 0, 900, 1200)).save(home / "photos" / "sea" / "0.jpg")
    for i in range(1, 32):
        os.link(home / "photos" / "sea" / "0.jpg", home / "photos" / "sea" / f"{i}.jpg")
    before = time.monotonic()
    with Image.open(home / "photos" / "sea" / "0.jpg") as photo:
        photo.load()
    pause = max(0.04, 6 * (time.monotonic() - before))
    (home / "site").mkdir()
    (home / "site" / "sitecustomize.py").write_text(
        "import os, time\n"
        "really = os.read\n"
        "def read(fd, size):\n"
        "    if os.readlink(f'/proc/self/fd/{fd}').endswith('.jpg'):\n"
        f"        time.sleep({pause})\n"
        "    return really(fd, size)\n"
        "os.read = read\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(home / "site"), prepend=os.pathsep)  # of the daemon and its workers
    config = Config.load(written(home, stream(home / "photos")))
    found = profile.profile(config, "train", quiet, workers=[1], seconds=25 * pause)
    assert found.verdict.stage == "read", found
    assert found.headroom is not None and found.headroom.then == "decode"
    assert found.headroom.rate > 2 * found.best.rate
    assert any("workers: {processes:" in line for advice in found.advice for line in advice.lines)
    assert any("one disk" in reason for reason in found.distrust)


def test_large_photos_are_named(home: Path) -> None:
    """Of 12 megapixels, shown at 64 by 64."""
    (home / "large" / "a").mkdir(parents=True)
    across, down = np.meshgrid(np.arange(4000), np.arange(3000))
    Image.fromarray((across // 16 ^ down // 16).astype(np.uint8)).convert("RGB").save(home / "large" / "a" / "0.jpg")
    for i in range(1, 8):
        os.link(home / "large" / "a" / "0.jpg", home / "large" / "a" / f"{i}.jpg")
    page = home / "report.html"
    config = written(home, stream(home / "large", size=64, chunk=1))
    command = [*HEADRACE, "profile", str(config), "train", "--seconds", "0.5", "--workers", "1", "--target", "500"]
    done = subprocess.run([*command, "--json", "--html", str(page)], capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["verdict"]["stage"] == "decode", found
    assert "12.00 megapixels" in found["what"]
    assert "decode: {dct_scaling: true}" in [line for advice in found["advice"] for line in advice["lines"]]
    assert any("500 images/s take" in advice["text"] for advice in found["target"])
    assert page.read_text().startswith("<!doctype html>") and "12.00 megapixels" in page.read_text()


@pytest.fixture
def slow_trainer() -> Any:
    """`slow_trainer(address)`: takes a batch, and trains for a tenth of a second."""
    stop = threading.Event()
    threads = []

    def start(address: str) -> None:
        ready = threading.Event()

        def train() -> None:
            with headrace.Loader(address, batch_size=8, output="numpy", rank=0, world_size=1) as loader:
                while not stop.is_set():
                    for _ in loader:
                        ready.set()
                        if stop.wait(0.1):
                            break

        threads.append(thread := threading.Thread(target=train))
        thread.start()
        assert ready.wait(60)

    yield start
    stop.set()
    for thread in threads:
        thread.join(60)


def test_a_slow_trainer_is_named(photos: Path, home: Path, slow_trainer: Callable[[str], None]) -> None:
    with Daemon(home, {"train": stream(photos)}, workers=1, slots=16) as daemon:
        with pytest.raises(HeadraceError, match="no trainer is there"):
            profile.against(daemon.address, quiet, seconds=0.1)
        slow_trainer(daemon.address)
        time.sleep(1.5)  # until its first report
        found = profile.against(daemon.address, quiet, stream="train", seconds=2.5)
        assert found.verdict.stage == "trainer", found
        assert found.best.waited < 0.05
        assert found.best.rate == pytest.approx(80, rel=0.5)
        assert found.potential is not None and found.potential > 100
        with pytest.raises(ConfigError, match="there is no stream 'other'; there is train"):
            profile.against(daemon.address, quiet, stream="other")


def test_what_is_missing_is_said() -> None:
    done = subprocess.run([*HEADRACE, "profile"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"name a CONFIG" in done.stderr


def test_a_daemon_that_does_not_start_is_an_error(home: Path) -> None:
    with pytest.raises(HeadraceError, match="does not get ready.*streams"), serving({"listen": "ipc:///x"}, home):
        pass
