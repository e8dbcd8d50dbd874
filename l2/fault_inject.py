"""An adapter around another one that fails on schedule, for tests and for rehearsals.

    {"type": "fault_inject", "inner": {"type": "fs", ...}, "seed": 1,
     "faults": [{"operation": "store", "fault": "EIO", "rate": 0.01}]}

What strikes strikes single items (rules: `faults`):

    EIO, EINVAL   the item fails with that errno and the inner adapter does not see it (lookup: not present; delete: 0)
    ENOSPC        a store finds no space; other operations as EIO
    short         store: EIO after a part; load: the view is filled in part, then EIO
    bit_flip      store: a bit of the payload is damaged at rest, under its right checksum, so the inner adapter
                  finds out when it loads; load: a bit changed on the way, found out: the object is CORRUPT and gone
    stall         the item waits for ``seconds``, then goes on
"""

from __future__ import annotations

import builtins
import errno
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvkeep.l2.adapter import (
    OK,
    Adapter,
    AdapterError,
    Fetched,
    Item,
    Key,
    Listing,
    Outcome,
    Result,
    TenantUse,
    Usage,
    Verified,
)
from kvkeep.l2.faults import Fault, Schedule, rules_of
from kvkeep.l2.options import Options
from kvkeep.l2.record import payload_checksum

OPERATIONS = ("open", "lookup", "store", "load", "delete", "list", "usage", "verify")


class FaultInjectAdapter(Adapter):
    """See the module."""

    type_name = "fault_inject"

    def __init__(self, config: Mapping[str, object]) -> None:
        from kvkeep.l2.registry import create_adapter  # the registry knows this module

        options = Options("fault_inject", config)
        inner = options.table("inner")
        if not inner:
            raise options.wrong("inner", inner, 'the adapter that is to fail, an object like {"type": "mock"}')
        if "serde" in inner:
            raise AdapterError("fault_inject: 'inner' has a 'serde', which is the mover's: give it beside 'inner'")
        self.inner = create_adapter(inner)
        self._schedule = Schedule(rules_of(options), options.count("seed", 0), OPERATIONS)
        options.done()
        self.counters: Counter[str] = self.inner.counters
        self.keeps_encodings = self.inner.keeps_encodings
        self._closing = threading.Event()

    def _strikes(self, operation: str) -> Fault | None:
        """A stall is waited out here (until close)."""
        fault = self._schedule.next(operation)
        if fault is None:
            return None
        self.counters[f"injected_{fault.kind}"] += 1
        if fault.kind == "stall":
            self._closing.wait(fault.seconds)
            return None
        return fault

    def open(self) -> None:
        self._closing.clear()
        if (fault := self._strikes("open")) is not None:
            raise AdapterError(f"fault_inject: open fails with {fault.kind}, as configured")
        self.inner.open()

    def close(self) -> None:
        self._closing.set()
        self.inner.close()

    def lookup(self, keys: Sequence[Key]) -> builtins.list[bool]:
        struck = [self._strikes("lookup") is not None for _ in keys]
        return [there and not hit for there, hit in zip(self.inner.lookup(keys), struck, strict=True)]

    def touch(self, keys: Sequence[Key]) -> builtins.list[bool]:
        struck = [self._strikes("lookup") is not None for _ in keys]
        return [there and not hit for there, hit in zip(self.inner.touch(keys), struck, strict=True)]

    def store(self, items: Sequence[Item]) -> builtins.list[Result]:
        results: builtins.list[Result | None] = []
        passed = []
        for item in items:
            fault = self._strikes("store")
            if fault is not None and fault.kind == "bit_flip":
                sum_ = item.checksum or payload_checksum(item.payload)
                passed.append(item._replace(payload=_flipped(item.payload, fault), checksum=sum_))
                results.append(None)
            elif fault is None:
                passed.append(item)
                results.append(None)
            elif fault.kind == "ENOSPC":
                results.append(Result(Outcome.NO_SPACE, errno.ENOSPC, "injected ENOSPC"))
            else:
                results.append(_failure(fault))
        inner = iter(self.inner.store(passed))
        return [result or next(inner) for result in results]

    def load(self, items: Sequence[tuple[Key, memoryview]]) -> builtins.list[Result]:
        faults = [self._strikes("load") for _ in items]
        reads = [item for item, fault in zip(items, faults, strict=True) if _reads(fault)]
        inner = iter(self.inner.load(reads))
        results = []
        for (key, into), fault in zip(items, faults, strict=True):
            result = next(inner) if _reads(fault) else Result(Outcome.OK)
            if fault is None or result.outcome != Outcome.OK:
                results.append(result)
            elif fault.kind == "bit_flip":
                into[:] = _flipped(into, fault)
                self.inner.delete([key])
                results.append(Result(Outcome.CORRUPT, detail="injected bit flip"))
            else:
                if fault.kind == "short":
                    cut = fault.luck % len(into)
                    into[cut:] = bytes(len(into) - cut)
                results.append(_failure(fault))
        return results

    def fetch(self, items: Sequence[tuple[Key, int]]) -> builtins.list[Fetched]:
        """Struck like a load: "short" gives no part of the payload."""
        faults = [self._strikes("load") for _ in items]
        reads = [item for item, fault in zip(items, faults, strict=True) if _reads(fault)]
        inner = iter(self.inner.fetch(reads))
        fetched = []
        for (key, _), fault in zip(items, faults, strict=True):
            one = next(inner) if _reads(fault) else Fetched(OK)
            if fault is None or one.outcome != Outcome.OK:
                fetched.append(one)
            elif fault.kind == "bit_flip":
                self.inner.delete([key])
                fetched.append(Fetched(Result(Outcome.CORRUPT, detail="injected bit flip")))
            else:
                fetched.append(Fetched(_failure(fault)))
        return fetched

    def delete(self, keys: Sequence[Key]) -> int:
        return self.inner.delete([key for key in keys if self._strikes("delete") is None])

    def list(self, cursor: bytes, limit: int) -> Listing:
        return Listing([], b"", unreadable=1) if self._strikes("list") else self.inner.list(cursor, limit)

    def erase(self, keys: Sequence[Key]) -> builtins.list[bool]:
        spared = [self._strikes("delete") is not None for _ in keys]
        inner = iter(self.inner.erase([key for key, spare in zip(keys, spared, strict=True) if not spare]))
        return [not spare and next(inner) for spare in spared]

    def serdes(self, keys: Sequence[Key]) -> builtins.list[tuple[int, ...]]:
        return self.inner.serdes(keys)

    def verify(self, cursor: bytes, nbytes: int) -> Verified:
        """A struck verification reads nothing, and says so."""
        if self._strikes("verify"):
            return Verified(0, 0, 0, 1, ["injected failure"], b"")
        return self.inner.verify(cursor, nbytes)

    # Not struck: what the objects are is no operation of its own.

    def describe(self, namespace: bytes, manifest: bytes) -> Result:
        return self.inner.describe(namespace, manifest)

    def described(self, namespace: bytes) -> bytes:
        return self.inner.described(namespace)

    def undescribe(self, namespace: bytes) -> bool:
        return self.inner.undescribe(namespace)

    def manifests(self) -> int:
        return self.inner.manifests()

    def tenants(self) -> dict[str, TenantUse]:
        return self.inner.tenants()

    def trouble(self) -> str:
        return self.inner.trouble()

    def compact(self) -> Iterator[tuple[str, int]]:
        return self.inner.compact()

    def usage(self) -> Usage:
        self._strikes("usage")
        return self.inner.usage()


def _reads(fault: Fault | None) -> bool:
    return fault is None or fault.kind in ("bit_flip", "short")


def _failure(fault: Fault) -> Result:
    name = fault.kind if fault.kind != "short" else "EIO"
    return Result(Outcome.IO_ERROR, getattr(errno, name), f"injected {fault.kind}")


def _flipped(payload: memoryview, fault: Fault) -> memoryview:
    copy = bytearray(payload)
    copy[fault.luck % len(copy)] ^= 1 << (fault.luck >> 61)
    return memoryview(copy)
