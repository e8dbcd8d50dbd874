"""Values of the key/value store: what may be put, how its memory is laid out, and the header that says so.

A value is bytes, a numpy array or a torch CPU tensor, with a `MemoryFormat` that names its dimensions.  The header is
kept in front of the payload, so that a reader needs to know nothing but the key:

    offset 0   magic "KVKVALUE"            8
           8   version, u16                2     VERSION; another one is a miss
          10   zero                        2
          12   length of the body, u32     4
          16   xxh3_64 of bytes 0..16 and the body, u64
          24   body: msgpack array of the fields of `Header`
           …   zeros up to HEADER_BYTES, then the payload

All numbers are little-endian.  `decode` answers None for anything that is not exactly this; it never raises, and runs
nothing that the bytes say: dtypes come from closed tables.  torch is imported only to hand out what was put as a
tensor.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from kvkeep.ipc.buffers import Bytes, as_bytes

HEADER_BYTES = 4096  # the payload begins on a page of its own
VERSION = 1
MAGIC = b"KVKVALUE"
MAX_KEY_BYTES = 2048
MAX_DIMENSIONS = 16
DIGEST_BYTES = 16

_PREFIX = struct.Struct("<8sHHIQ")
_SUMMED = 16
_NUMPY_KINDS = "biufcmMSU"  # plain numbers, times, text; no objects, no records
TORCH_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}


class MemoryFormat(enum.IntEnum):
    """What the dimensions of a value are.  The numbers are at rest: never change one."""

    BINARY = 1  # any shape, no meaning
    KV_SPLIT = 2  # (2, layer, token, hidden): all K, then all V
    KV_SPLIT_LAYER = 3  # (2, token, hidden): one layer
    TOKEN_MAJOR = 4  # (token, 2, hidden): one layer, K and V of a token side by side
    MLA = 5  # (1, layer, token, width): one latent instead of K and V
    MLA_LAYER = 6  # (token, width): one layer

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Their names, outermost first; empty = any."""
        return _LAYOUTS[self].names

    def tokens(self, shape: tuple[int, ...]) -> int | None:
        """How many tokens a value of this shape covers; None = it does not say."""
        names = self.dimensions
        return shape[names.index("token")] if names else None

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if a value of this format cannot have this shape."""
        layout = _LAYOUTS[self]
        if not layout.names:
            return
        wrong = len(shape) != len(layout.names)
        if wrong or ("kv" in layout.names and shape[layout.names.index("kv")] != layout.kv):
            sizes = ", ".join(str(layout.kv) if name == "kv" else name for name in layout.names)
            raise ValueError(f"a value of format {self.name} has the shape ({sizes}), not {shape}; or use BINARY")


class _Layout(NamedTuple):
    names: tuple[str, ...] = ()
    kv: int = 2


_LAYOUTS = {
    MemoryFormat.BINARY: _Layout(),
    MemoryFormat.KV_SPLIT: _Layout(("kv", "layer", "token", "hidden")),
    MemoryFormat.KV_SPLIT_LAYER: _Layout(("kv", "token", "hidden")),
    MemoryFormat.TOKEN_MAJOR: _Layout(("token", "kv", "hidden")),
    MemoryFormat.MLA: _Layout(("kv", "layer", "token", "width"), kv=1),
    MemoryFormat.MLA_LAYER: _Layout(("token", "width")),
}


class Kind(enum.IntEnum):
    """As what a value was put, and comes back."""

    BYTES = 1
    NUMPY = 2
    TORCH = 3


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: bytes  # whose value this is, in full
    kind: Kind
    format: MemoryFormat
    dtype: str  # "uint8" for bytes; numpy's `dtype.str` ("<f4"); torch's name ("bfloat16")
    shape: tuple[int, ...]
    nbytes: int  # of the payload
    digest: bytes = b""  # xxh3_128 of the payload; empty = was not computed


class Data(NamedTuple):
    """A value that is to be put, in the form that is stored."""

    flat: Bytes
    kind: Kind
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """What `get` returns: ``data`` as it was put, and what was declared about it."""

    data: Any  # bytes, numpy array, torch tensor; of a tensor without torch: flat uint8; or what `allocate` returned
    format: MemoryFormat
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def describe(data: Any) -> Data:
    """The bytes of a value, in C order, and what they are.  Without a copy where they are contiguous.
    Raises ValueError for what cannot be kept: another dtype, memory that is not on this side."""
    if hasattr(data, "data_ptr"):
        name = str(data.dtype).removeprefix("torch.")
        if name not in TORCH_ITEM_BYTES:
            raise ValueError(f"a tensor of {data.dtype} cannot be kept; view it as uint8")
        return Data(as_bytes(data.detach().contiguous()), Kind.TORCH, name, tuple(data.shape))
    if isinstance(data, np.ndarray):
        if numpy_dtype(data.dtype.str) != data.dtype:
            raise ValueError(f"an array of dtype {data.dtype} cannot be kept; view it as uint8 or another plain dtype")
        plain = np.asarray(data)  # of a subclass only the array is kept
        flat = as_bytes(plain if plain.flags.c_contiguous else plain.copy(order="C"))
        return Data(flat, Kind.NUMPY, data.dtype.str, data.shape)
    try:
        view = memoryview(data)
    except TypeError:
        raise ValueError(f"a value is bytes, a numpy array or a torch tensor, not {type(data).__name__}") from None
    flat = as_bytes(view if view.c_contiguous else view.tobytes())
    return Data(flat, Kind.BYTES, "uint8", (flat.size,))


def restore(header: Header, flat: Bytes) -> Any:
    """The inverse of `describe`; ``flat`` is memory of its own, and becomes the value's."""
    if header.kind == Kind.BYTES:
        return flat.tobytes()
    if header.kind == Kind.NUMPY:
        return flat.view(np.dtype(header.dtype)).reshape(header.shape)
    try:
        import torch
    except ImportError:
        return flat
    return torch.from_numpy(flat).view(getattr(torch, header.dtype)).reshape(header.shape)


def digest_of(flat: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(flat.data)


def encode(header: Header) -> Bytes:
    """HEADER_BYTES bytes."""
    body = msgspec.msgpack.encode(header)
    if _PREFIX.size + len(body) > HEADER_BYTES:
        raise ValueError(f"the header of a value has {_PREFIX.size + len(body)} bytes, the limit is {HEADER_BYTES}")
    summed = _PREFIX.pack(MAGIC, VERSION, 0, len(body), 0)[:_SUMMED]
    out = np.zeros(HEADER_BYTES, np.uint8)
    text = summed + xxhash.xxh3_64_intdigest(summed + body).to_bytes(8, "little") + body
    out[: len(text)] = np.frombuffer(text, np.uint8)
    return out


def decode(data: bytes) -> Header | None:
    """The header at the start of ``data`` (HEADER_BYTES of it); None = these bytes are none that we can read."""
    magic, version, zero, length, checksum = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size : _PREFIX.size + length]
    if (magic, version, zero) != (MAGIC, VERSION, 0) or len(body) != length:
        return None
    if xxhash.xxh3_64_intdigest(data[:_SUMMED] + body) != checksum:
        return None
    try:
        header = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return header if _consistent(header) else None


_decoder = msgspec.msgpack.Decoder(Header)


def _consistent(header: Header) -> bool:
    if len(header.shape) > MAX_DIMENSIONS or any(n < 0 for n in header.shape):
        return False
    if len(header.digest) not in (0, DIGEST_BYTES):
        return False
    item = _item_bytes(header.kind, header.dtype)
    return item > 0 and math.prod(header.shape) * item == header.nbytes


def _item_bytes(kind: Kind, name: str) -> int:
    """0 = no dtype of ours."""
    if kind == Kind.TORCH:
        return TORCH_ITEM_BYTES.get(name, 0)
    if kind == Kind.BYTES:
        return int(name == "uint8")
    dtype = numpy_dtype(name)
    return dtype.itemsize if dtype is not None else 0


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """A plain dtype by its ``str``; None = none, or one that is more than a row of numbers."""
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None
    return dtype if dtype.kind in _NUMPY_KINDS and dtype.itemsize and dtype.str == name else None
