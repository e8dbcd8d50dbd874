"""Callers' memory and hashes in the one form the client works with: flat uint8 arrays, and packed 32-byte hashes.

numpy arrays, torch CPU tensors and anything with the buffer protocol are taken as they are, without a copy.  torch is
never imported here: a tensor brings it along.
"""

from __future__ import annotations

import sys
from collections import Counter
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
        try:
            each = hashes if isinstance(hashes, list | tuple) else list(hashes)
            packed = b"".join(each)
            lengths = set(map(len, each))
        except TypeError:
            raise ValueError(
                f"chunk hashes are {HASH_BYTES} bytes each, packed or in a list of bytes, not {_shortly(hashes)}"
            ) from None
        if not lengths <= _HASH_LENGTH:
            raise ValueError(f"a chunk hash has {HASH_BYTES} bytes, one of these has {min(lengths - _HASH_LENGTH)}")
    if len(packed) % HASH_BYTES:
        raise ValueError(f"packed hashes are n * {HASH_BYTES} bytes, these are {len(packed)}")
    return packed


def check_distinct(packed: bytes, start: int) -> None:
    """Raises ValueError if a hash stands twice from position ``start`` on."""
    chunks = [packed[at : at + HASH_BYTES] for at in range(start * HASH_BYTES, len(packed), HASH_BYTES)]
    if len(set(chunks)) < len(chunks):
        twice = next(chunk for chunk, count in Counter(chunks).items() if count > 1)
        raise ValueError(
            f"the hash {twice.hex()[:16]}… stands twice among {len(chunks)} chunks of a chain; a hash names its "
            "content and all before it, so each is another: see keys.ChunkHasher"
        )


def count_of(buffers: Buffers) -> int:
    try:
        return len(buffers)
    except TypeError:
        raise ValueError(f"buffers are a list of buffers, or one array of rows, not {_shortly(buffers)}") from None


def _shortly(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}{'…' * (len(text) > 60)} ({type(value).__name__})"


def as_bytes(buffer: Buffer, *, writable: bool = False) -> Bytes:
    """A flat uint8 view of the same memory.  Raises ValueError when there is none (strides, GPU memory, read-only, not
    bytes at all)."""
    if hasattr(buffer, "data_ptr"):
        flat = _tensor_bytes(buffer)
    elif isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError(f"a buffer of shape {buffer.shape} with strides {buffer.strides} is not contiguous")
        if buffer.dtype.hasobject:
            raise ValueError(f"an array of dtype {buffer.dtype} holds Python objects, not bytes; use a plain dtype")
        flat = buffer.reshape(-1).view(np.uint8)
    else:
        try:
            view = memoryview(buffer)
        except TypeError:
            raise ValueError(f"a buffer is an array, a tensor or bytes, not {_shortly(buffer)}") from None
        if not view.c_contiguous:
            raise ValueError(f"a memoryview with strides {view.strides} is not contiguous; copy it with bytes() first")
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
    count = count_of(buffers) if limit is None else min(limit, count_of(buffers))
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
