"""KVKeepConnector: what vLLM sees (0.32; see compat.py for others).  Dispatch, and a guard around every entry point.

vLLM makes two objects of this class, one for the scheduler and one for each worker, in one process or in several.  Each
has its half (scheduler.py, worker.py).  An engine that we refuse has none: every answer is then a miss, and the engine
runs as if the connector were not there.  No method raises into the engine.

All loads are asynchronous; `wait_for_layer_load` and `save_kv_layer` do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvkeep.ipc.extra_config import OptionError
from kvkeep.ipc.vllm import compat, identity, logs, options
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import KVKeepMetadata, KVKeepWorkerMetadata, WorkerFacts
from kvkeep.ipc.vllm.scheduler import SchedulerHalf
from kvkeep.ipc.vllm.stats import KVKeepProm, KVKeepStats
from kvkeep.ipc.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvkeep")

Method = TypeVar("Method", bound=Callable[..., Any])
VERSION = compat.differences()


def guarded(default: Callable[[], Any]) -> Callable[[Method], Method]:
    """Run the method; if it raises, note that and answer `default()`."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: KVKeepConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.guard.note(method.__name__, error)
                return default()

        return run  # type: ignore[return-value]

    return decorate


def nothing() -> None:
    return None


class KVKeepConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    _cache_hit_source = VERSION.DEFAULT_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logs.forward(logger)
        self.guard = Guard(logger.warning)
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self._refusal: WorkerFacts | None = None
        try:
            self._make_half(vllm_config, role, kv_cache_config)
        except OptionError as sentence:
            self._refuse(str(sentence))
        except Exception as error:
            self.guard.note("start", error)

    def _make_half(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        chosen = options.parse(self._kv_transfer_config.kv_connector_extra_config)
        refused = identity.refusal(vllm_config, kv_cache_config)
        if refused:
            self._refuse(refused)
            self._refusal = WorkerFacts(refused, (), {})
        elif role == KVConnectorRole.WORKER:
            self.worker = WorkerHalf(vllm_config, kv_cache_config, chosen, self.guard)
        else:
            fails = self._kv_transfer_config.kv_load_failure_policy != "recompute"
            self.scheduler = SchedulerHalf(
                vllm_config,
                kv_cache_config,
                chosen,
                self.guard,
                logger.warning,
                may_load=self._kv_transfer_config.is_kv_consumer,
                may_store=self._kv_transfer_config.is_kv_producer,
                failures_end_requests=fails,
            )
            if fails:
                logger.warning(
                    "kvkeep: kv_load_failure_policy is 'fail': a failed load ends its request with an error; set it to "
                    "'recompute' in --kv-transfer-config"
                )

    def _refuse(self, sentence: str) -> None:
        if self._role == KVConnectorRole.SCHEDULER:  # one line per engine, not one per half
            logger.warning("kvkeep: cache off for this engine: %s", sentence)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is a miss later

    # ---- worker ------------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.worker is not None:
            self.worker.register_kv_caches(kv_caches)

    @guarded(nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Also of a refusal: where layers of one group differ, the scheduler half is shown one of them only."""
        return self.worker.facts() if self.worker is not None else self._refusal

    @guarded(nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self.worker is not None and isinstance(self._connector_metadata, KVKeepMetadata):
            # The V2 model runner calls this outside the forward's context, with arguments if there is a forward.
            computes = bool(kwargs) or getattr(forward_context, "attn_metadata", None) is not None
            self.worker.start_loads(self._connector_metadata, computes=computes)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        pass

    @guarded(nothing)
    def wait_for_save(self) -> None:
        if self.worker is not None and isinstance(self._connector_metadata, KVKeepMetadata):
            self.worker.start_stores(self._connector_metadata)

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self.worker is not None:
            results.finished_recving, results.failed_recving = self.worker.take_finished_loads(finished_req_ids)
        return results

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_invalid_blocks() if self.worker is not None else set()

    @guarded(nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_report() if self.worker is not None else None

    # ---- scheduler ---------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        if self.scheduler is not None:
            self.scheduler.bind_kv_cache_manager(kv_cache_manager)
        super().bind_kv_cache_manager(kv_cache_manager)  # which is where the block pool comes from

    @guarded(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self.scheduler is not None:
            self.scheduler.bind_block_pool(gpu_block_pool)

    @guarded(nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        if self.scheduler is not None:
            facts = [metadata[rank] for rank in sorted(metadata)]
            if all(isinstance(of_rank, WorkerFacts) for of_rank in facts):
                self.scheduler.set_facts(facts)
            else:
                self._refuse("what we got at the start is another connector's: list KVKeepConnector first")

    @guarded(nothing)
    def on_new_request(self, request: Request) -> None:
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler is None:
            return 0, False
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    @guarded(nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self.scheduler is not None:
            self.scheduler.after_alloc(request, blocks, num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        found = self.scheduler.tokens_by_tier(request) if self.scheduler is not None else {}
        known = VERSION.HIT_SOURCES
        return {known[tier]: tokens for tier, tokens in found.items() if tokens and tier in known}

    @guarded(KVKeepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.step_metadata(scheduler_output) if self.scheduler is not None else KVKeepMetadata()

    @guarded(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self.scheduler is not None:
            self.scheduler.on_output(report if isinstance(report, KVKeepWorkerMetadata) else None)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is not None:
            self.scheduler.on_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer: tuple[bool, dict[str, Any] | None] = self.request_finished(request, block_ids[0] if block_ids else [])
        return answer

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until its last stores are reported and their blocks unpinned."""
        return self.scheduler is not None and self.scheduler.has_pending_stores()

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Asked when a running request gets no block: it waits a step, and nobody is preempted."""
        return self.scheduler is not None and self.scheduler.has_pending_block_frees()

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self.scheduler.reset() if self.scheduler is not None else True

    # ---- metrics and events ------------------------------------------------------------------------------------------

    @guarded(nothing)
    def get_kv_connector_stats(self) -> KVKeepStats | None:
        """The scheduler half counts everything (stats.py)."""
        return self.scheduler.take_stats() if self.scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVKeepStats:
        return KVKeepStats.of(data) if data is not None else KVKeepStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVKeepProm:
        return KVKeepProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events() if self.scheduler is not None else ()

    # ---- both --------------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def shutdown(self) -> None:
        for half in (self.scheduler, self.worker):
            if half is not None:
                half.close()
