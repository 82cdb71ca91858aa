"""The trainer's GPU, as the Loader sees it: page-locked memory, one stream of work, and who waits for it.

`Device` is the seam; `Cuda` is what stands behind it, in calls of torch's. It has never run on a GPU: everything above
it is tested with a stand-in that does its work as late as it may, and takes memory back as early as it may.

Work goes to a stream of the Loader's own, beside the trainer's. The fetching thread submits it and never waits for the
trainer; the trainer's stream, not its thread, waits for what it is handed. The memory of a batch comes from torch's
caching allocator, which belongs to the stream it was asked on: it is told who else uses a tensor (`record_stream`), and
gives the memory out again only behind whatever was queued there when the last reference went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError

#: Ahead of the trainer's kernels where these leave room: finishing is short, and a batch is waited for.
_PRIORITY = -1


class Event(Protocol):
    """A moment in the stream."""

    def done(self) -> bool:
        """Whether all that was submitted before has been done; waits for nothing."""


class Device(Protocol):
    """A device that batches are finished on. Everything but `hand_over` is for one thread at a time.

    Attributes:
        name: as torch writes it, such as "cuda:0".
        bus: the PCI bus id of the GPU as NVML writes it, in lower case, such as "0000:3b:00.0"; "" where it is unknown.
        target: the torch device.
    """

    @property
    def name(self) -> str: ...
    @property
    def bus(self) -> str: ...
    @property
    def target(self) -> Any: ...

    def lock(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked memory of the host, (nbytes,), from which copies run by themselves, as long as it is referred to.

        Raises:
            MemoryError: there is none.
        """

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A tensor in the device's memory, contiguous, of a torch dtype; its content is arbitrary.

        Raises:
            MemoryError: there is none.
        """

    def submit(self, host: NDArray[np.uint8], work: Callable[[Any], None]) -> Event:
        """Copy bytes to the device and work on them there, after all that was submitted before; return at once.

        Args:
            host: bytes (n,) in memory that `lock` gave; the caller keeps it, unchanged, until the event is done.
            work: submits what is to be done with their copy, a tensor of uint8 (n,) that is gone afterwards.

        Raises:
            MemoryError: the device has none left; what has begun touches nothing that anybody has.
        """

    def hand_over(self, event: Event, tensors: Sequence[Any]) -> None:
        """Have whatever the calling thread submits to the device from now on wait for the event, but not the thread;
        and keep the memory of these tensors until what uses them has been done."""


def open_device(given: Any) -> Device | None:
    """
    Args:
        given: a Loader's `device`: None, or what torch takes for a device.

    Returns:
        None for the CPU.

    Raises:
        ConfigError: it is no device that batches can go to.
    """
    if given is None or str(given) == "cpu":
        return None
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"device: {given} needs torch ({error}): pip install 'headrace[torch]'") from None
    try:
        wanted = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: {given!r} is no device: {str(error).splitlines()[0]}") from None
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise ConfigError(f"device: {given} is not available; use None, 'cpu' or 'cuda', and batch.to(device)")
    if not torch.cuda.is_available():
        why = "sees no GPU" if torch.version.cuda else "was built without CUDA"
        raise ConfigError(f"device: {given} is not available: torch {torch.__version__} {why}")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: {given} is not available: torch sees {torch.cuda.device_count()} GPUs")
    return Cuda(index)


class _CudaEvent:
    def __init__(self, event: Any) -> None:
        self.raw = event

    def done(self) -> bool:
        return bool(self.raw.query())


class Cuda:
    """A GPU by torch.cuda.

    Args:
        index: as torch counts.
    """

    def __init__(self, index: int) -> None:
        import torch

        self._torch: Any = torch
        self.target = torch.device("cuda", index)
        self.name = str(self.target)
        self.bus = _bus(torch.cuda.get_device_properties(self.target))
        self._stream = self._torch.cuda.Stream(self.target, priority=_PRIORITY)

    def lock(self, nbytes: int) -> NDArray[np.uint8]:
        # On this device: from a thread that knows of none torch would open a context on the first GPU.
        with self._here(f"{nbytes} bytes of page-locked memory for a batch"):
            locked = self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)
            return locked.numpy()  # type: ignore[no-any-return]

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        with self._here(f"a batch of {tuple(shape)} {dtype} on {self.name}"):
            return self._torch.empty(tuple(shape), dtype=dtype, device=self.target)

    def submit(self, host: NDArray[np.uint8], work: Callable[[Any], None]) -> Event:
        with self._here(f"{host.nbytes} bytes of levels on {self.name}"):
            levels = self._torch.empty(host.nbytes, dtype=self._torch.uint8, device=self.target)
            levels.copy_(self._torch.from_numpy(host), non_blocking=True)
            work(levels)
            event = self._torch.cuda.Event()
            event.record(self._stream)
        return _CudaEvent(event)

    def hand_over(self, event: Event, tensors: Sequence[Any]) -> None:
        assert isinstance(event, _CudaEvent)
        stream = self._torch.cuda.current_stream(self.target)
        stream.wait_event(event.raw)
        for tensor in tensors:
            tensor.record_stream(stream)

    @contextmanager
    def _here(self, wanted: str) -> Iterator[None]:
        torch = self._torch
        try:
            with torch.cuda.device(self.target), torch.cuda.stream(self._stream):
                yield
        except RuntimeError as error:
            # Of page-locked memory the error has no class of its own.
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                first = str(error).splitlines()[0]
                raise MemoryError(f"no memory for {wanted}: {first}; use a smaller batch or prefetch") from error
            raise


def _bus(properties: Any) -> str:
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""  # an older torch does not tell
