"""Headrace: image batches for training, decoded and augmented elsewhere, ready when the trainer asks.

This folder is the package root: users write `import headrace`, and there is no `headrace.client`.
Names are handed on lazily, so that importing the package pulls in neither torch nor DALI nor the pipeline;
every worker process imports this module first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headrace import errors as errors
    from headrace.batch import Batch as Batch
    from headrace.batch import Reject as Reject
    from headrace.loader import Loader as Loader
    from headrace.pipeline.photometric import ColorJitter as ColorJitter
    from headrace.pipeline.photometric import GaussianBlur as GaussianBlur
    from headrace.pipeline.photometric import RandomAutocontrast as RandomAutocontrast
    from headrace.pipeline.photometric import RandomEqualize as RandomEqualize
    from headrace.pipeline.photometric import RandomErasing as RandomErasing
    from headrace.pipeline.photometric import RandomGrayscale as RandomGrayscale
    from headrace.pipeline.photometric import RandomPosterize as RandomPosterize
    from headrace.pipeline.photometric import RandomSolarize as RandomSolarize
    from headrace.pipeline.spec import Config as Config
    from headrace.pipeline.spec import Stream as Stream
    from headrace.pipeline.torchvision import from_torchvision as from_torchvision
    from headrace.pipeline.transforms import CenterCrop as CenterCrop
    from headrace.pipeline.transforms import Letterbox as Letterbox
    from headrace.pipeline.transforms import Pad as Pad
    from headrace.pipeline.transforms import RandomCrop as RandomCrop
    from headrace.pipeline.transforms import RandomHorizontalFlip as RandomHorizontalFlip
    from headrace.pipeline.transforms import RandomResizedCrop as RandomResizedCrop
    from headrace.pipeline.transforms import RandomVerticalFlip as RandomVerticalFlip
    from headrace.pipeline.transforms import Resize as Resize

_HOME = {
    "Batch": "headrace.batch",
    "CenterCrop": "headrace.pipeline.transforms",
    "ColorJitter": "headrace.pipeline.photometric",
    "Config": "headrace.pipeline.spec",
    "GaussianBlur": "headrace.pipeline.photometric",
    "Letterbox": "headrace.pipeline.transforms",
    "Loader": "headrace.loader",
    "Pad": "headrace.pipeline.transforms",
    "RandomAutocontrast": "headrace.pipeline.photometric",
    "RandomCrop": "headrace.pipeline.transforms",
    "RandomEqualize": "headrace.pipeline.photometric",
    "RandomErasing": "headrace.pipeline.photometric",
    "RandomGrayscale": "headrace.pipeline.photometric",
    "RandomHorizontalFlip": "headrace.pipeline.transforms",
    "RandomPosterize": "headrace.pipeline.photometric",
    "RandomResizedCrop": "headrace.pipeline.transforms",
    "RandomSolarize": "headrace.pipeline.photometric",
    "RandomVerticalFlip": "headrace.pipeline.transforms",
    "Reject": "headrace.batch",
    "Resize": "headrace.pipeline.transforms",
    "Stream": "headrace.pipeline.spec",
    "from_torchvision": "headrace.pipeline.torchvision",
}

__all__ = ["__version__", "errors", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("headrace.errors")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
