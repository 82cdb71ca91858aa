"""The demo: real photos through a daemon into a small network, with the loss to see that it learns."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from headrace.errors import ConfigError
from headrace.loader import Loader

#: Colour photos that the scikit-image package ships; each becomes a class of cut-outs.
_PHOTOS = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "deep-field": "hubble_deep_field.jpg",
    "motorcycle": "motorcycle_left.png",
    "retina": "retina.jpg",
    "rocket": "rocket.jpg",
    "tissue": "ihc.png",
}
_CUT = 256  # pixels, a side of a cut-out
_PER_CLASS = 120
_EPOCHS = 4
_BATCH = 64
_SIZE = 96


def run(data: Path | None, out: Callable[..., None]) -> None:
    """Serve the pictures, train on them, print what came of it.

    Args:
        data: a folder of class folders; None makes one from scikit-image's photos.
        out: prints lines.

    Raises:
        ConfigError: torch or scikit-image is missing.
    """
    _need("torch", "torch")
    if data is not None:
        _train(data, None, out)
        return
    _need("skimage", "demo")
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        photos, cache = Path(folder, "photos"), Path(folder, "cache")
        photos.mkdir()
        count = cut_photos(photos)
        out(f"cut {count} JPEGs from the {len(_PHOTOS)} photos that scikit-image ships")
        _train(photos, cache, out)


def _need(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"the demo needs {module}: pip install 'headrace[{extra}]'")


def cut_photos(folder: Path, per_class: int = _PER_CLASS) -> int:
    """Write cut-outs of scikit-image's photos as JPEGs, a folder for each photo; how many."""
    spec = importlib.util.find_spec("skimage")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "data"
    count = 0
    for name, file in _PHOTOS.items():
        (folder / name).mkdir()
        with Image.open(source / file) as opened:
            photo = opened.convert("RGB")
        # A grid of overlapping windows: every run cuts the same.
        columns = 12
        rows = -(-per_class // columns)
        for i in range(per_class):
            row, column = divmod(i, columns)
            x = column * (photo.width - _CUT) // (columns - 1)
            y = row * (photo.height - _CUT) // max(1, rows - 1)
            photo.crop((x, y, x + _CUT, y + _CUT)).save(folder / name / f"{i:04}.jpg", quality=90)
            count += 1
    return count


def _train(folder: Path, cache: Path | None, out: Callable[..., None]) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    # The workers take every CPU but one: threads of torch beside them would spend their time waiting for each other.
    torch.set_num_threads(1)
    configuration: dict[str, Any] = {
        "cache_dir": None if cache is None else str(cache),
        "streams": {
            "train": {
                "dataset": {"folder": str(folder)},
                "shuffle": True,
                "transforms": [
                    {"random_resized_crop": {"size": _SIZE, "scale": [0.3, 1.0]}},
                    "random_horizontal_flip",
                ],
                "output": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
            }
        },
    }
    with Loader(configuration, batch_size=_BATCH) as loader:
        model = _network(len(loader.classes))
        optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loss_of = nn.CrossEntropyLoss()
        out(
            f"{loader.num_samples} photos in {len(loader.classes)} classes, served by a private daemon over ZeroMQ; "
            f"{len(loader)} batches of {_BATCH} an epoch"
        )
        for epoch in range(_EPOCHS):
            losses, right, images, waited = [], 0, 0, 0.0
            begin = before = time.perf_counter()
            for x, y in loader:
                waited += time.perf_counter() - before
                scores = model(x)
                loss = loss_of(scores, y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(float(loss.detach()))
                right += int((scores.argmax(1) == y).sum())
                images += len(y)
                before = time.perf_counter()
            seconds = time.perf_counter() - begin
            out(
                f"epoch {epoch + 1}: {images / seconds:5.0f} images/s, trainer waited {waited / seconds:4.0%}, "
                f"loss {sum(losses) / len(losses):.3f}, right {right / images:4.0%}"
            )
        out(f"transport: {loader.stats()['transport']}")


def _network(classes: int) -> Any:
    from torch import nn

    def stage(inside: int, outside: int) -> Any:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        )

    return nn.Sequential(
        stage(3, 16), stage(16, 32), stage(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    )
