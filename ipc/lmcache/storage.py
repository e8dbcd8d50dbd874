"""KVKeepStorageBackend: kvkeep as a storage of LMCache 0.5.6 in the engine's own process (its "storage plugin").

LMCache keeps its chunks in CPU memory of its own and asks its storages for what is not there.  It makes one backend per
rank, and calls it from the engine's thread, from its event loop and from whoever closes it:

    store      batched_submit_put_task     returns at once; put_tasks.py says who holds a chunk meanwhile
    look up    batched_contains(pin)       one prefix: stops at the first miss; pins end with `unpin`, or by themselves
    load       batched_get_blocking, …     into memory of LMCache's CPU backend; its one reference is the caller's

A chunk is one value of a `KVStore`, under the text of LMCache's key, with its shape, dtype and memory format.

Nothing is raised into LMCache: an answer is what was done, and whatever goes wrong is a miss and is counted.  So is no
daemon, or one that hangs, within the deadlines of storage_options.py.  Only what cannot be configured so is a
ValueError, when the backend is made; LMCache logs that and goes on without it.

LMCache closes its CPU backend, which frees the memory that we copy from and to, before it closes us.  So we close first
when that is about to happen (`_close_before`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch
from lmcache.v1.memory_management import MemoryFormat as TheirFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from kvkeep.ipc.client import Client
from kvkeep.ipc.formats import Header, Kind, MemoryFormat
from kvkeep.ipc.kvstore import KVStore
from kvkeep.ipc.kvstore_pages import Tally, name_of
from kvkeep.ipc.lmcache import storage_options
from kvkeep.ipc.lmcache.put_tasks import PutTasks, Task

log = logging.getLogger("kvkeep.lmcache")

ATTACH_S = 1.0
ALLOCATE_WAIT_S = 1.0  # for CPU memory that others are about to give back
ALLOCATE_POLL_S = 0.002
THREADS = 4  # of loads that LMCache does not wait for in a thread of its own

FORMATS = {
    TheirFormat.KV_2LTD: MemoryFormat.KV_SPLIT,
    TheirFormat.KV_2TD: MemoryFormat.KV_SPLIT_LAYER,
    TheirFormat.KV_T2D: MemoryFormat.TOKEN_MAJOR,
    TheirFormat.KV_MLA_FMT: MemoryFormat.MLA,
    TheirFormat.BINARY_BUFFER: MemoryFormat.BINARY,
}
_THEIRS = {ours: theirs for theirs, ours in FORMATS.items()}

F = TypeVar("F", bound=Callable[..., Any])


def _or(answer: Callable[..., Any]) -> Callable[[F], F]:
    """What LMCache gets when the method fails, or comes after `close`: ``answer`` of its arguments."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: KVKeepStorageBackend, *args: Any, **kwargs: Any) -> Any:
            if self._closed.is_set():
                return answer(*args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._failed(method.__name__, error)
                return answer(*args, **kwargs)

        return cast(F, guarded)

    return decorate


class KVKeepStorageBackend(StoragePluginInterface):  # type: ignore[misc]
    """See the module.  Signatures are those of LMCache's StoragePluginInterface, which also says who may call what."""

    def __init__(
        self,
        config: Any,
        dst_device: str,
        metadata: Any,
        local_cpu_backend: Any,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        _check(config, metadata, local_cpu_backend)
        self._options = options = storage_options.parse(
            config.storage_plugins, config.extra_config, type(self).__module__, type(self).__name__
        )
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._tally = Tally()
        self._noted: set[str] = set()
        self._pinned_for: dict[str, list[str]] = {}  # by lookup id, until its load
        self._lock = threading.Lock()
        self._chunk_tokens = int(config.chunk_size)
        chunk_bytes: int = math.prod(_layout(metadata)) * config.chunk_size * metadata.kv_dtype.itemsize
        self._chunk_pages = -(-chunk_bytes // storage_options.page_bytes_of(chunk_bytes))
        name = f"lmcache {metadata.model_name} {metadata.role or ''} rank {metadata.worker_id}"[:200]
        self._client = Client.attach(options.run_dir or None, name=name, wait=False, copy_threads=options.copy_threads)
        try:
            self._client._session.wait_attached(ATTACH_S)
            self._store = KVStore(
                self._client,
                space=storage_options.SPACE,
                identity=_identity(config, metadata, options.identity),
                page_bytes=storage_options.page_bytes_of(chunk_bytes),
            )
        except BaseException:
            self._client.close()
            raise
        self._copies = _Copies()
        self._put_tasks = PutTasks(self._put, self._tally, limit_bytes=int(config.max_local_cpu_size * 2**30) // 2)
        self._threads = ThreadPoolExecutor(THREADS, "kvkeep-lmcache")
        if local_cpu_backend is not None:
            self._close_before(local_cpu_backend)
        log.info(
            "kvkeep keeps LMCache's chunks of %d bytes%s",
            chunk_bytes,
            "" if self._client.attached else ": no daemon yet, all is a miss until there is one",
        )

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def counters(self) -> dict[str, int]:
        """Those of `KVStore`, and: unreachable (calls that met no daemon, or one that hangs), dropped (chunks that were
        not even sent: too many on their way, or closed), refused (chunks of a kind that we cannot keep), no_memory
        (loads that LMCache had no CPU memory for), failures (anything else)."""
        names = ("unreachable", "dropped", "refused", "no_memory", "failures")
        return {**self._store.counters, **{name: self._tally[name] for name in names}}

    # ---- is it there? ------------------------------------------------------------------------------------------------

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    @_or(lambda *_, **__: 0)
    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many of the first keys are there; with ``pin``, how many are there and pinned now."""
        if not keys:
            return 0
        texts = [key.to_string() for key in keys]
        ask = functools.partial(self._store.batched_pin, ttl_s=self._options.pin_ttl_s) if pin else None
        there = (ask or self._store.batched_contains)(texts, wait_s=self._l2_wait_s, deadline_s=self._lookup_s)
        self._count_unreachable()
        return int(there)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """As `batched_contains`.  LMCache ends such pins nowhere: they end with the load of this lookup."""
        return int(await self._in_thread(self._find_for, lookup_id, list(keys), pin) or 0)

    def _find_for(self, lookup_id: str, keys: list[Any], pin: bool) -> int:
        there = self.batched_contains(keys, pin)
        if pin and there:
            with self._lock:
                self._pinned_for.setdefault(lookup_id, []).extend(key.to_string() for key in keys[:there])
        return there

    @_or(lambda *_, **__: False)
    def exists_in_put_tasks(self, key: Any) -> bool:
        return key in self._put_tasks

    # ---- store -------------------------------------------------------------------------------------------------------

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[Any]] | None:
        """The callback comes once per key, whatever became of it."""
        self._put_tasks.submit(zip(keys, objs, strict=False), on_complete_callback)
        return None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def _put(self, batch: Sequence[Task]) -> None:
        by_format: dict[MemoryFormat, list[tuple[str, Any]]] = {}
        for task in batch:
            if (known := _storable(task.obj)) is None:
                self._refused(task)
                continue
            by_format.setdefault(known[0], []).append((task.key.to_string(), known[1]))
        for format, items in by_format.items():
            self._store.batched_put(items, format, deadline_s=self._options.transfer_deadline_s)
        self._count_unreachable()

    # ---- load --------------------------------------------------------------------------------------------------------

    def get_blocking(self, key: Any) -> Any | None:
        return self.batched_get_blocking([key])[0]

    @_or(lambda keys, *_, **__: [None] * len(keys))
    def batched_get_blocking(self, keys: list[Any]) -> list[Any | None]:
        """A memory object per key, of LMCache's CPU backend, or None; the caller has one reference on each."""
        if self.local_cpu_backend is None:  # the scheduler's, which only looks up
            return [None] * len(keys)
        with self._copies.one() as allowed:
            return self._get(keys) if allowed else [None] * len(keys)

    def get_non_blocking(self, key: Any, location: str | None = None) -> Future[Any] | None:
        """None if it is not there."""
        if not self.contains(key):
            return None
        with contextlib.suppress(RuntimeError):  # closed
            return self._threads.submit(self.get_blocking, key)
        return None

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """Of the first keys, up to the first miss."""
        return await self._in_thread(self._get_prefix, lookup_id, list(keys)) or []

    def _get_prefix(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        try:
            objs = self.batched_get_blocking(keys)
        finally:
            self.cancel_request(lookup_id)
        count = objs.index(None) if None in objs else len(objs)
        _release(objs[count:])
        return objs[:count]

    def _get(self, keys: list[Any]) -> list[Any | None]:
        names = [key.to_string() for key in keys]
        memory = _Memory(self.local_cpu_backend, self._closed)
        try:
            values = self._store.batched_get(
                names, wait_s=self._l2_wait_s, deadline_s=self._options.transfer_deadline_s, allocate=memory
            )
            objs = [
                memory.take(name_of(name).text) if value is not None else None
                for name, value in zip(names, values, strict=True)
            ]
        finally:
            memory.close()
        self._tally.add(no_memory=memory.missed)
        self._count_unreachable()
        return objs

    # ---- pins, removal -----------------------------------------------------------------------------------------------

    @_or(lambda *_, **__: False)
    def pin(self, key: Any) -> bool:
        return self.contains(key, pin=True)

    @_or(lambda *_, **__: False)
    def unpin(self, key: Any) -> bool:
        return self._store.unpin(key.to_string())

    @_or(lambda *_, **__: False)
    def remove(self, key: Any, force: bool = True) -> bool:
        """``force``: our own pins do not keep it, as LMCache wants it; those of others do."""
        name = key.to_string()
        while force and self._store.unpin(name):
            pass
        removed = self._store.remove(name, deadline_s=self._lookup_s + self._l2_wait_s)
        self._count_unreachable()
        return removed

    def batched_remove(self, keys: list[Any], force: bool = True) -> int:
        return sum(self.remove(key, force) for key in keys)

    @_or(lambda *_, **__: 0)
    def clear(self) -> int:
        """Drop all chunks of this model and layout that nobody uses, of all ranks.  Returns how many tokens left L1, as
        if all chunks were full."""
        return self._store.clear() // self._chunk_pages * self._chunk_tokens

    def touch_cache(self) -> None:
        """Nothing: the daemon counts uses itself."""

    @_or(lambda *_, **__: None)
    def cancel_request(self, req_id: str) -> None:
        with self._lock:
            names = self._pinned_for.pop(req_id, ())
        self._store.batched_unpin(names)

    # ---- what LMCache asks once --------------------------------------------------------------------------------------

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        """Waits for what is on its way while the daemon takes it, within the deadlines.  Afterwards all is a miss."""
        with self._closing:
            if self._closed.is_set():
                return
            reachable = self._client.attached and not self._client.hung
            patience_s = self._options.transfer_deadline_s
            self._put_tasks.close(drain_s=patience_s if reachable else 0.0, wait_s=patience_s + 1)
            self._closed.set()
            if not self._copies.close(patience_s + self._l2_wait_s + 1):
                log.error("a load has not ended in its time")
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._store.close()
            self._client.close()

    def _close_before(self, local_cpu_backend: Any) -> None:
        inner = local_cpu_backend.close

        def close() -> None:
            self.close()
            inner()

        local_cpu_backend.close = close

    # ---- small things ------------------------------------------------------------------------------------------------

    @property
    def _lookup_s(self) -> float:
        return self._options.lookup_deadline_ms / 1000

    @property
    def _l2_wait_s(self) -> float:
        return self._options.l2_wait_ms / 1000 if self._client.has_l2 else 0.0

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """LMCache's loop does not wait.  None if that failed.  A load that nobody waits for any more is given back."""
        try:
            future = self._threads.submit(work, *arguments)
        except RuntimeError:  # closed
            return None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_release_result)
            raise
        except Exception as error:
            self._failed(work.__name__, error)
            return None

    def _count_unreachable(self) -> None:
        if not self._client.attached or self._client.hung:
            self._tally.add(unreachable=1)

    def _refused(self, task: Task) -> None:
        self._tally.add(refused=1)
        form = f"{task.obj.get_memory_format().name} of {[tuple(shape) for shape in task.obj.get_shapes()]}"
        self._note(f"chunks are not kept that are {form}: one tensor in CPU memory, in a format of KV, can be")

    def _failed(self, what: str, error: Exception) -> None:
        self._tally.add(failures=1)
        self._note(f"{what} failed, which is a miss: {error!r}")

    def _note(self, sentence: str) -> None:
        """Each once."""
        if len(self._noted) < 100 and sentence not in self._noted:
            self._noted.add(sentence)
            log.warning("%s", sentence)


class _Memory:
    """Memory objects for the values of one `batched_get`, by the text of their names: `KVStore`'s ``allocate``.
    `close` gives back those that nobody took."""

    def __init__(self, local_cpu_backend: Any, closed: threading.Event) -> None:
        self._local, self._closed = local_cpu_backend, closed
        self._until = time.monotonic() + ALLOCATE_WAIT_S
        self._objs: dict[bytes, Any] = {}
        self._taken: Counter[bytes] = Counter()
        self.missed = 0

    def __call__(self, header: Header) -> Any | None:
        obj = self._allocate(header)
        if obj is None:
            return None
        if obj.get_size() != header.nbytes:
            obj.ref_count_down()
            return None
        self._objs[header.key] = obj
        return obj.raw_data if header.kind == Kind.BYTES else obj.raw_data[: header.nbytes]

    def _allocate(self, header: Header) -> Any | None:
        theirs = _THEIRS.get(header.format)
        if theirs is None or (header.kind == Kind.BYTES) != (theirs == TheirFormat.BINARY_BUFFER):
            return None
        dtype = None if header.kind == Kind.BYTES else getattr(torch, header.dtype)
        while not self._closed.is_set():
            obj = self._local.allocate(torch.Size(header.shape), dtype, theirs, eviction=True, busy_loop=False)
            if obj is not None:
                return obj
            if time.monotonic() >= self._until:  # nor for the others of this batch
                break
            time.sleep(ALLOCATE_POLL_S)
        self.missed += 1
        return None

    def take(self, text: bytes) -> Any:
        """With one reference for the caller, also where a key stands twice."""
        obj = self._objs[text]
        if self._taken[text]:
            obj.ref_count_up()
        self._taken[text] += 1
        return obj

    def close(self) -> None:
        _release([obj for text, obj in self._objs.items() if not self._taken[text]])


class _Copies:
    """Loads that are using LMCache's memory now, so that it is not freed under them."""

    def __init__(self) -> None:
        self._count = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def one(self) -> Iterator[bool]:
        """Whether it is still allowed."""
        with self._changed:
            allowed = not self._closed
            self._count += allowed
        try:
            yield allowed
        finally:
            with self._changed:
                self._count -= allowed
                self._changed.notify_all()

    def close(self, wait_s: float) -> bool:
        """Allows none from now on.  Whether all have ended in that time."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._count, wait_s)


def _storable(obj: Any) -> tuple[MemoryFormat, Any] | None:
    """The format and the data of a memory object; None = we cannot keep what it is."""
    theirs = obj.get_memory_format()
    format = FORMATS.get(theirs)
    if format is None:
        return None
    if theirs == TheirFormat.BINARY_BUFFER:
        return format, obj.byte_array
    if len(obj.get_shapes()) != 1:  # then `tensor` raises
        return None
    tensor = obj.tensor
    if tensor is None or tensor.device.type != "cpu":
        return None
    try:
        format.check(tuple(tensor.shape))
    except ValueError:
        return None
    return format, tensor


def _release(objs: Sequence[Any | None]) -> None:
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()


def _release_result(future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None and isinstance(future.result(), list):
        _release(future.result())


def _layout(metadata: Any) -> tuple[int, int, int, int]:
    """Layers, K and V (or the one latent), heads of this rank, width of a head."""
    layers, kv, _chunk, heads, width = metadata.kv_shape
    return layers, kv, heads, width


def _identity(config: Any, metadata: Any, identity: str) -> dict[str, Any]:
    """What the bytes depend on and LMCache's key does not say.  The same in the worker and in the scheduler."""
    return {
        "layout": list(_layout(metadata)),
        "dtype": str(metadata.kv_dtype).removeprefix("torch."),
        "mla": bool(metadata.use_mla),
        "chunk_tokens": int(config.chunk_size),
        "hash": config.pre_caching_hash_algorithm,
        "identity": identity,
    }


def _check(config: Any, metadata: Any, local_cpu_backend: Any) -> None:
    if config is None or metadata is None:
        raise ValueError("config and metadata are None; LMCache gives them to a storage plugin")
    if config.use_layerwise:
        raise ValueError(
            "use_layerwise is true: LMCache has no way to take a chunk that is gone after its look-up, and would use "
            "wrong KV; set it to false, or leave this storage out"
        )
    if local_cpu_backend is None and metadata.role != "scheduler":
        raise ValueError("there is no CPU memory to load into: set max_local_cpu_size to more than 0")
    if "PYTHONHASHSEED" not in os.environ:
        log.warning(
            "PYTHONHASHSEED is not set: LMCache may name the same tokens differently after a restart; set it to 0"
        )


__all__ = ["KVKeepStorageBackend"]
