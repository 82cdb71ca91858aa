"""The program that measures what reaches a GPU, where there is none: what it makes of figures, its loop on the CPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("gpu_train")
    for name in ("gpu_train", "peers", "common"):
        sys.modules.pop(name, None)


def asked(**more: Any) -> argparse.Namespace:
    usual = {"rounds": 1, "steps": 2, "batch_size": 4, "size": 32, "model": "resnet18", "workers": 1, "count": 48}
    return argparse.Namespace(**{**usual, "only": ("copy", "delivery", "train"), "cpu": False, **more})


def claims(program: Any, monkeypatch: pytest.MonkeyPatch, *, mps: bool, **more: Any) -> dict[str, float]:
    """By their texts, of figures that are made up: each side has so many images/s."""
    speed = {"bare DALI": 100, "delivery": 95, "constant batch": 200, "CPU workers": 150, "GPU worker": 190}
    speed |= {"GPU worker, MPS": 198, "DataLoader": 50}

    def fresh(_: str, option: str, side: str, *options: Any) -> dict[str, Any]:
        assert option == "--side" and options[:2] == ("--folder", Path("/photos"))
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) == side.endswith("MPS")
        if side == "copy":
            return {"copy_share": 0.97, "finish_share": 0.85}
        return {"images": 10, "images_per_s": speed[side], "others": 0.0}

    monkeypatch.setattr(program.common, "fresh", fresh)
    monkeypatch.setattr(program, "MPS", "true" if mps else "no-such-program")
    found, _ = program.measured(asked(**more), Path("/photos"))
    return {claim.text: claim.measured for claim in found}


def test_each_figure_is_held_against_its_limit(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = claims(program, monkeypatch, mps=True)
    assert list(found.values()) == [0.97, 0.85, 0.95, 0.75, 0.95, 0.99]
    assert len(claims(program, monkeypatch, mps=True, only=("train",))) == 3
    assert "not measured" not in capsys.readouterr().out
    assert len(claims(program, monkeypatch, mps=False)) == 5
    assert "not measured: GPU worker, MPS: [Errno 2] No such file or directory: 'no-such" in capsys.readouterr().out
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert claims(program, monkeypatch, mps=True, cpu=True) == {}  # of what stands in for a GPU nothing is claimed


def test_without_a_gpu_nothing_is_measured_and_it_says_why(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.gpus, "look", lambda: program.gpus.Gpus(trouble="there is no NVIDIA driver"))
    monkeypatch.setattr(sys, "argv", ["gpu_train.py"])
    with pytest.raises(SystemExit, match="nothing is measured without a GPU: there is no NVIDIA driver"):
        program.main()


@pytest.mark.soak
def test_the_loop_trains_on_batches_of_a_daemon_on_the_cpu(photos: Path) -> None:
    options = {"--side": "CPU workers", "--folder": str(photos), "--steps": "1", "--workers": "1"}
    options |= {"--batch-size": "4", "--size": "32", "--model": "mobilenet_v3_small"}
    command = [sys.executable, str(BENCHMARKS / "gpu_train.py"), "--cpu", *chain.from_iterable(options.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=110, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["images"] == 4 and found["images_per_s"] > 0 and 0 < found["wait_share"] < 1
    assert {"cpu_trainer", "cpu_workers", "cpu_daemon"} <= found.keys()
