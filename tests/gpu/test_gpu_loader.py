"""The way of a batch into the trainer's GPU, on one: the bits of the host, the trainer's stream, memory. None of it
needs DALI: pictures are rendered by the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedDaemon, level

from headrace.device import Cuda, open_device
from headrace.kernel import choose, fused, plain
from headrace.loader import Loader
from headrace.output import CutMix, DType, Layout, MixUp, Output

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} has no GPU"),
]

MEAN_STD: Any = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
FORMS = [*product(("uint8", "float16", "bfloat16", "float32"), ("NCHW", "NHWC", "channels_last"))]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s", samples=64, size=(40, 48), bad=[5, 22], seed=3) as daemon:
        yield daemon


def open_loader(daemon: ScriptedDaemon, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {"batch_size": 8, "device": "cuda", "timeout": 60, "rank": 0, "world_size": 1}
    return Loader(daemon.address, **(usual | arguments))


@pytest.mark.parametrize(("dtype", "layout"), FORMS)
def test_triton_and_plain_torch_give_the_same_bits_with_and_without_rows_left_out(dtype: DType, layout: Layout) -> None:
    output = Output(dtype, layout) if dtype == "uint8" else Output(dtype, layout, **MEAN_STD)
    levels = torch.randint(256, (7, 224, 160, 3), dtype=torch.uint8, device="cuda")
    for rows in (None, torch.tensor([6, 0, 3, 3], device="cuda")):
        count = 7 if rows is None else 4
        shape = (count, 3, 224, 160) if layout == "NCHW" else (count, 224, 160, 3)
        ours, theirs = (torch.empty(shape, dtype=getattr(torch, dtype), device="cuda") for _ in range(2))
        fused(output)(levels, rows, ours)
        plain(output, levels.device)(levels, rows, theirs)
        assert torch.equal(ours, theirs)


def test_triton_is_what_finishes_here() -> None:
    assert choose(Output(**MEAN_STD), 224, 224, torch.device("cuda", 0))[0] == "triton"


@pytest.mark.parametrize(("dtype", "layout"), FORMS)
def test_batches_have_the_bits_of_the_host(daemon: ScriptedDaemon, dtype: DType, layout: Layout) -> None:
    form: dict[str, Any] = {"dtype": dtype, "layout": layout} | ({} if dtype == "uint8" else MEAN_STD)
    with open_loader(daemon, **form) as there, open_loader(daemon, device=None, **form) as here:
        for ours, theirs in zip(there, here, strict=True):
            assert ours.images.is_cuda and ours.labels.is_cuda
            assert ours.images.stride() == theirs.images.stride() and ours.images.dtype is theirs.images.dtype
            assert torch.equal(ours.images.cpu(), theirs.images) and torch.equal(ours.labels.cpu(), theirs.labels)


@pytest.mark.parametrize("mixing", [{"mixup": MixUp()}, {"cutmix": CutMix()}, {"mixup": MixUp(), "cutmix": CutMix()}])
def test_mixed_batches_of_float32_have_the_bits_of_the_host(daemon: ScriptedDaemon, mixing: dict[str, Any]) -> None:
    form: dict[str, Any] = {"dtype": "float32", "on_bad_sample": "mask", **MEAN_STD, **mixing}
    with open_loader(daemon, **form) as there, open_loader(daemon, device=None, **form) as here:
        for ours, theirs in zip(there, here, strict=True):
            assert torch.equal(ours.images.cpu(), theirs.images) and torch.equal(ours.labels.cpu(), theirs.labels)


def test_pictures_stay_right_while_the_gpu_is_busy_and_batches_are_dropped(daemon: ScriptedDaemon) -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    means, wanted = [], []
    stream = torch.cuda.Stream()
    with open_loader(daemon, dtype="uint8", on_bad_sample="mask") as loader, torch.cuda.stream(stream):
        for epoch in range(4):
            for batch in loader:
                for _ in range(5):
                    busy = torch.tanh(busy @ busy)  # so that the trainer's stream lags behind
                means.append(batch.images.float().mean(dim=(1, 2, 3)))
                positions = range(8 * batch.step, 8 * batch.step + 8)
                wanted += [0 if p in (5, 22) else level(epoch, p) for p in positions]
    stream.synchronize()
    assert torch.cat(means).cpu().round().int().tolist() == wanted


def test_next_does_not_wait_for_the_gpu(daemon: ScriptedDaemon) -> None:
    with open_loader(daemon, dtype="uint8") as loader:
        batches = iter(loader)
        next(batches)
        time.sleep(1)  # the next ones are ready
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 31)  # a second or so on the current stream
        before = torch.cuda.Event()
        before.record()
        next(batches)
        assert not before.query()
        torch.cuda.synchronize()


def test_memory_of_the_device_stays_within_what_is_said_and_does_not_grow(daemon: ScriptedDaemon) -> None:
    with open_loader(daemon, batch_size=32, on_bad_sample="mask") as loader:
        list(map(len, loader))  # what is held once
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            for batch in loader:
                torch.cuda.synchronize()
                del batch
        rounded = 1 << 21  # torch's, for what is small
        held = 2 * 32 * 40 * 48 * 3 * 4  # by this loop, and what it has just dropped
        assert torch.cuda.max_memory_allocated() - before <= loader.stats()["device"]["memory"] + held + rounded


def test_page_locked_memory_is_page_locked() -> None:
    device = open_device("cuda")
    assert isinstance(device, Cuda) and device.bus.count(":") == 2
    assert torch.from_numpy(np.asarray(device.lock(1 << 20))).is_pinned()
