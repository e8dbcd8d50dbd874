"""The engine's host pools by name, each with its shelf, and what of a prefix can be restored from all of them (v2).

Models whose KV is not all of one kind (recurrent state, sliding windows, an indexer) have a host pool for each kind
beside the main one, "kv".  A key names the same page in all of them; each pool is a namespace of its own.

    all_pages        a prefix of n pages needs all n of that pool
    trailing_pages   ... the last few before its end: how many is the length of the transfer's keys
    block_groups     a second form of the same KV, which never shortens a hit: nothing is said about it

Which rank holds what: in a model whose KV all ranks hold alike (MLA) the first writes it for all, but recurrent state
is split over the ranks all the same, and SGLang lets each rank write its own.  A draft model's KV is of either kind,
and only the first rank is asked to write it: where it is not MLA too it is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvkeep.ipc.sglang.pages import HostPages
from kvkeep.ipc.sglang.shelf import Role, Shelf

KV = "kv"
_PER_RANK = "mamba"
_DRAFTS = ("draft", "draft_swa")


class Pool(NamedTuple):
    pages: HostPages
    shelf: Shelf


class Restorable(NamedTuple):
    """For `PoolTransferResult`: lengths in pages."""

    lengths: list[int]  # of the prefixes that can be restored, ascending
    boundary: dict[Any, int]  # per pool that was asked: how far it reaches; without the pools that have nothing

    @property
    def longest(self) -> int:
        return self.lengths[-1] if self.lengths else 0


def text_of(name: Any) -> str:
    """SGLang's names are an enum of strings."""
    return str(getattr(name, "value", name))


def role_of(config: Any, name: str, host_pool: Any) -> Role | None:
    """None = this pool is not kept."""
    tp, tp_rank = int(config.tp_size), int(config.tp_rank)
    cp, cp_rank = int(getattr(config, "attn_cp_size", 1) or 1), int(getattr(config, "attn_cp_rank", 0) or 0)
    alike = bool(config.is_mla_model) and name != _PER_RANK
    if alike and name in _DRAFTS and tp > 1 and not _is_mla(host_pool):
        return None
    if alike:
        return Role(cp, cp_rank, tp_rank == 0)
    return Role(tp * cp, cp_rank * tp + tp_rank, True)


def _is_mla(host_pool: Any) -> bool:
    return any("MLA" in cls.__name__ for cls in type(host_pool).__mro__)


def restorable(
    keys: Sequence[str], kv: Pool, transfers: Sequence[Any], find: Callable[[Any], Pool | None]
) -> Restorable:
    """Which prefixes of ``keys`` are in the main pool and in those of ``transfers``."""
    count = kv.shelf.exists(keys)
    lengths = list(range(1, count + 1))
    boundary: dict[Any, int] = {KV: count} if count else {}
    for transfer in transfers:
        policy = text_of(transfer.hit_policy)
        if policy == "block_groups" or not lengths:
            continue
        pool = find(transfer.name)
        fits: set[int] = set()
        if pool is not None and policy == "all_pages":
            fits = set(range(1, pool.shelf.exists(keys[:count]) + 1))
        elif pool is not None and policy == "trailing_pages":
            fits = _trailing(pool.shelf.present(keys[:count]), max(1, len(transfer.keys or ())))
        if fits:
            boundary[transfer.name] = max(fits)
        lengths = [length for length in lengths if length in fits]
    return Restorable(lengths, boundary)


def _trailing(present: Sequence[bool], window: int) -> set[int]:
    """Lengths of prefixes whose last ``window`` pages (all, if it is shorter) are there."""
    fits: set[int] = set()
    run = 0
    for length, here in enumerate(present, 1):
        run = run + 1 if here else 0
        if run >= min(window, length):
            fits.add(length)
    return fits
