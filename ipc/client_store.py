"""Storing: `Reservation` (extents to fill) and the answer of `Client.store`.

    reserve ─► Reservation ─write(i, …)…─► commit() ─► sealed (or waiting for other shards)
                    └ abort(), leaving the with-block, or being dropped: nothing becomes readable

Only what was written completely may be committed as true.  `write` and `copying` refuse once the daemon is gone: an
extent of an earlier epoch belongs to somebody else then.  Writing through raw `views` needs
``with reservation.copying() as allowed`` around the whole copy.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvkeep.ipc import messages as m
from kvkeep.ipc.buffers import Buffer, Bytes, as_bytes
from kvkeep.ipc.client_arena import Arena
from kvkeep.ipc.client_rpc import INTERRUPTED, Answer, Attachment
from kvkeep.ipc.copying import copy_all
from kvkeep.ipc.messages import Outcome, Verdict

if TYPE_CHECKING:
    from kvkeep.ipc.client_session import Session

_VERDICTS = {int(v): v for v in Verdict}
_OUTCOMES = {int(o): o for o in Outcome}
COMMIT_DEADLINE_S = 1.0


class Stored(enum.Enum):
    """What became of one chunk of a `Client.store`."""

    STORED = "stored"  # readable now
    WAITING = "waiting"  # this shard is in; the chunk is readable when its other shards are
    PRESENT = "present"  # was there already
    BUSY = "busy"  # somebody else is writing it
    FULL = "full"  # no room even after eviction
    ORPHAN = "orphan"  # a head before it is not resident; store from `StoreResult.missing`
    LOST = "lost"  # given up by the daemon while it was written
    UNAVAILABLE = "unavailable"  # no daemon, no answer, or it restarted in between


_OF_VERDICT = {
    Verdict.PRESENT: Stored.PRESENT,
    Verdict.BUSY: Stored.BUSY,
    Verdict.FULL: Stored.FULL,
    Verdict.ORPHAN: Stored.ORPHAN,
}
_OF_OUTCOME = {Outcome.SEALED: Stored.STORED, Outcome.WAITING: Stored.WAITING}


@dataclass(frozen=True)
class StoreResult:
    """One `Stored` per chunk; true if nothing of it failed or was refused."""

    outcome: list[Stored] = field(default_factory=list)
    missing: int = -1  # position of the first head that is not resident, with ORPHAN

    def _count(self, *kinds: Stored) -> int:
        return sum(self.outcome.count(kind) for kind in kinds)

    @property
    def stored(self) -> int:
        return self._count(Stored.STORED, Stored.WAITING)

    @property
    def present(self) -> int:
        return self._count(Stored.PRESENT)

    @property
    def refused(self) -> int:
        return self._count(Stored.BUSY, Stored.FULL, Stored.ORPHAN)

    @property
    def failed(self) -> int:
        return self._count(Stored.LOST, Stored.UNAVAILABLE)

    def __bool__(self) -> bool:
        return not (self.refused or self.failed)


class Reservation:
    """Extents for the chunks that were granted; empty when none was, or when there is no daemon."""

    _open = False  # for the finalizer of one whose making was interrupted

    def __init__(
        self,
        session: Session,
        attachment: Attachment | None = None,
        reply: m.StoreReply | None = None,
        *,
        start: int = 0,
        checksums: bool = False,
    ) -> None:
        self._session, self._attachment = session, attachment
        self._checksums = checksums
        self._arena: Arena | None = attachment.arena if attachment is not None and reply is not None else None
        self._views: list[Bytes] | None = None
        self.handle = reply.handle if reply is not None else 0
        self.length = reply.length if reply is not None else 0
        self.missing = reply.missing if reply is not None else -1
        self.verdicts = [_VERDICTS[v] for v in reply.verdicts] if reply is not None else []
        self.granted = [start + i for i, v in enumerate(self.verdicts) if v == Verdict.GRANTED]  # chunk positions
        self._offsets: list[int] = np.frombuffer(reply.offsets, "<u8").tolist() if reply is not None else []
        self._writable = self.handle != 0
        self._open = self.handle != 0  # until the daemon has been told what became of it

    @property
    def available(self) -> bool:
        """Whether the daemon answered at all."""
        return bool(self.verdicts)

    @property
    def revoked(self) -> bool:
        """The daemon is gone, or another one: writing is refused, `commit` will say LOST."""
        return self._arena is None or self._arena.guard.revoked

    @property
    def offsets(self) -> list[int]:
        """In the data segment, one per granted chunk: for a process that maps it by itself, under the same rules."""
        return list(self._offsets)

    @property
    def views(self) -> list[Bytes]:
        """Writable, one per granted chunk.  Use only inside `copying`."""
        if self._views is None:
            data = self._arena.data if self._arena is not None else np.empty(0, np.uint8)
            self._views = [data[offset : offset + self.length] for offset in self._offsets]
        return self._views

    def copying(self) -> contextlib.AbstractContextManager[bool]:
        """``with reservation.copying() as allowed``: if not allowed, do not touch the views.  Raises RuntimeError in a
        fork, whose copy nobody would wait for."""
        self._session.check_process()
        arena = self._arena
        return arena.guard.copying() if arena is not None and self._writable else contextlib.nullcontext(False)

    def write(self, i: int, source: Buffer) -> bool:
        """Fill the extent of chunk ``granted[i]``.  False = refused, nothing was written."""
        flat = as_bytes(source)
        if flat.size != self.length:
            raise ValueError(f"the source has {flat.size} bytes, the shard has {self.length}")
        return self.write_all([flat], first=i)

    def write_all(self, sources: Sequence[Bytes], first: int = 0) -> bool:
        """Flat sources for granted[first], granted[first + 1], …"""
        arena, length = self._arena, self.length
        with self.copying() as allowed:
            if not allowed or arena is None:
                return False
            offsets = self._offsets[first : first + len(sources)]
            pairs = [(arena.data[at : at + length], source) for at, source in zip(offsets, sources, strict=True)]
            copy_all(pairs, self._session.options.copy_threads)
        return True

    def commit(self, ok: Sequence[bool] | None = None, *, deadline_s: float = COMMIT_DEADLINE_S) -> list[Outcome]:
        """Seal what is complete: one bool per granted chunk, None = all.  LOST = it will not be found."""
        attachment, request = self._attachment, self.commit_request(ok)
        if request is None or attachment is None:
            return [Outcome.LOST] * len(self.granted)
        return self.committed(self._session.ask(attachment, request, deadline_s))

    def commit_request(self, ok: Sequence[bool] | None = None) -> m.Commit | None:
        """The first half of `commit`, for callers that send many at once: the request, None = there is nothing to
        commit.  From here on nothing can be written; `committed` must follow, else it is aborted after all."""
        count = len(self.granted)
        if ok is not None and len(ok) != count:
            raise ValueError(f"{len(ok)} results for {count} granted chunks")
        attachment, arena = self._attachment, self._arena
        if not self._writable or attachment is None or arena is None:
            return None
        results = b"\x01" * count if ok is None else bytes(map(bool, ok))
        sums = b""
        if self._checksums:
            with self.copying() as allowed:
                if allowed:
                    views = self.views
                    sums = np.array([xxhash.xxh3_64_intdigest(v.data) for v in views], "<u8").tobytes()
        self._writable = False
        return m.Commit(attachment.lease, attachment.epoch, self.handle, results, sums)

    def committed(self, answer: Answer) -> list[Outcome]:
        """The second half: what the answer to `commit_request` says."""
        count, reply, attachment = len(self.granted), answer.reply, self._attachment
        if not answer.sent and attachment is not None:  # else the daemon will find it, whenever it looks
            self._session.returns.give_back(attachment, m.Abort(attachment.lease, attachment.epoch, self.handle))
        self._open = False
        if isinstance(reply, m.CommitReply) and len(reply.outcomes) == count:
            return [_OUTCOMES.get(o, Outcome.LOST) for o in reply.outcomes]
        return [Outcome.LOST] * count

    def abort(self) -> None:
        """Give the extents back unread.  Never fails."""
        attachment = self._attachment
        if not self._open or attachment is None:
            return
        self._writable = False
        request = m.Abort(attachment.lease, attachment.epoch, self.handle)
        self._session.settle(attachment, request, COMMIT_DEADLINE_S)
        self._open = False  # not before: a second ABORT does no harm, one too few does

    def __len__(self) -> int:
        return len(self.granted)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __del__(self) -> None:
        if self._open and (attachment := self._attachment) is not None:
            try:
                self._session.returns.give_back(attachment, m.Abort(attachment.lease, attachment.epoch, self.handle))
            except Exception:  # interpreter shutdown
                pass
            except BaseException:
                attachment.end(INTERRUPTED)
                raise


def reservation_of(
    session: Session,
    attachment: Attachment,
    reply: m.StoreReply,
    *,
    chunks: int,
    start: int,
    length: int,
    **options: bool,
) -> Reservation:
    """Every field of a StoreReply checked; one that cannot be right is given back and counts as no answer."""
    arena = attachment.arena
    if arena is None:  # the daemon ended right after it had answered
        return Reservation(session)
    offsets = np.frombuffer(reply.offsets, "<u8") if len(reply.offsets) % 8 == 0 else None
    granted = reply.verdicts.count(int(Verdict.GRANTED))
    if (
        offsets is not None
        and len(reply.verdicts) == chunks
        and (not chunks or max(reply.verdicts) < len(Verdict))
        and len(offsets) == granted
        and (granted == 0 or (reply.length == length and reply.handle != 0))
        and arena.inside(offsets, length)
    ):
        return Reservation(session, attachment, reply, start=start, **options)
    session.counters["protocol_errors"] += 1
    session.returns.give_back_reply(attachment, reply)
    return Reservation(session)


def outcomes(reservation: Reservation, committed: Sequence[Outcome], chunks: int) -> list[Stored]:
    """Verdicts and outcomes of one store, as one list."""
    if not reservation.available:
        return [Stored.UNAVAILABLE] * chunks
    rest = iter(committed)
    return [
        _OF_OUTCOME.get(next(rest), Stored.LOST) if verdict == Verdict.GRANTED else _OF_VERDICT[verdict]
        for verdict in reservation.verdicts
    ]
