"""What is asked of the CUDA driver itself, beside what DALI does with it: page-locked memory, and copies into it.

By ctypes on the driver's library, which is there wherever a GPU works; see the CUDA driver API reference,
https://docs.nvidia.com/cuda/cuda-driver-api. It shares DALI's context, the device's primary one. Nothing here has ever
run on a GPU: it is tested with a library that only notes what it is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

_LIBRARY = "libcuda.so.1"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context
_NAME = 256  # bytes
_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, …_MINOR
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream

#: (address to write, address on the device, bytes)
Copy = tuple[int, int, int]


class CudaError(Exception):
    """The driver is missing, or has refused a call; says which call and why."""


class Device:
    """A GPU. Good for several threads.

    Args:
        number: as CUDA counts.
        load: the library by its name; OSError where it is missing.

    Raises:
        CudaError: there is no such device, or no driver, or it does not work.
    """

    def __init__(self, number: int, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._driver = load(_LIBRARY)
        except OSError as error:
            raise CudaError(
                f"the NVIDIA driver's {_LIBRARY} cannot be loaded, which containers get by "
                f"NVIDIA_DRIVER_CAPABILITIES=compute,utility: {error}"
            ) from error
        self._context = ctypes.c_void_p()
        self._device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._registered: list[int] = []
        self._stream = ctypes.c_void_p()

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock memory of this process, until `close`, so that copies into it run beside everything else.

        Raises:
            CudaError: it is refused; the memory is as it was.
        """
        with self._current():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE)
        self._registered.append(address)

    def fetch(self, copies: Sequence[Copy]) -> None:
        """Copy from the device, on a stream of this object's own; all of it is there on return.

        Raises:
            CudaError: anything may stand there.
        """
        with self._current():
            if not self._stream:
                self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
            try:
                for to, start, nbytes in copies:
                    self._call(
                        "cuMemcpyDtoHAsync_v2",
                        ctypes.c_void_p(to),
                        ctypes.c_uint64(start),
                        ctypes.c_size_t(nbytes),
                        self._stream,
                    )
            finally:  # also of copies before one that was refused
                self._call("cuStreamSynchronize", self._stream)

    @property
    def kind(self) -> str:
        """What it is: name and compute capability, such as "NVIDIA H200 9.0".

        Raises:
            CudaError: the device does not answer.
        """
        name, numbers = ctypes.create_string_buffer(_NAME), []
        self._call("cuDeviceGetName", name, _NAME, self._device)
        for attribute in _CAPABILITY:
            number = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(number), attribute, self._device)
            numbers.append(number.value)
        return f"{name.value.decode(errors='replace')} {numbers[0]}.{numbers[1]}"

    @property
    def uuid(self) -> UUID:
        """Of this GPU, or of the part of one (MIG) that it is.

        Raises:
            CudaError: the device does not answer.
        """
        octets = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", octets, self._device)
        return UUID(bytes=octets.raw)

    @property
    def free(self) -> int:
        """Bytes of its memory that nobody uses.

        Raises:
            CudaError: the device does not answer.
        """
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def close(self) -> None:
        """Give everything back. May be called twice.

        Raises:
            CudaError: the device is gone.
        """
        if not self._context:
            return
        with self._current():
            if self._stream:
                self._call("cuStreamDestroy_v2", self._stream)
                self._stream = ctypes.c_void_p()
            while self._registered:
                self._call("cuMemHostUnregister", ctypes.c_void_p(self._registered.pop()))
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)
        self._context = ctypes.c_void_p()

    @contextmanager
    def _current(self) -> Iterator[None]:
        # Each thread has a stack of contexts: whatever was there is there afterwards.
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._driver, name)(*arguments)
        except AttributeError:
            raise CudaError(f"the NVIDIA driver is too old: {name} is missing") from None
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'unknown error').decode(errors='replace')} ({code})")
