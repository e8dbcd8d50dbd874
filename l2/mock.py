"""An adapter over this process's own memory, with the latency and the bandwidth of a medium that one would like to try.

    {"type": "mock", "capacity_gb": 1.0, "latency_ms": 0, "bandwidth_gb": 0}

``bandwidth_gb`` (GB/s, 0 = no limit) is shared by all threads, as a device's is; ``latency_ms`` is paid per call.
Objects are whole records, header and payload, and are verified like on a real medium, so tests can damage them.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from kvkeep.l2.adapter import (
    MISS,
    OK,
    Adapter,
    AdapterError,
    Fetched,
    Item,
    Key,
    Listing,
    Outcome,
    Result,
    Usage,
    Verified,
)
from kvkeep.l2.options import Options
from kvkeep.l2.record import HEADER_BYTES, Header, header_of, pack, payload_checksum, unpack


class MockAdapter(Adapter):
    """See the module."""

    type_name = "mock"
    keeps_encodings = True

    def __init__(self, config: Mapping[str, object]) -> None:
        options = Options("mock", config)
        self._limit = options.gib("capacity_gb", 1.0, least=1e-6)
        self._latency_s = options.number("latency_ms", 0.0, most=1e6) / 1000
        self._bytes_per_s = options.number("bandwidth_gb", 0.0, most=1e6) * 1e9
        options.done()
        self.counters: Counter[str] = Counter()
        self.objects: OrderedDict[Key, bytearray] = OrderedDict()  # least recent first
        self._used = 0
        self._open = False
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def open(self) -> None:
        if self._limit < HEADER_BYTES:
            raise AdapterError(f"mock: capacity_gb is {self._limit} bytes, less than one header")
        self._open = True

    def close(self) -> None:
        self._open = False

    def _wait(self, transferred: int) -> None:
        """What the transfer of so many bytes would have taken, behind the ones that others asked for before."""
        now = time.monotonic()
        with self._lock:
            until = now
            if self._bytes_per_s:
                until = self._busy_until = max(self._busy_until, now) + transferred / self._bytes_per_s
        if (left := until + self._latency_s - time.monotonic()) > 0:
            time.sleep(left)

    def lookup(self, keys: Sequence[Key]) -> list[bool]:
        self._wait(0)
        with self._lock:
            return [key in self.objects for key in keys]

    def store(self, items: Sequence[Item]) -> list[Result]:
        self._wait(sum(len(item.payload) for item in items))
        return [self._store(item) for item in items]

    def _store(self, item: Item) -> Result:
        key, payload = item.key, item.payload
        need = HEADER_BYTES + len(payload)
        if need > self._limit:
            self.counters["too_large"] += 1
            detail = f"{len(payload)} bytes and a header can never fit into the {self._limit} bytes of capacity_gb"
            return Result(Outcome.TOO_LARGE, detail=detail)
        header = header_of(item)
        with self._lock:
            if key in self.objects:
                self.objects.move_to_end(key)
                self.counters["present"] += 1
                return OK
            while self._used + need > self._limit:
                self._forget(next(iter(self.objects)))
                self.counters["evicted"] += 1
            self.objects[key] = bytearray(pack(header)) + payload
            self._used += need
            self.counters["stored"] += 1
        return OK

    def load(self, items: Sequence[tuple[Key, memoryview]]) -> list[Result]:
        self._wait(sum(len(into) for _, into in items))
        return [self._load(*item) for item in items]

    def _load(self, key: Key, into: memoryview) -> Result:
        with self._lock:
            found = self._verified(key)
            if isinstance(found, Result):
                return found
            header, payload = found
            if header.encoding is not None:
                return Result(Outcome.ENCODED)
            if len(payload) != len(into):
                self.counters["wrong_length"] += 1
                return Result(Outcome.MISS, detail=f"{len(payload)} bytes are stored, {len(into)} were asked for")
            into[:] = payload
            self.objects.move_to_end(key)
            self.counters["loaded"] += 1
        return OK

    def fetch(self, items: Sequence[tuple[Key, int]]) -> list[Fetched]:
        fetched = [self._fetch(*item) for item in items]
        self._wait(sum(len(one.payload) for one in fetched))
        return fetched

    def _fetch(self, key: Key, most: int) -> Fetched:
        with self._lock:
            found = self._verified(key)
            if isinstance(found, Result):
                return Fetched(found)
            header, payload = found
            if len(payload) > most:
                self.counters["wrong_length"] += 1
                return Fetched(Result(Outcome.MISS, detail=f"{len(payload)} bytes are stored, at most {most} wanted"))
            self.objects.move_to_end(key)
            self.counters["loaded"] += 1
            return Fetched(OK, memoryview(bytes(payload)), header.encoding)

    def _verified(self, key: Key) -> tuple[Header, memoryview] | Result:
        """Of an object that is there and good, header and payload; otherwise what became of it.  Under the lock."""
        record = self.objects.get(key)
        if record is None:
            self.counters["missed"] += 1
            return MISS
        header, payload = unpack(memoryview(record)), memoryview(record)[HEADER_BYTES:]
        good = header is not None and header.key == key and header.stored_bytes == len(payload)
        if header is not None and good and payload_checksum(payload) == header.checksum:
            return header, payload
        payload.release()
        self._forget(key)
        self.counters["corrupt"] += 1
        return Result(Outcome.CORRUPT, detail="the object did not verify and is removed")

    def _forget(self, key: Key) -> None:
        self._used -= len(self.objects.pop(key))

    def delete(self, keys: Sequence[Key]) -> int:
        self._wait(0)
        with self._lock:
            there = [key for key in dict.fromkeys(keys) if key in self.objects]
            for key in there:
                self._forget(key)
        self.counters["deleted"] += len(there)
        return len(there)

    def list(self, cursor: bytes, limit: int) -> Listing:
        with self._lock:
            after = sorted(key for key in self.objects if _flat(key) > cursor)
            page = [(key, len(self.objects[key]) - HEADER_BYTES) for key in after[:limit]]
        return Listing(page, _flat(page[-1][0]) if len(after) > limit and page else b"")

    def serdes(self, keys: Sequence[Key]) -> builtins.list[tuple[int, ...]]:
        with self._lock:
            headers = [unpack(memoryview(self.objects[key])) if key in self.objects else None for key in keys]
        return [header.serdes if header is not None else () for header in headers]

    def verify(self, cursor: bytes, nbytes: int) -> Verified:
        page = self.list(cursor, 1)
        self._wait(sum(size for _, size in page.objects))
        with self._lock:
            found = [self._verified(key) for key, _ in page.objects]
        corrupt = [isinstance(one, Result) and one.outcome == Outcome.CORRUPT for one in found]
        which = zip(page.objects, corrupt, strict=True)
        details = [f"{key.chunk.hex()[:12]}: did not verify; it is removed" for (key, _), bad in which if bad]
        read = sum(size for _, size in page.objects)
        return Verified(len(found), read, sum(corrupt), 0, details, page.cursor)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._used, self._limit, len(self.objects))


def _flat(key: Key) -> bytes:
    return key.namespace + key.chunk + key.shard.to_bytes(4, "big") + key.shards.to_bytes(4, "big")
