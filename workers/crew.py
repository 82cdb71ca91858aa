"""Who renders: which processes a daemon starts, and what each of them is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crew:
    """
    Attributes:
        backend: of whoever renders first, a name of `headrace.pipeline.backend`, never "auto".
        processes: CPU workers. Beside devices they only take over when one fails.
        devices: numbers of the GPUs, a worker each; empty unless the backend uses a GPU.
        threads: that read and decode, of a device worker.
        in_flight: chunks that a device worker is given at once.
        gpu_memory: bytes of its GPU that a device worker may use.
        hw_decoder_load: as in `headrace.pipeline.backend.Options`.
    """

    backend: str
    processes: int
    devices: tuple[int, ...] = ()
    threads: int = 4
    in_flight: int = 4
    gpu_memory: int = 4 << 30
    hw_decoder_load: float = 0.0
