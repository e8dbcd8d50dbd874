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
* A hit that would take longer to load than to compute is none (pace.py), and what another request of this engine is
  loading is waited for, not loaded again (underway.py); who waited in vain, as long as computing takes, computes.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.ipc.messages import HASH_BYTES, MAX_CHUNKS
from kvkeep.ipc.vllm.adapters import Keys
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable, Group, alignment, cut, present
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.metadata import LoadFailure, LoadJob, LoadReport
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.pace import Pace
from kvkeep.ipc.vllm.stats import Tally, Tier
from kvkeep.ipc.vllm.underway import UnderWay

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from kvkeep.ipc.vllm.events import Events

MAX_EARLY = 16  # lookups begun when a request arrives; more would hold references for requests deep in the queue
GRACE_S = 0.001  # how long the first question waits for the answer, instead of costing the request a whole step
GRACE_OF_A_STEP_S = 0.004  # ... all requests of one step together
MANY = 1 << 30


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
    chunk_bytes: int = 0  # all shards
    drops_last: bool = False  # of the chunks that are there, no hit may have the last one (draft layers)

    def bytes_of(self, tokens: int) -> int:
        return tokens * self.chunk_bytes // self.chunk_tokens

    def table(self, block_ids: Sequence[Sequence[int]], start: int, end: int) -> BlockTable:
        """The blocks of tokens ``start`` to ``end``, out of a request's table from its first token on."""
        null, part = self.null_block, cut(block_ids, self.groups, start, end)
        return tuple(tuple(ABSENT if block == null else block for block in ids) if null in ids else ids for ids in part)

    def chain(self, request: Request, chunks: int) -> bytes:
        """Hashes of the first chunks: vLLM's hash of the last block in each, which covers all before it."""
        step = self.chunk_tokens // self.hash_block_size
        hashes = request.block_hashes[step - 1 : chunks * step : step]
        if hashes and len(hashes[0]) == HASH_BYTES:  # as those of sha256 are
            return b"".join(hashes)
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
    hashes: bytes = b""  # that were asked for
    pending: Any = None  # PendingLookup while WAITING
    lookup: Any = None  # Lookup while READY
    patience_s: float = 0.0
    deadline: float = 0.0  # from the first question on: time in the queue does not count
    early: bool = False
    wanted: bool = True  # the request may be looked up at all
    adapter_until: float = 0.0  # how long it waits for its adapter to be read, from the first question on
    shared_until: float = 0.0  # ... for what another request loads
    verdict: tuple[int, bool] = (-1, False)  # of how many tokens: worth it?
    failed: bool = False  # a load failed: no hit for this request ever again
    known: int = 0  # chunks that were there
    answered: int = -1  # the same, of this attempt; -1: the daemon has not said
    usable: int = 0  # of them, for this request
    local_tokens: int = 0  # that the engine had itself when it was offered the hit


@dataclass
class _Loading:
    """A load that the workers have."""

    lookup: Any
    ranks: int  # that have not reported yet
    job: LoadJob
    tokens: dict[Tier, int]  # that vLLM was promised
    active: Active | None  # None: there was no hit to promise
    hashes: bytes
    began: float
    failure: LoadFailure | None = None
    confirmed: bool = True
    good_chunks: int = MANY  # the leading ones that are good in all ranks
    seconds: float = 0.0  # of the slowest rank


class Lookups:
    def __init__(
        self,
        client: Any,
        options: Options,
        guard: Guard,
        tally: Tally,
        *,
        ranks: int = 1,
        events: Events | None = None,
        keys: Keys | None = None,
        pace: Pace | None = None,
        shares_blocks: bool = True,
    ) -> None:
        """``shares_blocks``: the engine has a prefix cache, in which one request finds what another loaded."""
        self._keys, self._pace, self._shares_blocks = keys or Keys(), pace or Pace(options.min_hit), shares_blocks
        self._client, self._guard, self._ranks = client, guard, ranks
        self._tally, self._events = tally, events
        self._patience_s = options.lookup_deadline_ms / 1000
        self._l2_wait_s = options.l2_wait_ms / 1000
        self._states: dict[str, _State] = {}
        self._early = 0
        self._grace_s = GRACE_OF_A_STEP_S
        self._loading: dict[str, _Loading] = {}  # by request id, until all ranks have reported
        self._under_way = UnderWay()
        self._transfer_s = options.transfer_deadline_s
        self._failed_at = 0.0  # when a load failed that was learned from
        self._new_loads: list[LoadJob] = []

    # ---- vLLM's questions --------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request, active: Active | None, *, wanted: bool = True) -> None:
        state = self._states.setdefault(request.request_id, _State())
        state.wanted = wanted
        if self._early < MAX_EARLY and wanted and not request.skip_reading_prefix_cache:
            self._ask(request, state, active)
            if state.phase is Phase.WAITING:
                state.early = True
                self._early += 1

    def matched_tokens(self, request: Request, local_tokens: int, active: Active | None) -> int | None:
        """Tokens after the local ones that can be loaded; None = ask again in the next step."""
        state = self._states.setdefault(request.request_id, _State())
        if state.failed or not state.wanted or request.skip_reading_prefix_cache:
            return 0
        if state.phase is Phase.IDLE or state.attempt != request.num_preemptions:
            self._ask(request, state, active)
            if state.phase is Phase.IDLE and self._waits_for_adapter(state):
                return None
        if state.phase is Phase.WAITING and not self._answered(state):
            return None
        if state.phase is not Phase.READY or active is None or state.active is None:
            return 0
        if state.active.generation != active.generation or not state.lookup.alive:
            return 0
        state.usable = self._usable(state, request, active)
        tokens = int(state.usable * active.chunk_tokens - local_tokens)
        if tokens < active.chunk_tokens or tokens % alignment(active.groups):
            return 0
        if not self._worth(state, tokens, local_tokens):
            return 0
        if self._waits_for_load(state, local_tokens, active):
            return None
        state.local_tokens = local_tokens
        return tokens if state.lookup is not None else 0

    def known_chunks(self, request_id: str) -> int:
        """How many chunks of the request need not be stored, as far as we know."""
        state = self._states.get(request_id)
        return state.known if state is not None else 0

    def missing_chunks(self, request_id: str) -> range:
        """Positions of the request's chunks that the daemon said it lacks; empty if it was not asked, or is silent."""
        state = self._states.get(request_id)
        if state is None or state.answered < 0:
            return range(0)
        return range(min(state.known, state.answered), len(state.hashes) // HASH_BYTES)

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
            job = LoadJob(request.request_id, 0, 0, 1, self._unfilled(state, blocks), generation)
        self._new_loads.append(job)
        loading = _Loading(
            state.lookup, self._ranks, job, _by_tier(state, tokens), state.active, state.hashes, time.monotonic()
        )
        self._loading[request.request_id] = loading
        self._under_way.begin(request.request_id, state.hashes, job.first_chunk, job.first_chunk + job.chunks)
        state.lookup = None
        state.phase = Phase.LOADING
        for tier, count in loading.tokens.items():
            self._tally.add(f"hit_tokens_{tier.value}", count)
            self._tally.add(f"hit_bytes_{tier.value}", loading.active.bytes_of(count) if loading.active else 0)

    def tokens_by_tier(self, request_id: str) -> dict[Tier, int]:
        """Of the load that this request waits for: where its tokens were found."""
        loading = self._loading.get(request_id)
        return loading.tokens if loading is not None else {}

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
        loading.failure = loading.failure or report.failure
        loading.confirmed &= report.confirmed
        loading.seconds = max(loading.seconds, report.seconds)
        if not report.ok:
            loading.good_chunks = min(loading.good_chunks, report.good_chunks)
        state = self._states.get(report.request_id)
        if state is not None and not report.ok:
            state.failed, state.known = True, 0  # now: vLLM may ask again before the other ranks have reported
        if loading.ranks > 0:
            return
        del self._loading[report.request_id]
        self._under_way.end(report.request_id)
        if loading.lookup is not None and loading.confirmed:
            loading.lookup.hand_over()
        if state is not None:
            state.phase = Phase.CLOSED
            self._learn(loading)
        self._count_load(loading)

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
        state.answered = -1
        if active is None:
            return
        hashes = self._keys.chain(request, active, request.num_tokens // active.chunk_tokens)
        if hashes is None and self._keys.reading(request):
            state.phase = Phase.IDLE
        if hashes:
            state.hashes = hashes[: MAX_CHUNKS * HASH_BYTES]
            state.shared_until, state.verdict = 0.0, (-1, False)
            wait_s = self._l2_patience(len(hashes) // HASH_BYTES * active.chunk_tokens)
            state.pending = self._client.begin_lookup(active.namespace, hashes, readers=active.readers, wait_s=wait_s)
            state.patience_s = self._patience_s + wait_s
            state.phase = Phase.WAITING
            self._tally.add("lookups")

    def _l2_patience(self, tokens: int) -> float:
        """Waiting for L2 longer than computing takes would be the slower way even with a load that takes no time."""
        if not self._client.has_l2:
            return 0.0
        compute_s = self._pace.compute_s(tokens)
        return self._l2_wait_s if compute_s is None else min(self._l2_wait_s, compute_s)

    def _waits_for_adapter(self, state: _State) -> bool:
        now = time.monotonic()
        state.adapter_until = state.adapter_until or now + self._patience_s
        return now < state.adapter_until

    def _worth(self, state: _State, tokens: int, context: int) -> bool:
        """vLLM repeats its question; the same hit is judged once."""
        if state.verdict[0] != tokens:
            state.verdict = (tokens, self._pace.worth(tokens, context))
            self._tally.add("hits_declined", not state.verdict[1])
        return state.verdict[1]

    def _waits_for_load(self, state: _State, local_tokens: int, active: Active) -> bool:
        """Another request loads what this one misses first.  After as long as computing takes, or a load's deadline, it
        computes."""
        first, windows = local_tokens // active.chunk_tokens, not all(group.sees_all for group in active.groups)
        if not self._shares_blocks or not self._under_way.serves(state.hashes, first, state.usable, windows=windows):
            return False
        now = time.monotonic()
        if state.shared_until == 0.0:
            compute_s = self._pace.compute_s(state.usable * active.chunk_tokens - local_tokens, local_tokens)
            state.shared_until = now + min(self._transfer_s, self._transfer_s if compute_s is None else compute_s)
            self._tally.add("loads_waited_for")
        if now < state.shared_until:
            return True
        self._drop(state)
        return False

    def _learn(self, loading: _Loading) -> None:
        """How long loads take; not from one that nobody wanted any more.  What fails together has one cause and counts
        once: a daemon that hung for a second while many loads were under way says nothing of the next hundred."""
        tokens, active, job = sum(loading.tokens.values()), loading.active, loading.job
        if active is not None and job.handle and loading.failure is not LoadFailure.CANCELLED:
            if loading.failure is not None:
                if loading.began < self._failed_at:
                    return
                self._failed_at = time.monotonic()
            context = (job.first_chunk + job.chunks) * active.chunk_tokens - tokens
            self._pace.load_ended(tokens, context, loading.seconds, ok=loading.failure is None)

    def _answered(self, state: _State) -> bool:
        lookup, now = state.pending.poll(), time.monotonic()
        if lookup is None and state.deadline == 0.0:
            state.deadline = now + state.patience_s
            lookup = self._wait_a_moment(state.pending, now)
        if lookup is None and now < state.deadline:
            return False
        pending, state.pending, state.phase = state.pending, None, Phase.CLOSED
        self._end_early(state)
        asked = state.deadline - state.patience_s if state.deadline else now
        self._tally.seen("lookup_seconds", time.monotonic() - asked)
        if lookup is None:
            pending.cancel()
            self._tally.add("lookups_expired")
            return True
        if lookup.ready > 0:
            state.lookup, state.phase, state.known = lookup, Phase.READY, lookup.ready
        self._tally.add("lookups_hit" if lookup.ready > 0 else "lookups_miss")
        if self._client.attached and not self._client.hung:
            state.answered = lookup.ready
            if self._events is not None:
                self._events.missing(state.hashes, lookup.ready)
        return True

    def _count_load(self, loading: _Loading) -> None:
        """It has ended.  Of a failed load vLLM keeps what is good from the beginning on."""
        job, active, promised = loading.job, loading.active, sum(loading.tokens.values())
        loaded, chunk = promised, active.chunk_tokens if active is not None else 0
        if loading.failure is not None:
            lost = job.chunks - loading.good_chunks
            loaded = max(0, promised - lost * chunk) if chunk and loading.good_chunks else 0
            self._tally.add("loads_failed")
            self._tally.add(f"load_failures_{loading.failure.value}")
        else:
            self._tally.add("loads")
        for what, tokens in (("loaded", loaded), ("failed", promised - loaded)):
            self._tally.add(f"{what}_tokens", tokens)
            self._tally.add(f"{what}_bytes", active.bytes_of(tokens) if active is not None else 0)
        self._tally.seen("load_seconds", time.monotonic() - loading.began)
        if self._events is not None and loading.failure in (LoadFailure.INVALID, LoadFailure.REFUSED):
            self._events.missing(loading.hashes, job.first_chunk + loading.good_chunks)

    def _wait_a_moment(self, pending: Any, began: float) -> Any:
        """Its answer, or None.  An answer takes a fraction of a millisecond; a step takes many."""
        lookup, now = None, began
        until = began + min(GRACE_S, self._grace_s, self._patience_s)
        while lookup is None and now < until:
            lookup, now = pending.poll(moment=True), time.monotonic()
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

    def _unfilled(self, state: _State, blocks: KVCacheBlocks) -> BlockTable:
        """What a load that cannot be made leaves as it is.  Not the blocks before it: other requests may have them."""
        ids, groups = blocks.get_block_ids(), state.active.groups if state.active is not None else ()
        if len(groups) != len(ids):
            return tuple(map(tuple, ids))
        return tuple(tuple(g[state.local_tokens // group.block_size :]) for g, group in zip(ids, groups, strict=True))

    def _usable(self, state: _State, request: Request, active: Active) -> int:
        """Chunks that a hit may end with.  After a hit of all tokens the last is computed again, with its window."""
        ready = int(state.lookup.ready)
        if active.drops_last:
            return ready - 1
        end = ready * active.chunk_tokens
        whole = end == request.num_tokens
        return ready - 1 if whole and any(group.lacks_last(end) for group in active.groups) else ready

    def _drop(self, state: _State) -> None:
        if state.pending is not None:
            self._tally.add("lookups_dropped")
            if state.pending.poll() is None:
                state.pending.cancel()
        state.pending = state.lookup = None
        state.phase = Phase.CLOSED
        self._end_early(state)

    def _end_early(self, state: _State) -> None:
        self._early -= state.early
        state.early = False


def _by_tier(state: _State, tokens: int) -> dict[Tier, int]:
    """Of the last `tokens` of the hit, those that were in L1 at once and those that came while the lookup waited."""
    if state.lookup is None or state.active is None:
        return {Tier.L1: tokens}
    late = max(0, state.usable - state.lookup.at_once) * state.active.chunk_tokens
    return {Tier.L1: max(0, tokens - late), Tier.L2: min(tokens, late)}


def _complete(table: BlockTable, active: Active, begin: int, end: int) -> bool:
    """Every block is there that the first token after the hit sees."""
    for group, ids in zip(active.groups, table, strict=True):
        first = begin // group.block_size
        if (first + len(ids)) * group.block_size != end:
            return False
        if any(block == ABSENT and (group.sees_all or group.needs(first + n, end + 1)) for n, block in enumerate(ids)):
            return False
    return True
