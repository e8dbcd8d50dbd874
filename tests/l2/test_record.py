"""The header at rest: what was packed comes back, and any flipped bit is seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.l2.adapter import Key
from kvkeep.l2.record import HEADER_BYTES, MAGIC, Header, pack, payload_checksum, unpack

HEADER = Header(Key(bytes(range(32)), bytes(range(32, 64)), 3, 8), 1 << 20, 999_999, 0xDEADBEEF, (7, 9), b"nonce", 42)


def test_what_was_packed_comes_back() -> None:
    data = pack(HEADER)
    assert len(data) == HEADER_BYTES
    assert data[:8] == MAGIC
    again = unpack(memoryview(data + b"payload"))
    assert again is not None
    assert again._replace(params=again.params.rstrip(b"\0")) == HEADER


def test_every_single_flipped_bit_makes_it_invalid() -> None:
    data = pack(HEADER)
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack(bytes(flipped)) is None, f"bit {bit}"


@given(st.binary(max_size=300))
def test_rubbish_is_no_header(data: bytes) -> None:
    assert unpack(data) is None
    assert unpack(MAGIC + data) is None


def test_a_cut_header_is_none() -> None:
    assert unpack(pack(HEADER)[:-1]) is None
    assert unpack(b"") is None


@pytest.mark.parametrize(("serdes", "params"), [((1, 2, 3, 4, 5), b""), ((1,), bytes(97))])
def test_what_does_not_fit_is_refused(serdes: tuple[int, ...], params: bytes) -> None:
    with pytest.raises(ValueError, match="limits are"):
        pack(HEADER._replace(serdes=serdes, params=params))


def test_a_checksum_is_never_zero_and_stays_what_it_was() -> None:
    assert payload_checksum(b"") == 0x2D06800538D394C2
    assert payload_checksum(memoryview(bytes(4096))) == payload_checksum(bytes(4096)) != 0
