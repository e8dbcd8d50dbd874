"""`zstd`: lossless.  Numbers are split into planes of bytes before they are compressed.

    {"type": "zstd", "level": 0}

The floats of a KV cache hardly ever repeat, so there is nothing to find for a compressor of strings.  What they do have
is an exponent with few values: with the sign turned to the other end of the number (a rotation by one bit), the first
byte of a bfloat16 is its exponent, and all first bytes together compress well; the other bytes are noise, which
Zstandard sees and leaves.  Level 0 hardly looks for repetitions and codes what there is: it is about twice as fast as
level 1, and as small where the numbers of one token do not come again exactly.  Where the manifest names no float
dtype, or after another serde, bytes are taken as they are, and level 0 is level 1.  What does not shrink is passed
over.

Parameters: a u8, the bytes of a number (1, 2 or 4).  Data: one Zstandard frame of all first bytes, then all second
ones, and so on, least significant last; bytes behind the last whole number come at the end.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.l2.adapter import AdapterError
from kvkeep.l2.options import Options
from kvkeep.l2.serde import Context, Encoded, Serde, Undecodable, Unfit

U8 = npt.NDArray[np.uint8]
_WORD: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

_NO_SEARCH = {"min_match": 7, "hash_log": 6, "window_log": 17}


class Zstd(Serde):
    """See the module."""

    id, name = 1, "zstd"

    def __init__(self, options: Options) -> None:
        self._level = options.count("level", 0, least=0, most=22)
        self._zstandard: ModuleType | None = None
        self._local = threading.local()  # a context of the library must not be shared

    def open(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise AdapterError(
                "serde zstd needs the package zstandard, which is not installed: pip install 'kvkeep[serde]'"
            ) from None
        self._zstandard = zstandard

    def encode(self, data: memoryview, context: Context) -> Encoded:
        width = 1 if context.before else context.layout.item_bytes
        assert self._zstandard is not None
        packed: bytes = self._compressor(width > 1).compress(planes(data, width) if width > 1 else data)
        if len(packed) >= len(data):
            raise Unfit("it does not shrink")
        return Encoded(packed, bytes([width]))

    def _compressor(self, of_planes: bool) -> Any:
        """This thread's."""
        name = "of_planes" if of_planes else "of_bytes"
        if not hasattr(self._local, name):
            assert self._zstandard is not None
            more = {} if self._level or not of_planes else _NO_SEARCH
            params = self._zstandard.ZstdCompressionParameters.from_level(max(1, self._level), **more)
            setattr(self._local, name, self._zstandard.ZstdCompressor(compression_params=params))
        return getattr(self._local, name)

    def decode(self, data: memoryview, params: bytes, into: memoryview, context: Context) -> None:
        zstandard = self._zstandard
        assert zstandard is not None
        if len(params) != 1 or params[0] not in (1, *_WORD):
            raise Undecodable("parameters that zstd never wrote")
        try:
            if zstandard.frame_content_size(data) != len(into):
                raise Undecodable("a frame of another length")
            if not hasattr(self._local, "decompressor"):
                self._local.decompressor = zstandard.ZstdDecompressor()
            plain = self._local.decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Undecodable(str(error)) from None
        if len(plain) != len(into):
            raise Undecodable("a frame of another length")
        if params[0] == 1:
            into[:] = plain
        else:
            merge(plain, into, params[0])


def planes(data: memoryview, width: int) -> U8:
    """First bytes of all numbers, second bytes, ...; the sign's place changed as the module says."""
    raw = np.frombuffer(data, np.uint8)
    count = len(raw) // width
    words = raw[: count * width].view(_WORD[width])
    turned = (words << 1) | (words >> (8 * width - 1))
    out = np.empty(len(raw), np.uint8)
    split = turned.view(np.uint8).reshape(count, width)
    for place in range(width):
        out[place * count : (place + 1) * count] = split[:, width - 1 - place]
    out[count * width :] = raw[count * width :]
    return out


def merge(data: bytes, into: memoryview, width: int) -> None:
    """The inverse of `planes`."""
    raw, out = np.frombuffer(data, np.uint8), np.frombuffer(into, np.uint8)
    count = len(raw) // width
    words = np.empty(count, _WORD[width])
    split = words.view(np.uint8).reshape(count, width)
    for place in range(width):
        split[:, width - 1 - place] = raw[place * count : (place + 1) * count]
    back = (words >> 1) | (words << (8 * width - 1))
    out[: count * width] = back.view(np.uint8)
    out[count * width :] = raw[count * width :]
