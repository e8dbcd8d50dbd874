"""What the driver asks of torch and of CUDA's library, both made up."""

from __future__ import annotations

import gc
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.ipc.vllm.cuda import driver, libcuda
from kvkeep.ipc.vllm.cuda.driver import CudaError, TorchDriver

PRIMARY, LOWEST, HIGHEST, NO_CONTEXT = 0xC0DE, 3, -5, 201


class FakeLibcuda:
    """CUDA's library as one thread sees it: what is not bound to a context may do nothing that needs one."""

    def __init__(self) -> None:
        self.current = 0
        self.streams: dict[int, tuple[int, int]] = {}  # flags, priority
        self.destroyed: list[int] = []
        self.modes: list[int] = []
        self.fail: dict[str, int] = {}

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.current or None
        return self.fail.get("cuCtxGetCurrent", 0)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal + 40
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 42
        context._obj.value = PRIMARY
        return self.fail.get("cuDevicePrimaryCtxRetain", 0)

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        if not self.current:
            return NO_CONTEXT
        self.modes.append(mode._obj.value)
        return self.fail.get("cuThreadExchangeStreamCaptureMode", 0)

    def cuCtxGetStreamPriorityRange(self, lowest: Any, highest: Any) -> int:
        if not self.current:
            return NO_CONTEXT
        lowest._obj.value, highest._obj.value = LOWEST, HIGHEST
        return 0

    def cuStreamCreateWithPriority(self, stream: Any, flags: Any, priority: Any) -> int:
        if not self.current:
            return NO_CONTEXT
        stream._obj.value = 0x5000 + len(self.streams)
        self.streams[stream._obj.value] = (flags.value, priority.value)
        return self.fail.get("cuStreamCreateWithPriority", 0)

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        self.destroyed.append(stream.value)
        return 0


class FakeTorchCuda(SimpleNamespace):
    """`set_device` binds nothing, as torch's does for the device that it thinks is chosen."""

    def __init__(self) -> None:
        super().__init__(
            set_device=lambda device: None,
            cudart=lambda: None,
            current_device=lambda: 2,
            ExternalStream=lambda handle, device: SimpleNamespace(cuda_stream=handle, device=device),
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibcuda:
    fake = FakeLibcuda()
    torch = SimpleNamespace(cuda=FakeTorchCuda(), version=SimpleNamespace(cuda="12.8"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(libcuda.ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(driver, "_driver_batched_copy", lambda: print)
    monkeypatch.setattr(driver, "_vllm_batched_copy", lambda: None)
    return fake


def device(index: int | None = 2) -> Any:
    return SimpleNamespace(index=index)


@pytest.mark.parametrize("index", [2, None])
def test_a_thread_without_a_context_gets_the_one_of_its_device(library: FakeLibcuda, index: int | None) -> None:
    made = TorchDriver(device(index))
    made.enter_thread()
    assert (library.current, library.modes) == (PRIMARY, [libcuda.CAPTURE_THREAD_LOCAL])
    library.current = 7  # another thread, to which torch has given one
    made.enter_thread()
    assert library.current == 7


@pytest.mark.parametrize("call", ["cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuThreadExchangeStreamCaptureMode"])
def test_a_thread_that_may_disturb_captures_costs_a_line_and_not_the_cache(
    library: FakeLibcuda, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    library.fail = {call: 999}
    made = TorchDriver(device())
    with caplog.at_level(logging.WARNING, "vllm.kvkeep"):
        made.enter_thread()
        made.enter_thread()
    (record,) = caplog.records
    assert f"{call} failed with code 999" in record.getMessage()


def test_a_stream_is_our_own_of_the_lowest_priority_and_goes_with_its_lane(library: FakeLibcuda) -> None:
    made = TorchDriver(device())
    made.enter_thread()
    first, second = made.stream(), made.stream()
    assert library.streams == {0x5000: (libcuda.NON_BLOCKING, LOWEST), 0x5001: (libcuda.NON_BLOCKING, LOWEST)}
    assert first._stream.cuda_stream == 0x5000
    assert library.destroyed == []
    del first
    gc.collect()
    assert library.destroyed == [0x5000]
    del second
    gc.collect()
    assert library.destroyed == [0x5000, 0x5001]


def test_a_stream_that_cannot_be_made_is_an_error(library: FakeLibcuda) -> None:
    made = TorchDriver(device())
    made.enter_thread()
    library.fail = {"cuStreamCreateWithPriority": 2}
    with pytest.raises(CudaError, match="cuStreamCreateWithPriority failed with code 2"):
        made.stream()


def test_a_driver_that_cannot_copy_in_batches_is_refused_whatever_vllm_offers(
    library: FakeLibcuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_vllm_batched_copy", lambda: print)
    assert TorchDriver(device())
    monkeypatch.setattr(driver, "_driver_batched_copy", lambda: None)
    with pytest.raises(CudaError, match=r"no cuMemcpyBatchAsync: it must be one of CUDA 12\.8 or newer"):
        TorchDriver(device())


@pytest.mark.parametrize(
    ("built_for", "batches"), [("12.8", True), ("13.0", True), ("12.6", False), ("11.8", False), (None, False)]
)
def test_an_operator_built_for_an_older_cuda_copies_one_by_one(built_for: str | None, batches: bool) -> None:
    assert driver._built_for_batches(built_for) is batches
