"""Who renders: which processes a daemon starts, and what each of them is told."""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace.pipeline.backend import resolve
from headrace.pipeline.spec import Workers
from headrace.workers.cpus import worker_count


@dataclass(frozen=True, slots=True)
class Crew:
    """
    Attributes:
        backend: of whoever renders first, a name of `headrace.pipeline.backend`, never "auto".
        processes: CPU workers. Beside devices they only take over when none of those works.
        devices: numbers of the GPUs, a worker each; empty unless the backend uses a GPU.
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
    in_flight: int = 4
    gpu_memory: int = 4 << 30
    hw_decoder_load: float = 0.0
    fallback: str | None = None
    cpu_module: str = "headrace.workers.worker"
    device_module: str = "headrace.workers.device"

    @property
    def workers(self) -> int:
        """Processes of both kinds."""
        return self.processes + len(self.devices)

    @property
    def cpu_backend(self) -> str:
        """With which a CPU worker begins."""
        return self.fallback or self.backend if self.devices else self.backend

    def device_argument(self, device: int) -> str:
        """What the worker of a device is told, as JSON."""
        told = {
            "device": device,
            "threads": self.threads,
            "in_flight": self.in_flight,
            "gpu_memory": self.gpu_memory,
            "hw_decoder_load": self.hw_decoder_load,
        }
        return json.dumps(told)


def crew(workers: Workers, *, private: bool) -> Crew:
    """Who renders by this configuration, on this machine.

    Args:
        private: the trainer runs on the same CPUs.
    """
    backend = resolve(workers.backend)
    processes = worker_count(workers.processes, private=private)
    return Crew(backend, processes, fallback="pillow" if backend.startswith("dali") else None)
