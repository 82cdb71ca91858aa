"""What `check` says of machines that are made up; what commands print as processes is tested beside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from service import stream

from headrace.errors import ConfigError
from headrace.pipeline import gpus, machine, trial
from headrace.pipeline.gpus import Gpu, Gpus
from headrace.pipeline.machine import Dali
from headrace.pipeline.trial import Trial
from headrace.server import cli
from headrace.workers.device import least_memory

GIB = 1 << 30


def check(photos: Path, home: Path, memory: str | None = None, **workers: Any) -> object:
    file = home / "headrace.yaml"
    file.write_text(yaml.safe_dump({"memory": memory, "workers": workers, "streams": {"train": stream(photos)}}))
    return cli.app(["check", str(file)], standalone_mode=False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Gpu(0, "NVIDIA Test", 80 * GIB, 79 * GIB)
    used = Gpu(1, "NVIDIA Test", 80 * GIB, 40 * GIB, users=(1 << 30,))
    monkeypatch.setattr(gpus, "look", lambda: Gpus((free, used), "580.65.06", (13, 0)))
    monkeypatch.setattr(machine, "dali", lambda: [Dali("nvidia-dali-cuda130", "2.4.0")])
    monkeypatch.setattr(trial, "run", lambda name, devices, hw_decoder_load: [Trial("dali-gpu/2.4.0")])


def test_check_says_which_gpus_render_with_what_and_which_do_not(
    photos: Path, home: Path, two_gpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(photos, home, processes=3, threads=5, in_flight=6, gpu_memory="5GiB") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "backend: auto runs as dali-gpu/2.4.0"
    assert lines[1] == "  a GPU is the fastest there is" and lines[2].startswith("  GPU 1 (NVIDIA Test) is used by")
    assert lines[3] == (
        "GPU 0: a worker with 5 threads, 6 chunks at once, and at most 5120 MiB of its memory, of which it takes about "
        f"{least_memory(5) >> 20} before the first picture"
    )
    assert lines[4].startswith("workers: 3 (") and lines[4].endswith("which take over where no GPU works any more")


def test_check_counts_the_chunks_that_gpus_have_at_once(photos: Path, home: Path, two_gpus: None) -> None:
    with pytest.raises(ConfigError, match="one more than the 9 chunks that can be in flight"):
        check(photos, home, memory="9 slots", processes=3, in_flight=6)


def test_check_of_a_backend_that_cannot_run_here_is_an_error_that_says_why(
    photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "look", lambda: Gpus(trouble="there is no NVIDIA driver"))
    with pytest.raises(ConfigError, match="dali-gpu cannot run here: there is no NVIDIA driver"):
        check(photos, home, backend="dali-gpu")


def test_a_standard_output_that_is_closed_is_none_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "--version"])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.close()
    assert ended.value.code == 0
