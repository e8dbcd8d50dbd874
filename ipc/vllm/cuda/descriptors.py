"""Lists of copies between an extent and the GPU's pages, as arrays: a prompt of 32k tokens in 80 layers has 160,000.

A copy is a run of bytes that lies in one piece on both sides: one page, or several blocks of one layer that follow each
other both in the block table and in the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.ipc.vllm.groups import ABSENT
from kvkeep.ipc.vllm.memory import Section
from kvkeep.ipc.vllm.places import Place

I64 = NDArray[np.int64]


class Copies(NamedTuple):
    """Three arrays of one length; in ascending order of host addresses, none overlaps another there."""

    host: I64  # addresses, or offsets in an extent
    device: I64  # addresses
    sizes: I64  # bytes, > 0

    def moved(self, by: int) -> Copies:
        return Copies(self.host + by, self.device, self.sizes)


def of_section(section: Section, place: Place) -> Copies:
    """Host = offset in the extent.  Blocks that are absent are in none.  Raises ValueError for a block that is not
    there: the GPU would not tell before it is too late."""
    ids = np.asarray(section.ids, np.int64)
    if ids.size and (int(ids.max()) >= place.blocks or int(ids.min()) < ABSENT):
        raise ValueError(f"block ids from {ids.min()} to {ids.max()}, the engine has {place.blocks}")
    position, first, length = _runs(ids, joined=place.block_stride == section.shape.page_bytes)
    page, layers = section.shape.page_bytes, np.arange(section.shape.layers, dtype=np.int64)[:, np.newaxis]
    host = section.start + layers * (len(ids) * page) + position * page
    device = place.address + layers * place.layer_stride + first * place.block_stride
    return Copies(host.ravel(), device.ravel(), np.tile(length * page, len(layers)))


def _runs(ids: I64, *, joined: bool) -> tuple[I64, I64, I64]:
    """(position, first id, length) of the runs of consecutive ids; not ``joined``: every id is a run of its own."""
    there = np.flatnonzero(ids != ABSENT)
    present = ids[there]
    if not joined or not len(there):
        return there, present, np.ones_like(there)
    follows = (np.diff(there) == 1) & (np.diff(present) == 1)
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return there[starts], present[starts], np.diff(np.append(starts, len(there)))


def joined(parts: Sequence[Copies]) -> Copies:
    return parts[0] if len(parts) == 1 else Copies(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def cut(copies: Copies, origin: int, step: int) -> Copies:
    """The same bytes; no copy crosses, on the host's side, a multiple of ``step`` from ``origin``."""
    host, device, sizes = copies
    first = (host - origin) // step
    pieces = (host + sizes - 1 - origin) // step - first + 1
    if not len(pieces) or int(pieces.max()) == 1:
        return copies
    of = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # within its copy
    edge = origin + (first[of] + number) * step
    begin, end = np.maximum(host[of], edge), np.minimum(host[of] + sizes[of], edge + step)
    return Copies(begin, device[of] + (begin - host[of]), end - begin)
