"""Batches on a device: the same bits as on the host, and no memory is used again while somebody may still read it. The
device is a stand-in that is late (`late_device`)."""

from __future__ import annotations

import gc
import re
import sys
import threading
import types
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_device import POISON, LateDevice
from numpy.typing import NDArray
from scripted import ScriptedDaemon, level, wait_until

import headrace.kernel
import headrace.loader
from headrace import staging
from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.device import Cuda, open_device
from headrace.errors import ConfigError, DeadlineError, HeadraceError
from headrace.form import Form
from headrace.loader import Loader
from headrace.mix import Mixing
from headrace.output import DType, Layout, Output
from headrace.slots import SlotLayout
from headrace.staging import DevicePixels

torch = pytest.importorskip("torch")

DTYPES: tuple[DType, ...] = ("uint8", "float16", "bfloat16", "float32")
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "channels_last")
MEAN_STD: Any = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
SIZE, ROWS, CLASSES = (5, 7), 6, 4
SOME_ROWS = [True, True, False, True, False, True]


def levels(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (ROWS, *SIZE, 3), np.uint8)


def mixing_of(output: Output) -> Mixing | None:
    return Mixing(output.mixup, output.cutmix, 5, CLASSES, planes=output.layout == "NCHW") if output.mixed else None


def staged(
    device: LateDevice, output: Output, layout: SlotLayout | None = None, *, timeout: float = 10
) -> DevicePixels:
    return DevicePixels(
        device, output, layout or SlotLayout(ROWS, *SIZE), batch_size=ROWS, mixing=mixing_of(output), timeout=timeout,
        stopped=lambda: False,
    )  # fmt: skip


def form(output: Output, pixels: DevicePixels | None = None) -> Form:
    return Form(
        "torch", output, height=SIZE[0], width=SIZE[1], batch_size=ROWS, prefetch=1, mixing=mixing_of(output),
        pixels=pixels,
    )  # fmt: skip


def make(form: Form, seed: int = 0, keep: list[bool] | None = None, labels: Any = None, rows: int = ROWS) -> Batch:
    draft = Draft(
        step=seed, positions=range(rows * seed, rows * (seed + 1)), images=form.allocate(rows),
        labels=np.arange(rows) % CLASSES if labels is None else labels, indices=np.arange(rows),
        valid=np.arange(rows) != 3, keep=np.array(keep or [True] * rows), missing=0,
    )  # fmt: skip
    source = levels(seed)[:rows].copy()
    form.finish(source[:2], draft.images[:2])
    form.finish(source[2:], draft.images[2:])
    source[...] = POISON  # the slot is leased to somebody else
    form.make_way()
    return form.make(draft, epoch=3)


def bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


# -- what arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "layout"), [*product(DTYPES, LAYOUTS)])
@pytest.mark.parametrize("keep", [None, SOME_ROWS], ids=["all", "some"])
def test_a_batch_on_the_device_has_the_bits_of_one_on_the_host(
    dtype: DType, layout: Layout, keep: list[bool] | None
) -> None:
    output = Output(dtype, layout) if dtype == "uint8" else Output(dtype, layout, **MEAN_STD)
    device = LateDevice()
    there = form(output, staged(device, output))
    ours, theirs = make(there, keep=keep), make(form(output), keep=keep)
    there.hand_over(ours)
    device.synchronize()
    assert ours.images.dtype is theirs.images.dtype and ours.images.shape == theirs.images.shape
    assert ours.images.stride() == theirs.images.stride()
    assert bits(ours.images) == bits(theirs.images)
    assert torch.equal(ours.labels, theirs.labels) and ours.labels.dtype is torch.int64
    assert ours.valid.tolist() == theirs.valid.tolist() and ours.indices.tolist() == theirs.indices.tolist()


@pytest.mark.parametrize(("dtype", "layout"), [*product(DTYPES[1:], LAYOUTS)])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_rows_are_mixed_on_the_device_to_the_same_bits(kind: str, dtype: DType, layout: Layout) -> None:
    output = Output(dtype, layout, **MEAN_STD).replaced(**{kind: {"alpha": 1.0}})
    device = LateDevice()
    there = form(output, staged(device, output))
    ours, theirs = make(there, seed=2, keep=SOME_ROWS), make(form(output), seed=2, keep=SOME_ROWS)
    there.hand_over(ours)
    device.synchronize()
    assert bits(ours.images) == bits(theirs.images)
    assert ours.labels.dtype is torch.float32 and torch.equal(ours.labels, theirs.labels)


@pytest.mark.parametrize("width", [0, 3])
def test_labels_of_any_kind_arrive(width: int) -> None:
    device, output = LateDevice(), Output("uint8")
    there = form(output, staged(device, output, SlotLayout(ROWS, *SIZE, "float32", width)))
    labels = np.random.default_rng(1).normal(size=(ROWS, width) if width else ROWS).astype(np.float32)
    batch = make(there, keep=SOME_ROWS, labels=labels)
    there.hand_over(batch)
    device.synchronize()
    assert np.array_equal(batch.labels, labels[SOME_ROWS])


def test_a_short_batch_brings_its_rows_alone() -> None:
    device, output = LateDevice(), Output(**MEAN_STD)
    there = form(output, staged(device, output))
    ours, theirs = make(there, rows=4), make(form(output), rows=4)
    there.hand_over(ours)
    device.synchronize()
    assert bits(ours.images) == bits(theirs.images) and len(ours.labels) == 4


# -- whose memory it is ---------------------------------------------------------------------------------------


def test_the_stand_in_shows_what_is_written_too_early_and_what_is_read_too_early() -> None:
    device = LateDevice()
    host: NDArray[np.uint8] = np.ndarray((64,), np.uint8, device.lock(64))
    host[...] = 1
    out = device.empty((64,), torch.uint8)
    event = device.submit(host, out.copy_)
    assert set(out.tolist()) == {POISON}
    host[...] = 2
    device.run(event.number)  # type: ignore[attr-defined]
    assert set(out.tolist()) == {2}
    found: list[Any] = []
    device.train(out, found)
    del out
    device.empty((64,), torch.uint8)
    device.synchronize()
    assert set(found[0].tolist()) == {POISON}


def test_memory_of_the_host_comes_back_only_when_its_copy_is_done() -> None:
    output = Output("uint8", "NHWC")
    device = LateDevice(asks=50)
    pixels = staged(device, output)
    there = form(output, pixels)
    batches = []
    for seed in range(12):
        batches.append(make(there, seed))
        there.hand_over(batches[-1])
        assert device.submitted - device.finished <= 2
    assert len(device.locked) <= 4
    assert pixels.locked_bytes == len(device.locked) * pixels.staged_bytes
    device.synchronize()
    for seed, batch in enumerate(batches):
        assert np.array_equal(batch.images, levels(seed))


def test_memory_of_a_batch_that_is_dropped_is_not_written_before_the_trainers_stream_has_read_it() -> None:
    output = Output("uint8", "NHWC")
    device = LateDevice(asks=0)
    there = form(output, staged(device, output))
    found: list[Any] = []
    for seed in range(6):
        batch = make(there, seed)
        there.hand_over(batch)
        device.train(batch.images, found)
        del batch
    device.synchronize()
    assert [piece.tobytes() for piece in found] == [levels(seed).tobytes() for seed in range(6)]


def test_a_draft_that_is_dropped_gives_its_memory_back() -> None:
    device, output = LateDevice(), Output("uint8")
    pixels = staged(device, output)
    for _ in range(9):
        pixels.allocate(ROWS)
    assert len(device.locked) == 1


def test_a_device_that_takes_nothing_is_named_after_the_timeout() -> None:
    output = Output("uint8")
    device = LateDevice(asks=1 << 60)
    pixels = staged(device, output, timeout=0.2)
    there = form(output, pixels)
    make(there), make(there, 1)
    with pytest.raises(DeadlineError, match=r"late:0 has not taken a batch for 0\.2 s"):
        make(there, 2)
    pixels._stopped = lambda: True
    pixels._timeout = 1000
    with pytest.raises(DeadlineError):
        make(there, 3)


def test_memory_that_a_device_may_still_read_in_the_end_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(staging, "_lost", lost)
    for asks, patience, kept in ((5, 20.0, 0), (1 << 60, 0.05, 2)):
        monkeypatch.setattr(staging, "_END", patience)
        output = Output("uint8")
        there = form(output, staged(LateDevice(asks=asks), output))
        make(there), make(there, 1)
        there.close()
        assert len(lost) == kept


# -- through a Loader -----------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s", samples=40, size=(4, 6), bad=[5, 22], seed=3) as daemon:
        yield daemon


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(headrace.loader, "open_device", lambda given: device)
    return device


def open_loader(daemon: ScriptedDaemon, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {
        "batch_size": 4, "dtype": "uint8", "device": "cuda", "timeout": 20, "rank": 0, "world_size": 1,
    }  # fmt: skip
    return Loader(daemon.address, **(usual | arguments))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("layout", ["NCHW", "channels_last"])
def test_epochs_arrive_whole_and_in_order_while_the_trainer_lags_behind(
    daemon: ScriptedDaemon, device: LateDevice, transport: str, layout: str
) -> None:
    with open_loader(daemon, transport=transport, layout=layout) as loader:
        for epoch in range(2):
            found: list[Any] = []
            shapes = []
            for batch in loader:
                device.train(batch.images, found)  # and drops it
                shapes.append(tuple(batch.images.shape))
                if batch.step % 3 == 2:
                    device.synchronize()
            del batch
            device.synchronize()
            assert shapes == [(3 if step in (1, 5) else 4, 3, 4, 6) for step in range(10)]
            positions = [p for p in range(40) if p not in (5, 22)]
            images = np.concatenate(found).reshape(-1, 72)
            assert (images == np.array([level(epoch, p) for p in positions], np.uint8)[:, None]).all()
        stats = loader.stats()["device"]
    assert [hello.device for hello in daemon.hellos] == [device.bus]
    assert stats["name"] == "late:0" and stats["finisher"] == "torch"
    assert 0 < stats["page_locked"] == sum(map(len, device.locked))


@pytest.mark.parametrize("prefetch", [0, 5])
def test_texts_stay_on_the_host_beside_pictures_on_the_device(
    tmp_path: Path, device: LateDevice, prefetch: int
) -> None:
    with (
        ScriptedDaemon(tmp_path / "t", samples=10, size=(4, 6), labels="text", columns=["n"], bad=[2]) as daemon,
        open_loader(daemon, prefetch=prefetch) as loader,
    ):
        seen = []
        for batch in loader:
            device.synchronize()
            assert len(batch.images) == len(batch.labels) == len(batch.extra["n"])
            seen += zip(batch.images[:, 0, 0, 0].tolist(), batch.labels, strict=True)
    assert seen == [(level(0, p), f"label {9 - p} é") for p in range(10) if p != 2]


def test_as_many_batches_lie_on_the_device_as_is_said(
    daemon: ScriptedDaemon, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.kernel, "WORKING", 0)
    with open_loader(daemon, batch_size=16, on_bad_sample="mask", prefetch=1) as loader:
        batch = next(iter(loader))
        wait_until(lambda: device.submitted >= 3)
        gc.collect()
        said = loader.stats()["device"]["memory"]
        device.synchronize()
        del batch
    assert 0 < device.most <= said


def test_a_device_without_memory_is_an_error_and_the_next_attempt_goes_on(
    daemon: ScriptedDaemon, device: LateDevice
) -> None:
    with open_loader(daemon, on_bad_sample="mask") as loader:
        device.capacity = 0
        batches = iter(loader)
        with pytest.raises(HeadraceError, match="late:0 is full"):
            next(batches)
        device.capacity = 1 << 40
        batch = next(batches)
        assert batch.step == 0
        device.synchronize()
        assert batch.images[:, 0, 0, 0].tolist() == [level(0, p) for p in range(4)]


def test_an_epoch_that_is_broken_off_leaves_memory_that_is_under_way_alone(
    daemon: ScriptedDaemon, device: LateDevice
) -> None:
    device.asks = 20
    with open_loader(daemon, on_bad_sample="mask") as loader:
        for epoch in range(5):
            for batch in loader:
                device.synchronize()
                assert batch.epoch == epoch
                wanted = [0 if p in (5, 22) else level(epoch, p) for p in range(4 * batch.step, 4 * batch.step + 4)]
                assert batch.images[:, 0, 0, 0].tolist() == wanted
                if batch.step == epoch:
                    break
        device_stage = loader.stats()["stages"]["device"]
    assert device_stage["count"] > 0 and device_stage["seconds"] > 0


def test_closing_ends_the_thread_though_the_device_takes_nothing(
    daemon: ScriptedDaemon, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_END", 0.05)
    monkeypatch.setattr(staging, "_lost", [])
    device.asks = 1 << 60
    loader = open_loader(daemon, timeout=1000)
    threading.Timer(0.3, loader.close).start()
    with pytest.raises(HeadraceError, match="closed"):
        for _ in loader:
            pass
    wait_until(lambda: "headrace-fetch" not in {thread.name for thread in threading.enumerate()})


# -- which device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "cpu", torch.device("cpu")])
def test_the_cpu_is_no_device(given: Any) -> None:
    assert open_device(given) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("meta", "device: meta is not available; use None, 'cpu' or 'cuda', and batch.to(device)"),
        ("gpu", "device: 'gpu' is no device: "),
        (1.5, "device: 1.5 is no device: "),
    ],
)
def test_what_is_no_device_is_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        open_device(given)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"^device: cuda is not available: torch .* (sees no GPU|built without CUDA)$"
    ):
        open_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"^device: cuda:7 is not available: torch sees 2 GPUs$"):
        open_device("cuda:7")


def test_a_device_takes_tensors(daemon: ScriptedDaemon, device: LateDevice) -> None:
    with pytest.raises(ConfigError, match="device: cuda takes tensors; use output='torch'"):
        open_loader(daemon, output="numpy")


def test_a_device_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"device: cuda needs torch .*pip install 'headrace\[torch\]'"):
        open_device("cuda")


# -- the calls of torch's ------------------------------------------------------------------------------------


class Noted:
    """In place of `torch.cuda`: notes what it is asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.current = "the trainer's"

    def get_device_properties(self, target: Any) -> Any:
        return types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)

    def Stream(self, target: Any, priority: int) -> Any:
        return "ours"

    def Event(self) -> Any:
        return types.SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream)), query=lambda: len(self.calls) > 1
        )

    def current_stream(self, target: Any) -> Any:
        name = self.current
        return types.SimpleNamespace(name=name, wait_event=lambda event: self.calls.append(("wait", name)))

    def device(self, target: Any) -> Any:
        return self

    def stream(self, stream: Any) -> Any:
        self.calls.append(("enter", stream))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.calls.append("leave")


def test_the_trainers_current_stream_waits_and_work_is_on_the_loaders_own(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr(torch, "cuda", noted)
    cuda = Cuda(1)
    cuda.target = torch.device("cpu")
    assert (cuda.name, cuda.bus) == ("cuda:1", "0000:3b:00.0")
    out = cuda.empty((8,), torch.uint8)
    noted.calls.clear()
    event = cuda.submit(np.arange(8, dtype=np.uint8), out.copy_)
    assert noted.calls == [("enter", "ours"), ("record", "ours"), "leave", "leave"]
    assert out.tolist() == list(range(8)) and event.done()
    used: list[Any] = []
    handed: Any = types.SimpleNamespace(record_stream=lambda stream: used.append(stream.name))
    noted.current = "another"
    cuda.hand_over(event, [handed, handed])
    assert noted.calls[-1] == ("wait", "another") and used == ["another", "another"]


def test_memory_that_the_device_lacks_is_a_memory_error_and_another_error_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "cuda", Noted())
    cuda = Cuda(0)
    cuda.target = torch.device("cpu")

    def fails(error: Exception) -> Any:
        def work(levels: Any) -> None:
            raise error

        return work

    host = np.zeros(8, np.uint8)
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("CUDA error: out of memory\nx")):
        with pytest.raises(MemoryError, match="no memory for 8 bytes of levels on cuda:0: .*; use a smaller batch"):
            cuda.submit(host, fails(error))
    with pytest.raises(RuntimeError, match="illegal address"):
        cuda.submit(host, fails(RuntimeError("an illegal address")))
