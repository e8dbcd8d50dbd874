"""A GPU for `kvkeep.ipc.vllm.cuda` whose memory is host memory.

Streams do what was submitted to them, in order, when somebody lets them: at once (the default), or with `run` while
`held`.  What waits for a fence waits until the test completes that fence.  So a byte moves exactly when the test says,
and everything that a real GPU would answer with garbage or a fault is noted in `faults`: host memory that is not pinned
at the moment of the copy, and copies that cross from one registration to the next.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvkeep.ipc.vllm.cuda.driver import CudaError

WAIT_S = 20.0


class FakeEvent:
    def __init__(self, *, over: bool = False) -> None:
        self._over = threading.Event()
        self.error: Exception | None = None
        if over:
            self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def complete(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> None:
        assert self._over.wait(WAIT_S), "an event was waited for that never came"
        if self.error is not None:
            raise self.error


class FakeStream:
    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.ops: deque[Callable[[], bool]] = deque()  # each answers whether it is done
        self.broken: Exception | None = None

    def wait(self, fence: FakeEvent) -> None:
        self._submit(lambda: fence.over)

    def copy(self, targets: Any, sources: Any, sizes: Any, *, to_device: bool) -> None:
        self.driver.submitted += len(sizes)
        if self.broken is not None or self.driver.fail_copy is not None:
            raise self.broken or self.driver.fail_copy
        copies = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self._submit(lambda: self.driver.move(copies, to_device))

    def record(self) -> FakeEvent:
        event = FakeEvent()

        def reach() -> bool:
            event.complete(self.broken)
            return True

        self._submit(reach)
        return event

    def drain(self) -> None:
        self.record().wait()

    def _submit(self, op: Callable[[], bool]) -> None:
        with self.driver.lock:
            self.ops.append(op)
        if not self.driver.held:
            self.driver.run()


class FakeDriver:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.held = False  # streams stand still until `run`
        self.compute_busy = False  # fences are not over until the test completes them
        self.fences: list[FakeEvent] = []
        self.fence_threads: set[str] = set()
        self.registered: dict[int, int] = {}  # address -> bytes
        self.own: list[np.ndarray] = []  # pinned memory that was asked for
        self.faults: list[str] = []
        self.calls: list[str] = []
        self.threads: set[str] = set()  # that entered
        self.submitted = self.moved = 0  # copies
        self.fail_copy: Exception | None = None
        self.fail_fence: Exception | None = None
        self.fail_unregister: Exception | None = None
        self.fail_register_after = 1 << 30  # pieces
        self.register_gate = threading.Event()
        self.register_gate.set()
        self.registering = threading.Event()

    # ---- kvkeep.ipc.vllm.cuda.driver.Driver --------------------------------------------------------------------------

    def enter_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    def fence(self) -> FakeEvent:
        if self.fail_fence is not None:
            raise self.fail_fence
        fence = FakeEvent(over=not self.compute_busy)
        self.fences.append(fence)
        self.fence_threads.add(threading.current_thread().name)
        return fence

    def stream(self) -> FakeStream:
        self._must_have_entered()
        stream = FakeStream(self)
        self.streams.append(stream)
        return stream

    def pinned_memory(self, size: int) -> np.ndarray:
        memory = np.full(size, 0xEE, np.uint8)
        self.own.append(memory)
        return memory

    def register(self, address: int, size: int) -> None:
        self._must_have_entered()
        self.registering.set()
        assert self.register_gate.wait(WAIT_S)
        if len(self.registered) >= self.fail_register_after:
            raise CudaError("cudaHostRegister failed with code 2 (out of memory)")
        with self.lock:
            assert address % 4096 == 0
            if address in self.registered:
                raise CudaError("cudaHostRegister failed with code 712 (already mapped)")
            self.registered[address] = size
            self.calls.append(f"register {size}")

    def unregister(self, address: int) -> None:
        with self.lock:
            if self.fail_unregister is not None:
                raise self.fail_unregister
            if self.registered.pop(address, None) is None:
                raise CudaError("cudaHostUnregister failed with code 713 (not mapped)")
            self.calls.append("unregister")

    def _must_have_entered(self) -> None:
        if threading.current_thread().name not in self.threads:
            self.faults.append(f"thread {threading.current_thread().name} did not choose its device")

    # ---- the test's hands --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Let every stream go as far as it can."""
        with self.lock:
            for stream in self.streams:
                while stream.ops and stream.ops[0]():
                    stream.ops.popleft()

    def complete_fences(self) -> None:
        for fence in self.fences:
            fence.complete()
        self.run()

    def break_streams(self, error: Exception) -> None:
        """As after an illegal access: nothing is moved any more, and every event says so."""
        with self.lock:
            for stream in self.streams:
                stream.broken = error
                stream.ops = deque(op for op in stream.ops if op.__name__ == "reach")
        self.run()

    def move(self, copies: list[tuple[int, int, int]], to_device: bool) -> bool:
        for target, source, size in copies:
            host = source if to_device else target
            if not self._pinned(host, size):
                self.faults.append(f"{size} bytes of host memory were copied that are not, or not in one piece, pinned")
                continue
            ctypes.memmove(target, source, size)
            self.moved += 1
        return True

    def _pinned(self, address: int, size: int) -> bool:
        own = [(int(memory.ctypes.data), memory.nbytes) for memory in self.own]
        ranges = [*self.registered.items(), *own]
        return any(start <= address and address + size <= start + length for start, length in ranges)
