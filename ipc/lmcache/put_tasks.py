"""Chunks on their way from LMCache to the daemon: one thread stores them, the engine goes on.

A task holds one reference on its memory object from `submit` until it ended, however it ended: stored, present,
refused, given up, cancelled.  Then the reference goes back, the key is no task any more, and the callback of the one
who submitted it is called, once per key, in this order.  Until then LMCache cannot evict the object, so the bytes on
their way are bounded: what is beyond `limit_bytes` is dropped at once, which is a chunk that is not kept, not an engine
without memory.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvkeep.ipc.kvstore import PUT_WINDOW, PUT_WINDOW_BYTES
from kvkeep.ipc.kvstore_pages import Tally

log = logging.getLogger("kvkeep.lmcache")

OnComplete = Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class Task:
    key: Any  # LMCache's CacheEngineKey
    obj: Any  # LMCache's MemoryObj
    nbytes: int
    on_complete: OnComplete | None


class PutTasks:
    """Thread-safe.  ``put`` stores one batch; what it raises is counted, and ends the batch as anything else does."""

    def __init__(self, put: Callable[[Sequence[Task]], None], tally: Tally, *, limit_bytes: int) -> None:
        self._put, self._tally, self._limit_bytes = put, tally, limit_bytes
        self._tasks: dict[Any, Task] = {}
        self._nbytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "kvkeep-lmcache-put")

    def __contains__(self, key: Any) -> bool:
        with self._changed:
            return key in self._tasks

    def __len__(self) -> int:
        with self._changed:
            return len(self._tasks)

    def submit(self, pairs: Iterable[tuple[Any, Any]], on_complete: OnComplete | None) -> None:
        """Keys and memory objects; returns at once.  A key that is on its way already is not sent twice."""
        batch: list[Task] = []
        for key, obj in pairs:
            task = Task(key, obj, obj.get_size(), on_complete)
            if not self._accept(task):
                _called(task)
                continue
            if batch and (
                len(batch) >= PUT_WINDOW or sum(one.nbytes for one in batch) + task.nbytes > PUT_WINDOW_BYTES
            ):
                self._send(batch)
                batch = []
            batch.append(task)
        if batch:
            self._send(batch)

    def _accept(self, task: Task) -> bool:
        with self._changed:
            if task.key in self._tasks:
                return False
            if self._closed or (self._tasks and self._nbytes + task.nbytes > self._limit_bytes):
                self._tally.add(dropped=1)
                return False
            task.obj.ref_count_up()
            self._tasks[task.key] = task
            self._nbytes += task.nbytes
            return True

    def _send(self, batch: Sequence[Task]) -> None:
        try:
            future = self._thread.submit(self._put, batch)
        except RuntimeError as error:  # closed since, or the interpreter ends
            future = Future()
            future.set_exception(error)
        future.add_done_callback(functools.partial(self._end, batch))

    def _end(self, batch: Sequence[Task], future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            self._tally.add(dropped=len(batch))
        elif error is not None:
            self._tally.add(failures=1)
            log.warning("%d chunks were not stored: %r", len(batch), error)
        for task in batch:
            task.obj.ref_count_down()
            with self._changed:
                del self._tasks[task.key]
                self._nbytes -= task.nbytes
                self._changed.notify_all()
            _called(task)

    def drain(self, wait_s: float) -> bool:
        """Whether all tasks ended in that time."""
        until = time.monotonic() + wait_s
        with self._changed:
            while self._tasks:
                if (left := until - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, drain_s: float, wait_s: float) -> None:
        """Takes no more; lets what is on its way arrive for ``drain_s``, gives up what has not begun then, and waits up
        to ``wait_s`` for what has."""
        with self._changed:
            self._closed = True
        self.drain(drain_s)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if not self.drain(wait_s):
            log.error("%d chunks are still being copied after %g s", len(self), drain_s + wait_s)


def _called(task: Task) -> None:
    if task.on_complete is None:
        return
    try:
        task.on_complete(task.key)
    except Exception as error:
        log.warning("the callback for %s failed: %r", task.key, error)
