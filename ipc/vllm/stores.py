"""What to store, and the pins that keep it in place meanwhile.  One thread, the engine's.

A chunk is stored in the step that completes it, or a few steps later with the next ones of a long prompt: all its
tokens are confirmed and, at the end of that step, computed; the worker copies after the step's forward.  From here
until the worker reports the job its blocks are pinned in vLLM's block pool (`touch`), so that neither preemption, abort
nor finish gives them to another request under the copy; with several ranks, until the last of those that store has
reported it.

A chunk is stored only if it has all blocks that a hit that ends with it needs (groups.py).  It has, in the step that
completes it.  Later, or where the engine's own prefix cache supplied the tokens, a sliding window may have passed.

Pins are capped: beyond the cap a chunk is skipped and counted, and the engine keeps its memory.  A request that was
already considered up to some chunk costs nothing until its next chunk is complete: a decode step sends no message.
Requests of low priority may hold half of the cap.

With ``leaving`` a complete chunk is remembered instead, and stored when it is about to leave the engine (leaving.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.ipc.messages import HASH_BYTES
from kvkeep.ipc.vllm.adapters import Keys
from kvkeep.ipc.vllm.controls import Scope
from kvkeep.ipc.vllm.groups import ABSENT, BlockTable, chunks, cut
from kvkeep.ipc.vllm.guard import Guard
from kvkeep.ipc.vllm.leaving import Batch, Kept, Leaving, Stage, recordable
from kvkeep.ipc.vllm.lookups import Active, Lookups
from kvkeep.ipc.vllm.metadata import StoreEnd, StoreJob, StoreReport
from kvkeep.ipc.vllm.options import Options
from kvkeep.ipc.vllm.stats import Tally

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvkeep.ipc.vllm.events import Events

BlocksOf = Callable[[str], tuple[Sequence[Any], ...]]

JOB_TOKENS = 8192  # of a long prompt, at least, in one job
MAX_REWINDS = 3  # times a request stores again from a head that was evicted


@dataclass
class _Progress:
    request: Request
    generation: int
    scope: Scope
    low: bool = False  # priority
    at_once: bool = False  # store what is complete, whatever the engine's way is
    considered: int = 0  # complete chunks that were looked at
    stored: int = 0  # leading chunks that need no store any more ...
    last_hash: bytes = b""  # ... and the hash of the last of them: a streaming session may take tokens back
    rewinds: int = 0
    enabled: bool = True


@dataclass
class _Pin:
    request_id: str
    blocks: tuple[Any, ...]
    ranks: int  # that have not reported yet
    active: Active
    began: float
    batch: Batch | None = None  # of what was about to leave
    worst: StoreReport | None = None


class Stores:
    def __init__(
        self,
        pool: Any,
        options: Options,
        lookups: Lookups,
        guard: Guard,
        tally: Tally,
        *,
        ranks: int = 1,
        events: Events | None = None,
        keys: Keys | None = None,
        blocks_of: BlocksOf | None = None,
        leaving: Leaving | None = None,
    ) -> None:
        """``ranks``: how many report each job.  ``blocks_of``: a request's blocks, which cost no copy of its table.
        ``leaving``: store only what is about to leave the engine."""
        self._blocks_of = blocks_of
        self._leaving = leaving
        self._keys = keys or Keys()
        self._pool, self._options, self._lookups, self._ranks = pool, options, lookups, ranks
        self._guard, self._tally, self._events = guard, tally, events
        self._progress: dict[str, _Progress] = {}
        self._pins: dict[int, _Pin] = {}
        self._next_job = 1
        self.pinned_blocks = self._late_blocks = 0  # of all jobs, of those that store what leaves
        self._starved = False  # a request of this step got no block
        self.blocked = False  # after a cache reset that left old KV in the engine

    def on_new_request(
        self,
        request: Request,
        generation: int,
        scope: Scope = Scope.PROMPT,
        *,
        low: bool = False,
        at_once: bool = False,
    ) -> None:
        if scope is not Scope.NONE:
            at_once = at_once or self._leaving is None
            self._progress[request.request_id] = _Progress(request, generation, scope, low, at_once)

    def on_finished(self, request_id: str) -> None:
        progress = self._progress.pop(request_id, None)
        if progress is not None and self._leaving is not None and progress.enabled and not progress.at_once:
            self._tally.add("chunks_skipped_window", max(0, progress.considered - progress.stored))

    def on_other_daemon(self) -> None:
        if self._leaving is not None:
            self._leaving.daemon_changed()

    def on_reset(self) -> None:
        """KV computed before the reset must not get into the namespace after it."""
        for progress in self._progress.values():
            progress.enabled = False
        self.blocked = len(self._pool.cached_block_hash_to_block) > 0
        if self._leaving is not None:
            self._leaving.forget()
        if self._events is not None:
            self._events.reset()

    def pending(self) -> bool:
        return bool(self._pins)

    def frees_soon(self) -> bool:
        """Asked when a running request gets no block: whether blocks come back that only stores of what leaves hold.  A
        store that is past its deadline is not waited for.  Then this step takes no others."""
        oldest = time.monotonic() - self._options.transfer_deadline_s
        late = [pin for pin in self._pins.values() if pin.batch is not None and pin.began > oldest]
        found = any(block.ref_cnt == 1 for pin in late for block in pin.blocks)
        self._starved |= found
        return found

    def new_jobs(self, output: SchedulerOutput, active: Active) -> list[StoreJob]:
        jobs: list[StoreJob] = []
        if self.blocked:
            return jobs
        for request_id, scheduled in output.num_scheduled_tokens.items():
            progress = self._progress.get(request_id)
            if progress is None or not progress.enabled or progress.generation != active.generation:
                continue
            complete = self._complete_chunks(progress, scheduled, active)
            before, progress.considered = progress.considered, complete  # it may shrink: a preemption, or a session
            if complete <= before:
                continue
            if progress.at_once and self._more_comes(progress, scheduled, complete - before, active):
                progress.considered = before
                continue
            try:
                chain = self._keys.chain(progress.request, active, complete)
                if chain is None:  # its adapter is known in a moment, or not for this request
                    progress.considered, progress.enabled = before, self._keys.reading(progress.request)
                    continue
                if not progress.at_once:
                    self._remember(progress, chain, output, active)
                    continue
                job = self._job(progress, chain, output, active, fresh=complete - before)
            except Exception as error:  # jobs of other requests hold pins already: they must go out
                self._guard.note("store_job", error)
                progress.enabled = False
            else:
                jobs += [job] if job is not None else []
                self._plan_event(job, progress.request, active)
        return jobs + self._late_jobs(active) if self._leaving is not None else jobs

    def on_report(self, report: StoreReport) -> None:
        pin = self._pins[report.job_id]
        pin.ranks -= 1
        pin.worst = report = _worse(pin.worst, report)
        if pin.ranks > 0:
            return
        del self._pins[report.job_id]
        self.pinned_blocks -= len(pin.blocks)
        if pin.batch is not None and self._leaving is not None:
            self._late_blocks -= len(pin.blocks)
            self._leaving.give_back(pin.blocks, pin.batch.place)
            self._leaving.ended(pin.batch, report)
        else:
            self._pool.free_blocks(reversed(pin.blocks))  # tails become free first
        self._count(pin, report)
        if self._events is not None:
            self._events.settled(report.job_id, stored=report.end is StoreEnd.DONE)
        progress = self._progress.get(pin.request_id)
        if progress is None:
            return
        if report.end is StoreEnd.FULL:
            progress.enabled = False  # what follows would have no head
        elif report.end is StoreEnd.ORPHAN and 0 <= report.missing < progress.stored:
            progress.rewinds += 1
            progress.enabled = progress.rewinds <= MAX_REWINDS
            progress.stored, progress.considered, progress.last_hash = report.missing, 0, b""

    # ---- what leaves -------------------------------------------------------------------------------------------------

    def _remember(self, progress: _Progress, chain: bytes, output: SchedulerOutput, active: Active) -> None:
        """Keep a record of each complete chunk of the request that has none yet, up to the first whose blocks vLLM does
        not cache yet.  (Multi-module MTP computes the last tokens of a prompt once more.)"""
        assert self._leaving is not None
        count, at = len(chain) // HASH_BYTES, progress.stored * HASH_BYTES
        before = None
        if at <= len(chain) and chain[max(0, at - HASH_BYTES) : at] == progress.last_hash:
            before = self._leaving.find(progress.last_hash)
        first = progress.stored  # or else a preemption, or a session that took tokens back
        if before is None or not before.here():
            first, before = 0, None
        if first >= count:
            return
        tokens, request = active.chunk_tokens, progress.request
        held = cut(self._held(request.request_id, output), active.groups, first * tokens, count * tokens)
        if sum(map(len, held)) != (count - first) * _per_chunk(active):
            raise RuntimeError(
                f"request {request.request_id} has {sum(map(len, held))} blocks for chunks {first} to {count}"
            )
        known = self._lookups.known_chunks(request.request_id)
        missing = self._lookups.missing_chunks(request.request_id)
        end = first
        for position, part in enumerate(chunks(held, count - first), first):
            if not recordable(part):
                break
            new = Kept(
                chunk=chain[position * HASH_BYTES : (position + 1) * HASH_BYTES],
                before=before,
                position=position,
                held=part,
                hashes=tuple(block.block_hash for group in part for block in group),
                generation=active.generation,
                low=progress.low,
                files=self._keys.files(request),
                stage=Stage.STORED if position < known else Stage.WAITS,
            )
            before, end = self._leaving.keep(new, missing=position in missing), position + 1
            if before is new:
                new.events = self._events_of(request, position, active)
        progress.stored, progress.last_hash = end, chain[max(0, end - 1) * HASH_BYTES : end * HASH_BYTES]

    def _events_of(self, request: Request, position: int, active: Active) -> tuple[Any, ...]:
        """Now: a record outlives its request, and must not keep it."""
        if self._events is None:
            return ()
        try:
            return self._events.of_chunk(request, position, active.chunk_tokens)
        except Exception as error:  # stored all the same
            self._guard.note("event", error)
            return ()

    def _late_jobs(self, active: Active) -> list[StoreJob]:
        assert self._leaving is not None
        jobs: list[StoreJob] = []
        starved, self._starved, more = self._starved, False, True
        try:
            while more and not starved and self._late_room() >= _per_chunk(active):
                made = len(jobs)  # they are not in the queue any more: others leave in their place
                self._add_late_jobs(jobs, self._leaving.about_to_leave(next_step=made > 0), active)
                more = len(jobs) > made
            if more:  # no room; nothing was looked at for want of it
                self._leaving.look_again()
        except Exception as error:  # what is in `jobs` holds pins: it must go out
            self._guard.note("store_job", error)
        self._tally.add("chunks_skipped_window", self._leaving.take_lost())
        return jobs

    def _add_late_jobs(self, jobs: list[StoreJob], leave: Sequence[Kept], active: Active) -> None:
        assert self._leaving is not None
        for kept in leave:
            if kept.stage is not Stage.WAITS or kept.generation != active.generation:
                continue  # a job of this step has it, or it is of before a reset
            room = self._late_room(low=kept.low) // _per_chunk(active)
            if room <= 0:
                self._leaving.look_again()
                if kept.low:  # others may have more
                    continue
                return
            try:
                job = self._late_job(kept, room, active)
            except Exception as error:  # jobs of other chunks hold pins already
                self._guard.note("store_job", error)
                self._leaving.failed(kept)
            else:
                jobs += [job] if job is not None else []

    def _late_job(self, kept: Kept, room: int, active: Active) -> StoreJob | None:
        """Nothing is pinned and nothing is under way unless it returns a job."""
        assert self._leaving is not None
        batch = self._leaving.batch(kept, room)
        if batch is None:
            return None
        job = StoreJob(self._next_job, batch.chain, batch.start, batch.table, active.generation, kept.files)
        self._pin(job, batch.blocks(), "", active, batch)
        batch.begin()
        if self._events is not None and all(chunk.events for chunk in batch.chunks):
            try:
                self._events.planned_late(job.job_id, job.hashes, job.start, [chunk.events for chunk in batch.chunks])
            except Exception as error:  # stored all the same
                self._guard.note("event", error)
        return job

    def _late_room(self, *, low: bool = False) -> int:
        """Blocks that may be pinned for what leaves.  They are taken out of vLLM's free ones, and running requests must
        not be preempted for it: as many stay free as a step may take, or half of them."""
        assert self._leaving is not None
        free: int = self._pool.get_num_free_blocks()
        return min(self._room(low=low), free - min(self._leaving.step, (free + self._late_blocks) // 2))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _count(self, pin: _Pin, report: StoreReport) -> None:
        tokens = report.stored * pin.active.chunk_tokens
        self._tally.add(f"stores_{report.end.value}")
        self._tally.add("chunks_stored", report.stored)
        self._tally.add("stored_tokens", tokens)
        self._tally.add("stored_bytes", pin.active.bytes_of(tokens))
        self._tally.seen("store_seconds", time.monotonic() - pin.began)

    def _plan_event(self, job: StoreJob | None, request: Request, active: Active) -> None:
        if job is not None and self._events is not None:
            try:
                self._events.planned(job.job_id, request, job.hashes, job.start, active.chunk_tokens)
            except Exception as error:  # stored all the same
                self._guard.note("event", error)

    def _more_comes(self, progress: _Progress, scheduled: int, fresh: int, active: Active) -> bool:
        """A prompt that is being computed keeps its blocks, so one job can store what several steps complete; the
        engine's thread pays for each job.  Not so where a window passes some of them."""
        request = progress.request
        per_chunk = _per_chunk(active)
        return (
            request.num_computed_tokens + scheduled < request.num_prompt_tokens
            and fresh * active.chunk_tokens < JOB_TOKENS
            and fresh * per_chunk < self._room(low=progress.low) // 2
            and all(group.sees_all for group in active.groups)
        )

    def _complete_chunks(self, progress: _Progress, scheduled: int, active: Active) -> int:
        """Chunks whose KV is complete after this step.  Hashes exist for confirmed tokens only, not for drafts."""
        request = progress.request
        tokens = min(request.num_computed_tokens + scheduled, len(request.block_hashes) * active.hash_block_size)
        if progress.scope is Scope.PROMPT:
            tokens = min(tokens, request.num_prompt_tokens)
        return int(tokens // active.chunk_tokens)

    def _job(
        self, progress: _Progress, chain: bytes, output: SchedulerOutput, active: Active, *, fresh: int
    ) -> StoreJob | None:
        """``fresh``: so many of the chunks are complete since this step; the others were looked at, and counted."""
        request_id, complete = progress.request.request_id, len(chain) // HASH_BYTES
        if complete < progress.stored:  # it was preempted, and is not as far again
            return None
        at = progress.stored * HASH_BYTES
        if progress.last_hash and chain[at - HASH_BYTES : at] != progress.last_hash:
            progress.stored = 0
        start = max(progress.stored, min(self._lookups.known_chunks(request_id), complete))
        per_chunk = _per_chunk(active)
        end = min(complete, start + self._room(low=progress.low) // per_chunk)
        self._tally.add("chunks_skipped_pins", min(fresh, complete - max(start, end)))
        if end <= start:
            return None
        held = cut(
            self._held(request_id, output), active.groups, start * active.chunk_tokens, end * active.chunk_tokens
        )
        if sum(map(len, held)) != (end - start) * per_chunk:
            raise RuntimeError(f"request {request_id} has {sum(map(len, held))} blocks for chunks {start} to {end}")
        table = tuple(tuple(ABSENT if block.is_null else block.block_id for block in group) for group in held)
        usable = self._usable(table, start, end, active)
        self._tally.add("chunks_skipped_window", min(fresh, end - usable))
        if usable <= start:
            return None
        if usable < end:
            tokens = (usable - start) * active.chunk_tokens
            end, table, held = usable, cut(table, active.groups, 0, tokens), cut(held, active.groups, 0, tokens)
        blocks = tuple(block for group in held for block in group if not block.is_null)
        files = self._keys.files(progress.request)
        job = StoreJob(self._next_job, chain[: end * HASH_BYTES], start, table, active.generation, files)
        self._pin(job, blocks, request_id, active)
        progress.stored, progress.last_hash = end, chain[(end - 1) * HASH_BYTES : end * HASH_BYTES]
        return job

    def _room(self, *, low: bool) -> int:
        """Blocks that may be pinned."""
        share = self._options.pinned_fraction / (2 if low else 1)
        return max(0, int(self._pool.num_gpu_blocks * share) - self.pinned_blocks)

    def _pin(
        self, job: StoreJob, blocks: Sequence[Any], request_id: str, active: Active, batch: Batch | None = None
    ) -> None:
        blocks = tuple(block for block in blocks if not block.is_null)
        self._pool.touch(blocks)
        self._pins[job.job_id] = _Pin(request_id, blocks, self._ranks, active, time.monotonic(), batch)
        self.pinned_blocks += len(blocks)
        self._late_blocks += len(blocks) if batch is not None else 0
        self._next_job += 1

    def _held(self, request_id: str, output: SchedulerOutput) -> tuple[Sequence[Any], ...]:
        """vLLM's blocks of a request, per group."""
        if self._blocks_of is not None:
            return self._blocks_of(request_id)
        ids = output.kv_connector_block_state.get_block_ids(request_id)
        return tuple([self._pool.blocks[block] for block in group] for group in ids)

    def _usable(self, table: BlockTable, start: int, end: int, active: Active) -> int:
        """The chunk before which all have what a hit that ends with them needs."""
        if not any(ABSENT in ids for ids in table):
            return end
        for chunk, part in enumerate(chunks(table, end - start), start):
            for group, ids in zip(active.groups, part, strict=True):
                first, tokens = chunk * len(ids), (chunk + 1) * active.chunk_tokens
                if any(block == ABSENT and group.needs(first + n, tokens) for n, block in enumerate(ids)):
                    return chunk
        return end


def _per_chunk(active: Active) -> int:
    """Blocks."""
    return sum(active.chunk_tokens // group.block_size for group in active.groups)


def _worse(one: StoreReport | None, other: StoreReport) -> StoreReport:
    """What of two ranks' reports holds for the job: a chunk is stored if all ranks stored it."""
    if one is None:
        return other
    ends = list(StoreEnd)
    end = max(one.end, other.end, key=ends.index)
    missing = [report.missing for report in (one, other) if report.end is StoreEnd.ORPHAN and report.missing >= 0]
    return StoreReport(other.job_id, end, min(one.stored, other.stored), min(missing, default=-1))
