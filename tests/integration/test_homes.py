"""Two GPUs and two trainers, one on each: who renders for whom. Both GPUs and both workers are stand-ins."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_device
import pytest
import two_gpus
import yaml
from service import stream

import headrace.loader
from headrace import Loader
from headrace.batch import Batch

pytest.importorskip("torch")
from late_device import LateDevice

CHUNK, ROWS = 4, 8


@pytest.fixture
def address(photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(fake_device.VARIABLE, str(home / "order"))
    (home / "order").write_text("work")
    configuration = {"listen": f"ipc://{home}/d.sock", "streams": {"train": stream(photos, chunk=CHUNK)}}
    (home / "d.yaml").write_text(yaml.safe_dump(configuration))
    with (home / "d.log").open("wb") as log:
        command = [sys.executable, two_gpus.__file__, "serve", str(home / "d.yaml")]
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert daemon.stdout is not None
    try:
        assert daemon.stdout.readline() == f"listening on ipc://{home}/d.sock\n".encode(), (home / "d.log").read_text()
        yield f"ipc://{home}/d.sock"
    finally:
        daemon.terminate()
        daemon.wait(60)
        daemon.stdout.close()


def test_each_gpu_renders_for_the_trainer_on_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        loaders = []
        for rank, bus in enumerate(two_gpus.BUSES):
            device = LateDevice(asks=0)
            device.bus = bus
            monkeypatch.setattr(headrace.loader, "open_device", lambda given, device=device: device)
            loader = Loader(address, batch_size=ROWS, rank=rank, world_size=2, prefetch=0, device="cuda")
            loaders.append(stack.enter_context(loader))
        taken: list[tuple[Batch, Batch]] = list(zip(*loaders, strict=True))
        assert len(taken) == 3
        # Both are there: what each has asked for fits into its own GPU's worker at any time.
        for rank in (0, 1):
            first = [range((2 * step + rank) * ROWS, (2 * step + rank + 1) * ROWS) for step in range(3)]
            own = {position // CHUNK for positions in first for position in positions}
            assert set(fake_device.given(rank)) == own
