"""The daemon's stats page as a document.

The meta segment is mapped read-only.  The document is decoded at most every `CACHE_S`, however many ask.  It says when
the control process wrote it: an old one means that control is stuck, since it writes at least every few seconds.
``monotonic_s`` is preferred to ``time``, because the wall clock may be set; both processes have the same clocks.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from kvkeep.shm.layout import ENTRY_OFFSET, MAX_NAMESPACES, NAMESPACE, NAMESPACE_BYTES, NAMESPACE_OFFSET
from kvkeep.shm.namespaces import namespace_digest, tenant_of
from kvkeep.shm.stats import read_stats

CACHE_S = 0.1
STALE_AFTER_S = 10.0
_UNKNOWN = ("", "")


class StatsSource:
    def __init__(self, fd: int) -> None:
        """``fd`` of the meta segment; it is closed here, the mapping stays."""
        try:
            self._map = mmap.mmap(fd, ENTRY_OFFSET, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._meta = np.frombuffer(self._map, dtype=np.uint8)
        self._lock = threading.Lock()
        self._document: dict[str, Any] = {}
        self._about: dict[tuple[Any, Any], tuple[str, str]] = {}  # model and tenant, by id and digest
        self._read_at = -CACHE_S

    def document(self) -> dict[str, Any]:
        """The latest one; empty until the first was written."""
        with self._lock:
            now = time.monotonic()
            if now - self._read_at >= CACHE_S:
                self._read_at = now
                try:
                    document = json.loads(read_stats(self._meta) or b"{}")
                except ValueError:
                    document = {}
                if isinstance(document, dict) and document:
                    self._name_models(document)
                    self._document = document
            return self._document

    def _name_models(self, document: dict[str, Any]) -> None:
        """Namespaces get the model's name from their manifest, which is in the same segment."""
        spaces = document.get("namespaces")
        about = {}
        for space in spaces if isinstance(spaces, list) else []:
            if isinstance(space, dict):
                key = (space.get("id"), space.get("digest"))
                known = self._about.get(key, _UNKNOWN)
                about[key] = known if known != _UNKNOWN else self._look_up(*key)
                space.setdefault("model", about[key][0])
        self._about = about

    def bytes_by_tenant(self) -> dict[str, int]:
        """Of L1.  Not part of the document: a tenant may be a salt, which is not everybody's to know."""
        spaces = self.document().get("namespaces")
        with self._lock:
            found: Counter[str] = Counter()
            for space in spaces if isinstance(spaces, list) else []:
                if isinstance(space, dict) and isinstance(space.get("bytes"), int):
                    found[self._about.get((space.get("id"), space.get("digest")), _UNKNOWN)[1]] += space["bytes"]
            return dict(found)

    def _look_up(self, number: Any, digest: Any) -> tuple[str, str]:
        if not isinstance(number, int) or not 0 < number <= MAX_NAMESPACES:
            return _UNKNOWN
        at = NAMESPACE_OFFSET + (number - 1) * NAMESPACE_BYTES
        slot = self._meta[at : at + NAMESPACE_BYTES].tobytes()  # a copy: control may be writing it
        head = np.frombuffer(slot, dtype=NAMESPACE, count=1)[0]
        manifest = slot[NAMESPACE.itemsize :][: int(head["length"])]
        if namespace_digest(manifest, int(head["shards"]), int(head["shard_bytes"])).hex() != digest:
            return _UNKNOWN
        try:
            return str(json.loads(manifest).get("model", "")), tenant_of(manifest)
        except (ValueError, AttributeError, RecursionError):
            return _UNKNOWN


def age_s(document: dict[str, Any]) -> float:
    """Seconds since control wrote it; 0 when it does not tell."""
    for field, clock in (("monotonic_s", time.monotonic), ("time", time.time)):
        written = document.get(field)
        if isinstance(written, (int, float)):
            return max(0.0, clock() - written)
    return 0.0


def problems(document: dict[str, Any]) -> list[str]:
    """Why the daemon is not ready; empty when it is."""
    if not document:
        return ["the daemon has not written its first statistics yet"]
    found = []
    age = age_s(document)
    if age > STALE_AFTER_S:
        found.append(f"the control process has written no statistics for {age:.0f} s: it hangs or is stopped")
    if document.get("health") != "ok":
        found.extend(str(reason) for reason in document.get("reasons") or ["degraded"])
    return found
