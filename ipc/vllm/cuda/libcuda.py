"""The calls of CUDA's driver API that torch does not offer, by ctypes, for one device.

Contexts: torch thinks that a new thread is on device 0 already and then does nothing in `set_device`, so that the
driver knows no context there.  The primary context is the one that torch and its runtime use.  Streams: torch's come
from a pool and one of them may be the engine's; one made here is nobody else's.
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBCUDA = "libcuda.so.1"
CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the default stream and this one do not wait for each other


class CudaError(Exception):
    """One sentence."""


class Context:
    """The primary context of one device.  What fails raises CudaError."""

    def __init__(self, ordinal: int) -> None:
        """``ordinal``: as torch counts the devices of this process."""
        try:
            self._library: Any = ctypes.CDLL(LIBCUDA)
        except OSError as error:
            raise CudaError(f"{LIBCUDA} cannot be loaded: {error}") from error
        self._ordinal = ordinal
        self._context = ctypes.c_void_p()  # once it was needed; the process keeps it

    def bind(self) -> None:
        """The calling thread has a context afterwards."""
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value:
            return
        if not self._context.value:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), self._ordinal)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._context = context
        self._call("cuCtxSetCurrent", self._context)

    def allow_captures(self) -> None:
        """From here on a CUDA graph that another thread captures does not forbid the calling one its calls, which
        would fail, and break the capture."""
        mode = ctypes.c_uint(CAPTURE_THREAD_LOCAL)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def create_stream(self) -> int:
        """Of the lowest priority.  In a thread with a context."""
        lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING), lowest)
        if not stream.value:  # the default stream's handle
            raise CudaError("cuStreamCreateWithPriority made no stream")
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        """An idle one.  Any thread; an error is of no use to anyone."""
        self._library.cuStreamDestroy_v2(ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise CudaError(f"the driver has no {name}") from error
        if code:
            raise CudaError(f"{name} failed with code {code}")
