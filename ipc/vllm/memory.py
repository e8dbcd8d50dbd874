"""The engine's paged KV memory as the copy threads see it, wherever it lies, and how an extent is filled.

A *plane* is a set of layers of one KV cache group whose pages have one size and lie at equal strides.  One chunk's
extent holds the groups one after another, of each its planes, each as a dense [layer, block of the chunk, byte]::

    extent  | group 0: plane 0: layer 0: b0 b1 .. | layer 1: b0 b1 .. | ... | plane 1: ... | group 1: ... |

That is the same for every device.  How the bytes get there is not: `pages.Pages` copies on the CPU with numpy,
`cuda.memory.CudaMemory` lets a GPU copy.  For both,

  * the engine's thread takes a `fence` when it hands a job over: no copy of that job begins before everything that the
    engine had asked of its device by then is done;
  * any thread may gather (store) and scatter (load), at any time.  When they return *or raise*, not a byte is moved any
    more: blocks may be given back, and extents too.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.ipc.vllm.groups import BlockTable

Bytes = NDArray[np.uint8]


class UnknownLayout(Exception):
    """One sentence: what about the KV memory we do not understand."""


class PlaneShape(NamedTuple):
    layers: int
    page_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes


class Section(NamedTuple):
    """The part of an extent that one plane fills: bytes start .. start + layers * len(ids) * page_bytes."""

    group: int
    plane: int
    shape: PlaneShape
    ids: Sequence[int]  # block ids, or ABSENT
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.ids) * self.shape.block_bytes

    def dense(self, extent: Bytes) -> Bytes:
        """A view [layers, blocks, page bytes] of the extent."""
        return extent[self.start : self.end].reshape(self.shape.layers, len(self.ids), self.shape.page_bytes)


class Levels(NamedTuple):
    """Of host memory, in bytes, now."""

    pinned: int  # of the arena
    arena: int


class KVMemory(abc.ABC):
    """All planes of one rank, by group."""

    def __init__(self, shapes: Sequence[Sequence[PlaneShape]], block_sizes: Sequence[int]) -> None:
        """``block_sizes``: tokens of a block, per group.  Raises UnknownLayout if a group has no plane."""
        if not shapes or not all(shapes):
            raise UnknownLayout("a KV cache group has no KV memory")
        self._shapes = tuple(tuple(of_group) for of_group in shapes)
        self._block_sizes = tuple(block_sizes)
        self.block_bytes = tuple(sum(shape.block_bytes for shape in group) for group in self._shapes)  # all layers

    # ---- how an extent is filled -------------------------------------------------------------------------------------

    def bytes_of(self, blocks: BlockTable) -> int:
        return sum(size * len(ids) for size, ids in zip(self.block_bytes, blocks, strict=True))

    def sections(self, blocks: BlockTable) -> Iterator[Section]:
        start = 0
        for group, (shapes, ids) in enumerate(zip(self._shapes, blocks, strict=True)):
            for plane, shape in enumerate(shapes):
                section = Section(group, plane, shape, ids, start)
                yield section
                start = section.end

    def check(self, extent: Bytes, blocks: BlockTable) -> None:
        """Raises ValueError if the extent is not of the size that these blocks fill."""
        if extent.nbytes != self.bytes_of(blocks):
            raise ValueError(f"an extent of {extent.nbytes} bytes, {self.bytes_of(blocks)} were expected")

    def describe(self) -> list[dict[str, object]]:
        """For the identity: how an extent is filled.  Strides of the engine's own memory are not part of it."""
        return [
            {
                "block_size": size,
                "planes": [{"layers": shape.layers, "page_bytes": shape.page_bytes} for shape in shapes],
            }
            for shapes, size in zip(self._shapes, self._block_sizes, strict=True)
        ]

    # ---- copying -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def gather_all(self, extents: Sequence[Bytes], tables: Sequence[BlockTable], after: Any) -> None:
        """Copy the blocks of each chunk into its extent, once ``after`` (a fence) is over; what is absent becomes
        zeros."""

    @abc.abstractmethod
    def scatter_all(self, extents: Sequence[Bytes], tables: Sequence[BlockTable], after: Any) -> None:
        """Copy each extent into the blocks of its chunk that are not absent, once ``after`` (a fence) is over."""

    def at_once(self, extent_bytes: int) -> int:
        """How many chunks to copy in one call.  Deadlines are looked at between calls."""
        return 1

    def fence(self) -> Any:
        """On the engine's thread.  Keep it until the job that it is for has ended."""
        return None

    # ---- its state ---------------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """A sentence: nothing can be copied any more, until the engine ends.  Empty = all is well."""
        return ""

    def levels(self) -> Levels | None:
        """None: there is nothing to tell, on this device."""
        return None

    def use(self, client: Any) -> None:
        """The client whose arenas the extents will be in; before the first copy."""
        return

    def close(self) -> None:
        """After the client was closed.  Best effort and short."""
        return
