from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from headrace.pipeline.cuda import CudaError, Device


class Driver:
    """Does what a driver with one device would; copies are those of this process's own memory, done when they are
    waited for.
    """

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[str] = []
        self.locked: list[int] = []
        self.depth = 0
        self.waiting: list[tuple[int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if code := self.codes.get(name, 0):
                return code
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context._obj.value = 0xC0

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        stream._obj.value = 0x5
        assert flags == 1

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:
        assert context.value == 0xC0
        self.depth += 1

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.depth -= 1

    def _cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: int) -> None:
        assert self.depth and nbytes.value
        self.locked.append(address.value)

    def _cuMemHostUnregister(self, address: Any) -> None:
        self.locked.remove(address.value)

    def _cuMemcpyDtoHAsync_v2(self, to: Any, start: Any, nbytes: Any, stream: Any) -> None:
        assert self.depth and stream.value == 0x5
        self.waiting.append((to.value, start.value, nbytes.value))

    def _cuStreamSynchronize(self, stream: Any) -> None:
        for to, start, nbytes in self.waiting:
            ctypes.memmove(to, start, nbytes)
        self.waiting.clear()

    def _cuDeviceGetName(self, name: Any, length: int, device: Any) -> None:
        name.value = b"Fake GPU"[:length]

    def _cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> None:
        number._obj.value = {75: 9, 76: 1}[attribute]

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        assert self.depth
        free._obj.value, total._obj.value = 7 << 30, 8 << 30

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        text._obj.value = b"out of memory"


def test_what_was_copied_is_there_on_return() -> None:
    driver = Driver()
    device = Device(0, lambda _: driver)
    there, here = np.arange(12, dtype=np.uint8), np.zeros(12, np.uint8)
    device.fetch([(here.ctypes.data + 6, there.ctypes.data, 6), (here.ctypes.data, there.ctypes.data + 6, 6)])
    assert here.tolist() == [*range(6, 12), *range(6)]
    assert driver.depth == 0  # no context stays current in the caller's thread


def test_the_stream_is_made_once_and_given_back() -> None:
    driver = Driver()
    device = Device(0, lambda _: driver)
    device.fetch([])
    device.fetch([])
    device.close()
    assert driver.calls.count("cuStreamCreate") == driver.calls.count("cuStreamDestroy_v2") == 1


def test_locked_memory_is_unlocked_with_the_device_and_the_context_released_once() -> None:
    driver = Driver()
    device = Device(0, lambda _: driver)
    device.lock(4096, 100)
    device.lock(8192, 100)
    assert driver.locked == [4096, 8192]
    device.close()
    device.close()
    assert not driver.locked
    assert driver.calls.count("cuDevicePrimaryCtxRelease_v2") == 1


def test_the_free_memory_is_the_drivers_word() -> None:
    assert Device(0, lambda _: Driver()).free == 7 << 30


def test_a_device_is_named_with_its_compute_capability() -> None:
    assert Device(0, lambda _: Driver()).kind == "Fake GPU 9.1"


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_device_that_does_not_work_is_an_error_with_the_call_and_the_drivers_words(call: str) -> None:
    with pytest.raises(CudaError, match=rf"^{call}: out of memory \(2\)$"):
        Device(0, lambda _: Driver(**{call: 2}))


def test_memory_that_cannot_be_locked_is_an_error_and_nothing_is_unlocked_later() -> None:
    driver = Driver(cuMemHostRegister_v2=2)
    device = Device(0, lambda _: driver)
    with pytest.raises(CudaError, match="cuMemHostRegister_v2: out of memory"):
        device.lock(4096, 100)
    device.close()
    assert "cuMemHostUnregister" not in driver.calls
    assert driver.depth == 0


def test_nobody_waits_for_copies_less_because_one_was_refused() -> None:
    driver = Driver(cuMemcpyDtoHAsync_v2=700)
    device = Device(0, lambda _: driver)
    with pytest.raises(CudaError, match=r"\(700\)"):
        device.fetch([(1, 2, 3)])
    assert driver.calls.index("cuStreamSynchronize") > driver.calls.index("cuMemcpyDtoHAsync_v2")
    assert driver.depth == 0


def test_without_a_driver_the_missing_library_is_named() -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(CudaError, match=r"the NVIDIA driver's libcuda\.so\.1 cannot be loaded"):
        Device(0, load)


def test_a_driver_that_lacks_a_function_is_too_old() -> None:
    with pytest.raises(CudaError, match="too old: cuInit is missing"):
        Device(0, lambda _: object())
