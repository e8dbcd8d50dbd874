"""The `fs` adapter: one file per shard of a chunk, in one or several directories, up to a limit.

    {"type": "fs", "base_path": "/nvme/kv" | ["/nvme0/kv", "/nvme1/kv"], "capacity_gb": 500, "fsync": "none|data|full",
     "direct_io": "auto|on|off", "shared": false, "io_threads": 8,
     "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.95, "eviction_ratio": 0.05,
                  "tenant_quotas": {"team-a": 64}}}

    store:  reserve bytes (evict) ─► unnamed file ─► header + payload ─► fsync ─► name it ─► known
    load:   known ─► open ─► header page + payload, into the arena ─► verify header, key, length, checksum ─► recent

Names and ownership are in `fs_root`, bytes in `fs_io` and `fs_objects`, accounts in `fs_index`, eviction in `fs_room`;
here is the order of things.  Invariants:

* the medium never holds more than ``capacity_gb`` (default: 80 % of what is free or ours), counted in blocks, also
  right after a restart: `open` looks at every file before the first store;
* a file has its name only when it is whole.  "fsync": "data" makes the content durable before that, "full" also the
  name; with "none" a power cut may leave a name without content, which the checksum turns into a miss;
* whatever does not verify is a miss, is removed and counted; nothing in a file is trusted, links are not followed;
* several directories: a key lives where its hash ranks highest, so another directory moves only its own share.

With "shared": true several processes use the directories at once, all of them safely; each learns of the others' files
by looking again every few seconds, so then the limit is kept only approximately: by what others store in between.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from kvkeep.l2 import catalogue
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
    TenantUse,
    Usage,
    Verified,
)
from kvkeep.l2.fs_care import Care
from kvkeep.l2.fs_index import NAME_BYTES, CapacityIndex
from kvkeep.l2.fs_io import PAGE, FileIO, file_bytes
from kvkeep.l2.fs_objects import ObjectFiles, Seen
from kvkeep.l2.fs_room import Eviction, Room, scan
from kvkeep.l2.fs_root import Root, identity_of
from kvkeep.l2.fs_tally import FULL, GONE, NOT_OURS, Tally
from kvkeep.l2.options import Options
from kvkeep.l2.tenants import quotas_of
from kvkeep.shm.policies import eviction_policy

LEAST_GIB = 1e-4  # of capacity_gb: hardly room for one object
FREE_SHARE = 0.8  # of what is free or ours, when no capacity is given
_CLOSE_S = 30.0
_CLOSED = Result(Outcome.UNAVAILABLE, detail="the adapter is closed")

log = logging.getLogger("kvkeep.l2.fs")
R = TypeVar("R")


class FsAdapter(Adapter):
    """See the module."""

    type_name = "fs"
    keeps_encodings = True

    def __init__(self, config: Mapping[str, object], io: FileIO | None = None) -> None:
        options = Options("fs", config)
        paths = options.take("base_path")
        if isinstance(paths, str):
            paths = [paths]
        if (
            not isinstance(paths, list)
            or not paths
            or len(paths) > 255
            or not all(p and isinstance(p, str) for p in paths)
        ):
            raise options.wrong("base_path", paths, "a directory, or a list of 1 to 255 directories")
        paths = [os.path.normpath(options.absolute("base_path", path)) for path in paths]
        _check_distinct(paths)
        self._capacity = options.gib("capacity_gb", least=LEAST_GIB)
        self._fsync = options.choice("fsync", "none", ("none", "data", "full"))
        self._direct_io = options.choice("direct_io", "auto", ("auto", "on", "off"))
        self._shared = options.flag("shared", False)
        self._io_threads = options.count("io_threads", 8, least=1, most=256)
        eviction = Options("fs: eviction", options.table("eviction"), ignore=())
        policy = eviction.checked("eviction_policy", "LRU", eviction_policy)
        self._eviction = Eviction(
            policy,
            eviction.number("trigger_watermark", 0.95, most=1.0, above=0),
            eviction.number("eviction_ratio", 0.05, most=1.0, above=0),
            quotas_of(eviction, policy),
        )
        eviction.done()
        options.done()
        self._tally = Tally()
        self._count = self._tally.count
        self.counters = self._tally.counters
        io = io or FileIO()
        self._files = ObjectFiles(io, self._fsync, self._tally)
        self._roots = [Root(path, number, io, self._tally) for number, path in enumerate(paths)]
        self._set_room(CapacityIndex(self._eviction.policy, 0, 1))
        self._state = threading.Condition()
        self._running = 0
        self._is_open = False
        self._pool: ThreadPoolExecutor | None = None

    def _set_room(self, index: CapacityIndex) -> None:
        self._index = index
        self._room = Room(self._roots, self._files, index, self._eviction, self._shared, self._tally)
        self._care = Care(self._roots, self._files, self._room, self._place, self._shared, self._tally)

    # ---- open and close ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        started = time.monotonic()
        _check_distinct([os.path.realpath(root.path) for root in self._roots])
        try:
            for root in self._roots:
                root.claim(self._shared)
            found = scan(self._roots)
            held = sum(file.size for file in found)
            limit = self._limit(held)
            policy, quotas = self._eviction.policy, self._eviction.quotas
            self._set_room(CapacityIndex(policy, limit, 2 * PAGE, len(found), quotas))
            self._room.adopt(found)
            for root in self._roots:
                root.direct = self._probe(root)
            if (over := self._index.used - limit) > 0:
                self._room.evict(over)
            self._room.evict_excess()
        except BaseException as error:
            for root in self._roots:
                root.release()
            if isinstance(error, OSError):
                raise AdapterError(
                    f"fs: {self._roots[0].path} cannot be read ({error.strerror}); check the disk"
                ) from error
            raise
        self._pool = ThreadPoolExecutor(self._io_threads, "kvkeep-fs")
        self._is_open = True
        self._room.start()
        log.info(
            "fs: %s open: %d objects, %.2f of at most %.2f GiB%s, O_DIRECT %s, %.2f s",
            ", ".join(root.path for root in self._roots),
            len(found),
            held / (1 << 30),
            limit / (1 << 30),
            " (shared: kept approximately)" if self._shared else "",
            "/".join("on" if root.direct else "off" for root in self._roots),
            time.monotonic() - started,
        )

    def _limit(self, held: int) -> int:
        free = sum(dict(root.free_bytes() for root in self._roots).values())
        if not self._capacity:
            return int((free + held) * FREE_SHARE)
        if self._capacity > free + held:
            log.warning(
                "fs: capacity_gb is %.2f GiB, but only %.2f GiB are free or already ours; the disk will be full first",
                self._capacity / (1 << 30),
                (free + held) / (1 << 30),
            )
        return self._capacity

    def _probe(self, root: Root) -> bool:
        """Whether to use O_DIRECT.  A full disk is no reason not to serve what is on it."""
        for direct in [True, False] if self._direct_io == "auto" else [self._direct_io == "on"]:
            try:
                root.probe(direct)
                return direct
            except OSError as error:
                if error.errno in FULL:
                    self._count("probe_without_space")
                    return direct
                if direct and self._direct_io == "auto":
                    self._count("direct_io_fallbacks")
                    log.warning("fs: %s: no O_DIRECT (%s), using the page cache", root.path, error.strerror)
                    continue
                hint = '; set "direct_io" to "auto" or "off"' if direct else ""
                how = "with O_DIRECT" if direct else "without O_DIRECT"
                raise AdapterError(
                    f"fs: {root.path} did not pass a write and read {how} ({error.strerror}){hint}"
                ) from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        with self._state:
            was, self._is_open = self._is_open, False
            if not was:
                return
            quiet = self._state.wait_for(lambda: not self._running, timeout=_CLOSE_S)
        quiet = self._room.stop(_CLOSE_S) and quiet
        if self._pool is not None:
            self._pool.shutdown(wait=quiet)
        if quiet:  # else a call hangs in the medium, and its descriptors must not become someone else's
            for root in self._roots:
                root.release()

    # ---- the calls ---------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key]) -> builtins.list[bool]:
        return self._each(lambda at: self._lookup(keys[at]), len(keys), False, spread=False)

    def touch(self, keys: Sequence[Key]) -> builtins.list[bool]:
        """The times of the files too, so that a restart knows; no content."""
        times = self._index.times(len(keys))
        there = self._each(lambda at: self._touch(keys[at], times[at]), len(keys), False, spread=False)
        good = [at for at, is_there in enumerate(there) if is_there]
        self._index.touch([self._place(keys[at])[1] for at in good], [times[at] for at in good], read=True)
        return there

    def _touch(self, key: Key, used_ns: int) -> bool:
        if not self._lookup(key):
            return False
        root, name = self._place(key)
        try:
            root.set_used(name, used_ns)
        except OSError:
            self._count("recency_not_kept")
        return True

    def store(self, items: Sequence[Item]) -> builtins.list[Result]:
        times = self._index.times(len(items))
        # What is there is used first, or it might be what goes to make room for the others, after it was found.
        self._index.touch([self._place(item.key)[1] for item in items], times, read=False)
        results = self._each(lambda at: self._store(items[at], times[at]), len(items), _CLOSED)
        self._used([item[0] for item in items], times, results, read=False)
        self._room.stored()
        return results

    def load(self, items: Sequence[tuple[Key, memoryview]]) -> builtins.list[Result]:
        times = self._index.times(len(items))
        results = self._each(lambda at: self._load(*items[at], times[at]), len(items), _CLOSED)
        self._used([item[0] for item in items], times, results, read=True)
        return results

    def fetch(self, items: Sequence[tuple[Key, int]]) -> builtins.list[Fetched]:
        times = self._index.times(len(items))
        fetched = self._each(lambda at: self._fetch(*items[at], times[at]), len(items), Fetched(_CLOSED))
        self._used([item[0] for item in items], times, [one.result for one in fetched], read=True)
        return fetched

    def _used(self, keys: Sequence[Key], times: range, results: Sequence[Result], read: bool) -> None:
        """The whole batch at once: however its items were spread, the order is that of the chain."""
        good = [at for at, result in enumerate(results) if result.outcome == Outcome.OK]
        self._index.touch([self._place(keys[at])[1] for at in good], [times[at] for at in good], read=read)

    def delete(self, keys: Sequence[Key]) -> int:
        keys = list(dict.fromkeys(keys))
        return sum(self._each(lambda at: self._delete(keys[at]), len(keys), False))

    def usage(self) -> Usage:
        return Usage(self._index.held, self._index.limit, len(self._index))

    def list(self, cursor: bytes, limit: int) -> Listing:
        return self._each(lambda _: self._list(cursor, limit), 1, Listing([], b""))[0]

    def _each(self, work: Callable[[int], R], count: int, closed: R, spread: bool = True) -> builtins.list[R]:
        """``work`` for 0..count, in several threads, this one being one of them; results in order."""
        with self._state:
            if not self._is_open:
                return [closed] * count
            self._running += 1
        try:
            results = [closed] * count
            queue = iter(range(count))  # next() of it is atomic

            def run() -> None:
                for at in queue:
                    results[at] = work(at)

            assert self._pool is not None
            helpers = min(self._io_threads, count) - 1 if spread else 0
            waiting = [self._pool.submit(run) for _ in range(helpers)]
            try:
                run()
            finally:  # whatever happened: nobody may still be at the caller's memory when this returns
                left = [helper for helper in waiting if not helper.cancel()]
                wait(left)
            for helper in left:
                helper.result()
            return results
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def _place(self, key: Key) -> tuple[Root, bytes]:
        if len(self._roots) == 1:
            return self._roots[0], self._roots[0].name(key)
        return max(((root, root.name(key)) for root in self._roots), key=lambda place: place[1][-8:])

    # ---- lookup and load ---------------------------------------------------------------------------------------------

    def _lookup(self, key: Key) -> bool:
        root, name = self._place(key)
        if name not in self._index and not self._shared:
            return False
        try:
            about = root.stat(name)
        except OSError as error:
            if error.errno in GONE:
                self._vanished(name)
            return False
        return stat.S_ISREG(about.st_mode) and about.st_size >= 2 * PAGE

    def _vanished(self, name: bytes) -> None:
        if self._index.forget(name):
            self._count("vanished")

    def _load(self, key: Key, into: memoryview, used_ns: int) -> Result:
        seen = self._see(key, lambda root, name: self._files.read(root, name, key, into, used_ns))
        if isinstance(seen, Result):
            return seen
        header = seen.header
        assert header is not None
        if header.serdes:
            return Result(Outcome.ENCODED)
        if header.stored_bytes != len(into):
            self._count("wrong_length")
            return Result(Outcome.MISS, detail=f"{header.stored_bytes} bytes are stored, {len(into)} were asked for")
        self._count("loaded")
        return OK

    def _fetch(self, key: Key, most: int, used_ns: int) -> Fetched:
        seen = self._see(key, lambda root, name: self._files.fetch(root, name, key, most, used_ns))
        if isinstance(seen, Result):
            return Fetched(seen)
        header = seen.header
        assert header is not None
        if header.stored_bytes > most:
            self._count("wrong_length")
            return Fetched(
                Result(Outcome.MISS, detail=f"{header.stored_bytes} bytes are stored, at most {most} wanted")
            )
        self._count("loaded")
        return Fetched(OK, seen.payload, header.encoding)

    def _see(self, key: Key, read: Callable[[Root, bytes], Seen]) -> Seen | Result:
        """What `read` found, with a header; or what became of an object that cannot be had."""
        root, name = self._place(key)
        known = self._index.begin_read(name)
        if not known and not self._shared:
            self._count("missed")
            return MISS
        try:
            seen = read(root, name)
            if seen.header is None:
                self._count("corrupt")
                self._tally.complain(f"{name.hex()} in {root.path} did not verify and is removed")
                self._room.remove(root, name, seen.identity)
                return Result(Outcome.CORRUPT, detail="the object did not verify and is removed")
            self._index.resize(name, seen.size)
            return seen
        except OSError as error:
            if error.errno in GONE:
                self._vanished(name)
                self._count("missed")
                return MISS
            if error.errno in NOT_OURS:
                self._index.forget(name)
                self._count("foreign_files")
                return MISS
            return self._tally.failed("load", root.path, error)
        finally:
            if known:
                self._index.end_read(name)

    # ---- store -------------------------------------------------------------------------------------------------------

    def _store(self, item: Item, used_ns: int) -> Result:
        payload = item.payload
        root, name = self._place(item.key)
        size = file_bytes(len(payload))
        if size > self._index.limit:
            self._count("too_large")
            detail = (
                f"{len(payload)} bytes and a header can never fit into the {self._index.limit} bytes of capacity_gb"
            )
            return Result(Outcome.TOO_LARGE, detail=detail)
        if not len(payload):
            return Result(Outcome.IO_ERROR, errno.EINVAL, "an object without payload")
        mine = False
        try:
            if self._present(root, name, item, size, used_ns):
                return OK
            mine = self._index.begin_store(name)
            if not mine:
                self._count("busy")
                return Result(Outcome.BUSY)
            if self._present(root, name, item, size, used_ns):  # somebody else has just finished
                return OK
            spare = self._room.reserve(name, size, root, item.key.namespace)
            if spare is None:
                self._count("no_space")
                return Result(Outcome.NO_SPACE, detail="the limit is reached and nothing can be evicted")
            size = self._write(root, name, item, used_ns, spare)
            self._index.publish(name, root.number, size, used_ns, item.key.namespace)
            self._count("stored")
            return OK
        except OSError as error:
            return self._tally.failed("store", root.path, error)
        finally:
            if mine:
                self._index.end_store(name)

    def _write(self, root: Root, name: bytes, item: Item, used_ns: int, spare: str) -> int:
        """Bytes on the medium.  On a full disk something goes, and again if others were faster to use its room."""
        for left in reversed(range(1 + self._io_threads)):
            try:
                return self._files.write(root, name, item, used_ns, spare)
            except OSError as error:
                need = 2 * file_bytes(len(item.payload))
                if error.errno not in FULL or not left or not self._room.evict_for_full_disk(need, root):
                    raise
                self._count("evicted_for_full_disk")
                spare = ""
        raise AssertionError("unreachable")

    def _present(self, root: Root, name: bytes, item: Item, size: int, used_ns: int) -> bool:
        if name not in self._index:
            return False
        try:
            about = root.stat(name)
            if about.st_size != size and not self._files.in_another_encoding(root, name, item):
                # Cut by somebody, or never written by a machine that lost power.
                self._count("truncated_removed", self._room.remove(root, name, identity_of(about)))
                return False
            root.set_used(name, used_ns)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._vanished(name)
            return False
        self._count("present")
        return True

    # ---- delete and list ---------------------------------------------------------------------------------------------

    def _delete(self, key: Key) -> bool:
        removed = self._room.remove(*self._place(key))
        self._count("deleted", removed)
        return removed

    def _list(self, cursor: bytes, limit: int) -> Listing:
        """Cursor: number of the root, name of the last object.  From the directories: they are the truth."""
        objects: builtins.list[tuple[Key, int]] = []
        unreadable = 0
        number, after = (cursor[0], cursor[1 : 1 + NAME_BYTES]) if cursor else (0, b"")
        for root in self._roots[number:]:
            last = after
            for name in root.names_from(after[0] if after else 0, after):
                if len(objects) >= max(1, limit):
                    return Listing(objects, bytes([root.number]) + last, unreadable)
                last = name
                try:
                    header = self._files.read_header(root, name).header
                except OSError as error:
                    unreadable += error.errno not in (*GONE, *NOT_OURS)
                    continue
                if header is not None and root.name(header.key) == name:
                    objects.append((header.key, header.stored_bytes))
            after = b""
        return Listing(objects, b"", unreadable + sum(root.take_unreadable() for root in self._roots))

    # ---- the catalogue and tenants -----------------------------------------------------------------------------------

    def describe(self, namespace: bytes, manifest: bytes) -> Result:
        self._index.learn(namespace, manifest)
        return catalogue.keep(self, namespace, manifest)

    def described(self, namespace: bytes) -> bytes:
        return catalogue.read(self, namespace)

    def undescribe(self, namespace: bytes) -> bool:
        return self.erase([catalogue.entry_key(namespace)])[0]

    def manifests(self) -> int:
        return self._index.kept

    def tenants(self) -> dict[str, TenantUse]:
        return self._index.usage_by_tenant()

    # ---- management --------------------------------------------------------------------------------------------------

    def erase(self, keys: Sequence[Key]) -> builtins.list[bool]:
        gone = self._each(lambda at: self._erase(keys[at]), len(keys), False)
        self._room.drop_spares()  # what was evicted before might be of what is to be forgotten
        if self._fsync != "none":  # a removal that the power takes back would bring the object back
            folders = {(root.number, name[0]): (root, name) for root, name in map(self._place, keys)}
            for root, name in folders.values():
                try:
                    root.sync_folder(name)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    self._tally.failed("remove", root.path, error)
                    return [False] * len(keys)
        return gone

    def _erase(self, key: Key) -> bool:
        self._delete(key)
        root, name = self._place(key)
        try:
            root.stat(name)
        except OSError as error:
            return error.errno in GONE
        try:
            root.unlink(name)  # nobody knew it, or it could not be removed a moment ago
        except OSError as error:
            if error.errno not in GONE:
                self._tally.failed("remove", root.path, error)
                return False
        self._index.forget(name)
        return True

    def serdes(self, keys: Sequence[Key]) -> builtins.list[tuple[int, ...]]:
        headers = self._each(lambda at: self._files.header(*self._place(keys[at])), len(keys), None)
        return [header.serdes if header is not None else () for header in headers]

    def verify(self, cursor: bytes, nbytes: int) -> Verified:
        closed = Verified(0, 0, 0, 1, ["the adapter is closed"], b"")
        return self._each(lambda _: self._care.verify(cursor, nbytes), 1, closed)[0]

    def compact(self) -> Iterator[tuple[str, int]]:
        work = self._care.compact()
        end = ("", -1)
        while (did := self._each(lambda _: next(work, end), 1, end)[0]) != end:
            yield did


def _check_distinct(paths: Sequence[str]) -> None:
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise AdapterError(f"fs: 'base_path' leads to {path} twice; give each directory once")
