"""Clear and delete, as far as L2 is concerned: from the first moment nothing of it is served, in the end it is gone.

    begin ── bans (nothing is asked of, or given to, the adapters) ── loads of it are doomed ── the ledger has it
      │
      ├─ L1:           when no Put of it is open (at most PUTS_S), drop what nobody uses
      └─ each adapter: when no Put of it is open there: Wipe steps, or Drop jobs ── none failed ──► the ban ends
                           ▲                     │ failed, the mover died, the adapter is away
                           └──── later, RETRY_S ─┘

A removal is a clear (of a namespace, or of everything) or a delete (of some chunks).  Its answer is given when all is
gone, or after ANSWER_S, or when the adapters that are left are away; it says what is still to be done.  That stays
banned and is done as soon as it can be, by a later daemon if need be: the ledger in the run directory has it.  An
answer that leaves something to the ledger waits for it to be written, for ANSWER_S too.

What a removal that was answered still has to do on an adapter, and another removal has to do there as well, is left to
that one: who clears again and again while an adapter is away leaves one removal behind.

An adapter gets one step at a time, behind all loads and stores (see l2/mover.py), so a large medium takes its time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeep.daemon.bans import EVERYTHING
from kvkeep.daemon.ledger import Entry, Ledger
from kvkeep.daemon.movers import Mover
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.l2.maintenance import Step, What
from kvkeep.shm import trace

PUTS_S = 5.0  # L1 waits so long for Puts that hold what is to go
ANSWER_S = 20.0
RETRY_S = 1.0  # after a failure; doubles, while nothing moves, up to
MAX_RETRY_S = 60.0
POLL_S = 0.01  # while something is waited for that tells nobody
DROP_CHUNKS = 64  # per Drop
DROP_DEADLINE_S = 30.0
MAX_CHUNKS = 1 << 18  # single chunks that may wait to be removed from one adapter

log = logging.getLogger("kvkeep.forget")

L1Pass = Iterator[int]  # each piece gives how many chunks went; at its end nothing of it is in L1 but what is in use
Answer = Callable[[int, dict[str, Any]], None]  # chunks that left L1, and what became of L2


@dataclass(eq=False)
class Share:
    """What one adapter has to do for one removal."""

    left: list[bytes] | None  # chunks; None = all of the namespace
    cursor: bytes = b""
    busy: bool = False  # with a job
    failed: int = 0  # objects of this pass that could not be removed
    removed: int = 0  # objects; for single chunks: chunks
    retries: int = 0
    not_before: float = 0.0
    trouble: str = ""
    done: bool = False
    banned: bool = True


@dataclass(eq=False)
class Removal:
    namespace: bytes  # digest; b"" = everything
    shards: int
    keys: frozenset[bytes] | None  # None = all of the namespace
    began: float
    shares: dict[int, Share] = field(default_factory=dict)  # by the adapter's index
    l1: L1Pass | None = None
    l1_over: bool = False
    dropped: int = 0
    in_use: int = 0
    answer: Answer | None = None
    saved_as: int = 0

    @property
    def over(self) -> bool:
        return self.l1_over and all(share.done for share in self.shares.values())

    @property
    def answered(self) -> bool:
        """Nobody waits for it, and L1 is through with it."""
        return self.l1_over and self.answer is None

    def covers(self, other: Removal) -> bool:
        """What the other one removes is gone when this one is done."""
        if self.namespace not in (EVERYTHING, other.namespace):
            return False
        return self.keys is None or (other.keys is not None and other.keys <= self.keys)

    def is_left(self, index: int) -> bool:
        return index in self.shares and not self.shares[index].done


class Forget:
    """``media``: per mover the names of its media (media.py).  ``doom`` ends loads of what is to go, ``resume`` lets an
    adapter have what it was not given meanwhile."""

    def __init__(
        self,
        movers: Sequence[Mover],
        media: Sequence[Sequence[str]],
        ledger: Ledger,
        *,
        doom: Callable[[bytes, Set[bytes] | None], None],
        resume: Callable[[Mover], None],
    ) -> None:
        self._movers, self._media, self._ledger = movers, media, ledger
        self._doom, self._resume = doom, resume
        self._removals: list[Removal] = []
        self._strangers: dict[str, list[Entry]] = {}  # by medium: of those that no adapter has now
        self.totals = {mover.index: 0 for mover in movers}
        self._remember()

    def _remember(self) -> None:
        """What an earlier daemon could not do."""
        loaded = self._ledger.load()
        for mover, media in zip(self._movers, self._media, strict=True):
            for namespace, shards, hashes in dict.fromkeys(one for medium in media for one in loaded.get(medium, [])):
                removal = self._made(namespace, shards, hashes, [mover])
                removal.l1_over = True
        known = {medium for media in self._media for medium in media}
        self._merge()
        self._strangers = {medium: entries for medium, entries in loaded.items() if medium not in known}
        for reason in self.strangers():
            log.warning("%s", reason)

    def _made(self, namespace: bytes, shards: int, hashes: bytes | None, movers: Sequence[Mover]) -> Removal:
        keys = None if hashes is None else list(dict.fromkeys(hashes[i : i + 32] for i in range(0, len(hashes), 32)))
        removal = Removal(namespace, shards, None if keys is None else frozenset(keys), time.monotonic())
        for mover in movers:
            removal.shares[mover.index] = Share(None if keys is None else list(keys))
            mover.bans.add(namespace, removal.keys)
        self._removals.append(removal)
        return removal

    # ---- from outside ------------------------------------------------------------------------------------------------

    def room_for(self, chunks: int) -> str:
        """Why no more chunks can be deleted now; "" = they can."""
        for mover in self._movers:
            if mover.bans.chunks + chunks > MAX_CHUNKS:
                return (
                    f"{mover.bans.chunks} chunks wait to be removed from {mover.name} ({mover.label}), the limit is "
                    f"{MAX_CHUNKS}: bring it back, or clear the namespace"
                )
        return ""

    def begin(self, namespace: bytes, shards: int, hashes: bytes | None, l1: L1Pass, answer: Answer) -> Removal:
        """``hashes`` None = all of the namespace.  ``answer`` is called once."""
        removal = self._made(namespace, shards, hashes, self._movers)
        removal.l1, removal.answer = l1, answer
        self._doom(namespace, removal.keys)
        self._save(removal)
        if trace.on(log):
            what = f"forget {namespace.hex()[:12] or 'everything'}"
            keys = np.frombuffer(b"".join(removal.keys or ()), dtype=np.uint64).reshape(-1, 4)
            trace.chunks(log, what, keys)
            if removal.keys is None:
                log.debug("%s: all", what)
        return removal

    def step(self, now: float) -> bool:
        """One bounded piece.  True = there is more to do at once."""
        busy = False
        told = False
        for removal in self._removals:
            if not removal.l1_over:
                busy |= self._step_l1(removal, now)
            if removal.answer is not None and self._may_answer(removal, now):
                self._tell(removal)
                told = True
        if told:
            self._merge()
        self._removals = [removal for removal in self._removals if not (removal.answered and removal.over)]
        for mover in self._movers:
            if mover.available:
                self._step_l2(mover, now)
        return busy

    def next_deadline(self, now: float) -> float | None:
        if any(not r.l1_over or r.answer is not None for r in self._removals):
            return now + POLL_S
        waiting = [
            share.not_before if share.not_before > now else now + POLL_S
            for removal in self._removals
            for index, share in removal.shares.items()
            if not share.done and not share.busy and self._movers[index].available
        ]
        return min(waiting, default=None)

    def reasons(self, mover: Mover) -> str:
        """Why health is degraded."""
        shares = [r.shares[mover.index] for r in self._removals if mover.index in r.shares]
        waiting = [share for share in shares if not share.done and (share.trouble or not mover.available)]
        if not waiting:
            return ""
        why = next((share.trouble for share in waiting if share.trouble), "it is away")
        return (
            f"{mover.name} ({mover.label}): {len(waiting)} clears or deletes are still to be done there ({why}); "
            "nothing of them is served"
        )

    def strangers(self) -> list[str]:
        """Why health is degraded: what waits for media that no adapter has."""
        return [
            f"{len(entries)} clears or deletes are still to be done on {medium}, which no --l2-adapter has any more: "
            f"nothing of them is removed there before one has; if it is gone for good, stop the daemon and remove "
            f"{self._ledger.path}"
            for medium, entries in self._strangers.items()
        ]

    def pending(self, mover: Mover) -> int:
        return sum(mover.index in r.shares and not r.shares[mover.index].done for r in self._removals)

    # ---- L1 and the answer -------------------------------------------------------------------------------------------

    def _step_l1(self, removal: Removal, now: float) -> bool:
        if now < removal.began + PUTS_S and any(m.is_storing(removal.namespace, removal.keys) for m in self._movers):
            return False  # they hold what is to go
        assert removal.l1 is not None
        piece = next(removal.l1, None)
        if piece is not None:
            removal.dropped += piece
            return True
        removal.l1_over = True
        for index in removal.shares:
            self._lift(removal, self._movers[index])
        return False

    def _may_answer(self, removal: Removal, now: float) -> bool:
        if not removal.l1_over:
            return False
        left = [index for index, share in removal.shares.items() if not share.done]
        waits = [i for i in left if self._movers[i].coming and not removal.shares[i].trouble]
        if left and self._ledger.saved < removal.saved_as:
            waits = left
        return not waits or now >= removal.began + ANSWER_S

    def _tell(self, removal: Removal) -> None:
        rows = []
        for index, share in removal.shares.items():
            mover = self._movers[index]
            state = "removed" if share.done else "under way" if mover.available and not share.trouble else "remembered"
            why = "" if share.done else share.trouble or ("" if mover.available else "; ".join(mover.reasons()))
            told = {"state": state, "removed": share.removed, "why": why}
            rows.append({"name": mover.name, "label": mover.label, **told})
        answer, removal.answer = removal.answer, None
        assert answer is not None
        report: dict[str, Any] = {"in_use": removal.in_use, "l2": rows}
        problem = self._ledger.problem
        if self._ledger.saved < removal.saved_as:
            problem = f"{self._ledger.path} is not written after {ANSWER_S:g} s, its disk hangs"
        if problem and any(row["state"] != "removed" for row in rows):
            report["problem"] = f"{problem}: a restart of the daemon forgets what is still to be removed"
        answer(removal.dropped, report)

    def _merge(self) -> None:
        merged = False
        for one in [removal for removal in self._removals if removal.answered]:
            for index, share in list(one.shares.items()):
                others = (other for other in self._removals if other is not one and other.is_left(index))
                if not share.done and not share.busy and any(other.covers(one) for other in others):
                    del one.shares[index]
                    self._movers[index].bans.remove(one.namespace, one.keys)
                    merged = True
        if merged:
            self._save(None)

    # ---- L2 ----------------------------------------------------------------------------------------------------------

    def _step_l2(self, mover: Mover, now: float) -> None:
        mine = [(r, r.shares[mover.index]) for r in self._removals if mover.index in r.shares]
        if any(share.busy for _, share in mine):
            return
        for removal, share in mine:
            if share.done or now < share.not_before or mover.is_storing(removal.namespace, removal.keys):
                continue
            share.busy = True
            if share.left is None:
                mover.manage(
                    What.WIPE,
                    lambda step, why, r=removal: self._wiped(r, mover, step, why),  # type: ignore[misc]
                    namespace=removal.namespace,
                    cursor=share.cursor,
                )
            else:
                self._drop(removal, mover, share, now)
            return

    def _drop(self, removal: Removal, mover: Mover, share: Share, now: float) -> None:
        assert share.left is not None
        keys = share.left[:DROP_CHUNKS]
        job = j.Drop(mover.next_id(), now + DROP_DEADLINE_S, removal.namespace, removal.shards, b"".join(keys))
        mover.submit(job, lambda codes: self._deleted(removal, mover, keys, codes))

    def _wiped(self, removal: Removal, mover: Mover, step: Step | None, why: str) -> None:
        share = removal.shares[mover.index]
        share.busy = False
        if step is None:
            self._later(share, mover, why)
            return
        share.removed += step.objects
        share.retries *= not step.objects  # something moves: no need to wait ever longer
        self.totals[mover.index] += step.objects
        share.failed += step.unreadable
        share.cursor = step.cursor
        if step.cursor:
            return
        if share.failed:
            self._later(share, mover, f"{share.failed} objects could not be looked at or removed")
        else:
            self._done(removal, mover)

    def _deleted(self, removal: Removal, mover: Mover, keys: list[bytes], codes: Sequence[int]) -> None:
        share = removal.shares[mover.index]
        share.busy = False
        assert share.left is not None
        gone = {key for key, code in zip(keys, codes, strict=True) if code == Code.OK}
        share.left = [key for key in share.left if key not in gone]
        share.removed += len(gone)
        share.retries *= not gone
        self.totals[mover.index] += len(gone)
        if len(gone) < len(keys):
            self._later(share, mover, f"{len(share.left)} chunks could not be removed")
        elif not share.left:
            self._done(removal, mover)

    def _later(self, share: Share, mover: Mover, why: str) -> None:
        if not mover.available:  # it died, or is left alone: begin again when it is back
            share.cursor, share.failed = b"", 0
            return
        if share.trouble != why:
            log.warning("%s (%s): what was cleared is still to be removed there: %s", mover.name, mover.label, why)
        share.trouble, share.cursor, share.failed = why, b"", 0
        share.not_before = time.monotonic() + min(MAX_RETRY_S, RETRY_S * 2**share.retries)
        share.retries += 1

    def _done(self, removal: Removal, mover: Mover) -> None:
        share = removal.shares[mover.index]
        share.done, share.trouble = True, ""
        log.debug("forget %s: gone from %s", removal.namespace.hex()[:12] or "everything", mover.name)
        self._lift(removal, mover)
        self._save(None)

    def _lift(self, removal: Removal, mover: Mover) -> None:
        """The ban ends when both levels are through: what L1 still had would be stored again."""
        share = removal.shares[mover.index]
        if share.done and removal.l1_over and share.banned:
            share.banned = False
            mover.bans.remove(removal.namespace, removal.keys)
            self._resume(mover)

    def _save(self, removal: Removal | None) -> None:
        media = {medium: list(entries) for medium, entries in self._strangers.items()}
        for one in self._removals:
            for index, share in one.shares.items():
                if not share.done:
                    hashes = None if share.left is None else b"".join(share.left)
                    for medium in self._media[index]:
                        media.setdefault(medium, []).append((one.namespace, one.shards, hashes))
        number = self._ledger.save(media)
        if removal is not None:
            removal.saved_as = number


__all__ = ["ANSWER_S", "EVERYTHING", "Forget", "Removal"]
