"""The copy threads of the worker half: every job that goes in comes out exactly once.

A load goes QUEUED -> RUNNING -> ENDED, or QUEUED -> ENDED when its deadline passes or its request is cancelled before a
thread took it.  Threads that have nothing else to do help the one that runs a load (load_copy.py).  A running load is
reported only by that one, after the last write of all of them: a deadline never gives blocks back under a copy.  They
look at the deadline between pieces (one chunk, or several on a GPU), so a load overruns by one piece's copy at most; on
a GPU also by what the engine had given it to do before: a copy waits for that, and cannot be taken back.

Loads and stores have threads of their own, so that a load never waits behind stores.  All daemon calls are made here,
each with a deadline; the engine's thread only moves small records under a lock.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.ipc.messages import HASH_BYTES, Outcome, Verdict
from kvkeep.ipc.vllm.adapters import Checks
from kvkeep.ipc.vllm.groups import chunks, present
from kvkeep.ipc.vllm.load_copy import LoadCopy
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadJob, NamespaceSpec, StoreEnd, StoreJob, StoreReport

if TYPE_CHECKING:
    from kvkeep.ipc.vllm.memory import KVMemory

CALL_DEADLINE_S = 1.0  # of one request to the daemon; a job's own deadline cuts it shorter
LEFT_AT_CLOSE_S = 0.4  # how long close() waits for the threads


class DeadlinePassed(Exception):
    """Counted and logged once per engine; the request is computed instead."""


class LoadState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass
class LoadTask:
    job: LoadJob
    deadline: float
    after: Any = None  # a fence; kept until the load is reported
    state: LoadState = LoadState.QUEUED
    cancelled: bool = False


class StoreTask(NamedTuple):
    job: StoreJob
    namespace: NamespaceSpec
    deadline: float
    after: Any  # a fence; kept until the store has ended


@dataclass(frozen=True)
class LoadEnd:
    job: LoadJob
    bad_blocks: tuple[int, ...]  # empty = every byte is right
    confirmed: bool
    failure: LoadFailure | None = None
    good_chunks: int = 0  # leading ones
    seconds: float = 0.0  # since its submission

    @classmethod
    def failed(cls, job: LoadJob, why: LoadFailure) -> LoadEnd:
        """Nothing was read."""
        return cls(job, present(job.blocks), confirmed=False, failure=why)


class CopyThreads:
    def __init__(
        self,
        client: Any,
        memory: KVMemory,
        *,
        shard: int,
        load_threads: int,
        deadline_s: float,
        log: Callable[[str, BaseException], None],
    ) -> None:
        self._client, self._memory, self._shard = client, memory, shard
        self._load_threads, self._deadline_s, self._log = load_threads, deadline_s, log
        self._lock = threading.Lock()
        self._something_ended = threading.Event()
        self._loads: dict[str, LoadTask] = {}  # by request id, until reported
        self._queued = 0  # of them
        self._ended_loads: list[LoadEnd] = []
        self._ended_stores: list[StoreReport] = []
        self._load_queue: queue.SimpleQueue[LoadTask | LoadCopy | None] = queue.SimpleQueue()
        self._store_queue: queue.SimpleQueue[StoreTask | None] = queue.SimpleQueue()
        self._namespace: tuple[NamespaceSpec, Any] | None = None  # the store thread's, as is:
        self._checks = Checks()
        self.counters: Counter[str] = Counter()
        names = [(f"kvkeep-load-{n}", self._load_loop) for n in range(load_threads)]
        names.append(("kvkeep-store", self._store_loop))
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in names]
        for thread in self._threads:
            thread.start()

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    def submit_load(self, job: LoadJob) -> None:
        """Begins when all is done that the engine has given its device so far: it may still read these blocks.
        Raises what the device raises; then there is no load."""
        after = self._memory.fence() if job.handle else None
        task = LoadTask(job, time.monotonic() + self._deadline_s, after)
        with self._lock:
            self._loads[job.request_id] = task
            self._queued += 1
        if job.handle == 0:
            self._end_if_queued(task, LoadFailure.ERROR)
        else:
            self._load_queue.put(task)

    def submit_store(self, job: StoreJob, namespace: NamespaceSpec) -> None:
        """Likewise: the KV is complete then."""
        after = self._memory.fence()
        self._store_queue.put(StoreTask(job, namespace, time.monotonic() + self._deadline_s, after))

    def cancel_load(self, request_id: str) -> None:
        """The request is gone.  Its load still ends, and is still reported, once."""
        task = self._loads.get(request_id)
        if task is not None:
            task.cancelled = True
            self._end_if_queued(task, LoadFailure.CANCELLED)

    def take_ended(self) -> tuple[list[LoadEnd], list[StoreReport]]:
        now = time.monotonic()
        for task in [task for task in self._loads.values() if task.deadline < now]:
            if self._end_if_queued(task, LoadFailure.DEADLINE):
                self._log("load", self._late(task, "waiting for a copy thread"))
        if not self._ended_loads and not self._ended_stores:
            return [], []
        with self._lock:
            loads, self._ended_loads = self._ended_loads, []
            stores, self._ended_stores = self._ended_stores, []
            for end in loads:
                del self._loads[end.job.request_id]
        return loads, stores

    def rest(self, longest_s: float) -> None:
        """For a step that computes nothing: wait a moment for a load to end; the copies get the interpreter."""
        self._something_ended.clear()
        if self._loads and not self._ended_loads:
            self._something_ended.wait(longest_s)

    def close(self) -> None:
        """Best effort and short: correctness never depends on it."""
        for task in list(self._loads.values()):
            task.cancelled = True
        for _ in self._threads[:-1]:
            self._load_queue.put(None)
        self._store_queue.put(None)
        until = time.monotonic() + LEFT_AT_CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    # ---- loads -----------------------------------------------------------------------------------------------------

    def _end_if_queued(self, task: LoadTask, why: LoadFailure) -> bool:
        with self._lock:
            if task.state is not LoadState.QUEUED:
                return False
            task.state = LoadState.ENDED
            self._queued -= 1
            self._ended_loads.append(replace(LoadEnd.failed(task.job, why), seconds=self._seconds(task)))
            self.counters["loads_not_started"] += 1
            return True

    def _seconds(self, task: LoadTask) -> float:
        return time.monotonic() - (task.deadline - self._deadline_s)

    def _late(self, task: LoadTask, stage: str) -> DeadlinePassed:
        size = self._memory.bytes_of(task.job.blocks)
        return DeadlinePassed(
            f"request {task.job.request_id}: {size} bytes were not loaded in {self._deadline_s:g} s, {stage}"
        )

    def _load_loop(self) -> None:
        while (task := self._load_queue.get()) is not None:
            if isinstance(task, LoadCopy):
                task.run(lambda: self._queued == 0)  # the owner goes on alone
                continue
            with self._lock:
                if task.state is not LoadState.QUEUED:
                    continue
                task.state = LoadState.RUNNING
                self._queued -= 1
            end = LoadEnd.failed(task.job, LoadFailure.ERROR)
            try:
                end = self._load(task)
            except Exception as error:
                self._log("load", error)
            with self._lock:
                task.state = LoadState.ENDED
                self._ended_loads.append(replace(end, seconds=self._seconds(task)))
                self.counters["loads_failed" if end.failure else "loads"] += 1
            self._something_ended.set()

    def _load(self, task: LoadTask) -> LoadEnd:
        job = task.job
        left = task.deadline - time.monotonic()
        if left <= 0 or task.cancelled:
            return LoadEnd.failed(job, LoadFailure.CANCELLED if task.cancelled else LoadFailure.DEADLINE)
        reading = self._client.open_read(
            job.handle, self._shard, job.first_chunk, job.chunks, deadline_s=min(CALL_DEADLINE_S, left)
        )
        if reading is None:
            return LoadEnd.failed(job, self._unread(LoadFailure.REFUSED))
        parts = chunks(job.blocks, job.chunks)
        copying = LoadCopy(self._memory, reading, parts, task.after, lambda copied: self._stops(task, copied))
        try:
            for _ in range(min(self._load_threads, len(copying)) - 1):
                self._load_queue.put(copying)  # behind the loads that wait: who has one of those does not help
            copying.run()
            copying.end()
            valid = list(reading.validate())
        finally:
            reading.confirm(wait=False)  # the request need not wait for that
        good = [there and fine for there, fine in zip(copying.copied, valid, strict=True)]
        self.counters["chunks_loaded"] += sum(good)
        bad = tuple(block for part, fine in zip(parts, good, strict=True) if not fine for block in present(part))
        failure = None if all(good) else copying.stopped or self._unread(LoadFailure.INVALID)
        return LoadEnd(job, bad, True, failure, good_chunks=[*good, False].index(False))

    def _unread(self, else_: LoadFailure) -> LoadFailure:
        return else_ if self._client.attached and not self._client.hung else LoadFailure.DAEMON_AWAY

    def _stops(self, task: LoadTask, copied: int) -> LoadFailure | None:
        if time.monotonic() > task.deadline:
            self._log("load", self._late(task, f"{copied} of {task.job.chunks} chunks were copied"))
            return LoadFailure.DEADLINE
        return LoadFailure.CANCELLED if task.cancelled else None

    # ---- stores ----------------------------------------------------------------------------------------------------

    def _store_loop(self) -> None:
        while (task := self._store_queue.get()) is not None:
            report = StoreReport(task.job.job_id, StoreEnd.FAILED)
            try:
                report = self._store(task)
            except Exception as error:
                self._log("store", error)
            with self._lock:
                self._ended_stores.append(report)
                self.counters[f"stores_{report.end.value}"] += 1
                self.counters["chunks_stored"] += report.stored

    def _store(self, task: StoreTask) -> StoreReport:
        job, spec, deadline, after = task
        failed = StoreReport(job.job_id, StoreEnd.FAILED)
        if time.monotonic() > deadline or not self._client.attached or self._client.hung:
            return failed
        if self._namespace is None or self._namespace[0] != spec:
            registered = self._client.register(spec.manifest, shard_bytes=spec.shard_bytes, shards=spec.shards)
            self._namespace = (spec, registered)
        parts = chunks(job.blocks, len(job.hashes) // HASH_BYTES - job.start)
        left = max(0.0, min(CALL_DEADLINE_S, deadline - time.monotonic()))
        reservation = self._client.reserve(
            self._namespace[1], job.hashes, start=job.start, shard=self._shard, deadline_s=left
        )
        with reservation:
            granted = [parts[position - job.start] for position in reservation.granted]
            at_once = self._memory.at_once(self._memory.bytes_of(parts[0]))
            complete: list[bool] = []
            while len(complete) < len(granted):
                piece = slice(len(complete), len(complete) + at_once)
                with reservation.copying() as allowed:
                    write = allowed and time.monotonic() <= deadline
                    if write:
                        self._memory.gather_all(reservation.views[piece], granted[piece], after)
                complete += [write] * len(granted[piece])
            left = max(0.0, deadline - time.monotonic())
            if job.adapter is not None and not self._checks.unchanged(job.adapter, left):  # or it cannot be told
                complete = [False] * len(complete)
            outcomes = list(reservation.commit(complete)) if complete else []
        stored = sum(outcome in (Outcome.SEALED, Outcome.WAITING) for outcome in outcomes)
        verdicts = list(reservation.verdicts)
        if Verdict.ORPHAN in verdicts:
            return StoreReport(job.job_id, StoreEnd.ORPHAN, stored, reservation.missing)
        if Verdict.FULL in verdicts:
            return StoreReport(job.job_id, StoreEnd.FULL, stored)
        if len(verdicts) < len(parts) or stored < len(complete):
            return StoreReport(job.job_id, StoreEnd.FAILED, stored)
        return StoreReport(job.job_id, StoreEnd.DONE, stored)
