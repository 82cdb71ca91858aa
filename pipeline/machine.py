"""What `workers.backend` means on this machine: which backend runs, on which GPUs, and why.

`auto` takes the best that really works here, and no GPU that another process uses unless `devices` names it. What a
configuration names and cannot have is an error. Where there is neither GPU nor DALI, asking costs nothing.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata

from headrace.errors import ConfigError
from headrace.pipeline import backend, gpus
from headrace.pipeline.backend import Backend, BackendFailed, Options
from headrace.pipeline.gpus import Gpu, Gpus
from headrace.pipeline.spec import Workers

#: What `auto` is without a GPU, and why: to be changed here alone. Measured, CPU time of one core per picture beside
#: Pillow's: from the second epoch on, when DALI decodes windows alone, `dali-cpu` takes 0.85 of it for windows of
#: 500x375 and 0.9 for those of 1280x853; in the first epoch it takes more; and each process starts 0.7 s later.
_WITHOUT_GPU = "pillow"
_WITHOUT_GPU_WHY = (
    "without a GPU Pillow starts sooner; dali-cpu, which has to be named, takes a tenth less from the second epoch on"
)

#: DALI by the package that brings it, with the oldest CUDA of the driver that it needs, and our extra for it.
_DALI = {
    "nvidia-dali-cuda130": ((13, 0), "dali"),
    "nvidia-dali-cuda120": ((12, 0), "dali-cuda12"),
}


@dataclass(frozen=True, slots=True)
class Dali:
    """An installed DALI: its package and version."""

    package: str
    version: str

    @property
    def cuda(self) -> tuple[int, int]:
        """The oldest CUDA that the driver must run."""
        return _DALI[self.package][0]


@dataclass(frozen=True, slots=True)
class Choice:
    """
    Attributes:
        backend: a name of `headrace.pipeline.backend`, never "auto".
        devices: numbers of the GPUs that it uses; empty unless it is "dali-gpu".
        why: sentences.
        render_id: of the backend as it was tried, or "" if it was not; of GPUs of several kinds all of them, with
            " + " in between.
        buses: where each of `devices` is, as `gpus.Gpu` says it.
    """

    backend: str
    devices: tuple[int, ...] = ()
    why: tuple[str, ...] = ()
    render_id: str = ""
    buses: tuple[str, ...] = ()


def dali() -> list[Dali]:
    """Which DALI is installed, by the word of the packages; nothing is imported. Two get in each other's way."""
    found = []
    for package in _DALI:
        try:
            found.append(Dali(package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return found


def choose(workers: Workers) -> Choice:
    """What runs here.

    Raises:
        ConfigError: what is named cannot run here; says why and what to do.
    """
    if workers.backend == "auto":
        return _best(workers)
    if workers.backend == "dali-gpu":
        found = _usable(workers)
        if not found.devices:
            raise ConfigError(_cannot("dali-gpu", *found.troubles))
        return Choice("dali-gpu", found.devices, (_NAMED, *found.troubles), found.render_id, found.buses)
    if workers.backend == "dali-cpu" and (missing := lack(dali())):
        raise ConfigError(_cannot("dali-cpu", str(missing)))
    return Choice(workers.backend, (), (_NAMED,))


def prove(workers: Workers) -> Choice:
    """What runs here, with its render id: also what `choose` takes on trust is tried.

    Raises:
        ConfigError: as `choose`; or it does not work.
    """
    chosen = choose(workers)
    if chosen.render_id:
        return chosen
    if chosen.backend != "dali-cpu":
        with closing(backend.make(chosen.backend)) as made:
            return replace(chosen, render_id=made.render_id)
    from headrace.pipeline import trial

    (tried,) = trial.run(chosen.backend)
    if tried.trouble:
        raise ConfigError(_cannot(chosen.backend, tried.trouble))
    return replace(chosen, render_id=tried.render_id)


def make(workers: Workers) -> Backend:
    """What runs here, on the first of its GPUs, for a program that renders by itself.

    Raises:
        ConfigError: as `choose`; or it does not work.
    """
    chosen = choose(workers)
    options = Options(device=chosen.devices[0] if chosen.devices else 0, hw_decoder_load=workers.hw_decoder_load)
    gpus.count_by_bus()
    try:
        return backend.make(chosen.backend, options)
    except BackendFailed as failed:
        raise ConfigError(_cannot(chosen.backend, str(failed))) from failed


def _cannot(name: str, *troubles: str) -> str:
    return f"workers.backend: {name} cannot run here: {'; '.join(troubles)}. `auto` takes what works"


@dataclass(frozen=True, slots=True)
class Lack:
    """Why DALI cannot run, and what to do."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def lack(installed: list[Dali], there: Gpus | None = None) -> Lack | None:
    """What keeps DALI from running, as far as is known without trying it.

    Args:
        installed: see `dali`.
        there: the GPUs that it is to run on.
    """
    if not installed:
        return Lack(
            "NVIDIA DALI is not installed",
            "pip install 'headrace[dali]', or 'headrace[dali-cuda12]' where the driver knows no CUDA 13",
        )
    if len(installed) > 1:
        both = [dali.package for dali in installed]
        return Lack(
            f"{' and '.join(both)} are installed and overwrite each other's files",
            f"pip uninstall {' '.join(both)}, then install one of them again",
        )
    (only,) = installed
    if there is None or there.cuda >= only.cuda:
        return None
    other = "'headrace[dali-cuda12]' instead of 'headrace[dali]', or " if there.cuda >= (12, 0) else ""
    return Lack(
        f"NVIDIA driver {there.driver} runs CUDA {_dotted(there.cuda)} at most, and {only.package} {only.version} "
        f"needs {_dotted(only.cuda)}",
        f"install {other}a newer driver",
    )


_NAMED = "the configuration names it"
_FASTEST = "a GPU is the fastest there is"


@dataclass(frozen=True, slots=True)
class _Usable:
    """GPUs that `dali-gpu` can run on, and what is wrong with others."""

    devices: tuple[int, ...] = ()
    troubles: tuple[str, ...] = ()
    render_id: str = ""
    buses: tuple[str, ...] = ()


def _best(workers: Workers) -> Choice:
    found = _usable(workers)
    if found.devices:
        return Choice("dali-gpu", found.devices, (_FASTEST, *found.troubles), found.render_id, found.buses)
    return Choice(_WITHOUT_GPU, (), (*found.troubles, _WITHOUT_GPU_WHY))


def _usable(workers: Workers) -> _Usable:
    """
    Raises:
        ConfigError: `devices` names a GPU that is not among those there are.
    """
    there = gpus.look()
    if there.trouble:
        missing = lack(dali()) if workers.backend == "dali-gpu" else None
        return _Usable(troubles=(there.trouble, *([str(missing)] if missing else [])))
    wanted = _wanted(workers, there)
    if missing := lack(dali(), there):
        return _Usable(troubles=(str(missing),))
    troubles: list[str] = []
    candidates: list[Gpu] = []
    for gpu in wanted:
        if trouble := _trouble(workers, gpu):
            troubles.append(trouble)
        else:
            candidates.append(gpu)
    if not candidates:
        return _Usable(troubles=tuple(troubles))
    from headrace.pipeline import trial  # which opens pictures, and most daemons never do

    working: list[tuple[Gpu, str]] = []
    for gpu, tried in zip(
        candidates, trial.run("dali-gpu", candidates, hw_decoder_load=workers.hw_decoder_load), strict=True
    ):
        if tried.trouble:
            troubles.append(f"GPU {gpu.number} ({gpu.name}): {tried.trouble}")
        else:
            working.append((gpu, tried.render_id))
    return _Usable(
        tuple(gpu.number for gpu, _ in working),
        tuple(troubles),
        " + ".join(sorted({render_id for _, render_id in working})),
        tuple(gpu.bus for gpu, _ in working),
    )


def _trouble(workers: Workers, gpu: Gpu) -> str:
    """Why a GPU is not even tried, or ""."""
    named = f"GPU {gpu.number} ({gpu.name})"
    if gpu.trouble:
        return f"{named}: {gpu.trouble}"
    if (busy := gpu.busy) and workers.devices == "auto":
        return f"{named} is used by {busy}; to share it, name it in workers.devices"
    if gpu.free < workers.gpu_memory:
        return (
            f"{named} has {gpu.free >> 20} MiB of free memory, and workers.gpu_memory is {workers.gpu_memory >> 20} MiB"
        )
    return ""


def _wanted(workers: Workers, there: Gpus) -> list[Gpu]:
    if workers.devices == "auto":
        return list(there.found)
    by_number = {gpu.number: gpu for gpu in there.found}
    if unknown := [number for number in workers.devices if number not in by_number]:
        known = ", ".join(f"{gpu.number} ({gpu.name})" for gpu in there.found)
        raise ConfigError(f"workers.devices: there is no GPU {', '.join(map(str, unknown))}; there is {known}")
    return [by_number[int(number)] for number in workers.devices]


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
