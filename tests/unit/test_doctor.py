"""Every finding of `headrace doctor`, on machines that have it: made up where they must be, else this one."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from PIL import features

from headrace.pipeline.gpus import Gpu, Gpus
from headrace.pipeline.machine import Dali
from headrace.pipeline.trial import Trial
from headrace.server import cli, doctor
from headrace.server.doctor import CHECKS, Finding, Level, examine
from headrace.workers import cgroup

GIB = 1 << 30
NO_DRIVER = Gpus(trouble="there is no NVIDIA driver")
FREE = Gpu(0, "NVIDIA Test", 80 * GIB, 79 * GIB)
IN_USE = Gpu(1, "NVIDIA Test", 80 * GIB, 40 * GIB, users=(1 << 30,))
THIRD = Gpu(2, "NVIDIA Test", 80 * GIB, 79 * GIB)
LOST = Gpu(3, "NVIDIA Test", 0, 0, trouble="nvmlDeviceGetMemoryInfo_v2: GPU is lost (15)")
FINE = Finding("ok", "fine")
DALI = Dali("nvidia-dali-cuda130", "2.4.0")


def gpus(*found: Gpu, cuda: tuple[int, int] = (13, 0)) -> Gpus:
    return Gpus(found, "580.65.06", cuda)


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise error

    return call


# -- versions, kernel -----------------------------------------------------------------------------------------


def test_versions_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = doctor.versions()
    assert (
        told.level == "ok"
        and f"pillow {metadata.version('pillow')}, pyzmq {metadata.version('pyzmq')}, libzmq 4." in told.found
    )
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert "torch is not installed" in doctor.versions().found


def test_a_slow_pillow_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check_feature", lambda name: False)
    told = doctor.versions()
    assert told.level == "warn" and "no libjpeg-turbo" in told.found and "pip install" in told.advice


@pytest.mark.parametrize(("call", "what"), [("memfd_create", "a memfd"), ("pidfd_open", "a pidfd")])
def test_a_kernel_or_sandbox_without_what_is_needed_is_bad(
    call: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.kernel().level == "ok"
    monkeypatch.setattr(os, call, raising(OSError(errno.ENOSYS, "Function not implemented")))
    told = doctor.kernel()
    assert (
        told.level == "bad"
        and f"does not give {what}" in told.found
        and "not implemented" in told.found
        and "5.3" in told.advice
    )
    monkeypatch.delattr(os, call)
    assert doctor.kernel().level == "bad"


# -- cores, memory, descriptors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("may", "share", "level", "words"),
    [
        (8, None, "ok", "8 of"),
        (8, 2.5, "ok", "and 2.5 of their time by the cgroup's quota"),
        (1, None, "warn", "1 of"),
        (8, 1.5, "warn", "1.5 of their time"),
    ],
)
def test_fewer_than_two_cores_are_a_warning(may: int, share: float | None, level: str, words: str) -> None:
    told = doctor.cores(lambda: may, lambda: share)
    assert told.level == level and words in told.found and (level == "ok" or "tcp" in told.advice)


@pytest.mark.parametrize(("left", "level"), [(8 * GIB, "ok"), (GIB // 4, "warn"), (GIB // 32, "bad")])
def test_memory_is_measured_by_the_chunks_of_a_default_ring(left: int, level: str) -> None:
    told = doctor.memory(lambda: left, workers=4)
    assert told.level == level and (level == "ok" or "processes" in told.advice)
    assert "needs at least 5" in told.found if level == "bad" else "chunks of 32 pictures" in told.found


def test_memory_says_whose_limit_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = "this machine leaves"
    for group, words in ((None, machine), (4 * GIB, "the cgroup leaves"), (9 * GIB, machine)):
        monkeypatch.setattr(cgroup, "memory_left", lambda group=group: group)
        assert doctor.memory(lambda: 4 * GIB, workers=1).found.startswith(words)


@pytest.mark.parametrize(
    ("hard", "level"), [(resource.RLIM_INFINITY, "ok"), (1 << 20, "ok"), (1023, "warn"), (63, "bad")]
)
def test_descriptors_are_counted_by_the_limit_that_a_daemon_raises_itself_to(hard: int, level: str) -> None:
    told = doctor.files(lambda: (64, hard))
    assert told.level == level and (level == "ok" or "ulimit -Hn" in told.advice)


# -- folders --------------------------------------------------------------------------------------------------


def test_sockets_can_be_bound_where_private_daemons_listen(home: Path) -> None:
    assert doctor.sockets() == Finding("ok", f"sockets can be bound in {home}/run/headrace")
    assert list((home / "run" / "headrace").iterdir()) == []


def test_a_runtime_folder_that_others_may_enter_is_bad(home: Path) -> None:
    (home / "run" / "headrace").mkdir(mode=0o755)
    (home / "run" / "headrace").chmod(0o755)
    told = doctor.sockets()
    assert told.level == "bad" and "mode 0700" in told.found and "XDG_RUNTIME_DIR" in told.advice


def test_a_runtime_folder_whose_path_is_too_long_is_bad(home: Path) -> None:
    long = home / ("x" * 80)
    told = doctor.sockets(lambda: long)
    assert told.level == "bad" and "at most 107" in told.found and "shorter" in told.advice


def test_a_runtime_folder_without_sockets_or_without_room_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = doctor.sockets(lambda: home / "none")
    assert (told.level, told.found) == ("bad", f"no socket can be bound in {home}/none: No such file or directory")
    monkeypatch.setattr(doctor, "_space", lambda folder: 4096)
    assert doctor.sockets().found == f"{home}/run/headrace has 4 KiB of free space"


def test_a_cache_that_can_be_written_is_fine_and_one_that_cannot_is_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = doctor.cache()
    assert told.level == "ok" and told.found.startswith(f"{home}/cache/headrace can be written")
    assert list((home / "cache" / "headrace").iterdir()) == []
    (home / "file").touch()
    told = doctor.cache(lambda: home / "file" / "cache")
    assert told.level == "warn" and "Not a directory" in told.found and "cache_dir" in told.advice
    monkeypatch.setattr(doctor, "_space", lambda folder: 5 << 20)
    assert doctor.cache().found == f"{home}/cache/headrace has 5 MiB of free space"


# -- GPU, DALI, page-locking ----------------------------------------------------------------------------------


def test_gpus_are_listed_with_those_who_use_them() -> None:
    told = doctor.gpu(lambda: gpus(FREE, IN_USE))
    assert told.level == "ok" and told.found.startswith(
        "driver 580.65.06, CUDA 13.0: GPU 0 NVIDIA Test, 80896 of 81920 MiB free; "
    )
    assert told.found.endswith(f"used by process {1 << 30}")


def test_no_gpu_or_none_that_is_free_is_a_warning() -> None:
    told = doctor.gpu(lambda: NO_DRIVER)
    assert told.level == "warn" and told.found == "no GPU: there is no NVIDIA driver" and "driver" in told.advice
    told = doctor.gpu(lambda: gpus(IN_USE))
    assert told.level == "warn" and "workers.devices" in told.advice


def test_a_gpu_of_which_the_driver_does_not_tell_is_a_warning() -> None:
    told = doctor.gpu(lambda: gpus(FREE, LOST))
    assert told.level == "warn" and "dmesg" in told.advice
    assert told.found.endswith("MiB free; GPU 3 NVIDIA Test, nvmlDeviceGetMemoryInfo_v2: GPU is lost (15)")


def test_dali_is_missed_only_where_there_is_a_gpu() -> None:
    assert doctor.dali(lambda: NO_DRIVER, list).level == "ok"
    told = doctor.dali(lambda: gpus(FREE), list)
    assert (told.level, told.found) == ("warn", "NVIDIA DALI is not installed") and "headrace[dali]" in told.advice
    assert doctor.dali(lambda: NO_DRIVER, list).found == told.found


def test_two_packages_of_dali_are_a_warning() -> None:
    two = [DALI, Dali("nvidia-dali-cuda120", "2.4.0")]
    told = doctor.dali(lambda: NO_DRIVER, lambda: two, raising(AssertionError()))
    assert told.level == "warn" and "overwrite" in told.found
    assert told.advice.startswith("pip uninstall nvidia-dali-cuda130 nvidia-dali-cuda120,")


def test_a_driver_that_is_too_old_is_a_warning_and_nothing_is_tried() -> None:
    told = doctor.dali(lambda: gpus(FREE, cuda=(12, 4)), lambda: [DALI], raising(AssertionError()))
    assert told.level == "warn" and "needs 13.0" in told.found


class Tries:
    """What is tried; on GPU 2 nothing works."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        self.tried: list[tuple[str, list[int]]] = []

    def __call__(self, name: str, devices: Sequence[Gpu]) -> list[Trial]:
        numbers = [gpu.number for gpu in devices]
        self.tried.append((name, numbers))
        return [Trial(trouble=self.trouble) if number == 2 else Trial(f"{name}/2.4.0") for number in numbers or [0]]


def test_dali_is_tried_on_every_gpu_that_works_and_nobody_uses_else_on_the_cpu() -> None:
    attempt = Tries("it hangs")
    assert doctor.dali(lambda: NO_DRIVER, lambda: [DALI], attempt).level == "ok"
    told = doctor.dali(lambda: gpus(FREE, IN_USE, LOST), lambda: [DALI], attempt)
    assert (told.level, told.found) == ("ok", "nvidia-dali-cuda130 2.4.0 works on GPU 0: dali-gpu/2.4.0")
    told = doctor.dali(lambda: gpus(FREE, THIRD), lambda: [DALI], attempt)
    assert (told.level, told.found) == ("warn", "nvidia-dali-cuda130 2.4.0 does not work on GPU 2: it hangs")
    assert "dmesg" in told.advice
    assert attempt.tried == [("dali-cpu", []), ("dali-gpu", [0]), ("dali-gpu", [0, 2])]


def test_dali_that_does_not_work_on_the_cpu_is_a_warning_without_a_word_of_drivers() -> None:
    told = doctor.dali(
        lambda: NO_DRIVER, lambda: [DALI], lambda name, devices: [Trial(trouble="it cannot be imported")]
    )
    assert told.level == "warn" and told.found.endswith("does not work on the CPU: it cannot be imported")
    assert "install headrace[dali] again" in told.advice and "dmesg" not in told.advice


def test_without_a_gpu_memory_is_locked_by_the_kernel_and_the_limit_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LOCKED", 1 << 12)
    fine = Finding("ok", "memory can be locked; the limit is 64 KiB")
    assert doctor.locking(lambda: 64 << 10, lambda: NO_DRIVER, raising(AssertionError())) == fine
    assert doctor.locking(lambda: 64 << 10, lambda: gpus(IN_USE), raising(AssertionError())) == fine
    assert "any amount" in doctor.locking(lambda: resource.RLIM_INFINITY, lambda: NO_DRIVER).found
    monkeypatch.setattr(doctor, "_lock", lambda nbytes: "Cannot allocate memory")
    told = doctor.locking(lambda: 0, lambda: NO_DRIVER)
    assert (
        told.level == "warn"
        and "(Cannot allocate memory); the limit is 0 KiB" in told.found
        and "ulimit -l" in told.advice
    )


def test_where_a_gpu_is_free_its_driver_locks_whatever_the_kernel_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_lock", raising(AssertionError()))
    attempt = Tries("operation not supported (801)")
    told = doctor.locking(lambda: 0, lambda: gpus(FREE, IN_USE), attempt)
    assert told == Finding("ok", "memory can be page-locked for GPU 0")
    told = doctor.locking(lambda: 0, lambda: gpus(FREE, THIRD), attempt)
    assert told.level == "warn" and "slower" in told.advice
    assert told.found == "memory cannot be page-locked for GPU 2: operation not supported (801)"
    assert attempt.tried == [("page-locking", [0]), ("page-locking", [0, 2])]


def test_locking_more_than_a_process_may_is_refused_by_the_kernel() -> None:
    program = (
        "import os, resource; from headrace.server import doctor; "
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); os.getuid() or os.setuid(65534); "
        "told = doctor.locking(); print(told.level, told.found)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("warn 8 MiB of memory cannot be locked (") and "is 0 KiB" in done.stdout


# -- all of them ----------------------------------------------------------------------------------------------


def test_a_check_that_fails_in_a_way_of_its_own_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"a": raising(RuntimeError("odd")), "b": lambda: FINE})
    assert list(examine()) == [("a", Finding("bad", "the check failed: RuntimeError: odd")), ("b", FINE)]


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warn", 0), ("bad", 1)])
def test_the_command_prints_findings_and_ends_by_the_worst(
    level: Level, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: Finding(level, "so it is", "do this"), "b": lambda: FINE})
    assert cli.app(["doctor"], standalone_mode=False) == status
    assert capsys.readouterr().out == f"{level:4}  a: so it is\n      do this\nok    b: fine\n"
    assert cli.app(["doctor", "--json"], standalone_mode=False) == status
    assert json.loads(capsys.readouterr().out) == {
        "usable": status == 0,
        "findings": [
            {"check": "a", "level": level, "found": "so it is", "advice": "do this"},
            {"check": "b", "level": "ok", "found": "fine", "advice": ""},
        ],
    }


def test_this_machine_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = {name: check for name, check in CHECKS.items() if name != "dali"}  # which is tried elsewhere
    monkeypatch.setattr(doctor, "CHECKS", cheap)
    assert [finding for _, finding in examine() if finding.level == "bad"] == []
