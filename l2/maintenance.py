"""Management of one medium, cut into steps: list, count, describe, verify, wipe, compact.

The entries of the catalogue (catalogue.py) are neither listed nor counted as objects; they are verified like these, and
go with their namespaces.

A step is small (STEP_S, or one batch of the adapter), so that whoever asks can stop at any time, and whoever loads or
stores meanwhile waits for one step at most.  Where the next step goes on is in its cursor, which the asker keeps; only
a compaction that is under way is remembered here.

    asker ── what, namespace, cursor ──► step ── Step ──► asker ── its cursor ──► …  until the cursor is empty

The mover does this for control, and `kvkeep l2 --adapter` does it for itself when there is no daemon.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from kvkeep.l2.adapter import Adapter, Key
from kvkeep.l2.catalogue import CATALOGUE

STEP_S = 0.1
PAGE = 256  # objects of a step
VERIFY_BYTES = 16 << 20
MAX_DETAILS = 8
MAX_TENANTS = 128  # those with the most bytes
_GOES_ON = b"+"


class What(str, enum.Enum):
    LIST = "list"  # rows
    TALLY = "tally"  # objects and bytes by namespace; the last step has the tenants
    MANIFEST = "manifest"  # of a namespace
    VERIFY = "verify"  # reads and checks; what is corrupt is removed
    WIPE = "wipe"  # removes every object (of a namespace)
    COMPACT = "compact"


class Row(msgspec.Struct, frozen=True, array_like=True):
    namespace: bytes
    chunk: bytes
    shard: int
    shards: int
    nbytes: int  # of payload at rest
    serdes: tuple[int, ...] = ()


class Step(msgspec.Struct, array_like=True):
    """What one step did."""

    cursor: bytes = b""  # b"" = that was the last
    objects: int = 0  # looked at; WIPE: removed
    nbytes: int = 0
    corrupt: int = 0
    unreadable: int = 0  # not looked at; WIPE: not removed either
    rows: list[Row] = []
    spaces: dict[bytes, tuple[int, int]] = {}  # by namespace: objects, bytes
    details: list[str] = []
    did: dict[str, int] = {}  # COMPACT
    manifest: bytes = b""  # MANIFEST; empty = the medium does not know it
    tenants: dict[str, tuple[int, int]] = {}  # TALLY: bytes on the medium, quota (-1 = none); empty = not told apart


class Maintenance:
    """Called by one thread at a time."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._compaction: Iterator[tuple[str, int]] | None = None

    def step(self, what: str, namespace: bytes, cursor: bytes, limit: int = 0) -> Step:
        """ValueError for an unknown ``what``; what the adapter raises goes through."""
        steps = {
            What.LIST: self._list,
            What.TALLY: self._tally,
            What.MANIFEST: self._manifest,
            What.VERIFY: self._verify,
            What.WIPE: self._wipe,
            What.COMPACT: self._compact,
        }
        return steps[What(what)](namespace, cursor, min(limit, PAGE) or PAGE)

    def _list(self, namespace: bytes, cursor: bytes, limit: int) -> Step:
        page = self._adapter.list(cursor, limit)
        mine = [(key, size) for key, size in page.objects if _is_of(key, namespace)]
        chains = self._adapter.serdes([key for key, _ in mine]) if mine else []
        rows = [Row(*key, size, serdes) for (key, size), serdes in zip(mine, chains, strict=True)]
        return Step(page.cursor, len(rows), sum(row.nbytes for row in rows), unreadable=page.unreadable, rows=rows)

    def _tally(self, namespace: bytes, cursor: bytes, limit: int) -> Step:
        until, step = time.monotonic() + STEP_S, Step(cursor)
        objects: Counter[bytes] = Counter()
        nbytes: Counter[bytes] = Counter()
        while True:
            page = self._adapter.list(step.cursor, limit)
            for key, size in page.objects:
                if _is_of(key, namespace):
                    objects[key.namespace] += 1
                    nbytes[key.namespace] += size
            step.cursor, step.unreadable = page.cursor, step.unreadable + page.unreadable
            if not page.cursor or time.monotonic() > until or len(objects) > PAGE:
                break
        if not step.cursor:
            used = sorted(self._adapter.tenants().items(), key=lambda tenant: -tenant[1].bytes_used)
            step.tenants = {name: (use.bytes_used, use.quota) for name, use in used[:MAX_TENANTS]}
        step.spaces = {space: (count, nbytes[space]) for space, count in objects.items()}
        step.objects, step.nbytes = objects.total(), nbytes.total()
        return step

    def _manifest(self, namespace: bytes, cursor: bytes, limit: int) -> Step:
        return Step(manifest=self._adapter.described(namespace))

    def _verify(self, namespace: bytes, cursor: bytes, limit: int) -> Step:
        until, step = time.monotonic() + STEP_S, Step(cursor)
        while True:
            piece = self._adapter.verify(step.cursor, VERIFY_BYTES)
            step.cursor = piece.cursor
            step.objects += piece.objects
            step.nbytes += piece.nbytes
            step.corrupt += piece.corrupt
            step.unreadable += piece.unreadable
            step.details = [*step.details, *(detail[:300] for detail in piece.details)][:MAX_DETAILS]
            if not piece.cursor or step.nbytes >= VERIFY_BYTES or time.monotonic() > until:
                return step

    def _wipe(self, namespace: bytes, cursor: bytes, limit: int) -> Step:
        """Ends at the end of the list; if it says ``unreadable`` anywhere, begin again."""
        page = self._adapter.list(cursor, limit)
        mine = [(key, size) for key, size in page.objects if not namespace or key.namespace == namespace]
        gone = self._adapter.erase([key for key, _ in mine]) if mine else []
        went = [(key, size) for (key, size), done in zip(mine, gone, strict=True) if done and _is_of(key, b"")]
        left = page.unreadable + len(gone) - sum(gone)
        if namespace and not page.cursor and not left:
            left += not self._adapter.undescribe(namespace)
        return Step(page.cursor, len(went), sum(size for _, size in went), unreadable=left)

    def _compact(self, namespace: bytes, cursor: bytes, limit: int) -> Step:
        if not cursor or self._compaction is None:
            self._compaction = self._adapter.compact()
        until = time.monotonic() + STEP_S
        did: Counter[str] = Counter()
        for name, count in self._compaction:
            did[name] += count
            if time.monotonic() > until:
                return Step(_GOES_ON, did=dict(did))
        self._compaction = None
        return Step(did=dict(did))


def _is_of(key: Key, namespace: bytes) -> bool:
    return key.namespace == namespace if namespace else key.namespace != CATALOGUE
