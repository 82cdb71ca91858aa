"""`headrace` on a machine that is made up: with two GPUs, whose workers are stand-ins (`fake_device`).

A program with the arguments of `headrace`; `FAKE_DEVICE` says what those workers do. Clients are welcome once both
work.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fake_device

from headrace.server import cli, service
from headrace.workers.crew import Crew
from headrace.workers.supervisor import Supervisor

BUSES = ("0000:3b:00.0", "0000:5e:00.0")

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    crew = Crew("fake", 1, (0, 1), device_module="fake_device", buses=BUSES)
    service.crew = lambda workers, **_: crew  # type: ignore[assignment]
    Supervisor.render_id = property(  # type: ignore[assignment, method-assign]
        lambda self: fake_device.RENDER_ID if self.ready == len(BUSES) else None
    )
    sys.exit(cli.main())
