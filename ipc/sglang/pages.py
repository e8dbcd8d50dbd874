"""The pages of one of SGLang's host pools, as runs of bytes in CPU memory.

A page is what one key names: ``page_size`` tokens of all layers.  Where it lies depends on the pool's layout:

    page_first, page_first_direct, page_head    K in one run, V in another (MLA: one run)
    layer_first                                 K and V of each layer, 2 * layers runs (MLA: one per layer)

The pool itself says so: ``get_page_buffer_meta(indices)`` gives addresses and sizes, page after page, the same number
for each.  They are copied from and to as they are.  A pool that cannot say it (``packing`` "flat") gives and takes each
page as one flat tensor, which costs one more copy.  The bytes of the two may be in another order, so the packing is
part of the identity.

A pool may have no bytes at all (an anchor of other pools): its pages are then only known to be there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvkeep.ipc.buffers import Bytes, as_bytes

Page = list[Bytes]  # the runs of one page, in their order


class Targets(NamedTuple):
    """Where to read pages to; ``done(i)`` must follow for each page that was read."""

    pages: list[Page]
    done: Callable[[int], None]


class HostPages:
    """Raises ValueError if the pool's pages cannot be reached by this process."""

    def __init__(self, pool: Any, *, flat: bool = False) -> None:
        self.pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        device = str(getattr(pool, "device", "cpu"))
        if device != "cpu":
            raise ValueError(f"its host pool {type(pool).__name__} is on {device}, not in CPU memory")
        sizes = None if flat else self._sizes()
        self.packing = "flat" if sizes is None else "buffers"
        self.sizes = [as_bytes(pool.get_dummy_flat_data_page()).size] if sizes is None else sizes
        self.page_bytes = sum(self.sizes)

    def _sizes(self) -> list[int] | None:
        """Of the runs of one page.  None = the pool does not say."""
        try:
            meta = self.pool.get_page_buffer_meta(_range(self.page_tokens))
        except Exception:  # whatever it says: not in this layout, not in this pool
            return None
        if meta is None:
            return []
        addresses, sizes = meta
        return _each(sizes, len(addresses))

    def _check(self, keys: int, indices: Any) -> None:
        count = 0 if indices is None else len(indices)
        if count != keys * self.page_tokens:
            raise ValueError(f"{count} host indices for {keys} pages of {self.page_tokens} tokens")

    def sources(self, count: int, indices: Any) -> list[Page]:
        """Of the ``count`` pages at these host indices (``page_tokens`` for each page)."""
        self._check(count, indices)
        if self.packing == "buffers":
            return self._buffers(count, indices)
        return [[self._flat(self.pool.get_data_page(index, flat=True))] for index in self._first_of(indices)]

    def targets(self, count: int, indices: Any) -> Targets:
        self._check(count, indices)
        if self.packing == "buffers":
            return Targets(self._buffers(count, indices), lambda i: None)
        first_of = self._first_of(indices)
        staged = [self.pool.get_dummy_flat_data_page() for _ in first_of]
        return Targets(
            [[self._flat(page)] for page in staged],
            lambda i: self.pool.set_from_flat_data_page(first_of[i], staged[i]),
        )

    def _first_of(self, indices: Any) -> list[int]:
        return [int(index) for index in indices[:: self.page_tokens]]

    def _flat(self, page: Any) -> Bytes:
        flat = as_bytes(page)
        if flat.size != self.page_bytes:
            raise ValueError(f"a page of {flat.size} bytes in a pool of pages of {self.page_bytes}")
        return flat

    def _buffers(self, count: int, indices: Any) -> list[Page]:
        each = len(self.sizes)
        if not each:
            return [[] for _ in range(count)]
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        if _each(sizes, len(addresses)) != self.sizes * count:
            raise ValueError(f"{len(addresses)} buffers for {count} pages of {each}, or of other sizes than before")
        runs = _memory(addresses, self.sizes * count)
        return [runs[at : at + each] for at in range(0, len(runs), each)]


def _range(count: int) -> Any:
    """As the engine's own indices are."""
    torch = sys.modules.get("torch")
    return np.arange(count) if torch is None else torch.arange(count)


def _each(sizes: int | Sequence[int], count: int) -> list[int]:
    """Some pools give one size for all."""
    return [int(sizes)] * count if isinstance(sizes, int) else [int(size) for size in sizes]


class _Span:
    """Memory of this process, for numpy; nothing in it is touched but through slices."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (size,), "typestr": "|u1"}


def _memory(addresses: Sequence[int], sizes: Sequence[int]) -> list[Bytes]:
    """One slice of one array for each run: an array of its own costs five times as much, and there may be thousands."""
    low = min(addresses)
    high = max(address + size for address, size in zip(addresses, sizes, strict=True))
    span = np.asarray(_Span(low, high - low))
    return [span[address - low : address - low + size] for address, size in zip(addresses, sizes, strict=True)]
