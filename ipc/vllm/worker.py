"""The worker half: owns the KV memory's view and the copy threads.

All of it runs on the engine's worker thread and only moves records; copies.py does the work.  Loads start after the
forward was launched, stores after it ended (`wait_for_save`), when the KV of the step is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.ipc.vllm import clients, devices, identity
from kvkeep.ipc.vllm.copies import CopyThreads
from kvkeep.ipc.vllm.groups import groups_of, present
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.memory import KVMemory, Levels, UnknownLayout
from kvkeep.ipc.vllm.metadata import (
    KVKeepMetadata,
    KVKeepWorkerMetadata,
    LoadFailure,
    LoadJob,
    LoadReport,
    NamespaceSpec,
    StoreEnd,
    StoreReport,
    WorkerFacts,
)
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.ranks import Rank

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

START_WAIT_S = 0.5  # at engine start, for a daemon that is there
REST_S = 0.004  # in a step without a forward, while loads are under way: one that comes meanwhile waits so long


class WorkerHalf:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options, guard: Guard) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._options, self._guard = options, guard
        groups = groups_of(kv_cache_config)
        self._all_or_nothing = len(groups) > 1 or not groups[0].sees_all
        self._rank = Rank()
        self._client: Any = None
        self._facts: WorkerFacts | None = None
        self._namespace: NamespaceSpec | None = None
        self._generation = 0
        self._rests = False
        self._memory: KVMemory | None = None
        self._levels: Levels | None = None  # as reported
        self._problem = ""  # likewise
        self.copies: CopyThreads | None = None
        self._lost_loads: list[LoadJob] = []  # that no copy thread took
        self._lost_stores: list[StoreReport] = []
        self._invalid_blocks: set[int] = set()
        self._report = KVKeepWorkerMetadata()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            memory = devices.open_memory(self._vllm_config, self._kv_cache_config, kv_caches, self._guard.say)
        except UnknownLayout as sentence:
            self._facts = WorkerFacts(str(sentence), (), {})
            return
        self._memory = memory
        layout = {"groups": memory.describe(), **identity.describe_platform(self._vllm_config, list(kv_caches))}
        self._facts = WorkerFacts("", memory.block_bytes, layout)
        self._rank = Rank.of_this_process(self._vllm_config, self._kv_cache_config)
        self._client = clients.attach(self._options, f"vllm worker {self._rank.rank}")
        clients.wait(self._client, START_WAIT_S)
        memory.use(self._client)
        self.copies = CopyThreads(
            self._client,
            memory,
            shard=self._rank.shard,
            load_threads=self._options.load_threads,
            deadline_s=self._options.transfer_deadline_s,
            log=self._guard.note,
        )

    def facts(self) -> WorkerFacts | None:
        return self._facts

    def start_loads(self, metadata: KVKeepMetadata, *, computes: bool) -> None:
        self._rests = not computes
        self._generation = metadata.generation
        self._report.step = metadata.step
        if metadata.namespace is not None:
            self._namespace = metadata.namespace
        for job in metadata.loads:
            try:
                assert self.copies is not None
                self.copies.submit_load(job)
            except Exception as error:  # the scheduler waits for this id: it must come back
                self._guard.note("submit_load", error)
                self._lost_loads.append(job)

    def start_stores(self, metadata: KVKeepMetadata) -> None:
        if not self._rank.stores:
            return
        for job in metadata.stores:
            try:
                assert self.copies is not None
                assert self._namespace is not None
                if job.generation != self._namespace.generation:
                    raise RuntimeError(f"store of generation {job.generation} in {self._namespace.generation}")
                self.copies.submit_store(job, self._namespace)
            except Exception as error:  # its blocks are pinned until it is reported
                self._guard.note("submit_store", error)
                self._lost_stores.append(StoreReport(job.job_id, StoreEnd.FAILED))

    def take_finished_loads(self, finished_requests: set[str]) -> tuple[set[str], set[str]]:
        """Request ids whose load has ended, and those of them that failed altogether.  With one KV cache group what is
        good of a load counts: its other blocks wait in `take_invalid_blocks`, and it is not among the failed.  Not so
        with a sliding window, before whose blocks there are none: nothing can be computed from inside it."""
        if self.copies is None:
            return set(), set()
        for request_id in finished_requests:
            self.copies.cancel_load(request_id)
        if self._rests:
            self.copies.rest(REST_S)
        ended, stores = self.copies.take_ended()
        reports: list[LoadReport] = []
        invalid: set[int] = set()
        for end in ended:
            bad, failure, good = end.bad_blocks, end.failure, 0 if self._all_or_nothing else end.good_chunks
            if failure is None and end.job.generation != self._generation:  # it was reset while this was under way
                bad, failure, good = present(end.job.blocks), LoadFailure.RESET, 0
            invalid.update(bad)
            reports.append(LoadReport(end.job.request_id, failure, end.confirmed, good, end.seconds))
        for job in self._lost_loads:
            invalid.update(present(job.blocks))
            reports.append(LoadReport(job.request_id, LoadFailure.ERROR, False))
        self._report.loads += reports
        self._report.stores += stores + self._lost_stores
        self._lost_loads, self._lost_stores = [], []
        finished = {report.request_id for report in reports}
        if self._all_or_nothing:  # vLLM takes invalid blocks for models with one group only
            return finished, {report.request_id for report in reports if not report.ok}
        self._invalid_blocks |= invalid
        return finished, set()

    def take_invalid_blocks(self) -> set[int]:
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def take_report(self) -> KVKeepWorkerMetadata | None:
        """None = nothing has happened."""
        self._report_memory()
        if self._report == KVKeepWorkerMetadata():
            return None
        report, self._report = self._report, KVKeepWorkerMetadata()
        return report

    def _report_memory(self) -> None:
        if self._memory is None:
            return
        levels, problem = self._memory.levels(), self._memory.problem
        if levels is not None and levels != self._levels:
            self._report.levels = {self._rank.rank: levels}
            self._levels = levels
        if problem != self._problem:
            self._report.problem = self._problem = problem

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()
        if self._client is not None:
            self._client.close()
        if self._memory is not None:
            self._memory.close()
