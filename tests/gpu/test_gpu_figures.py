"""What reaches a trainer's GPU, in figures. They stand at the end of what `make test-gpu` prints: `conftest` puts them
there. Other runs leave this test out, for it takes minutes and wants the machine for itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu_train.py"
_SECONDS = 1500

pytestmark = [pytest.mark.gpu, pytest.mark.soak, pytest.mark.timeout(_SECONDS + 60)]


def test_figures(record_property: Any) -> None:
    """All are measured. Whether the claims hold is left to who reads them: they ask for cores enough, too."""
    command = [sys.executable, str(PROGRAM), "--rounds", "2", "--steps", "30"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, check=False)
    *lines, last = done.stdout.splitlines() or [""]
    for line in lines:
        record_property("figure", line)
    assert done.returncode in (0, 1), done.returncode
    found = json.loads(last)
    assert {"copy", "delivery", "train"} <= found.keys()
    assert len(found["claims"]) >= 5 and all(claim["measured"] > 0 for claim in found["claims"])
