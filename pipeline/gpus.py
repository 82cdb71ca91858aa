"""The GPUs of this machine, by NVML: nothing here starts CUDA, so no process gets a context, or memory, on a GPU.

A driver that is in trouble may keep for ever who asks it. So `look` has a process of its own ask,
`python -m headrace.pipeline.gpus`, where there is a driver at all.

See the NVML API reference, https://docs.nvidia.com/deploy/nvml-api. NVML counts GPUs by their place on the bus, as
`nvidia-smi` does; CUDA counts as it likes, unless CUDA_DEVICE_ORDER says otherwise. So whoever starts CUDA calls
`count_by_bus` before, and numbers mean the same everywhere.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headrace.pipeline import isolated
from headrace.pipeline.isolated import Isolated

#: Seconds for an answer. Where no process keeps GPUs ready, the driver starts each of them first, which takes seconds.
TIMEOUT = 15.0
_LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96  # bytes of a name, of an identity, of a version
_PROCESSES = 256
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
#: Bytes in use on a GPU, of which NVML names no process, that are taken for one of another container.
_NOBODYS = 1 << 30


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t"""

    _fields_ = [("version", ctypes.c_uint)] + [(n, ctypes.c_ulonglong) for n in ("total", "reserved", "free", "used")]


class _Pci(ctypes.Structure):
    """nvmlPciInfo_t"""

    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint * 2),
        ("text", ctypes.c_char * 32),
    ]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t"""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@dataclass(frozen=True, slots=True)
class Gpu:
    """
    Attributes:
        number: as CUDA counts the GPUs that this process may see, by their place on the bus.
        total, free: bytes of its memory.
        users: processes that compute on it, as far as they can be seen.
        crowded: whether somebody who cannot be seen, in another container, uses its memory.
        uuid: as `nvidia-smi -L` prints it.
        trouble: why the driver does not tell all of this, or "".
        bus: its place, such as "0000:3b:00.0", or "" where it is not told: the same in every process and container,
            whatever numbers GPUs have there. The instances of one that is divided share it.
    """

    number: int
    name: str
    total: int
    free: int
    users: tuple[int, ...] = ()
    crowded: bool = False
    uuid: str = ""
    trouble: str = ""
    bus: str = ""

    @property
    def busy(self) -> str:
        """Who uses it, in words, or ""."""
        if self.users:
            return ", ".join(f"process {pid}{_name(pid)}" for pid in self.users)
        return "somebody who cannot be seen from here" if self.crowded else ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """
    Attributes:
        found: those that this process may see.
        driver: its version, "" without one.
        cuda: the newest CUDA that the driver runs, as (major, minor).
        trouble: why there are none, or "".
    """

    found: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    trouble: str = ""


class _Failed(Exception):
    """NVML has refused a call."""


def count_by_bus() -> None:
    """Have CUDA, which this process has not started yet, count GPUs as NVML does."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def look(load: Callable[[str], Any] = ctypes.CDLL, *, timeout: float = TIMEOUT) -> Gpus:
    """What there is. Costs a failed `dlopen` where there is no driver.

    Args:
        load: the library by its name; OSError where it is missing.
        timeout: seconds for an answer.
    """
    try:
        load(_LIBRARY)
    except OSError:
        return _NO_DRIVER
    try:
        return Isolated(__name__, (), Gpus, timeout=timeout).result()
    except isolated.Failed as failed:
        return Gpus(trouble=f"the NVIDIA driver does not work: a process that asked it {failed}")


def ask(load: Callable[[str], Any] = ctypes.CDLL) -> Gpus:
    """The same, asked in this process."""
    try:
        nvml = load(_LIBRARY)
    except OSError:
        return _NO_DRIVER
    try:
        _call(nvml, "nvmlInit_v2")
    except _Failed as error:
        return Gpus(trouble=f"the NVIDIA driver does not work: {error}")
    driver = ""
    try:
        driver = _text(nvml, "nvmlSystemGetDriverVersion")
        cuda = ctypes.c_int()
        _call(nvml, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))
        newest = cuda.value // 1000, cuda.value % 1000 // 10
        found = tuple(_gpu(nvml, number, handle) for number, handle in enumerate(_visible(nvml)))
    except _Failed as error:
        return Gpus(driver=driver, trouble=f"NVIDIA driver {driver or 'of unknown version'}: {error}")
    finally:
        with suppress(_Failed):
            _call(nvml, "nvmlShutdown")
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if asked is None else f' that CUDA_VISIBLE_DEVICES="{asked}" lets be seen'
    return Gpus(found, driver, newest, "" if found else f"NVIDIA driver {driver}: there is no GPU{hidden}")


_NO_DRIVER = Gpus(trouble=f"there is no NVIDIA driver: {_LIBRARY} cannot be loaded")


class OwnMemory:
    """How many bytes of a GPU this process holds: call it.

    Args:
        number: as in `Gpu`.
        load: as in `look`.
    """

    def __init__(self, number: int, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._handle: ctypes.c_void_p | None = None
        with suppress(OSError, _Failed, IndexError):
            self._nvml = load(_LIBRARY)
            _call(self._nvml, "nvmlInit_v2")  # until the process ends
            handle = _visible(self._nvml)[number]
            self._handle = None if isinstance(handle, _Failed) else handle

    def __call__(self) -> int | None:
        """None where NVML does not tell: in a container it may know this process by another number, or not at all."""
        if self._handle is None:
            return None
        try:
            running = _running(self._nvml, self._handle)
        except _Failed:
            return None
        mine = [process.memory for process in running if process.pid == os.getpid()]
        return sum(mine) if mine and max(mine) != _UNKNOWN else None


#: A GPU, or why the driver does not give it.
_Handle = ctypes.c_void_p | _Failed


def _visible(nvml: Any) -> list[_Handle]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. As in CUDA the first entry that names none ends the
    list, and so does one that comes again; see "Environment Variables" in the CUDA programming guide.
    """
    count = ctypes.c_uint()
    _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    handles = [_handle(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number)) for number in range(count.value)]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return handles
    seen: list[_Handle] = []
    for entry in map(str.strip, asked.split(",")):
        if entry.isascii() and entry.isdigit() and int(entry) < len(handles):
            named = [handles[int(entry)]]
        elif entry.startswith("GPU-"):
            named = [handle for handle in handles if _uuid(nvml, handle).startswith(entry)]
        elif entry.startswith("MIG-"):
            instance = _handle(nvml, "nvmlDeviceGetHandleByUUID", entry.encode())
            named = [] if isinstance(instance, _Failed) else [instance]
        else:
            break
        if len(named) != 1 or any(_same(named[0], other) for other in seen):
            break
        seen += named
    return seen


def _handle(nvml: Any, name: str, key: Any) -> _Handle:
    handle = ctypes.c_void_p()
    try:
        _call(nvml, name, key, ctypes.byref(handle))
    except _Failed as error:  # it has fallen off the bus, or may not be used
        return error
    return handle


def _same(one: _Handle, other: _Handle) -> bool:
    if isinstance(one, _Failed) or isinstance(other, _Failed):
        return one is other
    return one.value == other.value


def _uuid(nvml: Any, handle: _Handle) -> str:
    """Or "" where it is not told."""
    if isinstance(handle, _Failed):
        return ""
    try:
        return _text(nvml, "nvmlDeviceGetUUID", handle)
    except _Failed:
        return ""


def _gpu(nvml: Any, number: int, handle: _Handle) -> Gpu:
    name, uuid = "unknown", _uuid(nvml, handle)
    try:
        if isinstance(handle, _Failed):
            raise handle
        name = _text(nvml, "nvmlDeviceGetName", handle)
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        _call(nvml, "nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
    except _Failed as error:
        return Gpu(number, name, 0, 0, uuid=uuid, trouble=str(error))
    try:
        users = tuple(sorted(process.pid for process in _running(nvml, handle)))
    except _Failed:  # it may be forbidden to ask
        users = ()
    crowded = not users and memory.used > _NOBODYS
    return Gpu(number, name, memory.total, memory.free, users, crowded, uuid, bus=_bus(nvml, handle))


def _bus(nvml: Any, handle: ctypes.c_void_p) -> str:
    pci = _Pci()
    try:
        _call(nvml, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    except _Failed:  # of an instance, by some drivers
        return ""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _running(nvml: Any, handle: ctypes.c_void_p) -> list[_Process]:
    count, running = ctypes.c_uint(_PROCESSES), (_Process * _PROCESSES)()
    _call(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), running)
    return running[: count.value]


def _call(nvml: Any, name: str, *arguments: Any) -> None:
    try:
        function = getattr(nvml, name)
    except AttributeError:
        raise _Failed(f"it is too old, {name} is missing") from None
    if (code := function(*arguments)) == 0:
        return
    explain = nvml.nvmlErrorString
    explain.restype = ctypes.c_char_p
    raise _Failed(f"{name}: {(explain(code) or b'unknown error').decode(errors='replace')} ({code})")


def _text(nvml: Any, name: str, *handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _call(nvml, name, *handle, buffer, ctypes.c_uint(_TEXT))
    return buffer.value.decode(errors="replace")


def _name(pid: int) -> str:
    """` (python)`, where it can be seen."""
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()})"
    except OSError:
        return ""


def main(argv: list[str]) -> NoReturn:
    isolated.attach(argv)
    isolated.answer(ask())


if __name__ == "__main__":
    main(sys.argv)
