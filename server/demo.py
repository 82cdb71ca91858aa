"""The demo: real photos through a daemon into a small network, with the loss to see that it learns.

First with a private daemon through shared memory; then, where the machine allows it, the same between two hosts, the
daemon on one and the trainer on the other, over tcp.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from headrace.errors import ConfigError, HeadraceError
from headrace.loader import Loader
from headrace.server.own import serving
from headrace.server.second_host import NotPossible, two_hosts

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

Out = Callable[..., None]


def run(data: Path | None, out: Out) -> None:
    """Serve the pictures, train on them, print what came of it.

    Args:
        data: a folder of class folders; None makes one from scikit-image's photos.
        out: prints lines.

    Raises:
        ConfigError: torch or scikit-image is missing.
    """
    _need("torch", "torch")
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as name:
        folder = Path(name)
        cache = None
        if data is None:
            _need("skimage", "demo")
            data, cache = folder / "photos", folder / "cache"
            data.mkdir()
            count = cut_photos(data)
            out(f"cut {count} JPEGs from the {len(_PHOTOS)} photos that scikit-image ships")
        configuration = _configuration(data, cache)
        train(configuration, out)
        _train_on_another_host(configuration, folder, out)


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


def _configuration(folder: Path, cache: Path | None) -> dict[str, Any]:
    return {
        "cache_dir": None if cache is None else str(cache),
        "streams": {
            "train": {
                "dataset": {"folder": str(folder.absolute())},
                "shuffle": True,
                "transforms": [
                    {"random_resized_crop": {"size": _SIZE, "scale": [0.3, 1.0]}},
                    "random_horizontal_flip",
                ],
                "output": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
            }
        },
    }


def train(source: Any, out: Out, *, epochs: int = _EPOCHS, transport: str = "auto", curve: Any = None) -> None:
    """Train a small network on a stream.

    Args:
        source, transport, curve: as the Loader takes them.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    # The workers take every CPU but one: threads of torch beside them would spend their time waiting for each other.
    torch.set_num_threads(1)
    with Loader(source, batch_size=_BATCH, transport=transport, curve=curve) as loader:
        model = _network(len(loader.classes))
        optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loss_of = nn.CrossEntropyLoss()
        out(
            f"{loader.num_samples} photos in {len(loader.classes)} classes from {_whom(source)}, "
            f"transport {loader.stats()['transport']}; {len(loader)} batches of {_BATCH} an epoch"
        )
        for epoch in range(epochs):
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


def _whom(source: Any) -> str:
    return f"the daemon at {source}" if isinstance(source, str) else "a private daemon"


def _train_on_another_host(configuration: dict[str, Any], folder: Path, out: Out) -> None:
    """One epoch more, with the daemon on one host and the trainer on another."""
    try:
        with (
            two_hosts() as (server, client),
            serving(
                configuration | {"listen": f"tcp://{server.ip}:0"}, folder, "--insecure", command=server.command
            ) as address,
        ):
            out(
                f"and from another host: the daemon on {server.ip}, the trainer on {client.ip} (two network namespaces)"
            )
            # --transport tcp: the two have one file system, so the daemon's Unix socket would be found here too.
            command = client.command(
                sys.executable, "-m", "headrace.server", "demo", "--from", address, "--transport", "tcp"
            )
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as trainer:
                assert trainer.stdout is not None
                for line in trainer.stdout:
                    out(line.rstrip("\n"))
            if trainer.returncode:
                raise HeadraceError(f"the trainer on the other host ended with status {trainer.returncode}")
    except NotPossible as error:
        out(f"two hosts cannot be played on this machine: {error}")


def _network(classes: int) -> Any:
    from torch import nn

    def stage(inside: int, outside: int) -> Any:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        )

    return nn.Sequential(
        stage(3, 16), stage(16, 32), stage(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    )
