"""Trainers that others wrote: torchrun, Lightning and Accelerate take a Loader as it is, and resume it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from service import Daemon, Truth

from headrace import Loader

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def daemon(photos: Path, session_home: Path) -> Iterator[Daemon]:
    small = {"dataset": {"folder": str(photos)}, "chunk": 4, "transforms": [{"resize": {"size": [8, 8]}}]}
    folder = Path(tempfile.mkdtemp(dir=session_home))
    with Daemon(folder, {"train": small | {"shuffle": True}, "val": small}, workers=1) as made:
        yield made


def needs(module: str) -> None:
    """Without importing it here."""
    if find_spec(module) is None:
        pytest.skip(f"no {module}")


def run(*command: str) -> str:
    """What it prints; it has to end well, and says on standard error why it does not."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def order(daemon: Daemon, home: Path, epoch: int) -> list[int]:
    return [index for index, _, _ in Truth(daemon.config, home / "truth").rows(epoch)]


def test_four_processes_of_torchrun_share_each_epoch_in_as_many_steps_and_three_go_on(
    daemon: Daemon, home: Path
) -> None:
    needs("torch")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run(*torchrun, str(ROOT / "with_torchrun.py"), daemon.address, str(home))
    ranks = [json.loads((home / f"{rank}.json").read_text()) for rank in range(4)]
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == 2 * 3  # 48 samples in steps of 4 times 5
    for epoch in range(2):
        got = [
            index
            for step in steps[3 * epoch : 3 * epoch + 3]
            for number, indices, valid, _ in step
            for index, counts in zip(indices, valid, strict=True)
            if counts and number == epoch
        ]
        assert got == order(daemon, home, epoch)
    for step in steps:
        assert all(len(indices) == 5 for _, indices, _, _ in step)
        assert all(state == step[0][3] for _, _, _, state in step)
    state = steps[3][0][3]
    assert (state["epoch"], state["position"]) == (1, 20)
    rest: list[list[Any]] = []
    for rank in range(3):
        with Loader(daemon.address, stream="train", batch_size=5, rank=rank, world_size=3, output="numpy") as loader:
            loader.load_state_dict(state)
            rest.append([batch.indices[batch.valid].tolist() for batch in loader])
    assert [i for step in zip(*rest, strict=True) for indices in step for i in indices] == order(daemon, home, 1)[20:]


def test_lightning_trains_validates_and_resumes_from_any_step_and_any_epochs_end(daemon: Daemon, home: Path) -> None:
    needs("pytorch_lightning")
    said = json.loads(run(str(ROOT / "with_lightning.py"), daemon.address, str(home)))
    whole = said["whole"]
    assert [(epoch, step, of) for epoch, step, of, _ in whole] == [(e, s, e) for e in range(3) for s in range(5)]
    for epoch in range(3):
        got = [index for number, _, _, indices in whole if number == epoch for index in indices]
        assert got == order(daemon, home, epoch)
    assert [index for indices in said["validated"] for index in indices] == 3 * list(range(48))
    for name, done in (("step-3", 3), ("step-5", 5), ("step-12", 12), ("epoch-0", 5), ("epoch-1", 10)):
        assert said["after"][name] == whole[done:], name


def test_accelerate_takes_a_loader_as_it_is_and_resumes_it(daemon: Daemon, home: Path) -> None:
    needs("accelerate")
    said = json.loads(run(str(ROOT / "with_accelerate.py"), daemon.address, str(home / "state")))
    assert said["resumed"] == said["followed"]
    got = [index for _, indices in said["resumed"] for index in indices]
    assert got == order(daemon, home, 0)[30:] + order(daemon, home, 1)
