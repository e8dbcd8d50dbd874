"""`fp8`: lossy.  16-bit floats as 8-bit ones (e4m3: sign, 4 bits of exponent, 3 of mantissa), with a scale per channel.

    {"type": "fp8"}

A scale is a power of two, so scaling is exact: it is the difference of two exponents.  Each channel is scaled so that
its largest magnitude comes to lie in [128, 256), where e4m3 has its full precision down to 2^-13 of the largest.

Error bound.  With M the largest magnitude of a channel, for every number x of it and what comes back for it, y:

    |y - x|  <=  max(2^-4 |x|, 2^-17 M)

the first where the scaled number is normal in e4m3, the second below (there e4m3 has steps of 2^-9).  Zero stays zero;
a finite number stays finite and keeps its sign.  With bfloat16 there is a term for what nobody should meet: numbers
below 2^-126, and channels with M < 2^-109, become zero.

A channel is what the namespace's layout says (serde_layout.py): the numbers that stand at the same place for all tokens
of a block.  If it does not say, or if it does not divide the payload, BLOCK numbers that follow each other share a
scale: e4m3 floats have an exponent of their own, so this costs accuracy only for numbers below 2^-13 of the largest
in their block.

Passed over (and stored without fp8): what is not bfloat16 or float16 by its manifest, what another serde was applied
to, and an object with a NaN or an infinity in it.

Parameters: u8 dtype (1 bfloat16, 2 float16), u32 tokens, u32 channels.  Data: for each channel a u8, its exponent (0 =
all of it is zero), then a byte for each number.  With n numbers and t tokens: n/t (rounded up) + n bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.l2.options import Options
from kvkeep.l2.serde import Context, Encoded, Serde, Undecodable, Unfit

BLOCK = 128  # numbers under one scale where channels are not known
TOP = 7  # exponent that a channel's largest number is scaled to
LEAST = 18  # exponent field: below it a channel is zero, so that 0 and subnormals need no care elsewhere
_PIECE = 1 << 16  # numbers that are worked on at a time: what is in between stays in the processor's cache
_PARAMS = struct.Struct("<BII")
_DTYPES = {"bfloat16": 1, "float16": 2}

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


class Fp8(Serde):
    """See the module."""

    id, name = 2, "fp8"

    def __init__(self, options: Options) -> None:
        pass

    def encode(self, data: memoryview, context: Context) -> Encoded:
        dtype = _DTYPES.get(context.layout.dtype, 0)
        if context.before or not dtype or len(data) % 2:
            raise Unfit("it is no payload of 16-bit floats")
        words = np.frombuffer(data, "<u2")
        tokens, channels = context.layout.tokens, context.layout.channels
        if not tokens or len(words) % (tokens * channels):
            tokens, channels = BLOCK, 1
        scales = -(-len(words) // tokens)
        out = np.empty(scales + len(words), np.uint8)
        with np.errstate(over="ignore"):
            for piece in _pieces(words, out, scales, tokens, channels):
                _encode(_tables(dtype), *piece)
        return Encoded(out.data, _PARAMS.pack(dtype, tokens, channels))

    def decode(self, data: memoryview, params: bytes, into: memoryview, context: Context) -> None:
        if len(params) != _PARAMS.size or len(into) % 2:
            raise Undecodable("parameters that fp8 never wrote")
        dtype, tokens, channels = _PARAMS.unpack(params)
        count = len(into) // 2
        blocks = tokens == BLOCK and channels == 1
        if dtype not in _DTYPES.values() or not tokens or not channels or (count % (tokens * channels) and not blocks):
            raise Undecodable("parameters that fp8 never wrote")
        scales = -(-count // tokens)
        if len(data) != scales + count:
            raise Undecodable(f"{len(data)} bytes for {count} numbers with {scales} scales")
        for piece in _pieces(np.frombuffer(into, "<u2"), np.frombuffer(data, np.uint8), scales, tokens, channels):
            _decode(_tables(dtype), *piece)


def _pieces(words: U16, data: U8, scales: int, tokens: int, channels: int) -> Iterator[tuple[U16, U8, U8]]:
    """Words [n, tokens, channels], their scales [n, channels], their codes [n, tokens, channels]; views, bit by bit."""
    exponents, codes = data[:scales], data[scales:]
    group = tokens * channels
    whole = len(words) // group
    step = max(1, _PIECE // group)
    for start in range(0, whole, step):
        end = min(whole, start + step)
        shape = (end - start, tokens, channels)
        numbers = slice(start * group, end * group)
        yield (
            words[numbers].reshape(shape),
            exponents[start * channels : end * channels].reshape(-1, channels),
            codes[numbers].reshape(shape),
        )
    if rest := len(words) - whole * group:  # only with one channel: a shorter block
        yield (
            words[-rest:].reshape(1, rest, 1),
            exponents[whole:].reshape(1, 1),
            codes[-rest:].reshape(1, rest, 1),
        )


# ---- numbers ---------------------------------------------------------------------------------------------------------
#
# Inside, a number is its sign, and a *wide* magnitude: an exponent field and ``mantissa`` bits behind it, without
# subnormals.  For bfloat16 that is what it has already.  A float16 gets a longer exponent (its subnormals are normal
# then) and one bit of mantissa less: the last bit stands for all that were cut ("round to odd"), so that rounding to
# the three bits of e4m3 comes out as if nothing had been cut.


#
# What is normal on both sides is a few operations on whole arrays of 16-bit words; the rest (small numbers, usually one
# in thousands) is looked up in tables of all that there can be.


class _Tables(NamedTuple):
    mantissa: int  # bits of a wide magnitude
    infinite: int  # wide magnitudes from here on are infinities and NaNs
    widen: U16 | None  # float16 magnitude -> wide; None = they are the same
    encode: U8  # wide magnitude minus (exponent of the channel << mantissa), mod 2^16 -> magnitude in e4m3
    decode: U16  # exponent of the channel << 8 | e4m3 -> number
    bits: int  # of the mantissa of the number itself
    offset: int  # a channel's exponent minus this, plus that of e4m3, is the exponent of the number
    largest: int  # finite number


def _encode(tables: _Tables, words: U16, exponents: U8, codes: U8) -> None:
    magnitude = _wide(tables, words)
    largest = (magnitude[:, :, 0] if magnitude.shape[2] == 1 else magnitude).max(axis=1).reshape(exponents.shape)
    if int(largest.max()) >= tables.infinite:
        raise Unfit("there is a NaN or an infinity in it")
    top = largest >> np.uint16(tables.mantissa)
    zero = top < LEAST
    exponents[:] = np.where(zero, 0, top)
    # Of a channel that becomes zero, what is subtracted is more than any of its numbers has.
    top[zero] = 0x7FFF >> tables.mantissa
    magnitude -= (top << np.uint16(tables.mantissa))[:, None, :]
    # Normal in e4m3: its exponent, and its mantissa cut to three bits; halves go to the even one.
    cut = np.uint16(tables.mantissa - 3)
    normal = magnitude + np.uint16((TOP + 7) << tables.mantissa)
    rounded = normal >> cut
    rounded &= np.uint16(1)
    rounded += normal
    rounded += np.uint16((1 << (int(cut) - 1)) - 1)
    rounded >>= cut
    _rare(normal.view(np.int16) < (1 << tables.mantissa), tables.encode, magnitude, rounded)
    sign = words >> np.uint16(8)
    sign &= np.uint16(0x80)
    rounded |= sign
    codes[:] = rounded  # the low bytes


def _wide(tables: _Tables, words: U16) -> U16:
    magnitude = words & np.uint16(0x7FFF)
    if tables.widen is None:
        return magnitude
    wide: U16 = magnitude >> np.uint16(1)
    wide |= magnitude & np.uint16(1)
    wide += np.uint16(28 << 9)
    _rare((magnitude < 0x400) | (magnitude >= 0x7C00), tables.widen, magnitude, wide)
    return wide


def _decode(tables: _Tables, words: U16, exponents: U8, codes: U8) -> None:
    scale = exponents.astype(np.uint16)[:, None, :]
    if int(scale.min()) < LEAST:
        np.take(tables.decode, scale << np.uint16(8) | codes, out=words, mode="clip")
        return
    code = codes & np.uint8(0x7F)
    small = code < 8
    magnitude = code.astype(np.uint16)
    magnitude <<= np.uint16(tables.bits - 3)
    magnitude += (scale - np.uint16(tables.offset)) << np.uint16(tables.bits)
    if int(scale.min()) < tables.offset:  # else what is normal in e4m3 is normal
        small |= magnitude.view(np.int16) < (1 << tables.bits)
    np.minimum(magnitude, np.uint16(tables.largest), out=magnitude)
    sign = codes.astype(np.uint16)
    sign &= np.uint16(0x80)
    sign <<= np.uint16(8)
    np.bitwise_or(magnitude, sign, out=words)
    if len(at := np.flatnonzero(small)):
        group, channels = words[0].size, words.shape[2]
        its = exponents[at // group, at % channels].astype(np.uint16) << np.uint16(8)
        words.reshape(-1)[at] = tables.decode[its | codes.reshape(-1)[at]]


def _rare(where: npt.NDArray[np.bool_], table: U8 | U16, index: U16, out: U16) -> None:
    at = np.flatnonzero(where)
    if len(at):
        out.reshape(-1)[at] = table[index.reshape(-1)[at]]


@functools.cache
def _tables(dtype: int) -> _Tables:
    if dtype == _DTYPES["bfloat16"]:
        mantissa, bias = 7, 127
        coder = _encoder(mantissa), _decoder(bias, _bfloat16)
        return _Tables(mantissa, 0xFF << mantissa, None, *coder, 7, TOP + 7, 0x7F7F)
    mantissa, bias = 9, 43
    coder = _encoder(mantissa), _decoder(bias, _float16)
    return _Tables(mantissa, 0x3F << mantissa, _widener(), *coder, 10, TOP + 7 + bias - 15, 0x7BFF)


def _encoder(mantissa: int) -> U8:
    difference = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.int64)
    exponent, fraction = difference >> mantissa, difference & ((1 << mantissa) - 1)
    value = np.ldexp(1 + fraction / (1 << mantissa), np.minimum(exponent, 0) + TOP)  # above 0 there is nothing
    power = np.maximum(np.frexp(value)[1] - 1, -6)  # below 2^-6 the steps stay those of 2^-6
    steps = np.rint(np.ldexp(value, 3 - power))  # halves go to even, as IEEE has it
    code = ((power + 6) << 3) + steps  # a step too many carries into the exponent, as it should
    table: U8 = code.astype(np.uint8)
    return table


def _decoder(bias: int, narrow: object) -> U16:
    exponent, code = np.divmod(np.arange(1 << 16), 256)
    field, fraction = (code & 0x7F) >> 3, code & 7
    value = np.where(field == 0, np.ldexp(fraction, -9), np.ldexp(1 + fraction / 8, field - 7))
    value = np.ldexp(value, exponent - bias - TOP)
    value[exponent < LEAST] = 0
    words: U16 = narrow(value)  # type: ignore[operator]
    return words | np.where(code & 0x80, 0x8000, 0).astype(np.uint16)


def _bfloat16(value: npt.NDArray[np.float64]) -> U16:
    """Of numbers that bfloat16 has; what is too large becomes its largest."""
    largest = np.ldexp(255 / 128, 127)
    words = np.minimum(value, largest).astype(np.float32).view(np.uint32) >> 16
    return words.astype(np.uint16)


def _float16(value: npt.NDArray[np.float64]) -> U16:
    return np.minimum(value, 65504).astype(np.float16).view(np.uint16)


def _widener() -> U16:
    words = np.arange(1 << 15, dtype=np.uint16)
    value = words.view(np.float16).astype(np.float64)
    finite = np.isfinite(value) & (value > 0)
    fraction, power = np.frexp(np.where(finite, value, 1))
    bits = ((fraction * 2 - 1) * 1024).astype(np.int64)  # ten of them, exactly
    wide = ((power - 1 + 43) << 9) | (bits >> 1) | (bits & 1)
    wide[value == 0] = 0
    wide[~np.isfinite(value)] = 0x7FFF
    return wide.astype(np.uint16)
