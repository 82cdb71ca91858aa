"""What lies in `examples/` runs as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from service import stream

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_jax_trains_on_batches_by_dlpack_and_the_loss_falls(photos: Path, home: Path) -> None:
    pytest.importorskip("jax")
    transforms = [{"random_resized_crop": {"size": 32}}, "random_horizontal_flip"]
    configuration = {"streams": {"train": stream(photos) | {"transforms": transforms}}}
    (home / "headrace.yaml").write_text(yaml.safe_dump(configuration))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "jax_train.py"), "headrace.yaml", "--batch-size", "20", "--epochs", "4"],
        cwd=home,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^epoch (\d): 2 batches, loss (\d\.\d{3})$", done.stdout, re.M)
    assert [int(epoch) for epoch, _ in found] == [1, 2, 3, 4]
    losses = [float(loss) for _, loss in found]
    assert losses[-1] < losses[0]
