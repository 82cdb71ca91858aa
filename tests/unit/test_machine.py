"""Which backend runs, for machines that are made up: their GPUs, their DALI, and how a trial ends there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.pipeline import backend, gpus, machine, trial
from headrace.pipeline.backend import BackendFailed, Options
from headrace.pipeline.gpus import Gpu, Gpus
from headrace.pipeline.machine import Choice, Dali, choose, make, prove
from headrace.pipeline.spec import Workers
from headrace.pipeline.trial import Trial

GIB = 1 << 30
NO_DRIVER = Gpus(trouble="there is no NVIDIA driver")
FREE = Gpu(0, "NVIDIA Test", 80 * GIB, 79 * GIB, bus="0000:3b:00.0")
IN_USE = Gpu(1, "NVIDIA Test", 80 * GIB, 40 * GIB, users=(1 << 30,))
CROWDED = Gpu(2, "NVIDIA Test", 80 * GIB, 40 * GIB, crowded=True)
FULL = Gpu(3, "NVIDIA Test", 80 * GIB, 2 * GIB)
CUDA13 = Dali("nvidia-dali-cuda130", "2.4.0")


class Here:
    """The machine; what is tried on it is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus = NO_DRIVER
        self.dali = [CUDA13]
        self.troubles: dict[int, str] = {}
        self.render_ids: dict[int, str] = {}
        self.tried: list[tuple[str, list[int], float]] = []
        monkeypatch.setattr(gpus, "look", lambda: self.gpus)
        monkeypatch.setattr(machine, "dali", lambda: self.dali)
        monkeypatch.setattr(trial, "run", self._run)

    def has(self, *found: Gpu, cuda: tuple[int, int] = (13, 0)) -> None:
        self.gpus = Gpus(found, "580.65.06", cuda)

    def _run(self, name: str, devices: Sequence[Gpu] = (), *, hw_decoder_load: float = 0.0) -> list[Trial]:
        numbers = [gpu.number for gpu in devices]
        self.tried.append((name, numbers, hw_decoder_load))
        return [self._trial(name, number) for number in numbers or [0]]

    def _trial(self, name: str, number: int) -> Trial:
        trouble = self.troubles.get(number, "")
        return Trial("" if trouble else self.render_ids.get(number, f"{name}/2.4.0"), trouble)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(monkeypatch)


def refused(**workers: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        choose(Workers(**workers))
    return str(caught.value)


def test_auto_is_pillow_where_there_is_no_gpu_and_tries_nothing(here: Here) -> None:
    chosen = choose(Workers())
    assert (chosen.backend, chosen.devices) == ("pillow", ())
    assert chosen.why[0] == "there is no NVIDIA driver" and "Pillow starts sooner" in chosen.why[1]
    assert here.tried == []


def test_auto_is_every_gpu_that_works_and_that_nobody_uses(here: Here) -> None:
    here.has(FREE, IN_USE, CROWDED, FULL, Gpu(4, "NVIDIA Test", 80 * GIB, 79 * GIB))
    chosen = choose(Workers(hw_decoder_load=1))
    assert chosen == Choice("dali-gpu", (0, 4), chosen.why, "dali-gpu/2.4.0", ("0000:3b:00.0", ""))
    assert here.tried == [("dali-gpu", [0, 4], 1)]  # at once
    _, used, crowded, full = chosen.why
    assert used.startswith(f"GPU 1 (NVIDIA Test) is used by process {1 << 30}; to share it, name it in workers.devices")
    assert crowded.startswith("GPU 2 (NVIDIA Test) is used by somebody who cannot be seen")
    assert full == "GPU 3 (NVIDIA Test) has 2048 MiB of free memory, and workers.gpu_memory is 4096 MiB"


def test_a_gpu_that_is_used_is_taken_when_it_is_named(here: Here) -> None:
    here.has(FREE, IN_USE)
    for name in ("auto", "dali-gpu"):
        assert choose(Workers(backend=name, devices=[1])).devices == (1,)
        assert choose(Workers(backend=name, devices=[1, 0])).devices == (0, 1)
    assert choose(Workers(backend="dali-gpu")).devices == (0,)


def test_a_gpu_that_fails_its_trial_is_left_out_with_the_reason(here: Here) -> None:
    here.has(FREE, Gpu(5, "NVIDIA Test", 80 * GIB, 79 * GIB))
    here.troubles = {0: "a trial of it was killed by SIGSEGV"}
    chosen = choose(Workers())
    assert chosen.devices == (5,)
    assert chosen.why[1] == "GPU 0 (NVIDIA Test): a trial of it was killed by SIGSEGV"
    here.troubles[5] = "a trial of it did not end"
    chosen = choose(Workers())
    assert (chosen.backend, len(chosen.why)) == ("pillow", 3)
    assert re.search("dali-gpu cannot run here: GPU 0 .* SIGSEGV; GPU 5 .* did not end", refused(backend="dali-gpu"))


@pytest.mark.parametrize("name", ["auto", "dali-gpu"])
def test_a_device_that_is_not_there_is_an_error_that_names_those_that_are(here: Here, name: str) -> None:
    here.has(FREE, IN_USE)
    said = refused(backend=name, devices=[0, 7])
    assert said == "workers.devices: there is no GPU 7; there is 0 (NVIDIA Test), 1 (NVIDIA Test)"


def test_devices_of_a_machine_without_a_gpu_leave_auto_on_the_cpu(here: Here) -> None:
    assert choose(Workers(devices=[0])).backend == "pillow"


def test_a_named_backend_that_cannot_run_says_why_and_what_to_do(here: Here) -> None:
    assert "dali-gpu cannot run here: there is no NVIDIA driver. `auto` takes" in refused(backend="dali-gpu")
    here.dali = []
    assert "no NVIDIA driver; NVIDIA DALI is not installed: pip install" in refused(backend="dali-gpu")
    assert len(choose(Workers()).why) == 2
    here.dali = [CUDA13]
    here.has(IN_USE)
    assert "is used by process" in refused(backend="dali-gpu")
    here.has(FREE)
    here.dali = []
    for name in ("dali-gpu", "dali-cpu"):
        assert f"{name} cannot run here: NVIDIA DALI is not installed: pip inst" in refused(backend=name)
    assert choose(Workers()).why[0].startswith("NVIDIA DALI is not installed")
    assert here.tried == []


def test_two_packages_of_dali_run_nowhere(here: Here) -> None:
    here.has(FREE)
    here.dali = [CUDA13, Dali("nvidia-dali-cuda120", "2.4.0")]
    for name in ("dali-gpu", "dali-cpu"):
        assert "overwrite each other's files: pip uninstall nvidia-dali-cuda130 nv" in refused(backend=name)
    assert choose(Workers()).backend == "pillow"
    assert here.tried == []


def test_a_gpu_of_which_the_driver_does_not_tell_is_left_out_even_if_it_is_named(here: Here) -> None:
    here.has(FREE, Gpu(1, "unknown", 0, 0, trouble="GPU is lost (15)"))
    assert choose(Workers()).devices == (0,)
    assert choose(Workers()).why[1] == "GPU 1 (unknown): GPU is lost (15)"
    assert "cannot run here: GPU 1 (unknown): GPU is lost (15)." in refused(backend="dali-gpu", devices=[1])


def test_gpus_of_two_kinds_have_two_render_ids(here: Here) -> None:
    here.has(FREE, Gpu(1, "NVIDIA Other", 80 * GIB, 79 * GIB), Gpu(2, "NVIDIA Test", 80 * GIB, 79 * GIB))
    here.render_ids = {0: "dali-gpu/test", 1: "dali-gpu/other", 2: "dali-gpu/test"}
    assert prove(Workers()).render_id == "dali-gpu/other + dali-gpu/test"


def test_a_driver_that_is_too_old_for_the_installed_dali_is_told_which_to_install(here: Here) -> None:
    here.has(FREE, cuda=(12, 4))
    said = refused(backend="dali-gpu")
    assert "driver 580.65.06 runs CUDA 12.4 at most, and nvidia-dali-cuda130 2.4.0 needs 13.0" in said
    assert "install 'headrace[dali-cuda12]' instead of 'headrace[dali]', or a newer driver" in said
    here.dali = [Dali("nvidia-dali-cuda120", "2.4.0")]
    assert choose(Workers()).devices == (0,)
    here.has(FREE, cuda=(11, 8))
    assert "needs 12.0: install a newer driver" in refused(backend="dali-gpu")


@pytest.mark.parametrize("name", ["pillow", "fake", "dali-cpu"])
def test_a_named_backend_that_can_run_is_taken_without_looking_for_gpus(name: str, here: Here) -> None:
    here.gpus = None  # type: ignore[assignment]
    assert choose(Workers(backend=name)) == Choice(name, (), ("the configuration names it",))


def test_proof_has_the_render_id_of_what_was_tried(here: Here) -> None:
    assert prove(Workers(backend="pillow")).render_id.startswith("pillow/")
    assert prove(Workers()).render_id.startswith("pillow/")
    assert prove(Workers(backend="fake")).render_id == "fake/1"
    assert here.tried == []
    assert prove(Workers(backend="dali-cpu")).render_id == "dali-cpu/2.4.0"
    here.has(FREE)
    assert prove(Workers()).render_id == "dali-gpu/2.4.0"
    assert [name for name, *_ in here.tried] == ["dali-cpu", "dali-gpu"]


def test_what_does_not_work_when_it_is_tried_is_an_error(here: Here) -> None:
    here.troubles = {0: "libcuda is broken"}
    with pytest.raises(ConfigError, match="dali-cpu cannot run here: libcuda is broken"):
        prove(Workers(backend="dali-cpu"))


def test_a_program_that_renders_by_itself_gets_the_first_device(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Options]] = []

    def made(name: str, options: Options) -> Any:
        asked.append((name, options))
        raise BackendFailed("out of memory")

    monkeypatch.setattr(backend, "make", made)
    here.has(IN_USE, FREE)
    with pytest.raises(ConfigError, match="dali-gpu cannot run here: out of memory"):
        make(Workers(devices=[0, 1], hw_decoder_load=1))


def test_the_installed_dali_is_told_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-dali-cuda120": "2.4.0"}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    assert machine.dali() == [Dali("nvidia-dali-cuda120", "2.4.0")]
    versions.clear()
    assert machine.dali() == []
