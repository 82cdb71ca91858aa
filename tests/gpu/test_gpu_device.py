"""What only a GPU can answer beside its pixels: verdicts, errors, memory, locked slots, the worker as a process."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import kinds
import numpy as np
import pytest
from numpy.typing import NDArray
from parity import files, planned
from plant import plants, run_epoch

from headrace.pipeline.backend import Backend, Options, make
from headrace.pipeline.cuda import Device
from headrace.pipeline.dali import DaliBackend
from headrace.pipeline.probe import BadPicture, probe
from headrace.pipeline.spec import Decode
from headrace.slots import Ring, SlotLayout
from headrace.workers.crew import Crew

pytestmark = pytest.mark.gpu

CHAIN = "[{random_resized_crop: {size: 96}}, random_horizontal_flip]"
#: Bytes by which pools may still grow once every batch has been seen.
SLACK = 64 << 20


@pytest.fixture
def dali_gpu() -> Iterator[Backend]:
    backend = make("dali-gpu", Options(threads=4, batch=32))
    yield backend
    backend.close()


def render(backend: Backend, encoded: Sequence[bytes]) -> tuple[NDArray[np.uint8], list[BadPicture | None]]:
    pictures = [probe(data, Decode()) for data in encoded]
    out = np.zeros((len(encoded), 96, 96, 3), np.uint8)
    return out, backend.render(pictures, planned(CHAIN, pictures), list(out), lambda begun: None)


def readable() -> dict[str, bytes]:
    """Files of every kind whose header says that they are pictures."""
    found = {}
    for name, kind in kinds.make().items():
        try:
            probe(kind.data, Decode()).take().close()
        except BadPicture:
            continue
        found[name] = kind.data
    return found


def broken(data: bytes) -> bytes:
    """A JPEG whose header and end are good, and its data not."""
    middle = len(data) // 2
    return data[:middle] + b"\xff\xd9" + data[middle + 2 :]


def test_verdicts_are_pillows_on_every_kind_of_file(dali_gpu: Backend) -> None:
    for name, data in readable().items():
        ours, theirs = (render(backend, [data])[1][0] for backend in (dali_gpu, make("pillow")))
        assert (ours is None) == (theirs is None), f"{name}: {ours} and {theirs}"


def test_verdicts_are_pillows_on_the_optional_hard_samples(dali_gpu: Backend, extra_samples: Path) -> None:
    for path in sorted((extra_samples / "hard").rglob("*")):
        try:
            data = path.read_bytes() if path.is_file() else b""
            probe(data, Decode()).take().close()
        except BadPicture:
            continue
        ours, theirs = (render(backend, [data])[1][0] for backend in (dali_gpu, make("pillow")))
        assert (ours is None) == (theirs is None), f"{path.name}: {ours} and {theirs}"


def test_a_bad_picture_costs_nobody_in_its_batch_nor_in_those_after(dali_gpu: Backend) -> None:
    good = [file.data for file in files()][:12]
    want, verdicts = render(dali_gpu, good)
    assert verdicts == [None] * 12
    for place in (0, 5, 12):
        pixels, verdicts = render(dali_gpu, [*good[:place], broken(good[0]), *good[place:]])
        assert [i for i, verdict in enumerate(verdicts) if verdict is not None] == [place]
        assert not pixels[place].any()
    np.testing.assert_array_equal(render(dali_gpu, good)[0], want)


def test_memory_stays_as_it_is_through_a_hundred_rebuilt_pipelines(dali_gpu: Backend) -> None:
    assert isinstance(dali_gpu, DaliBackend)
    device, good = Device(0), [file.data for file in files()][:12]
    for _ in range(5):
        render(dali_gpu, good)
        dali_gpu._pipelines.clear()
        gc.collect()  # as the backend does when it drops one
    before = device.free
    for _ in range(100):
        render(dali_gpu, good)
        dali_gpu._pipelines.clear()
        gc.collect()  # as the backend does when it drops one
    assert before - device.free < SLACK
    device.close()


def test_slots_can_be_page_locked_and_pixels_come_into_them_as_into_any_memory(dali_gpu: Backend) -> None:
    ring = Ring.create(SlotLayout(chunk=12, height=96, width=96), 2)
    device = Device(0)
    device.lock(ring.generation.ctypes.data, ring.nbytes)
    encoded = [file.data for file in files()][:12]
    pictures = [probe(data, Decode()) for data in encoded]
    rows = ring.views[1].images
    assert dali_gpu.render(pictures, planned(CHAIN, pictures), list(rows), lambda begun: None) == [None] * 12
    np.testing.assert_array_equal(rows, render(dali_gpu, encoded)[0])
    device.close()
    del rows
    ring.close()


def test_the_worker_of_a_gpu_renders_what_a_single_thread_does_to_the_bit_and_survives_a_kill(
    home: Path, many: Callable[[int], Path]
) -> None:
    with plants(home / "cache") as build:
        at = build(many(400), Crew("dali-gpu", 1, devices=(0,), fallback="pillow"), truth="dali-gpu")
        at.ready(1)
        done = run_epoch(at, 100)
        assert {report.render_id for report in done} == {at.truth.backend.render_id}
        os.kill(at.supervisor.pids[0], signal.SIGKILL)
        at.until(lambda: at.supervisor.notices)
        at.until(lambda: not at.supervisor.notices)
