"""All that we ask of CUDA, through torch, which the engine has loaded anyway.

Pinning goes through torch.cuda.cudart(): it is the very runtime that the engine uses, so nothing has to be searched for
and its state is one, and the call gives up the GIL.  Batched copies go through vLLM's own operator; where vLLM is not
(benchmarks), through the driver's cuMemcpyBatchAsync, which is what the operator calls.  Without that the operator
would copy one by one and look at no error, so a driver without it is refused.

Streams are our own (libcuda.py), with the lowest priority, so that the engine's kernels go first.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep.ipc.vllm.cuda.libcuda import LIBCUDA, Context
from kvkeep.ipc.vllm.cuda.libcuda import CudaError as CudaError
from kvkeep.ipc.vllm.memory import Bytes

log = logging.getLogger("vllm.kvkeep")

I64 = NDArray[np.int64]
BatchedCopy = Callable[[I64, I64, I64, bool, int], None]  # targets, sources, sizes, sources are stable, stream

BATCH_SINCE = 12080  # cuMemcpyBatchAsync came with CUDA 12.8; asked for this version, its signature stays the same
ORDER_STREAM, ORDER_ANY = 1, 3  # CU_MEMCPY_SRC_ACCESS_ORDER_*


class Event(Protocol):
    def wait(self) -> None:
        """Until all that it marks is done.  Gives up the GIL, sleeps.  Raises what the stream failed with."""


class Stream(Protocol):
    def wait(self, fence: Event) -> None:
        """What is submitted from now on begins when the fence is over."""

    def copy(self, targets: I64, sources: I64, sizes: I64, *, to_device: bool) -> None:
        """Begin to copy sizes[i] bytes from address sources[i] to address targets[i], in any order, for all i.  Host
        addresses are in pinned memory, no copy crosses two registrations, and the source of a copy to the device does
        not change meanwhile."""

    def record(self) -> Event:
        """An event that is over when all that was submitted so far is."""

    def drain(self) -> None:
        """Until it is idle, whatever happens; without the GIL.  Raises what it failed with."""


class Driver(Protocol):
    def enter_thread(self) -> None:
        """In each thread of ours, first of all."""

    def fence(self) -> Event:
        """An event on the stream that the calling thread, the engine's, computes on."""

    def stream(self) -> Stream: ...

    def pinned_memory(self, size: int) -> Bytes:
        """Host memory of our own."""

    def register(self, address: int, size: int) -> None:
        """Pin memory that is there already.  Raises CudaError."""

    def unregister(self, address: int) -> None:
        """Raises CudaError."""


class TorchDriver:
    """Of one device.  Raises CudaError if it cannot copy in batches."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._cudart: Any = torch.cuda.cudart()
        of_driver = _driver_batched_copy()
        if of_driver is None:
            raise CudaError("the NVIDIA driver has no cuMemcpyBatchAsync: it must be one of CUDA 12.8 or newer")
        self._batched = _vllm_batched_copy() or of_driver
        self._context = Context(device.index if device.index is not None else torch.cuda.current_device())
        self._warned = False

    def enter_thread(self) -> None:
        self._cuda.set_device(self._device)
        try:
            self._context.bind()
            self._context.allow_captures()
        except CudaError as error:  # captures are at the engine's start, mostly, and our calls later
            if not self._warned:
                log.warning("kvkeep: copies and captures of CUDA graphs may disturb each other: %s", error)
            self._warned = True

    def fence(self) -> TorchEvent:
        return TorchEvent(self._cuda, self._cuda.current_stream(self._device))

    def stream(self) -> TorchStream:
        handle = self._context.create_stream()
        stream = TorchStream(self._cuda, self._cuda.ExternalStream(handle, self._device), self._batched)
        last = weakref.finalize(stream, self._context.destroy_stream, handle)
        last.atexit = False  # a thread may still be in a copy then
        return stream

    def pinned_memory(self, size: int) -> Bytes:
        import torch

        memory: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()  # which keeps the tensor
        return memory

    def register(self, address: int, size: int) -> None:
        self._check("cudaHostRegister", self._cudart.cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._cudart.cudaHostUnregister(address))

    def _check(self, what: str, code: Any) -> None:
        if int(code):
            raise CudaError(f"{what} failed with code {int(code)} ({self._cudart.cudaGetErrorString(code)})")


class TorchEvent:
    def __init__(self, cuda: Any, stream: Any) -> None:
        self.event: Any = cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class TorchStream:
    """Whoever drops it has drained it."""

    def __init__(self, cuda: Any, stream: Any, batched: BatchedCopy) -> None:
        self._cuda, self._stream, self._batched = cuda, stream, batched

    def wait(self, fence: Event) -> None:
        assert isinstance(fence, TorchEvent)
        self._stream.wait_event(fence.event)

    def copy(self, targets: I64, sources: I64, sizes: I64, *, to_device: bool) -> None:
        with self._cuda.stream(self._stream):
            self._batched(targets, sources, sizes, to_device, self._stream.cuda_stream)

    def record(self) -> TorchEvent:
        return TorchEvent(self._cuda, self._stream)

    def drain(self) -> None:
        try:
            self.record().wait()
        except Exception:  # no event could be had, or the context is broken, which this will tell at once
            self._stream.synchronize()
            raise


def _vllm_batched_copy() -> BatchedCopy | None:
    """On the current stream.  Reads the three arrays before it returns."""
    try:
        import torch
        from vllm import _custom_ops as ops

        if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch") or not _built_for_batches(torch.version.cuda):
            return None
    except Exception:  # not installed, or built for other libraries
        return None

    named = "is_src_access_order_any" in inspect.signature(ops.swap_blocks_batch).parameters  # in 0.32

    def copy(targets: I64, sources: I64, sizes: I64, stable: bool, stream: int) -> None:
        arrays = [torch.from_numpy(array) for array in (sources, targets, sizes)]
        ops.swap_blocks_batch(*arrays, **({"is_src_access_order_any": stable} if named else {}))

    return copy


def _built_for_batches(cuda: str | None) -> bool:
    """Of the CUDA that torch and vLLM are built for, e.g. "12.8": an operator built for an older one copies one by
    one."""
    major, minor = (cuda or "0.0").split(".")[:2]
    return (int(major), int(minor)) >= (BATCH_SINCE // 1000, BATCH_SINCE % 1000 // 10)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes, CUDA driver API 12.8."""

    _fields_ = (
        ("order", ctypes.c_uint),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


def _driver_batched_copy() -> BatchedCopy | None:
    try:
        library = ctypes.CDLL(LIBCUDA)
        find = library.cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    find.argtypes = (
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_int),
    )
    if find(b"cuMemcpyBatchAsync", ctypes.byref(address), BATCH_SINCE, 0, ctypes.byref(status)) or not address.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    # CUresult f(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    function = kind(address.value)

    def copy(targets: I64, sources: I64, sizes: I64, stable: bool, stream: int) -> None:
        attributes = _Attributes(order=ORDER_ANY if stable else ORDER_STREAM)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = function(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code:
            raise CudaError(f"cuMemcpyBatchAsync failed with code {code} at copy {failed.value} of {len(sizes)}")

    return copy
