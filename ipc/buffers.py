"""Callers' memory and hashes in the one form the client works with: flat uint8 arrays, and packed 32-byte hashes.

numpy arrays, torch CPU tensors and anything with the buffer protocol are taken as they are, without a copy.  torch is
never imported here: a tensor brings it along.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvkeep.ipc.messages import HASH_BYTES

Bytes: TypeAlias = npt.NDArray[np.uint8]
Hashes: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any] | Sequence[bytes]"
Buffer: TypeAlias = Any  # numpy array, torch CPU tensor, or an object with the buffer protocol
Buffers: TypeAlias = "Sequence[Buffer] | npt.NDArray[Any] | Any"

_HASH_LENGTH = {HASH_BYTES}


def pack_hashes(hashes: Hashes) -> bytes:
    """Raises ValueError if these are not whole 32-byte hashes."""
    if isinstance(hashes, bytes):
        packed = hashes
    elif isinstance(hashes, bytearray | memoryview | np.ndarray):
        packed = bytes(hashes) if not isinstance(hashes, np.ndarray) else hashes.tobytes()
    else:
        if hashes and set(map(len, hashes)) != _HASH_LENGTH:
            wrong = next(len(h) for h in hashes if len(h) != HASH_BYTES)
            raise ValueError(f"a chunk hash has {HASH_BYTES} bytes, one of these has {wrong}")
        packed = b"".join(hashes)
    if len(packed) % HASH_BYTES:
        raise ValueError(f"packed hashes are n * {HASH_BYTES} bytes, these are {len(packed)}")
    return packed


def as_bytes(buffer: Buffer, *, writable: bool = False) -> Bytes:
    """A flat uint8 view of the same memory.  Raises ValueError when there is none (strides, GPU memory, read-only)."""
    if hasattr(buffer, "data_ptr"):
        flat = _tensor_bytes(buffer)
    elif isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError(f"a buffer of shape {buffer.shape} with strides {buffer.strides} is not contiguous")
        flat = buffer.reshape(-1).view(np.uint8)
    else:
        view = memoryview(buffer)
        flat = np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)
    if writable and not flat.flags.writeable:
        raise ValueError("the buffer is read-only; a load needs one that can be written")
    return flat


def rows(buffers: Buffers, length: int, *, writable: bool = False, limit: int | None = None) -> list[Bytes]:
    """One flat view of exactly ``length`` bytes per chunk: of a list of buffers, or of one array's rows."""
    if isinstance(buffers, np.ndarray) and buffers.dtype == np.uint8 and buffers.ndim == 2:
        if buffers.shape[1] != length:
            raise ValueError(f"rows have {buffers.shape[1]} bytes, a shard of this namespace has {length}")
        if buffers.strides[1] != 1 or (writable and not buffers.flags.writeable):
            raise ValueError("rows must be contiguous" if buffers.strides[1] != 1 else "the array is read-only")
        return list(buffers[:limit])
    count = len(buffers) if limit is None else min(limit, len(buffers))
    views = [as_bytes(buffers[i], writable=writable) for i in range(count)]
    for i, view in enumerate(views):
        if view.size != length:
            raise ValueError(f"buffer {i} has {view.size} bytes, a shard of this namespace has {length}")
    return views


def _tensor_bytes(tensor: Any) -> Bytes:
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} cannot be mapped; copy it to the CPU first")
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous; call .contiguous() first")
    uint8 = getattr(sys.modules["torch"], "uint8")  # noqa: B009 (its module is not known here)
    flat: Bytes = tensor.detach().reshape(-1).view(uint8).numpy()
    return flat
