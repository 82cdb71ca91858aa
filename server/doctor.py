"""`headrace doctor`: what this machine has and lacks, and what to do about it. Each check is a function that tries the
real thing, as cheaply as it can be tried, and returns one finding; `CHECKS` lists them.

*warn* is what works and could be better, *bad* what keeps Headrace from working.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from headrace import __version__
from headrace.connect import LONGEST_PATH
from headrace.errors import ConfigError
from headrace.pipeline import gpus, machine, trial
from headrace.pipeline.gpus import Gpu, Gpus
from headrace.pipeline.machine import Dali
from headrace.pipeline.spec import cache_home
from headrace.server import ring_size
from headrace.server.listener import private_folder
from headrace.slots import SlotLayout
from headrace.workers import cgroup, cpus

Level = Literal["ok", "warn", "bad"]

_MIB, _GIB = 1 << 20, 1 << 30
#: A usual chunk; others may be larger.
_CHUNK = SlotLayout(32, 224, 224)
#: Chunks per worker in a default ring, below which trainers that do not keep pace find little there.
_ROOMY = 4
#: Bytes of indexes, ledgers and logs: a hundred for each of ten million samples.
_CACHE = _GIB
#: Bytes for sockets and locks in the runtime folder.
_SOCKETS = _MIB
#: Characters of a private daemon's socket behind its folder, with ZeroMQ's beside it.
_SOCKET_NAME = len("/01234567890123456789-99.sock.zmq")
#: Descriptors: what a daemon with a few workers and clients takes, each of them two or three beside twenty of its own;
#: and enough for some hundreds of them.
_FEW_FILES, _MANY_FILES = 64, 1024
_NO_GPU = (
    "CPU workers render without one; for a GPU install its driver, and let a container see it, docker run --gpus all"
)
#: Bytes that are locked for a try.
_LOCKED = 8 * _MIB


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Attributes:
        level: see the module.
        found: one sentence.
        advice: what to do about it, or "".
    """

    level: Level
    found: str
    advice: str = ""


def examine() -> Iterator[tuple[str, Finding]]:
    """All checks by their names, one after the other. One that fails in a way nobody thought of is a finding too."""
    for name, check in CHECKS.items():
        try:
            yield name, check()
        except Exception as error:
            yield name, Finding("bad", f"the check failed: {type(error).__name__}: {error}")


def versions() -> Finding:
    """What is installed. Only Pillow and pyzmq are imported, torch may take seconds."""
    import zmq
    from PIL import features

    packages = [f"{package} {_version(package) or 'is not installed'}" for package in ("torch", "pillow", "pyzmq")]
    said = (
        f"headrace {__version__}, Python {platform.python_version()}, {', '.join(packages)}, libzmq {zmq.zmq_version()}"
    )
    if not features.check_feature("libjpeg_turbo"):
        advice = "install Pillow from a wheel, pip install --force-reinstall pillow; its own build of libjpeg is slow"
        return Finding("warn", f"{said}; Pillow has no libjpeg-turbo", advice)
    return Finding("ok", said)


@functools.cache
def _look() -> Gpus:
    return gpus.look()


def _free(there: Gpus) -> list[Gpu]:
    """GPUs on which something may be tried."""
    return [gpu for gpu in there.found if not gpu.busy and not gpu.trouble]


def gpu(look: Callable[[], Gpus] = _look) -> Finding:
    """GPUs, and who uses them."""
    there = look()
    if there.trouble:
        return Finding("warn", f"no GPU: {there.trouble}", _NO_GPU)
    named = "; ".join(
        f"GPU {gpu.number} {gpu.name}, "
        + (gpu.trouble or f"{gpu.free >> 20} of {gpu.total >> 20} MiB free")
        + (f", used by {gpu.busy}" if gpu.busy else "")
        for gpu in there.found
    )
    said = f"driver {there.driver}, CUDA {'.'.join(map(str, there.cuda))}: {named}"
    if any(gpu.trouble for gpu in there.found):
        return Finding("warn", said, "look at what the driver says in dmesg, and what nvidia-smi shows")
    if not _free(there):
        return Finding(
            "warn", said, "`backend: auto` leaves GPUs alone that others use: name those to share in workers.devices"
        )
    return Finding("ok", said)


def dali(
    look: Callable[[], Gpus] = _look,
    installed: Callable[[], list[Dali]] = machine.dali,
    attempt: Callable[[str, Sequence[Gpu]], list[trial.Trial]] = trial.run,
) -> Finding:
    """Whether DALI renders a picture, in a process of its own."""
    there, found = look(), installed()
    if missing := machine.lack(found, None if there.trouble else there):
        return Finding("ok" if not found and there.trouble else "warn", missing.what, missing.remedy)
    named = f"{found[0].package} {found[0].version}"
    free = _free(there)
    tried = zip(
        [f"on GPU {gpu.number}" for gpu in free] or ["on the CPU"],
        attempt("dali-gpu" if free else "dali-cpu", free),
        strict=True,
    )
    worked: list[str] = []
    failed: list[str] = []
    for where, done in tried:
        (failed if done.trouble else worked).append(f"{where}: {done.trouble or done.render_id}")
    if failed:
        advice = "`backend: auto` goes without; install headrace[dali] again" + (
            ", and look at what the driver says in dmesg" if free else ""
        )
        return Finding("warn", f"{named} does not work {'; '.join(failed)}", advice)
    return Finding("ok", f"{named} works {'; '.join(worked)}")


def locking(
    limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    look: Callable[[], Gpus] = _look,
    attempt: Callable[[str, Sequence[Gpu]], list[trial.Trial]] = trial.run,
) -> Finding:
    """Whether memory can be page-locked, into which copies from a GPU are faster: by the driver, which does it for
    workers, or where no GPU can be asked by the kernel.
    """
    if free := _free(look()):
        numbers = ", ".join(str(gpu.number) for gpu in free)
        troubles = [
            f"for GPU {gpu.number}: {done.trouble}"
            for gpu, done in zip(free, attempt(trial.PAGE_LOCKING, free), strict=True)
            if done.trouble
        ]
        if troubles:
            advice = "copies from such a GPU are slower; look at what the driver says in dmesg"
            return Finding("warn", f"memory cannot be page-locked {'; '.join(troubles)}", advice)
        return Finding("ok", f"memory can be page-locked for GPU {numbers}")
    allowed = limit()
    shown = "any amount" if allowed == resource.RLIM_INFINITY else f"{allowed >> 10} KiB"
    if error := _lock(_LOCKED):
        advice = (
            "raise it where GPUs render: ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1"
        )
        return Finding(
            "warn", f"{_LOCKED >> 20} MiB of memory cannot be locked ({error}); the limit is {shown}", advice
        )
    return Finding("ok", f"memory can be locked; the limit is {shown}")


def sockets(folder: Callable[[], Path] = private_folder) -> Finding:
    """Whether private daemons can listen."""
    try:
        place = folder()
    except ConfigError as error:
        return Finding("bad", str(error), "set XDG_RUNTIME_DIR to a folder of yours with mode 0700")
    if (length := len(os.fsencode(place)) + _SOCKET_NAME) > LONGEST_PATH:
        advice = "set XDG_RUNTIME_DIR or TMPDIR to a shorter path"
        return Finding(
            "bad",
            f"{place}: a socket in it has a path of {length} bytes, at most {LONGEST_PATH} are possible",
            advice,
        )
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=place) as inner, socket.socket(socket.AF_UNIX) as sock:
            # The path of a trial may be longer than that of a daemon: it is bound from within.
            at = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.bind(f"/proc/self/fd/{at}/sock")
            finally:
                os.close(at)
    except OSError as error:
        advice = "set XDG_RUNTIME_DIR to a folder on a local disk or in memory"
        return Finding("bad", f"no socket can be bound in {place}: {error.strerror}", advice)
    if (left := _space(place)) < _SOCKETS:
        return Finding("warn", f"{place} has {left >> 10} KiB of free space", "make room there")
    return Finding("ok", f"sockets can be bound in {place}")


def memory(left: Callable[[], int] = ring_size.available_bytes, workers: int | None = None) -> Finding:
    """Whether a default ring has room."""
    count = workers or cpus.worker_count("auto", private=False)
    free, group = left(), cgroup.memory_left()
    by = "this machine leaves" if group is None or group > free else "the cgroup leaves"
    try:
        slots = ring_size.slots("any", None, ring_size.Need(_CHUNK, count, 1 << 40, 1), free, free)
    except ConfigError as error:
        return Finding(
            "bad", f"{by} {free / _GIB:.2f} GiB: {error}", "give it more memory, or set workers.processes to less"
        )
    said = f"{by} {free / _GIB:.1f} GiB; a quarter of it holds {slots} chunks of 32 pictures of 224x224"
    if slots < _ROOMY * (count + 1):
        return Finding(
            "warn", said, f"{count} workers want {_ROOMY * (count + 1)}: set `memory`, or workers.processes to less"
        )
    return Finding("ok", said)


def files(limits: Callable[[], tuple[int, int]] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)) -> Finding:
    """Whether a daemon, which raises its limit as far as it may, has descriptors for clients."""
    hard = limits()[1]
    said = f"a process may have {'any number of' if hard == resource.RLIM_INFINITY else hard} descriptors"
    if hard != resource.RLIM_INFINITY and hard < _MANY_FILES:
        return Finding(
            "bad" if hard < _FEW_FILES else "warn",
            said,
            f"raise the hard limit, ulimit -Hn, to {_MANY_FILES} or more",
        )
    return Finding("ok", said)


def cores(
    affinity: Callable[[], int] = lambda: len(os.sched_getaffinity(0)),
    quota: Callable[[], float | None] = cgroup.cpu_quota,
) -> Finding:
    """How many cores there are for workers beside a trainer."""
    may, share = affinity(), quota()
    said = f"{may} of {os.cpu_count()} CPUs may be used"
    if share is not None:
        said += f", and {share:g} of their time by the cgroup's quota"
    usable = may if share is None else min(may, share)
    if usable < 2:
        return Finding(
            "warn",
            said,
            "a trainer and its worker share one: give them more, or serve from another machine over tcp",
        )
    return Finding("ok", f"{said}; a private daemon leaves the trainer one of them")


def cache(folder: Callable[[], Path] = cache_home) -> Finding:
    """Whether indexes can be kept."""
    place = folder()
    advice = (
        "set cache_dir, or XDG_CACHE_HOME, to a folder that can be written; until then each start lists the data anew"
    )
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * mmap.PAGESIZE)
            file.flush()
    except OSError as error:
        return Finding("warn", f"nothing can be written to {place}: {error.strerror}", advice)
    if (left := _space(place)) < _CACHE:
        return Finding("warn", f"{place} has {left >> 20} MiB of free space", "make room there, or set cache_dir")
    return Finding("ok", f"{place} can be written and has {left / _GIB:.0f} GiB of free space")


def kernel() -> Finding:
    """What the daemon and its clients share memory and watch each other by."""
    for what, attempt in (("a memfd, sealed and opened read-only", _memfd), ("a pidfd", _pidfd)):
        try:
            attempt()
        except (OSError, AttributeError) as error:
            advice = "Linux 5.3 or newer is needed, with /proc mounted and no sandbox that forbids it"
            return Finding("bad", f"Linux {platform.release()} does not give {what}: {error}", advice)
    return Finding("ok", f"Linux {platform.release()}: memfd and pidfd work")


#: In the order in which they are shown.
CHECKS: dict[str, Callable[[], Finding]] = {
    "versions": versions,
    "kernel": kernel,
    "cores": cores,
    "memory": memory,
    "descriptors": files,
    "sockets": sockets,
    "cache": cache,
    "gpu": gpu,
    "dali": dali,
    "page-locking": locking,
}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lock(nbytes: int) -> str:
    """Lock so many bytes for a moment; why that cannot be, or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, nbytes) as memory:
        start = ctypes.c_char.from_buffer(memory)
        where = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(nbytes)
        try:
            if libc.mlock(*where):
                return os.strerror(ctypes.get_errno())
            libc.munlock(*where)
        finally:
            del start  # or the mapping could not be closed
    return ""


def _space(folder: Path) -> int:
    """Bytes that may be written there."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def _memfd() -> None:
    fd = os.memfd_create("headrace-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    finally:
        os.close(fd)


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))
