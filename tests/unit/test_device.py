"""The worker of a device, in this process and with backends that need none: what it answers, and why it ends."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from plant import poison

from headrace.channel import Channel, Closed
from headrace.pipeline import wholes
from headrace.pipeline.backend import Backend, BackendFailed, make
from headrace.pipeline.cuda import CudaError
from headrace.pipeline.dataset import open_index
from headrace.pipeline.fake import REJECT, FakeBackend
from headrace.pipeline.probe import BadPicture, Picture
from headrace.pipeline.render import PART_PIXELS, ChunkRenderer
from headrace.pipeline.spec import Config
from headrace.pipeline.transforms import Params
from headrace.slots import Ring, Status
from headrace.stages import Lap, Stages, unmeasured
from headrace.workers import device, messages
from headrace.workers.device import DeviceWorker, Told, least_memory
from headrace.workers.messages import Convict, Leaving, Open, Ready, Render, Rendered, RenderFailed

CHUNK = 4
SLOTS = 8
TOLD = Told(backend="fake", device=0, threads=2, gpu_memory=4 << 30, hw_decoder_load=0.0)


class Gated(FakeBackend):
    """Renders when it is let, and notes how many pictures at once."""

    def __init__(self, gate: threading.Semaphore, error: Exception | None = None) -> None:
        self.gate = gate
        self.error = error
        self.entered: queue.Queue[int] = queue.Queue()
        self.closed = threading.Event()

    def render(
        self,
        pictures: Sequence[Picture],
        params: Params,
        out: Sequence[Any],
        begin: Callable[[Sequence[int]], None],
        lap: Lap = unmeasured,
    ) -> list[BadPicture | None]:
        begin(range(len(pictures)))
        self.entered.put(len(pictures))
        assert self.gate.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        return super().render(pictures, params, out, lambda _: None, lap)

    def close(self) -> None:
        self.closed.set()


class Desk:
    """The daemon's end: a ring, a channel, and the worker in a thread at the other end."""

    def __init__(self, folder: Path, cache: Path) -> None:
        transforms = [{"random_resized_crop": {"size": 16}}]
        plain = {"dataset": {"folder": str(folder)}, "shuffle": True, "chunk": CHUNK, "transforms": transforms}
        self.spec = Config.load({"streams": {"s": plain}}).streams["s"]
        self.index = open_index(self.spec.dataset, cache)
        self.ring = Ring.create(self.spec.layout(self.index), SLOTS)
        self.locked: list[tuple[int, int]] = []
        self.memory = 0
        self.outcome: Leaving | Exception | None = None
        ours, theirs = socket.socketpair()
        self.channel, self._theirs = Channel(ours), Channel(theirs, descriptors=3)

    def start(self, backends: Sequence[Backend], told: Told = TOLD) -> None:
        self._before = {*threading.enumerate()}
        worker = self._worker = DeviceWorker(
            self._theirs, [*backends], told, lambda: self.memory, lambda *range_: self.locked.append(range_)
        )

        def run() -> None:
            try:
                self.outcome = worker.run()
            except (Closed, BackendFailed) as error:
                self.outcome = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert isinstance(self.answer(), Ready)
        flags = wholes.create(len(self.index))
        opened = Open(
            stream=0,
            spec=msgspec.json.encode(self.spec.plain()).decode(),
            layout=self.ring.layout,
            slots=SLOTS,
            convicted={},
        )
        self.channel.send(messages.encode(opened), [self.ring.fd, self.index.fd, flags], timeout=10)
        os.close(flags)

    def ask(self, chunk: int, rows: tuple[int, ...] = tuple(range(CHUNK)), job: int | None = None) -> None:
        task = Render(job=chunk if job is None else job, stream=0, epoch=0, chunk=chunk, slot=chunk % SLOTS, rows=rows)
        self.tell(task)

    def tell(self, message: Render | Convict) -> None:
        self.channel.send(messages.encode(message), timeout=10)

    def answer(self) -> Any:
        return messages.from_worker.decode(self.channel.recv(timeout=60)[0])

    def answers(self, count: int) -> dict[int, Any]:
        got = [self.answer() for _ in range(count)]
        assert len({message.job for message in got}) == count
        return {message.job: message for message in got}

    def check(self, chunk: int) -> None:
        """The slot holds what a renderer of this process makes."""
        scratch = Ring.create(self.ring.layout, 1)
        view, want = self.ring.views[chunk % SLOTS], scratch.views[0]
        ChunkRenderer(self.spec, self.index, FakeBackend()).render(0, chunk, want)
        for name in ("images", "labels", "indices", "status"):
            np.testing.assert_array_equal(getattr(view, name), getattr(want, name), err_msg=name)
        del view, want
        scratch.close()

    def end(self) -> Leaving | Exception | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.outcome

    def close(self) -> None:
        self.channel.close()
        self.end()
        for thread in {*threading.enumerate()} - self._before:
            thread.join(60)
        for stream in self._worker._streams.values():  # what the end of its process gives back
            stream.ring.close()
            stream.reader.index.close()
        self.outcome = None
        del self._worker
        self._theirs.close()
        self.ring.close()
        self.index.close()


@pytest.fixture
def desk(home: Path) -> Iterator[Callable[[Path], Desk]]:
    made: list[Desk] = []

    def build(folder: Path) -> Desk:
        made.append(Desk(folder, home / "cache"))
        return made[-1]

    yield build
    for one in made:
        one.close()


def read(at: Desk) -> int:
    """Pictures that take memory."""
    return sum(int(np.isin(view.status, (Status.READ, Status.RENDERING)).sum()) for view in at.ring.views)


def lanes(count: int = 2, **options: Any) -> tuple[threading.Semaphore, list[Gated]]:
    gate = threading.Semaphore(0)
    return gate, [Gated(gate, **options) for _ in range(count)]


def test_chunks_are_answered_by_number_and_lie_in_their_slots(
    desk: Callable[[Path], Desk], many: Callable[[int], Path]
) -> None:
    at = desk(many(31))
    at.start([FakeBackend(), FakeBackend()])
    for chunk in range(8):
        at.ask(chunk, tuple(range(min(CHUNK, 31 - 4 * chunk))), job=100 + chunk)
    answers = at.answers(8)
    assert answers.keys() == {*range(100, 108)}
    for chunk in range(7):
        at.check(chunk)
    assert all(isinstance(one, Rendered) and one.render_id == "fake/1" and not one.rejects for one in answers.values())
    all_of_them = Stages()
    for one in answers.values():
        all_of_them.merge(one.stages)
    stages = all_of_them.status()
    assert stages.keys() == {"wait", "plan", "read", "render", "write"}
    assert stages["read"].nbytes == sum(at.index.sizes)
    assert [stages[name].count for name in ("wait", "read", "plan", "render")] == [1, 31, 31, 31]
    at.ask(3, job=3)
    at.answers(1)
    first, stride = at.locked[0][0], at.ring.layout.stride
    assert at.locked == [(first + slot * stride, stride) for slot in range(8)]  # each slot once


def test_two_lanes_render_at_once_and_an_iteration_takes_all_that_is_ready(
    desk: Callable[[Path], Desk], many: Callable[[int], Path]
) -> None:
    at, (gate, backends) = desk(many(32)), lanes()
    at.start(backends)
    for chunk, backend in enumerate(backends):
        at.ask(chunk)
        assert backend.entered.get(timeout=60) == CHUNK
    for chunk in range(2, 8):
        at.ask(chunk)
    for view in at.ring.views[:8]:
        for row in range(CHUNK):
            while view.status[row] not in (Status.RENDERING, Status.READ):
                time.sleep(0.001)
    begun = [chunk for chunk in range(8) if (at.ring.views[chunk].status == Status.RENDERING).all()]
    assert begun == [0, 1]
    gate.release(100)
    at.answers(8)
    for chunk in range(8):
        at.check(chunk)
    sizes = [size for backend in backends for size in [*backend.entered.queue]]
    assert sum(sizes) == 6 * CHUNK and max(sizes) > CHUNK


def test_a_bad_picture_and_a_convicted_one_cost_nobody_else(
    desk: Callable[[Path], Desk], many: Callable[[int], Path]
) -> None:
    folder = many(8)
    bad = poison(folder, 3, REJECT)
    at = desk(folder)
    at.start([FakeBackend(), FakeBackend()])
    at.tell(Convict(stream=0, index=5, reason="it kills"))
    at.ask(0)
    at.ask(1)
    rejects = {reject.index: reject for one in at.answers(2).values() for reject in one.rejects}
    assert {index: (reject.stage, reject.reason) for index, reject in rejects.items()} == {
        bad: ("decode", "the file asks for it"),
        5: ("worker", "it kills"),
    }
    statuses = [status for view in at.ring.views[:2] for status in view.status]
    assert sorted(statuses) == [Status.OK] * 6 + [Status.REJECTED] * 2


def test_only_the_chunk_with_an_unreadable_sample_fails_by_its_name(
    desk: Callable[[Path], Desk], many: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = many(12)
    at = desk(folder)
    missing = sorted(folder.glob("*/*"))[7]
    missing.unlink()
    at.start([FakeBackend(), FakeBackend()])
    for chunk in range(3):
        at.ask(chunk)
    answers = at.answers(3)
    [failed] = [one for one in answers.values() if isinstance(one, RenderFailed)]
    assert failed.kind == "DatasetError" and missing.name in failed.text
    for job in answers.keys() - {failed.job}:
        at.check(job)
    caplog.clear()  # the error in it keeps the slot


def test_a_device_that_fails_ends_the_worker_without_another_answer(
    desk: Callable[[Path], Desk], many: Callable[[int], Path]
) -> None:
    at, (gate, backends) = desk(many(32)), lanes(error=BackendFailed("out of memory"))
    at.start(backends)
    for chunk in range(8):
        at.ask(chunk)
    backends[0].entered.get(timeout=60)
    gate.release(100)
    failed = at.end()
    assert isinstance(failed, BackendFailed) and str(failed) == "out of memory"
    assert all(backend.closed.wait(60) for backend in backends)
    at._theirs.close()
    with pytest.raises(Closed):
        at.answer()


def test_whatever_else_a_backend_raises_is_the_device_s_failure_too(
    desk: Callable[[Path], Desk], many: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    at, (gate, backends) = desk(many(4)), lanes(error=ZeroDivisionError("by zero"))
    at.start(backends)
    at.ask(0)
    gate.release(100)
    failed = at.end()
    assert isinstance(failed, BackendFailed) and str(failed) == "ZeroDivisionError: by zero"
    assert "Traceback" in caplog.text
    caplog.clear()


def test_a_worker_over_its_memory_answers_what_it_was_given_and_leaves_to_be_replaced(
    desk: Callable[[Path], Desk], many: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_FAIR", 1)
    at, (gate, backends) = desk(many(32)), lanes()
    at.start(backends)
    at.ask(0)
    gate.release(1)
    at.answers(1)
    at.memory = 5 << 30
    for chunk in range(1, 5):
        at.ask(chunk)
    while (at.ring.views[4].status == Status.PENDING).any():  # the last one was begun
        time.sleep(0.001)
    gate.release(100)
    at.answers(4)
    for chunk in range(5):
        at.check(chunk)
    leaving = at.end()
    assert leaving == Leaving(text="it holds 5120 MiB of memory, and workers.gpu_memory is 4096 MiB", failed=False)


def test_a_worker_that_is_over_its_memory_from_the_start_is_not_replaced_for_ever(
    desk: Callable[[Path], Desk], many: Callable[[int], Path]
) -> None:
    at = desk(many(4))
    at.memory = 5 << 30
    at.start([FakeBackend(), FakeBackend()])
    at.ask(0)
    at.answers(1)
    leaving = at.end()
    assert isinstance(leaving, Leaving) and leaving.failed
    assert leaving.text.endswith("after the first 1 chunks: this stream needs more")


def test_the_worker_ends_with_its_daemon(desk: Callable[[Path], Desk], many: Callable[[int], Path]) -> None:
    at, (gate, backends) = desk(many(4)), lanes()
    at.start(backends)
    at.ask(0)
    at.channel.close()
    assert isinstance(at.end(), Closed)
    gate.release(100)
    assert all(backend.closed.wait(60) for backend in backends)


def test_pictures_that_are_read_and_not_rendered_are_few_however_long_a_chunk_is(
    desk: Callable[[Path], Desk], many: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.pipeline.render.PART_PICTURES", 1)
    monkeypatch.setattr(device, "_AHEAD", 1)
    at, (gate, backends) = desk(many(32)), lanes()
    at.start(backends)
    for chunk in range(8):
        at.ask(chunk)
    room = TOLD.threads + 1
    while read(at) < room:
        time.sleep(0.001)
    time.sleep(0.1)
    assert read(at) <= room + 1  # one more is looked at while its predecessor is handed over
    gate.release(1000)
    at.answers(8)


# -- what it is told --------------------------------------------------------------------------------------------


def test_an_iteration_is_as_large_as_the_budget_lets_two_lanes_be() -> None:
    least = least_memory(TOLD.threads)
    assert device.LANES * device._PIXEL * TOLD.pixels + least <= TOLD.gpu_memory
    small = msgspec.structs.replace(TOLD, gpu_memory=least)
    assert small.pixels == 1 << 20
    huge = msgspec.structs.replace(TOLD, gpu_memory=1 << 40)
    assert huge.pixels == PART_PIXELS
    assert huge.options.batch_pixels == huge.pixels and huge.options.threads == 1


def test_a_budget_that_no_picture_would_fit_in_is_said_at_the_start(home: Path) -> None:
    ours, theirs = socket.socketpair()
    told = msgspec.structs.replace(TOLD, backend="dali-gpu", gpu_memory=256 << 20)
    with ours:
        channel = Channel(theirs)
        leaving = device.serve(channel, told)
        channel.close()
    assert leaving.failed and "workers.gpu_memory is 256 MiB, and 2 threads take" in leaving.text


def test_without_a_driver_the_worker_s_last_word_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(number: int) -> Any:
        raise CudaError("there is no NVIDIA driver")

    monkeypatch.setattr(device, "Device", missing)
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(theirs)
        leaving = device.serve(channel, msgspec.structs.replace(TOLD, backend="dali-gpu"))
        channel.close()
    assert leaving == Leaving(text="there is no NVIDIA driver", failed=True)


class Card:
    """What the driver says of a GPU."""

    refused = ""

    def __init__(self, number: int) -> None:
        self.free = 7 << 30

    def lock(self, address: int, nbytes: int) -> None:
        if self.refused:
            raise CudaError(self.refused)


@pytest.mark.parametrize(("own", "want"), [(3 << 30, 3 << 30), (None, 2 << 30)])
def test_memory_is_what_nvml_tells_of_this_process_or_what_has_gone_since_its_start(
    monkeypatch: pytest.MonkeyPatch, own: int | None, want: int
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.setattr(device, "Device", Card)
    monkeypatch.setattr(device, "OwnMemory", lambda number: lambda: own)
    gpu = device._Gpu(TOLD)
    gpu._device.free = 5 << 30  # type: ignore[misc]
    assert gpu.memory() == want


def test_slots_that_cannot_be_page_locked_are_used_nevertheless_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.setattr(device, "Device", Card)
    monkeypatch.setattr(Card, "refused", "cuMemHostRegister_v2: operation not permitted (800)")
    gpu, before = device._Gpu(TOLD), len(caplog.messages)
    for slot in range(3):
        gpu.lock(4096 * slot, 4096)
    [said] = caplog.messages[before:]
    assert said.startswith("slots cannot be page-locked any more, so pixels come slower: cuMemHostRegister")


def test_a_backend_of_its_own_for_each_lane_has_one_render_id() -> None:
    assert len({make("fake", TOLD.options).render_id for _ in range(device.LANES)}) == 1
