"""Lookups and loads, as the scheduler half sees them.  One thread, the engine's.

A request's lookup, once per attempt (an attempt ends with a preemption)::

    IDLE --ask--> WAITING --answer--> READY --admitted with our tokens--> LOADING --worker reports--> CLOSED
                     '--deadline, no daemon, nothing there--> CLOSED <--admitted without, or gone--'

* vLLM repeats the question every step while a request cannot be admitted; the answer is kept, never asked again.
* A request whose load failed is never offered a hit again: vLLM would ask for ever.
* What vLLM was promised comes back: after (n, True) was admitted there is a load job, if need be one that fails.
* References that a lookup holds end in exactly one of: the confirmation of all readers, the end of the Lookup object,
  our death.  Dropping the object gives them back in the background; `release` would wait for the daemon.
* A load has ended when all ranks have reported it, and is right if it is in all of them.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable, Group, alignment, cut, present
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import LoadJob, LoadReport
from kvkeep.ipc.vllm.options import Options

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

MAX_EARLY = 16  # lookups begun when a request arrives; more would hold references for requests deep in the queue
GRACE_S = 0.001  # how long the first question waits for the answer, instead of costing the request a whole step
GRACE_OF_A_STEP_S = 0.004  # ... all requests of one step together
GRACE_PAUSE_S = 0.0001


@dataclass(frozen=True)
class Active:
    """A registered namespace of an attached client, and how it cuts a request into chunks."""

    namespace: Any  # kvkeep.ipc.client.Namespace
    generation: int
    chunk_tokens: int
    groups: tuple[Group, ...]
    hash_block_size: int
    readers: int = 1  # ranks that read the same shard
    null_block: int = 0  # vLLM's id for "no block"

    def table(self, block_ids: Sequence[Sequence[int]], start: int, end: int) -> BlockTable:
        """The blocks of tokens ``start`` to ``end``, out of a request's table from its first token on."""
        every = tuple(tuple(ABSENT if b == self.null_block else b for b in blocks) for blocks in block_ids)
        return cut(every, self.groups, start, end)

    def chain(self, request: Request, chunks: int) -> bytes:
        """Hashes of the first chunks: vLLM's hash of the last block in each, which covers all before it."""
        step = self.chunk_tokens // self.hash_block_size
        hashes = request.block_hashes[step - 1 : chunks * step : step]
        return b"".join(bytes(value).ljust(HASH_BYTES, b"\0") for value in hashes)


class Phase(enum.Enum):
    IDLE = "idle"
    WAITING = "waiting"
    READY = "ready"
    LOADING = "loading"
    CLOSED = "closed"


@dataclass
class _State:
    phase: Phase = Phase.IDLE
    attempt: int = 0  # request.num_preemptions when it was asked
    active: Active | None = None  # that it was asked under
    pending: Any = None  # PendingLookup while WAITING
    lookup: Any = None  # Lookup while READY
    patience_s: float = 0.0
    deadline: float = 0.0  # from the first question on: time in the queue does not count
    early: bool = False
    failed: bool = False  # a load failed: no hit for this request ever again
    known: int = 0  # chunks that were there
    usable: int = 0  # of them, for this request


@dataclass
class _Loading:
    """A load that the workers have."""

    lookup: Any
    ranks: int  # that have not reported yet
    ok: bool = True
    confirmed: bool = True


class Lookups:
    def __init__(self, client: Any, options: Options, guard: Guard, counters: Counter[str], *, ranks: int = 1) -> None:
        self._client, self._guard, self._counters, self._ranks = client, guard, counters, ranks
        self._patience_s = options.lookup_deadline_ms / 1000
        self._l2_wait_s = options.l2_wait_ms / 1000
        self._states: dict[str, _State] = {}
        self._early = 0
        self._grace_s = GRACE_OF_A_STEP_S
        self._loading: dict[str, _Loading] = {}  # by request id, until all ranks have reported
        self._new_loads: list[LoadJob] = []

    # ---- vLLM's questions --------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request, active: Active | None) -> None:
        state = self._states.setdefault(request.request_id, _State())
        if self._early < MAX_EARLY and not never_cached(request):
            self._ask(request, state, active)
            if state.phase is Phase.WAITING:
                state.early = True
                self._early += 1

    def matched_tokens(self, request: Request, local_tokens: int, active: Active | None) -> int | None:
        """Tokens after the local ones that can be loaded; None = ask again in the next step."""
        state = self._states.setdefault(request.request_id, _State())
        if state.failed or never_cached(request):
            return 0
        if state.phase is Phase.IDLE or state.attempt != request.num_preemptions:
            self._ask(request, state, active)
        if state.phase is Phase.WAITING and not self._answered(state):
            return None
        if state.phase is not Phase.READY or active is None or state.active is None:
            return 0
        if state.active.generation != active.generation or not state.lookup.alive:
            return 0
        state.usable = self._usable(state, request, active)
        tokens = int(state.usable * active.chunk_tokens - local_tokens)
        return 0 if tokens < active.chunk_tokens or tokens % alignment(active.groups) else tokens

    def known_chunks(self, request_id: str) -> int:
        """How many chunks of the request need not be stored, as far as we know."""
        state = self._states.get(request_id)
        return state.known if state is not None else 0

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, tokens: int, generation: int) -> None:
        state = self._states.setdefault(request.request_id, _State())
        if tokens == 0:
            if state.phase is not Phase.LOADING:
                self._drop(state)
            return
        try:
            job = self._load_job(request, state, blocks, tokens)
        except Exception as error:
            self._guard.note("load_job", error)
            self._drop(state)
            held = tuple(tuple(ids) for ids in blocks.get_block_ids())
            job = LoadJob(request.request_id, 0, 0, 1, held, generation)
        self._loading[request.request_id] = _Loading(state.lookup, self._ranks)
        state.lookup = None
        state.phase = Phase.LOADING
        self._new_loads.append(job)

    def take_new_loads(self) -> tuple[LoadJob, ...]:
        """Called once a step, at its end."""
        self._grace_s = GRACE_OF_A_STEP_S
        loads, self._new_loads = tuple(self._new_loads), []
        return loads

    def on_load_report(self, report: LoadReport) -> None:
        loading = self._loading.get(report.request_id)
        if loading is None:
            return
        loading.ranks -= 1
        loading.ok &= report.ok
        loading.confirmed &= report.confirmed
        state = self._states.get(report.request_id)
        if state is not None and not report.ok:
            state.failed, state.known = True, 0  # now: vLLM may ask again before the other ranks have reported
        if loading.ranks > 0:
            return
        del self._loading[report.request_id]
        if loading.lookup is not None and loading.confirmed:
            loading.lookup.hand_over()
        if state is not None:
            state.phase = Phase.CLOSED
        self._counters["loads" if loading.ok else "loads_failed"] += 1

    def on_finished(self, request_id: str) -> None:
        """A load that is under way keeps its references until the worker reports it."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._drop(state)

    def held(self) -> int:
        """Lookups that hold references or may come to hold some.  0 when the engine is idle."""
        waiting = sum(state.pending is not None or state.lookup is not None for state in self._states.values())
        return waiting + len(self._loading)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, state: _State, active: Active | None) -> None:
        self._drop(state)
        state.attempt, state.active, state.deadline = request.num_preemptions, active, 0.0
        if active is None:
            return
        hashes = active.chain(request, request.num_tokens // active.chunk_tokens)
        if hashes:
            wait_s = self._l2_wait_s if self._client.has_l2 else 0.0
            state.pending = self._client.begin_lookup(active.namespace, hashes, readers=active.readers, wait_s=wait_s)
            state.patience_s = self._patience_s + wait_s
            state.phase = Phase.WAITING
            self._counters["lookups"] += 1

    def _answered(self, state: _State) -> bool:
        lookup, now = state.pending.poll(), time.monotonic()
        if lookup is None and state.deadline == 0.0:
            state.deadline = now + state.patience_s
            lookup = self._wait_a_moment(state.pending, now)
        if lookup is None and now < state.deadline:
            return False
        pending, state.pending, state.phase = state.pending, None, Phase.CLOSED
        self._end_early(state)
        if lookup is None:
            pending.cancel()
            self._counters["lookups_expired"] += 1
        elif lookup.ready > 0:
            state.lookup, state.phase, state.known = lookup, Phase.READY, lookup.ready
            self._counters["lookups_hit"] += 1
        return True

    def _wait_a_moment(self, pending: Any, began: float) -> Any:
        """Its answer, or None.  An answer takes a fraction of a millisecond; a step takes many."""
        until = began + min(GRACE_S, self._grace_s, self._patience_s)
        lookup, now = None, began
        while lookup is None and now < until:
            time.sleep(GRACE_PAUSE_S)
            lookup, now = pending.poll(), time.monotonic()
        self._grace_s -= now - began
        return lookup

    def _load_job(self, request: Request, state: _State, blocks: KVCacheBlocks, tokens: int) -> LoadJob:
        active, name = state.active, request.request_id
        if state.phase is not Phase.READY or active is None:
            raise RuntimeError(f"{tokens} tokens of request {name} were admitted in phase {state.phase.value}")
        end = state.usable * active.chunk_tokens
        begin = end - tokens
        first = max(0, begin) // active.chunk_tokens
        table = active.table(blocks.get_block_ids(), max(0, begin), end)
        if begin < 0 or not _complete(table, active, begin, end):
            raise RuntimeError(
                f"{tokens} tokens of request {name} were admitted into {len(present(table))} blocks, {end} are there"
            )
        skip = begin % active.chunk_tokens
        filled = tuple(
            (ABSENT,) * (skip // group.block_size) + ids for group, ids in zip(active.groups, table, strict=True)
        )
        return LoadJob(name, state.lookup.handle, first, state.usable - first, filled, active.generation)

    def _usable(self, state: _State, request: Request, active: Active) -> int:
        """Chunks that a hit may end with.  After a hit of all tokens the last is computed again, with its window."""
        ready = int(state.lookup.ready)
        end = ready * active.chunk_tokens
        whole = end == request.num_tokens
        return ready - 1 if whole and any(group.lacks_last(end) for group in active.groups) else ready

    def _drop(self, state: _State) -> None:
        if state.pending is not None and state.pending.poll() is None:
            state.pending.cancel()
        state.pending = state.lookup = None
        state.phase = Phase.CLOSED
        self._end_early(state)

    def _end_early(self, state: _State) -> None:
        self._early -= state.early
        state.early = False


def _complete(table: BlockTable, active: Active, begin: int, end: int) -> bool:
    """Every block is there that the first token after the hit sees."""
    for group, ids in zip(active.groups, table, strict=True):
        first = begin // group.block_size
        if (first + len(ids)) * group.block_size != end:
            return False
        if any(
            block == ABSENT and (not group.window or group.needs(first + n, end + 1)) for n, block in enumerate(ids)
        ):
            return False
    return True


def never_cached(request: Request) -> bool:
    """A LoRA adapter's name is part of a block hash, but its content is not: such requests are not cached."""
    return request.lora_request is not None or bool(request.skip_reading_prefix_cache)
