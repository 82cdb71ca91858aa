"""torchvision without its compiled operators, which wheels of torch without CUDA may lack."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest


def torchvision(module: str) -> ModuleType:
    """`torchvision.<module>`; the test is skipped where torch or torchvision is absent."""
    torch = pytest.importorskip("torch")
    if find_spec("torchvision") is None:
        pytest.skip("no torchvision")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return import_module(f"torchvision.{module}")
