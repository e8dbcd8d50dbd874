"""KVKeepStorage: the storage backend that SGLang's HiCache loads by name ("dynamic").

SGLang makes one per rank, in its scheduler process, and then calls it from several threads at once: look-ups in the
prefetch thread, loads in another, stores in the backup thread, `clear` and `get_stats` in the scheduler's.  An
exception would end such a thread for good, or the engine with it.  So none gets out: an answer is what was done, and
whatever goes wrong is a miss.  Only a wrong option is a ValueError, when the backend is made.

An engine that cannot be cached (identity.py) runs without: all is a miss, with one sentence in the log.

`clear` must hold: SGLang offers it for weights that changed, and keys do not know.  So until the daemon has confirmed
that nothing is left, everything is a miss and nothing is stored; it is asked again with the calls that come.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvkeep.ipc.buffers import Bytes, as_bytes
from kvkeep.ipc.client import Client
from kvkeep.ipc.sglang import identity, options
from kvkeep.ipc.sglang.metrics import Meter
from kvkeep.ipc.sglang.pages import HostPages, Page, Targets
from kvkeep.ipc.sglang.pools import KV, Pool, restorable, role_of, text_of
from kvkeep.ipc.sglang.shelf import Shelf

log = logging.getLogger("kvkeep.sglang")

CLEAR_AGAIN_S = 1.0

F = TypeVar("F", bound=Callable[..., Any])


def _or(answer: Callable[..., Any]) -> Callable[[F], F]:
    """What the engine gets when the method fails: ``answer`` of its arguments.  Each kind of failure is logged once."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: KVKeepStorage, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._note(method.__name__, error)
                return answer(*args, **kwargs)

        return cast(F, guarded)

    return decorate


def _none_of(keys: Sequence[str] | None, *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys or ())


def _no_pools(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {transfer.name: _none_of(transfer.keys) for transfer in transfers}


class KVKeepStorage(HiCacheStorage):  # type: ignore[misc]
    """See the module.  Signatures are those of HiCacheStorage; its documentation says who calls what."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._options = options.parse(extra)
        self._config = storage_config
        self._flat = not extra.get("interface_v1")  # then SGLang makes flat pages itself, for get and set
        self._meter = Meter() if getattr(storage_config, "enable_storage_metrics", False) else None
        self._lock = threading.Lock()
        self._pools: dict[str, Pool] = {}
        self._noted: Counter[str] = Counter()
        self._counting = threading.Lock()  # of the next line: none may be lost
        self._clears_wanted = self._clears_done = 0
        self._clear_at = 0.0
        self._client: Client | None = None
        self._document: dict[str, object] = {}
        try:
            self._document = {
                "kind": "kvkeep.sglang",
                "format": identity.FORMAT,
                "parallel": identity.topology(storage_config),
                "engine": identity.engine(storage_config.model_name, self._options.identity),
            }
        except identity.Refused as reason:
            log.warning("kvkeep: this engine runs without the cache: %s", reason)
            return
        name = f"sglang {storage_config.model_name or ''} tp{storage_config.tp_rank}"[:200]
        self._client = Client.attach(
            self._options.run_dir or None, name=name, wait=False, copy_threads=self._options.copy_threads
        )

    # ---- host pools --------------------------------------------------------------------------------------------------

    @_or(lambda *_, **__: None)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._register(KV, mem_pool_host, flat=self._flat)

    @_or(lambda *_, **__: None)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = text_of(host_pool_name)
        with self._lock:
            known = self._pools.get(name)
        if known is None or (name != KV and known.pages.pool is not host_pool):
            self._register(name, host_pool, flat=False)

    @_or(lambda *_, **__: None)
    def on_host_pools_registered(self) -> None:
        """Nothing is left to do."""

    def _register(self, name: str, host_pool: Any, *, flat: bool) -> None:
        client, role = self._client, role_of(self._config, name, host_pool)
        if client is None:
            return
        try:
            if role is None:
                raise identity.Refused(f"the pool {name!r} of a draft model that is not MLA, beside KV that is")
            pages = HostPages(host_pool, flat=flat)
            manifest = {**self._document, "pool": identity.pool(name, pages)}
            pool = Pool(pages, Shelf(client, manifest, pages.page_bytes, role, self._options))
        except Exception as error:  # a daemon that refuses such pages, a pool that we cannot read
            self._note(f"pool {name!r} is not kept", error)
            return
        with self._lock:
            replaced = self._pools.get(name)
            self._pools[name] = pool
        if replaced is not None:
            replaced.shelf.close()
        log.info("kvkeep keeps pages of %d bytes of pool %r (%s)", pages.page_bytes, name, pages.packing)

    def _pool(self, name: Any = KV) -> Pool | None:
        """None = not kept, or not now."""
        if self._clears_done != self._clears_wanted and not self._clear():
            return None
        return self._pools.get(text_of(name))

    # ---- is it there? ------------------------------------------------------------------------------------------------

    @_or(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        pool = self._pool()
        return pool is not None and pool.shelf.exists([key]) == 1

    @_or(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        pool = self._pool()
        return pool.shelf.exists(keys) if pool is not None else 0

    @_or(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        kv = self._pool()
        if kv is None:
            return PoolTransferResult.empty()
        found = restorable(keys, kv, pool_transfers or (), self._pool)
        result = PoolTransferResult(found.longest, found.boundary)
        if hasattr(result, "restorable_prefix_pages"):
            result.restorable_prefix_pages = found.lengths
        return result

    # ---- pages of the host pools -------------------------------------------------------------------------------------

    @_or(_none_of)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._read(self._pool(), keys, host_indices, extra_info)

    @_or(_none_of)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._write(self._pool(), keys, host_indices, extra_info)

    @_or(_no_pools)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._each(self._read, one, extra_info) for one in transfers}

    @_or(_no_pools)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._each(self._write, one, extra_info) for one in transfers}

    def _each(self, operation: Callable[..., list[bool]], transfer: Any, extra_info: Any) -> list[bool]:
        """A pool that fails does not take the others along.  Keys of a pool need not be a chain: they stand alone."""
        keys = transfer.keys or []
        try:
            return operation(self._pool(transfer.name), keys, transfer.host_indices, None)
        except Exception as error:
            self._note(f"pool {text_of(transfer.name)!r}", error)
            return _none_of(keys)

    def _read(self, pool: Pool | None, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        if pool is None or not keys:
            return _none_of(keys)
        begin = time.monotonic()
        good = pool.shelf.read(keys, pool.pages.targets(len(keys), indices), _prefix_of(extra_info))
        self._count("loaded", good, pool.pages.page_bytes, time.monotonic() - begin)
        return good

    def _write(self, pool: Pool | None, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        if pool is None or not keys:
            return _none_of(keys)
        return self._store(pool, keys, pool.pages.sources(len(keys), indices), _prefix_of(extra_info))

    def _store(self, pool: Pool, keys: Sequence[str], pages: Sequence[Page], prefix: Sequence[str] = ()) -> list[bool]:
        begin, clears = time.monotonic(), self._clears_wanted
        good = pool.shelf.write(keys, pages, prefix)
        if clears != self._clears_wanted:  # what was stored is of before, and may have come after
            self._want_clear()
        self._count("stored", good, pool.pages.page_bytes, time.monotonic() - begin)
        return good

    # ---- flat pages --------------------------------------------------------------------------------------------------

    @_or(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    @_or(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        pool = self._flat_pool()
        if pool is None or not keys:
            return [None] * len(keys)
        if target_locations is None:
            target_locations = [pool.pages.pool.get_dummy_flat_data_page() for _ in keys]
        pages = [self._page(pool, location, writable=True) for location in target_locations]
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        begin = time.monotonic()
        good = pool.shelf.read(keys, Targets([[page] for page in pages], lambda i: None))
        self._count("loaded", good, pool.pages.page_bytes, time.monotonic() - begin)
        return [location if ok else None for location, ok in zip(target_locations, good, strict=True)]

    @_or(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        page = value if value is not None else target_location
        return page is not None and bool(self.batch_set([key], [page]))

    @_or(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pool, values = self._flat_pool(), values if values is not None else target_locations
        if pool is None or values is None or len(values) != len(keys):
            return False
        pages = [[self._page(pool, value, writable=False)] for value in values]
        return not keys or all(self._store(pool, keys, pages))

    def _flat_pool(self) -> Pool | None:
        pool = self._pool()
        if pool is not None and pool.pages.packing != "flat":
            raise ValueError("get and set are for extra configs without interface_v1, whose pages are flat")
        return pool

    def _page(self, pool: Pool, value: Any, *, writable: bool) -> Bytes:
        flat = as_bytes(value, writable=writable)
        if flat.size != pool.pages.page_bytes:
            raise ValueError(f"a page of {flat.size} bytes for a pool of pages of {pool.pages.page_bytes}")
        return flat

    # ---- the rest ----------------------------------------------------------------------------------------------------

    @_or(lambda *_, **__: None)
    def clear(self) -> None:
        if self._pools:
            self._want_clear()
            self._clear_at = 0.0
            self._clear()

    def _want_clear(self) -> None:
        with self._counting:
            self._clears_wanted += 1

    def _clear(self) -> bool:
        """Whether nothing of before `clear` is left.  Others do not wait for one who is asking."""
        if time.monotonic() < self._clear_at or not self._lock.acquire(blocking=False):
            return False
        try:
            wanted = self._clears_wanted
            problem = next(filter(None, [pool.shelf.clear() for pool in self._pools.values()]), "")
            if problem:
                self._clear_at = time.monotonic() + CLEAR_AGAIN_S
                self._note("clear", RuntimeError(f"{problem}; all is a miss until it is done"))
                return False
            self._clears_done = wanted
            return wanted == self._clears_wanted
        finally:
            self._lock.release()

    @_or(lambda *_, **__: None)
    def get_stats(self) -> Any:
        return self._meter.take() if self._meter is not None else None

    @_or(lambda *_, **__: None)
    def close(self) -> None:
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.shelf.close()
        if self._client is not None:
            self._client.close()

    def _count(self, what: str, good: Sequence[bool], page_bytes: int, seconds: float) -> None:
        if self._meter is not None:
            self._meter.add(what, sum(good), page_bytes, seconds)

    def _note(self, where: str, error: BaseException) -> None:
        kind = f"{where}: {type(error).__name__}"
        self._noted[kind] += 1
        if self._noted[kind] == 1:
            log.warning("kvkeep: %s (%s); the engine goes on without it (logged once)", kind, error)


def _prefix_of(extra_info: Any) -> Sequence[str]:
    """The keys before the batch, if SGLang was told to pass them."""
    return getattr(extra_info, "prefix_keys", None) or ()
