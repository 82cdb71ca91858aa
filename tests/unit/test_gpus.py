"""What NVML says, by a library of the tests' own: it answers like the real one, of a machine that is made up."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from headrace.pipeline import gpus
from headrace.pipeline.gpus import Gpu, Gpus, ask, look

GIB = 1 << 30
POPEN = subprocess.Popen


@dataclass
class Card:
    name: str = "NVIDIA Test 1"
    uuid: str = "GPU-aaaa"
    total: int = 80 * GIB
    used: int = 0
    pids: tuple[int, ...] = ()
    lost: bool = False
    place: tuple[int, int, int] = (0, 0x3B, 0)


class Explain:
    restype: Any = None

    def __call__(self, code: int) -> bytes:
        return {3: b"Not Supported", 9: b"Driver Not Loaded", 15: b"GPU is lost"}.get(code, b"Unknown Error")


@dataclass
class Nvml:
    """Functions by their names in the library; each writes its answers behind the pointers it gets."""

    cards: list[Card] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    called: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)
        if name == "nvmlErrorString":
            return Explain()  # type: ignore[return-value]
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> int:
        self.called.append(name)
        if name in self.failing:
            return self.failing[name]
        match name, arguments:
            case (("nvmlInit_v2" | "nvmlShutdown"), ()):
                pass
            case "nvmlSystemGetDriverVersion", (text, _):
                text.value = b"580.65.06"
            case "nvmlSystemGetCudaDriverVersion_v2", (version,):
                version._obj.value = 13020
            case "nvmlDeviceGetCount_v2", (count,):
                count._obj.value = len(self.cards)
            case "nvmlDeviceGetHandleByIndex_v2", (number, handle):
                if self.cards[number.value].lost:
                    return 15
                handle._obj.value = number.value + 1
            case "nvmlDeviceGetHandleByUUID", (uuid, handle):
                if uuid != b"MIG-1":
                    return 6
                handle._obj.value = 1
            case "nvmlDeviceGetName", (handle, text, _):
                text.value = self._card(handle).name.encode()
            case "nvmlDeviceGetUUID", (handle, text, _):
                text.value = self._card(handle).uuid.encode()
            case "nvmlDeviceGetPciInfo_v3", (handle, pci):
                at = pci._obj
                assert ctypes.sizeof(at) == 68  # of nvmlPciInfo_t
                at.domain, at.bus, at.device = self._card(handle).place
            case "nvmlDeviceGetMemoryInfo_v2", (handle, memory):
                card, at = self._card(handle), memory._obj
                if at.version != ctypes.sizeof(at) | 2 << 24:
                    return 25
                if card.total < 0:
                    return 3
                at.total, at.used, at.reserved = card.total, card.used, GIB
                at.free = card.total - card.used - GIB
            case "nvmlDeviceGetComputeRunningProcesses_v3", (handle, count, running):
                for process, pid in zip(running, self._card(handle).pids, strict=False):
                    process.pid, process.memory = pid, GIB
                count._obj.value = len(self._card(handle).pids)
            case _:
                raise AssertionError(name)
        return 0

    def _card(self, handle: ctypes.c_void_p) -> Card:
        return self.cards[int(handle.value or 0) - 1]


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def seen(nvml: Nvml) -> Gpus:
    return ask(lambda name: nvml)


@pytest.mark.parametrize("asks", [look, ask])
def test_a_machine_without_a_driver_has_no_gpus_and_says_why(asks: Any) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert asks(missing) == Gpus(trouble="there is no NVIDIA driver: libnvidia-ml.so.1 cannot be loaded")


def found(answer: str, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """What is found where there is a driver, and this program asks it."""
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: POPEN([command[0], "-c", answer], **options))
    return look(lambda name: None, timeout=0.5)


def test_a_driver_is_asked_by_a_process_of_its_own_which_may_hang_or_die(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Gpus((Gpu(0, "NVIDIA Test", 2, 1, (7,), uuid="GPU-aaaa"),), "580.65.06", (13, 2))
    assert found(f"print({msgspec.json.encode(there).decode()!r})", monkeypatch) == there
    trouble = "the NVIDIA driver does not work: a process that asked it "
    assert found("import time; time.sleep(60)", monkeypatch).trouble == f"{trouble}did not end within 0.5 seconds"
    assert found("import os; os.kill(os.getpid(), 11)", monkeypatch).trouble.startswith(
        f"{trouble}was killed by SIGSEGV"
    )


def test_that_process_says_what_it_has_found() -> None:
    program = [sys.executable, "-P", "-m", "headrace.pipeline.gpus", str(os.getpid()), "30"]
    done = subprocess.run(program, stdout=subprocess.PIPE, timeout=60, check=True)
    assert msgspec.json.decode(done.stdout, type=Gpus) == ask()


def test_a_gpu_that_fails_does_not_hide_the_others() -> None:
    lost, deaf, fine = seen(Nvml([Card(lost=True), Card(total=-1), Card("NVIDIA Test 2")])).found
    assert (lost.number, lost.name, lost.trouble) == (0, "unknown", "nvmlDeviceGetHandleByIndex_v2: GPU is lost (15)")
    assert (deaf.name, deaf.trouble) == ("NVIDIA Test 1", "nvmlDeviceGetMemoryInfo_v2: Not Supported (3)")
    assert (fine.number, fine.name, fine.trouble) == (2, "NVIDIA Test 2", "")


def test_gpus_have_a_name_memory_and_those_who_compute_on_them() -> None:
    nvml = Nvml([Card(used=5 * GIB, pids=(1 << 30, os.getpid())), Card("NVIDIA Test 2", "GPU-bbbb", used=1 << 20)])
    there = seen(nvml)
    assert (there.driver, there.cuda, there.trouble) == ("580.65.06", (13, 2), "")
    first, second = there.found
    assert (first.number, first.name, first.total, first.free) == (0, "NVIDIA Test 1", 80 * GIB, 74 * GIB)
    assert (first.uuid, second.uuid) == ("GPU-aaaa", "GPU-bbbb")
    assert first.users == (os.getpid(), 1 << 30)
    assert f"process {os.getpid()} (" in first.busy and first.busy.endswith(f"process {1 << 30}")
    assert (second.number, second.name, second.users, second.busy) == (1, "NVIDIA Test 2", (), "")
    assert nvml.called[-1] == "nvmlShutdown"


def test_gpus_have_a_place_that_is_written_as_torch_and_nvml_write_it() -> None:
    nvml = Nvml([Card(), Card("NVIDIA Test 2", "GPU-bbbb", place=(0x10000, 0xAF, 0x1F))])
    assert [gpu.bus for gpu in seen(nvml).found] == ["0000:3b:00.0", "10000:af:1f.0"]
    nvml.failing["nvmlDeviceGetPciInfo_v3"] = 3
    assert [(gpu.bus, gpu.trouble) for gpu in seen(nvml).found] == [("", "")] * 2


def test_a_process_learns_what_it_holds_itself() -> None:
    nvml = Nvml([Card(), Card(pids=(1, os.getpid(), os.getpid()))])
    own = gpus.OwnMemory(1, lambda name: nvml)
    assert own() == 2 * GIB
    assert own() == 2 * GIB
    assert nvml.called.count("nvmlInit_v2") == 1


@pytest.mark.parametrize(
    "nvml",
    [
        Nvml([Card(pids=(1,))]),
        Nvml([]),
        Nvml([Card()], {"nvmlInit_v2": 9}),
        Nvml([Card()], {"nvmlDeviceGetComputeRunningProcesses_v3": 4}),
        Nvml([Card(lost=True)]),
    ],
    ids=["of another number", "no gpu", "no driver", "forbidden", "lost"],
)
def test_where_nvml_does_not_tell_nothing_is_made_up(nvml: Nvml) -> None:
    assert gpus.OwnMemory(0, lambda name: nvml)() is None


def test_memory_that_no_visible_process_uses_is_somebodys() -> None:
    (gpu,) = seen(Nvml([Card(used=2 * GIB)])).found
    assert gpu.crowded and gpu.busy == "somebody who cannot be seen from here"
    (gpu,) = seen(Nvml([Card()], failing={"nvmlDeviceGetComputeRunningProcesses_v3": 4})).found
    assert not gpu.busy


@pytest.mark.parametrize(
    ("nvml", "trouble"),
    [
        (Nvml(failing={"nvmlInit_v2": 9}), "the NVIDIA driver does not work: nvmlInit_v2: Driver Not Loaded (9)"),
        (Nvml([]), "NVIDIA driver 580.65.06: there is no GPU"),
        (
            Nvml([Card()], missing=("nvmlDeviceGetCount_v2",)),
            "NVIDIA driver 580.65.06: it is too old, nvmlDeviceGetCount_v2 is missing",
        ),
        (
            Nvml([Card()], failing={"nvmlSystemGetDriverVersion": 999}),
            "NVIDIA driver of unknown version: nvmlSystemGetDriverVersion: Unknown Error (999)",
        ),
    ],
)
def test_a_driver_that_does_not_work_says_why(nvml: Nvml, trouble: str) -> None:
    there = seen(nvml)
    assert (there.found, there.trouble) == ((), trouble)
    assert ("nvmlShutdown" in nvml.called) == ("nvmlInit_v2" not in nvml.failing)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1,0", ["b", "a"]),
        (" 2 ", ["c"]),
        ("GPU-bb", ["b"]),
        ("GPU-b", []),  # two of them
        ("0,7,1", ["a"]),  # as in CUDA, what is unknown ends the list
        ("0,1,0,2", ["a", "b"]),  # and what comes again
        ("1,GPU-bbbb", ["b"]),
        ("1, -1, 0", ["b"]),
        ("all", []),
        ("NoDevFiles", []),
        ("MIG-1,MIG-2,0", ["a"]),
        ("", []),
        ("-1", []),
    ],
)
def test_only_what_cuda_would_see_is_counted_in_its_order(
    visible: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    there = seen(Nvml([Card("a", "GPU-aaaa"), Card("b", "GPU-bbbb"), Card("c", "GPU-bccc")]))
    assert [gpu.name for gpu in there.found] == names
    assert [gpu.number for gpu in there.found] == list(range(len(names)))
    if not names:
        assert there.trouble.endswith(f'there is no GPU that CUDA_VISIBLE_DEVICES="{visible}" lets be seen')


def test_cuda_is_told_to_count_as_nvml_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    gpus.count_by_bus()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
