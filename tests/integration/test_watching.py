"""Those who watch a daemon: `headrace top`, Prometheus, a supervisor."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from service import Daemon, stream, until

from headrace.errors import ConfigError
from headrace.loader import Loader

TOP = [sys.executable, "-m", "headrace.server", "top"]
PHOTOS = 48


@pytest.fixture(scope="module")
def daemon(photos: Path, session_home: Path) -> Iterator[Daemon]:
    with Daemon(Path(tempfile.mkdtemp(dir=session_home)), {"train": stream(photos)}, metrics=True) as running:
        yield running


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[None]:
    """It has had an epoch, and the daemon has heard of that."""
    with Loader(daemon.address, batch_size=16, output="numpy") as loader:
        assert sum(len(batch.indices) for batch in loader) == PHOTOS
        until(lambda: [client.images for client in daemon.ping().clients] == [PHOTOS], "its report")
        yield


def fetch(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(daemon: Daemon) -> dict[str, float]:
    """By name and labels but for the client's."""
    _, text = fetch(f"{daemon.metrics_address}/metrics")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels = [[value for key, value in sorted(sample.labels.items()) if key != "client"] for sample in samples]
    return {" ".join([sample.name, *more]): sample.value for sample, more in zip(samples, labels, strict=True)}


def test_metrics_and_health_are_a_daemons(daemon: Daemon, trainer: None) -> None:
    until(lambda: metrics(daemon).get("headrace_client_images_total train shm") == PHOTOS, "the next status")
    found = metrics(daemon)
    assert found["headrace_sessions"] == found["headrace_workers"] == 1
    assert found["headrace_stream_images_total train"] >= PHOTOS
    assert found["headrace_stream_slots filling train"] <= found["headrace_stream_requests_waiting train"]
    assert found["headrace_stream_chunks_delivered_total train"] >= PHOTOS / 4
    decoded = found["headrace_stage_seconds_count decode"]
    assert decoded > 0 and found["headrace_stage_seconds_bucket +Inf decode"] == decoded
    assert 0 < found["headrace_stage_seconds_sum decode"] < found["headrace_worker_seconds_total"]
    assert fetch(f"{daemon.metrics_address}/healthz") == (200, "ok\n")


def test_the_port_is_free_when_the_daemon_has_stopped(photos: Path, home: Path) -> None:
    with Daemon(home, {"train": stream(photos)}, metrics=True) as running:
        address = running.metrics_address
        until(lambda: fetch(f"{address}/healthz")[0] == 200, "its first status")
    with pytest.raises(urllib.error.URLError, match="Connection refused"):
        fetch(f"{address}/healthz")


def test_a_private_daemon_whose_port_is_taken_is_an_error_that_says_so(daemon: Daemon, photos: Path) -> None:
    place = daemon.metrics_address.removeprefix("http://")
    config = {"metrics": place, "workers": {"processes": 1, "backend": "pillow"}, "streams": {"train": stream(photos)}}
    with pytest.raises(ConfigError, match=f"metrics: {place} cannot be listened at: Address already in use"):
        Loader(config, batch_size=16, output="numpy")


def test_one_frame_shows_streams_stages_and_clients(daemon: Daemon, trainer: None) -> None:
    done = subprocess.run([*TOP, daemon.address, "--once", "--interval", "0.2"], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert text.startswith(f"headrace {daemon.ping().version} at {daemon.address}, process {daemon.pid}, up ")
    for row in (r"train +0 +0 ", r"decode +", r"client .*pid \d+ +train +shm +"):
        assert re.search(f"^{row}", text, re.M), text
    assert "\x1b" not in text


def test_nobody_there_is_status_1(home: Path) -> None:
    done = subprocess.run([*TOP, f"ipc://{home}/no.sock", "--once"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"") and b"no daemon" in done.stderr


def test_on_a_terminal_it_stays_until_ctrl_c_and_leaves_the_screen_as_it_was(daemon: Daemon) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    process = subprocess.Popen(
        [*TOP, daemon.address, "--interval", "0.1"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while shown.count(b"images/s") < 3 and time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 20.0)[0]:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # its end
                break
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert shown.count(b"images/s") >= 3 and b"Traceback" not in shown
    assert shown.index(b"\x1b[?1049h") < shown.rindex(b"\x1b[?1049l")
