"""torchvision's transforms without its compiled operators, which the CPU wheels of torch may lack."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import pytest


def transforms() -> ModuleType:
    """`torchvision.transforms`; the test is skipped where torch or torchvision is absent."""
    torch = pytest.importorskip("torch")
    if find_spec("torchvision") is None:
        pytest.skip("no torchvision")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision.transforms

    module: ModuleType = torchvision.transforms
    return module
