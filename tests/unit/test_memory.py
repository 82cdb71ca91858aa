"""Batch memory: reused when nothing refers to it any more, and never a moment before."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.memory import BatchMemory

torch = pytest.importorskip("torch")

SIZE = 1 << 20
IMAGES = (16, 4, 64, 64)  # float32, SIZE bytes


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def images(memory: BatchMemory) -> NDArray[np.float32]:
    return memory.take().view(np.float32).reshape(IMAGES)


def test_dropped_memory_is_handed_out_again() -> None:
    memory = BatchMemory(SIZE, idle=2)
    first = images(memory)
    place = address(first)
    del first
    assert address(images(memory)) == place


def test_memory_that_is_held_is_not_handed_out_again() -> None:
    memory = BatchMemory(SIZE, idle=2)
    held = [images(memory) for _ in range(5)]
    assert len({address(a) for a in held}) == 5


def through_graph(array: NDArray[np.float32]) -> Any:
    """A value that only autograd refers to."""
    weight = torch.ones(IMAGES, requires_grad=True)
    return weight * torch.from_numpy(array)


def graph_gradient(product: Any) -> NDArray[Any]:
    (gradient,) = torch.autograd.grad(product.sum(), product.grad_fn.next_functions[0][0].variable, retain_graph=True)
    return np.asarray(gradient)


Keep = Callable[[Any], Any]
KEPT: dict[str, tuple[Keep, Callable[[Any], NDArray[Any]]]] = {
    "array": (lambda a: a, np.asarray),
    "slice": (lambda a: a[3:5], np.asarray),
    "slice of a slice": (lambda a: a[2:9][1:, 1][:, ::2], np.asarray),
    "one row of a transposed view": (lambda a: a.transpose(0, 2, 3, 1)[7], np.asarray),
    "view of another dtype": (lambda a: a.view(np.uint8), np.asarray),
    "reshaped": (lambda a: a.reshape(-1)[5:], np.asarray),
    "memoryview": (lambda a: memoryview(a[1:2]), np.asarray),
    "array over a memoryview": (lambda a: np.frombuffer(memoryview(a), np.float32), np.asarray),
    "pickle buffer": (lambda a: pickle.PickleBuffer(a), lambda b: np.frombuffer(b.raw(), np.uint8)),
    "tensor": (torch.from_numpy, np.asarray),
    "view of a tensor": (lambda a: torch.from_numpy(a).permute(0, 2, 3, 1)[4:6], np.asarray),
    "numpy of a view of a tensor": (lambda a: torch.from_numpy(a)[1:].numpy(), np.asarray),
    "bfloat16 view": (lambda a: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16), lambda t: t.float().numpy()),
    "detached": (lambda a: torch.from_numpy(a).detach(), np.asarray),
    "storage": (
        lambda a: torch.from_numpy(a).untyped_storage(),
        lambda s: np.array([s[i] for i in range(1000)], np.uint8),
    ),
    "dlpack to torch": (lambda a: torch.from_dlpack(a)[2], np.asarray),
    "dlpack to numpy": (lambda a: np.from_dlpack(torch.from_numpy(a)), np.asarray),
    "saved for backward": (through_graph, graph_gradient),
    "deep copy": (copy.deepcopy, np.asarray),
    "pickled copy": (lambda a: pickle.loads(pickle.dumps(a)), np.asarray),
    "pickled tensor": (lambda a: pickle.loads(pickle.dumps(torch.from_numpy(a))), np.asarray),
}


@pytest.mark.parametrize("kind", KEPT)
def test_whatever_is_kept_of_a_batch_keeps_its_pixels(kind: str) -> None:
    keep, look = KEPT[kind]
    memory = BatchMemory(SIZE, idle=3)
    array = images(memory)
    array[...] = np.random.default_rng(1).standard_normal(IMAGES)
    kept = keep(array)
    before = look(kept).copy()
    del array
    gc.collect()
    for value in range(6):  # more than are kept idle, so anything returned too early is written over
        images(memory)[...] = value
    assert look(kept).tobytes() == before.tobytes()


def test_what_was_kept_comes_back_once_the_last_view_is_gone() -> None:
    memory = BatchMemory(SIZE, idle=2)
    array = images(memory)
    place = address(array)
    tensor = torch.from_numpy(array).permute(0, 2, 3, 1)[3]
    del array
    assert address(images(memory)) != place
    del tensor
    places = {address(a) for a in [images(memory), images(memory)]}
    assert place in places


def test_a_batch_in_a_reference_cycle_is_safe_until_the_cycle_is_collected() -> None:
    class Node:
        batch: NDArray[np.float32]
        me: Node
        saved: list[NDArray[np.float32]]

        def __del__(self) -> None:
            self.saved.append(self.batch)  # brings the batch back to life

    memory = BatchMemory(SIZE, idle=2)
    node = Node()
    node.me, node.batch, node.saved = node, images(memory), []
    node.batch[...] = 7
    saved = node.saved
    del node
    gc.collect()
    images(memory)[...] = 1
    images(memory)[...] = 2
    assert (saved[0] == 7).all()


def test_memory_outlives_its_source_and_may_be_dropped_in_another_thread() -> None:
    memory = BatchMemory(SIZE, idle=2)
    held = [images(memory) for _ in range(3)]
    for value, array in enumerate(held):
        array[...] = value
    del memory
    gc.collect()
    assert [float(a.max()) for a in held] == [0.0, 1.0, 2.0]
    del array
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(10)
    assert not held


def test_no_more_than_the_idle_pieces_are_kept() -> None:
    def mapped() -> int:
        with open("/proc/self/smaps") as maps:
            return sum(line.startswith("Size:") and int(line.split()[1]) >= (64 << 10) for line in maps)

    memory = BatchMemory(64 << 20, idle=2)
    before = mapped()
    held = [memory.take() for _ in range(6)]
    del held
    assert mapped() <= before + 2


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
@pytest.mark.parametrize("size", [3072, SIZE])
def test_a_thousand_kept_batches_need_no_descriptors(size: int) -> None:
    memory = BatchMemory(size, idle=2)
    held = [memory.take() for _ in range(1000)]
    assert len({address(a) for a in held}) == 1000


def test_memory_that_cannot_be_had_is_an_error_that_names_its_size() -> None:
    with pytest.raises(MemoryError, match=f"batch of {1 << 60} bytes"):
        BatchMemory(1 << 60, idle=1).take()
