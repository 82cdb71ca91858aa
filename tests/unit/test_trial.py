"""Trials of backends that work and of those that do not, in whatever way."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from headrace.loader import Loader
from headrace.pipeline import gpus, isolated, trial
from headrace.pipeline.backend import BACKENDS, BackendFailed, Options, make
from headrace.pipeline.gpus import Gpu
from headrace.pipeline.trial import Trial, confused, lock, render, run
from headrace.server import private

HERE = Options()


class Bent:
    """Pillow's backend, but for what it does to the pictures."""

    render_id = "bent/1"

    def __init__(self, bend: Callable[[Any], None], verdict: Any = None) -> None:
        self._bend = bend
        self._verdict = verdict
        self.closed = False

    def render(self, pictures: Any, params: Any, out: Any, begin: Any) -> Any:
        make("pillow").render(pictures, params, out, begin)
        self._bend(out[0])
        return [self._verdict]

    def close(self) -> None:
        self.closed = True


def darker(levels: int) -> Callable[[Any], None]:
    return lambda out: np.copyto(out, np.maximum(out.astype(np.int16) - levels, 0).astype(np.uint8))


def test_a_backend_that_renders_like_pillow_works(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Bent(darker(2))
    monkeypatch.setitem(BACKENDS, "bent", lambda options: backend)
    assert render("bent", HERE) == Trial("bent/1")
    assert backend.closed
    assert render("pillow", HERE) == Trial(make("pillow").render_id)


def test_a_backend_that_renders_nonsense_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "bent", lambda options: Bent(darker(9)))
    assert render("bent", HERE) == Trial(trouble="it renders nonsense, on average 9 levels away from Pillow's picture")
    assert "nonsense" in render("fake", HERE).trouble


def test_a_backend_that_cannot_be_made_or_refuses_a_good_picture_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: Options) -> Any:
        raise BackendFailed(f"GPU {options.device} has no memory")

    monkeypatch.setitem(BACKENDS, "broken", broken)
    assert render("broken", Options(device=3)) == Trial(trouble="GPU 3 has no memory")
    verdict = type("Verdict", (), {"reason": "not today"})()
    monkeypatch.setitem(BACKENDS, "bent", lambda options: Bent(darker(0), verdict))
    assert render("bent", HERE) == Trial(trouble="it refuses a good picture: not today")
    assert render("other", HERE) == Trial(trouble="this version of Headrace does not have it")


def test_dali_on_the_cpu_is_tried_in_a_process_of_its_own() -> None:
    (done,) = run("dali-cpu")
    assert done.trouble == "" and done.render_id.startswith("dali-cpu/")


class Driver:
    """A CUDA driver that notes what is locked."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 1
            return 801 if name == self.refuses else 0

        return call


def test_page_locking_is_tried_and_undone() -> None:
    driver = Driver()
    assert lock(0, lambda name: driver) == Trial()
    assert driver.called.count("cuMemHostRegister_v2") == driver.called.count("cuMemHostUnregister") == 1
    assert driver.called[-1].startswith("cuDevicePrimaryCtxRelease")
    assert lock(0, lambda name: Driver("cuMemHostRegister_v2")).trouble == "cuMemHostRegister_v2: unknown error (801)"


def test_page_locking_without_a_driver_says_so() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert lock(0, missing).trouble.startswith("the NVIDIA driver's libcuda.so.1 cannot be loaded")


class Numbered(Driver):
    """One that has a GPU of this identity."""

    def __init__(self, identity: UUID) -> None:
        super().__init__()
        self.identity = identity

    def cuDeviceGetUuid_v2(self, octets: Any, device: Any) -> int:
        octets.raw = self.identity.bytes
        return 0


def test_a_gpu_that_cuda_counts_otherwise_than_nvml_is_not_used() -> None:
    here, other = UUID(int=7 << 96), UUID(int=8 << 96)
    for prefix in ("GPU-", "MIG-"):
        assert confused(0, f"{prefix}{here}", lambda name: Numbered(here)) == ""
    said = confused(0, f"GPU-{other}", lambda name: Numbered(here))
    assert f"CUDA counts as GPU 0 is another one, {here}, and not GPU-{other}" in said and "CUDA_VISIBLE" in said
    assert confused(0, "", lambda name: Numbered(here)) == ""
    assert confused(0, f"GPU-{here}", lambda name: Driver("cuInit")) == "CUDA: cuInit: unknown error (801)"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the trial's process run some other program."""

    def runs(program: str) -> None:
        start = subprocess.Popen

        def other(command: list[str], **options: Any) -> Any:
            return start([command[0], "-I", "-S", "-c", program, *command[6:]], **options)

        monkeypatch.setattr(subprocess, "Popen", other)

    return runs


def test_a_trial_that_dies_says_so(child: Callable[[str], None]) -> None:
    child("import os; os.write(2, b'free(): invalid pointer\\n\\n'); os.kill(os.getpid(), 11)")
    assert run("dali-gpu") == [
        Trial(trouble="a trial of it was killed by SIGSEGV; its last words: free(): invalid pointer")
    ]


def test_every_gpu_has_a_trial_and_none_waits_for_another(child: Callable[[str], None]) -> None:
    child(
        "import sys, time; name, number, uuid, load = sys.argv[1:]; number == '0' and time.sleep(60); "
        """print('{"render_id": "' + '/'.join(sys.argv[1:]) + '", "trouble": ""}')"""
    )
    devices = [Gpu(number, "NVIDIA Test", 2, 1, uuid=f"GPU-{number}") for number in (0, 3)]
    hung, fine = run("dali-gpu", devices, hw_decoder_load=0.5, timeout=0.5)
    assert hung == Trial(trouble="a trial of it did not end within 0.5 seconds")
    assert fine == Trial("dali-gpu/3/GPU-3/0.5")


def test_to_find_out_what_runs_takes_less_than_those_allow_who_wait_for_a_private_daemon() -> None:
    longest = gpus.TIMEOUT + trial.TIMEOUT + 4 * isolated._GRACE  # that of the deadline, and that to be killed
    assert longest < private._FIND_TIMEOUT < inspect.signature(Loader).parameters["timeout"].default
