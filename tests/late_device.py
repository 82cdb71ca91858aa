"""A stand-in for a GPU, of what `headrace.device` asks of CUDA: it does its work as late as it may, and takes memory
back as early as it may. So what is written, read or let go of too early shows as a wrong picture.

There are two streams, as on a GPU: the Loader's, where work waits until somebody waits for its event or has asked for
it `asks` times, and the trainer's, whose work waits until `synchronize`. All of it is on the CPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.device import Event
from headrace.memory import BatchMemory

#: What stands in memory that was not written yet.
POISON = 0xA5


class LateEvent:
    def __init__(self, device: LateDevice, number: int) -> None:
        self.number = number
        self._device = device
        self._asked = 0

    def done(self) -> bool:
        self._asked += 1
        if self._asked > self._device.asks:
            self._device.run(self.number)
        return self._device.finished >= self.number


class LateDevice:
    """
    Args:
        asks: how often an event is asked for in vain.
        capacity: bytes of tensors that may live at once.

    Attributes:
        submitted, finished: pieces of work.
        most: bytes of tensors that lived at once, at most.
    """

    name, bus = "late:0", "0000:3b:00.0"
    target = torch.device("cpu")

    def __init__(self, asks: int = 3, capacity: int = 1 << 40) -> None:
        self.asks = asks
        self.capacity = capacity
        self.submitted = self.finished = 0
        self.most = 0
        self.locked: list[NDArray[np.uint8]] = []
        self._work: deque[Callable[[], None]] = deque()
        self._trainer: deque[Callable[[], None]] = deque()
        self._recorded: list[Any] = []
        self._memories: dict[int, BatchMemory] = {}
        self._lock = threading.RLock()

    # -- Device ---------------------------------------------------------------------------------------------

    def lock(self, nbytes: int) -> NDArray[np.uint8]:
        self.locked.append(np.full(nbytes, POISON, np.uint8))  # kept, so that a late copy finds it
        return self.locked[-1]

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = self._memories.setdefault(nbytes, BatchMemory(nbytes, idle=99, fresh=_fresh))
        piece = memory.take()  # what nobody refers to any more is written over
        piece[...] = POISON
        self.most = max(self.most, sum(size * each.pieces for size, each in self._memories.items()))
        if self.most > self.capacity:
            raise MemoryError("late:0 is full")
        return torch.from_numpy(piece).view(dtype).reshape(tuple(shape))

    def submit(self, host: NDArray[np.uint8], work: Callable[[Any], None]) -> Event:
        start, nbytes = host.ctypes.data, host.nbytes  # and not the array: a copy keeps nothing alive

        def run() -> None:
            work(torch.from_numpy(np.frombuffer(_at(start, nbytes), np.uint8).copy()))

        with self._lock:
            self._work.append(run)
            self.submitted += 1
            return LateEvent(self, self.submitted)

    def hand_over(self, event: Event, tensors: Sequence[Any]) -> None:
        assert isinstance(event, LateEvent)
        number = event.number
        with self._lock:
            self._trainer.append(lambda: self.run(number))
            self._recorded.extend(tensors)

    # -- the test's -----------------------------------------------------------------------------------------

    def run(self, number: int) -> None:
        """Do the work up to this event."""
        with self._lock:
            while self.finished < number:
                self._work.popleft()()
                self.finished += 1

    def train(self, images: Any, found: list[Any]) -> None:
        """Submit to the trainer's stream: what stands in these images then is added to what was found. Like a kernel it
        keeps nothing alive."""
        start, nbytes = images.data_ptr(), images.numel() * images.element_size()
        with self._lock:
            self._trainer.append(lambda: found.append(np.frombuffer(_at(start, nbytes), np.uint8).copy()))

    def synchronize(self) -> None:
        """Wait for the trainer's stream; what it has used is free then."""
        with self._lock:
            while self._trainer:
                self._trainer.popleft()()
            self._recorded.clear()


def _fresh(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


def _at(start: int, nbytes: int) -> Any:
    return (ctypes.c_uint8 * nbytes).from_address(start)
