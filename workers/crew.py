"""Who renders: which processes a daemon starts, and what each of them is told."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.pipeline.machine import Choice, choose
from headrace.pipeline.spec import Workers
from headrace.workers.cpus import worker_count

log = logging.getLogger(__name__)

#: What takes over where DALI or a GPU does not work: it always does.
FALLBACK = "pillow"
#: Chunks that a device worker has at once: one on its way in, one out, and two between.
IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Crew:
    """
    Attributes:
        backend: of whoever renders first, a name of `headrace.pipeline.backend`, never "auto".
        processes: CPU workers. Beside devices they only take over when none of those works.
        devices: numbers of the GPUs, a worker each; empty unless the backend uses a GPU.
        buses: where each of these is, as `headrace.pipeline.gpus.Gpu` says it; empty where nobody knows.
        threads: that read and decode, of a device worker.
        in_flight: chunks that a device worker is given at once.
        gpu_memory: bytes of its GPU that a device worker may use.
        hw_decoder_load: as in `headrace.pipeline.backend.Options`.
        fallback: the backend that takes over where `backend` does not work; None for a backend that always does.
        cpu_module, device_module: the programs of the workers, as `python -m` names them.
    """

    backend: str
    processes: int
    devices: tuple[int, ...] = ()
    threads: int = 4
    in_flight: int = IN_FLIGHT
    gpu_memory: int = 4 << 30
    hw_decoder_load: float = 0.0
    fallback: str | None = None
    buses: tuple[str, ...] = ()
    cpu_module: str = "headrace.workers.worker"
    device_module: str = "headrace.workers.device"

    @property
    def workers(self) -> int:
        """Processes of both kinds."""
        return self.processes + len(self.devices)

    @property
    def chunks(self) -> int:
        """That can be at the workers at once: when a device comes back, CPU workers still have theirs."""
        return self.processes + self.in_flight * len(self.devices)

    @property
    def cpu_backend(self) -> str:
        """With which a CPU worker begins."""
        return self.fallback or self.backend if self.devices else self.backend

    def home(self, bus: str) -> int | None:
        """The device that is there; None if there is none, or several (instances of one GPU), or `bus` is empty."""
        found = [device for device, place in zip(self.devices, self.buses, strict=False) if bus and place == bus]
        return found[0] if len(found) == 1 else None

    def device_argument(self, device: int) -> str:
        """What the worker of a device is told, as JSON."""
        told = {
            "backend": self.backend,
            "device": device,
            "threads": self.threads,
            "gpu_memory": self.gpu_memory,
            "hw_decoder_load": self.hw_decoder_load,
        }
        return json.dumps(told)


def crew(workers: Workers, *, private: bool, chosen: Choice | None = None) -> Crew:
    """Who renders by this configuration, on this machine.

    Args:
        private: the trainer runs on the same CPUs.
        chosen: what was chosen already.

    Raises:
        ConfigError: what is named cannot run here; or a GPU's worker needs more than `gpu_memory`.
    """
    if chosen is None:
        chosen = choose(workers)
        log.info("%s renders: %s", chosen.backend, "; ".join(chosen.why))
    processes = worker_count(workers.processes, private=private)
    return Crew(
        chosen.backend,
        processes,
        devices=chosen.devices,
        threads=_threads(workers, len(chosen.devices), private=private) if chosen.devices else 1,
        in_flight=workers.in_flight if isinstance(workers.in_flight, int) else IN_FLIGHT,
        gpu_memory=workers.gpu_memory,
        hw_decoder_load=workers.hw_decoder_load,
        fallback=FALLBACK if chosen.backend.startswith("dali") else None,
        buses=chosen.buses,
    )


def _threads(workers: Workers, devices: int, *, private: bool) -> int:
    """Of each device worker: as many as there are CPUs for it, if they leave half of its memory for pictures."""
    from headrace.workers.device import least_memory  # which opens pictures, and most daemons never do

    allowed = workers.gpu_memory
    threads = workers.threads
    if not isinstance(threads, int):
        threads = max(1, worker_count("auto", private=private) // devices)
        while threads > 1 and least_memory(threads) > allowed // 2:
            threads -= 1
    if (least := least_memory(threads)) > allowed:
        raise ConfigError(
            f"workers.gpu_memory: {allowed >> 20} MiB are too little: a worker with {threads} threads takes about "
            f"{least >> 20} MiB before the first picture; allow more, or set workers.threads to less"
        )
    return threads
