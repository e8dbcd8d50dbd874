"""The scheduler half: owns identity and generation, passes vLLM's questions to lookups.py and stores.py.

Nothing here waits for the daemon longer than a millisecond or so: lookups are begun and polled, registration runs in
namespace.py's thread, and without a daemon there is no `Active` and every answer is a miss.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.ipc.vllm import clients, compat, events, fingerprint, identity
from kvkeep.ipc.vllm.adapters import Adapters, Keys, settings_text
from kvkeep.ipc.vllm.controls import Controls
from kvkeep.ipc.vllm.groups import alignment, groups_of
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.leaving import Leaving
from kvkeep.ipc.vllm.lookups import Active, Lookups
from kvkeep.ipc.vllm.memory import Levels
from kvkeep.ipc.vllm.metadata import (
    KVKeepMetadata,
    KVKeepWorkerMetadata,
    LoadFailure,
    LoadReport,
    NamespaceSpec,
    WorkerFacts,
)
from kvkeep.ipc.vllm.namespace import NamespaceKeeper
from kvkeep.ipc.vllm.options import LEAVING, Options
from kvkeep.ipc.vllm.pace import Pace
from kvkeep.ipc.vllm.pins import Pinner
from kvkeep.ipc.vllm.ranks import Ranks
from kvkeep.ipc.vllm.stats import KVKeepStats, Tally, Tier
from kvkeep.ipc.vllm.stores import BlocksOf, Stores

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

DEFAULT_CHUNK_TOKENS = 256
START_WAIT_S = 0.5  # at engine start, for a daemon that is there
LEAVING_STEPS = 4  # blocks that so many steps can take are about to leave


class SchedulerHalf:
    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: Options,
        guard: Guard,
        log: Callable[[str], None],
        *,
        may_load: bool = True,
        may_store: bool = True,
        failures_end_requests: bool = False,
    ) -> None:
        """``failures_end_requests``: so vLLM's kv_load_failure_policy says."""
        self._untold = failures_end_requests
        self._may_load, self._may_store = may_load, may_store
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._options, self._guard, self._log = options, guard, log
        self._groups = groups_of(kv_cache_config)
        self._ranks = Ranks.of(vllm_config, kv_cache_config)
        self._drops_last = identity.drops_last_chunk(vllm_config)
        self._hash_block_size: int = compat.differences().hash_block_size(vllm_config, kv_cache_config)
        self._pool: Any = None
        self._blocks_of: BlocksOf | None = None
        self._facts: WorkerFacts | None = None
        self._levels: dict[int, Levels] = {}  # by rank
        self._client: Any = None
        self._keeper: NamespaceKeeper | None = None
        self._active: Active | None = None  # made from `_registered`
        self._registered: Any = None
        self._told_worker: NamespaceSpec | None = None
        self._generation, self._epoch = 0, ""
        self._controls = Controls(log, store_generated=options.store_generated, max_pin_s=options.max_pin_s)
        self._pin_s: dict[str, float] = {}  # of requests that want their prompts kept
        self._pinner: Pinner | None = None
        self._keys = self._make_keys()
        self._pace = Pace(options.min_hit)
        self._epoch_of_daemon = 0  # that its loads were measured with
        self.tally = Tally()
        self._events = events.Events(kv_cache_config, self._hash_block_size) if events.wanted(vllm_config) else None
        self.lookups: Lookups | None = None
        self.stores: Stores | None = None

    # ---- start and end -----------------------------------------------------------------------------------------------

    def bind_block_pool(self, pool: Any) -> None:
        self._pool = pool

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self._blocks_of = lambda request_id: manager.get_blocks(request_id).blocks

    def set_facts(self, facts: Sequence[WorkerFacts]) -> None:
        """Each worker has seen its KV memory, so the identity is complete: attach, and register in the background."""
        refused = next((of_rank.refused for of_rank in facts if of_rank.refused), "")
        if not refused and (len(facts) != self._ranks.count or any(of_rank != facts[0] for of_rank in facts)):
            refused = f"{len(facts)} of {self._ranks.count} ranks described their KV memory, or not all alike"
        if refused:
            self._refuse(refused)
            return
        self._facts = facts[0]
        self._client = clients.attach(self._options, "vllm scheduler")
        self._pinner = Pinner(self._client, self._guard.note)
        common: Any = {"tally": self.tally, "events": self._events, "keys": self._keys}
        self.lookups = Lookups(
            self._client,
            self._options,
            self._guard,
            ranks=self._ranks.count,
            pace=self._pace,
            shares_blocks=bool(self._vllm_config.cache_config.enable_prefix_caching),
            **common,
        )
        self.stores = Stores(
            self._pool,
            self._options,
            self.lookups,
            self._guard,
            ranks=self._ranks.shards,
            blocks_of=self._blocks_of,
            leaving=self._make_leaving(),
            **common,
        )
        self._keeper = NamespaceKeeper(self._client, self._build_namespace, self._refuse)
        self._keeper.start(self._generation)
        self._keeper.wait(START_WAIT_S)

    def _make_leaving(self) -> Leaving | None:
        if self._options.store_when != LEAVING:
            return None
        if not self._vllm_config.cache_config.enable_prefix_caching:
            self._log("kvkeep: without prefix caching nothing stays in the engine: chunks are stored when complete")
            return None
        if not all(group.sees_all for group in self._groups):
            self._log(
                "kvkeep: kvkeep.store_when is 'leaving', but this model has a sliding window or chunked local "
                "attention, where the engine keeps most blocks without a hash: chunks are stored when complete"
            )
            return None
        step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        step = sum(-(-step_tokens // group.block_size) for group in self._groups)
        most = int(self._pool.num_gpu_blocks * self._options.pinned_fraction)
        return Leaving(self._pool, min(LEAVING_STEPS * step, most), min(step, most))

    def _make_keys(self) -> Keys:
        lora = self._vllm_config.lora_config
        if lora is None:
            return Keys()
        trust = self._options.trust_new_adapters
        return Keys(Adapters(self._log, settings=settings_text(lora), trust_new=trust))

    def close(self) -> None:
        if self._pinner is not None:
            self._pinner.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._client is not None:
            self._client.close()

    def _refuse(self, sentence: str) -> None:
        self._facts = None
        self._log(f"kvkeep: cache off for this engine: {sentence}")

    def _build_namespace(self, generation: int) -> NamespaceSpec:
        assert self._facts is not None
        chunk = self._options.chunk_tokens or self._client.chunk_tokens or DEFAULT_CHUNK_TOKENS
        refused = identity.refused_chunk(chunk, alignment(self._groups))
        if refused:
            raise NamespaceKeeper.Refused(refused)
        layout = self._facts.layout
        try:
            manifest = identity.manifest(self._vllm_config, self._kv_cache_config, layout, chunk, self._epoch)
        except fingerprint.NoFingerprint as sentence:
            raise NamespaceKeeper.Refused(str(sentence)) from None
        sizes = zip(self._facts.block_bytes, self._groups, strict=True)
        shard_bytes = sum(size * (chunk // group.block_size) for size, group in sizes)
        return NamespaceSpec(manifest, shard_bytes, self._ranks.shards, chunk, generation)

    def active(self) -> Active | None:
        """None: no daemon, or one that hangs, not registered yet, or refused."""
        registered = self._keeper.current if self._keeper is not None else None
        if registered is None or self._facts is None or not self._client.attached or self._client.hung:
            return None
        if self._client.epoch != self._epoch_of_daemon:  # another daemon, or one that was restarted
            self._epoch_of_daemon = self._client.epoch
            self._pace.forget_loads()
            if self.stores is not None:
                self.stores.on_other_daemon()
        if registered is not self._registered:
            spec = registered.spec
            self._registered = registered
            self._active = Active(
                registered.namespace,
                spec.generation,
                spec.chunk_tokens,
                self._groups,
                self._hash_block_size,
                readers=self._ranks.replicas,
                null_block=self._pool.null_block.block_id,
                chunk_bytes=spec.shard_bytes * spec.shards,
                drops_last=self._drops_last,
            )
        return self._active

    # ---- vLLM's questions --------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if self.lookups is None or self.stores is None:
            return
        control = self._controls.of(request.kv_transfer_params)
        if control.pin_s:
            self._pin_s[request.request_id] = control.pin_s
        if self._may_store:
            at_once = control.pin_s > 0  # only what is stored can be pinned
            self.stores.on_new_request(request, self._generation, control.store, low=control.low, at_once=at_once)
        if self._may_load:
            self.lookups.on_new_request(request, self.active(), wanted=control.load)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        if self.lookups is None or not self._may_load:
            return 0, False
        tokens = self.lookups.matched_tokens(request, local_tokens, self.active())
        return tokens, bool(tokens)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        if self.lookups is not None:
            self.lookups.after_alloc(request, blocks, tokens, self._generation)

    def step_metadata(self, output: SchedulerOutput) -> KVKeepMetadata:
        if self.lookups is None or self.stores is None:
            return KVKeepMetadata()
        metadata = KVKeepMetadata(loads=self.lookups.take_new_loads(), generation=self._generation)
        try:
            active = self.active()
            self.tally.level("attached", int(active is not None))
            if active is not None:
                if self._registered.spec is not self._told_worker:
                    metadata.namespace = self._told_worker = self._registered.spec
                metadata.stores = tuple(self.stores.new_jobs(output, active))
        except Exception as error:  # the loads must go out whatever happens here
            self._guard.note("new_stores", error)
        try:
            metadata.step = self._begin_step(output)
        except Exception as error:
            self._guard.note("begin_step", error)
        return metadata

    def _begin_step(self, output: SchedulerOutput) -> int:
        """Take the time of a step of many tokens.  Its number, or 0."""
        if not self._pace.times_steps(output.total_num_scheduled_tokens):
            return 0
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        scheduled = output.num_scheduled_tokens
        return self._pace.step_began((tokens, before.get(name, 0)) for name, tokens in scheduled.items())

    def on_output(self, report: KVKeepWorkerMetadata | None) -> None:
        """The output of a step is there."""
        if report is not None:
            self._pace.step_ended(report.step)
        self._pace.output_seen()
        if report is not None:
            self._on_worker_report(report)
            self._on_memory_report(report)

    def _on_worker_report(self, report: KVKeepWorkerMetadata) -> None:
        assert self.lookups is not None
        assert self.stores is not None
        for load in report.loads:
            try:
                self.lookups.on_load_report(load)
                self._tell_of_policy(load)
            except Exception as error:  # the reports after it end pins and references
                self._guard.note("load_report", error)
        for store in report.stores:
            try:
                self.stores.on_report(store)
            except Exception as error:  # the next one unpins blocks, too
                self._guard.note("store_report", error)

    def _tell_of_policy(self, report: LoadReport) -> None:
        if self._untold and report.failure not in (None, LoadFailure.CANCELLED):
            self._untold = False
            self._log(
                f"kvkeep: request {report.request_id} ends with an error because its load failed "
                f"({report.failure.value}) and kv_load_failure_policy is 'fail'; set it to 'recompute' in "
                "--kv-transfer-config, and such requests are computed instead (logged once)"
            )

    def _on_memory_report(self, report: KVKeepWorkerMetadata) -> None:
        if report.levels:
            self._levels |= report.levels
            self.tally.level("arena_bytes", sum(levels.arena for levels in self._levels.values()))
            self.tally.level("arena_pinned_bytes", sum(levels.pinned for levels in self._levels.values()))
        if report.problem and self._facts is not None:  # every lookup is a miss from now on
            self._refuse(report.problem)
            if self._keeper is not None:
                self._keeper.close()

    def on_finished(self, request: Request) -> None:
        if self.lookups is not None and self.stores is not None:
            self.lookups.on_finished(request.request_id)
            self.stores.on_finished(request.request_id)
            self._pin(request)  # last: whatever it meets, nothing is held any more

    def _pin(self, request: Request) -> None:
        seconds = self._pin_s.pop(request.request_id, 0.0)
        active = self.active() if seconds else None
        if active is not None and self._pinner is not None:
            chain = self._keys.chain(request, active, request.num_prompt_tokens // active.chunk_tokens)
            self._pinner.ask(active.namespace, chain or b"", seconds)

    @property
    def counters(self) -> Counter[str]:
        """Since the start."""
        return self.tally.totals

    def tokens_by_tier(self, request: Request) -> dict[Tier, int]:
        return self.lookups.tokens_by_tier(request.request_id) if self.lookups is not None else {}

    def take_stats(self) -> KVKeepStats | None:
        """None in a step in which nothing happened."""
        if self.stores is not None:
            self.tally.level("pinned_blocks", self.stores.pinned_blocks)
        return self.tally.take()

    def take_events(self) -> list[Any]:
        return self._events.take() if self._events is not None else []

    def has_pending_stores(self) -> bool:
        return self.stores is not None and self.stores.pending()

    def has_pending_block_frees(self) -> bool:
        return self.stores is not None and self.stores.frees_soon()

    def reset(self) -> bool:
        """Nothing stored so far is seen again: a new, unique epoch goes into the identity.  O(1)."""
        if self._keeper is None or self.stores is None:
            return True
        self._generation += 1
        self._epoch = f"{self._generation}-{os.urandom(8).hex()}"
        self.stores.on_reset()
        self._keeper.start(self._generation)
        if self.stores.blocked:
            self._log(
                "kvkeep: the cache was reset while the engine still held KV blocks, so nothing is stored until a reset "
                "of the idle engine: wait for requests and stores to end, then reset again"
            )
        return not self.stores.blocked
