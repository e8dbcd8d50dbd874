"""Finding and reading: `Lookup` (references on a prefix), `PendingLookup` (one that is on its way), `Reading` (a copy).

Required sequence, and what ends it:

    begin_lookup ─► PendingLookup ─poll─► Lookup ─► open_read ─► Reading ─read()…─► confirm() ─► references gone
                         └cancel()             └release()  (or hand_over() when others read and confirm by handle)

Whatever is dropped without its end (garbage, exception, cancelled task) gives back its handle in the background.  After
a restart of the daemon handles mean nothing any more; every object here then says so by `False`, a miss, or silence.

`Reading.read` copies under the arena's guard and validates afterwards.  Raw `views` are for callers that copy by other
means (pinned memory, threads): they must do it inside ``with reading.copying() as allowed``, and believe `validate`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from kvkeep.ipc import messages as m
from kvkeep.ipc.arguments import seconds, whole
from kvkeep.ipc.buffers import Buffer, Bytes, as_bytes
from kvkeep.ipc.client_arena import U32, U64, Arena
from kvkeep.ipc.client_rpc import INTERRUPTED, MAX_DEADLINE_S, Attachment, Channel, Sink
from kvkeep.ipc.copying import copy_all

if TYPE_CHECKING:
    from kvkeep.ipc.client_session import Session

RELEASE_DEADLINE_S = 0.5


class Lookup:
    """``ready`` chunks from the root are present and stay so until `release`, or until all readers confirmed."""

    _open = False  # for the finalizer of one whose making was interrupted

    def __init__(
        self,
        session: Session,
        attachment: Attachment | None,
        handle: int,
        ready: int,
        unconfirmed: int,
        at_once: int | None = None,
    ) -> None:
        self.handle = handle  # 0 = no references: nothing to read
        self.ready = ready
        self.at_once = ready if at_once is None else min(at_once, ready)  # the others came while the lookup waited
        self._session = session
        self._attachment = attachment
        self._unconfirmed = unconfirmed  # confirmations until the daemon ends the handle by itself
        self._open = handle != 0

    @property
    def alive(self) -> bool:
        """Whether the references are held: not released, and the daemon is still the same."""
        return self._open and self._attachment is not None and self._attachment.alive

    def release(self, keep: int = 0) -> None:
        """Give back the references of chunks ``keep`` and after.  Never fails: it is done, pending, or pointless."""
        attachment, keep = self._attachment, whole("keep", keep)
        if not self._open or attachment is None:
            return
        if keep > 0:
            self.ready = min(self.ready, keep)
        request = m.Release(attachment.lease, attachment.epoch, self.handle, max(keep, 0))
        self._session.settle(attachment, request, RELEASE_DEADLINE_S)
        self._open = keep > 0  # not before: a second RELEASE does no harm, one too few does

    def hand_over(self) -> int:
        """The handle, for others to read and confirm.  This object will not release it any more."""
        self._open = False
        return self.handle

    def confirmed(self) -> None:
        """One CONFIRM has been sent by this process; the last of them ends the handle."""
        self._unconfirmed -= 1
        if self._unconfirmed <= 0:
            self._open = False

    def __len__(self) -> int:
        return self.ready

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._open and (attachment := self._attachment) is not None:
            try:
                self._session.returns.give_back(attachment, m.Release(attachment.lease, attachment.epoch, self.handle))
            except Exception:  # interpreter shutdown
                pass
            except BaseException:
                attachment.end(INTERRUPTED)
                raise

    def __repr__(self) -> str:
        return f"Lookup(ready={self.ready}, handle={self.handle}, alive={self.alive})"


class PendingLookup:
    """A lookup that was sent.  `poll` does not wait unless told to; it answers with an empty Lookup when the daemon is
    gone or late."""

    _request_id: bytes | None = None  # until it is known what became of it

    def __init__(
        self,
        session: Session,
        attachment: Attachment | None,
        *,
        confirmations: int = 0,
        wait_s: float = 0.0,
        deadline_s: float = 1.0,
    ) -> None:
        self._session = session
        self._attachment = attachment
        self._confirmations = confirmations
        self._channel: Channel | None = None
        self._handle = 0  # of a reply that said pending
        self._at_once: int | None = None  # chunks that it had
        self._heard = False
        self._deadline_s = min(deadline_s + wait_s, MAX_DEADLINE_S)
        self._deadline = time.monotonic() + self._deadline_s
        self._result: Lookup | None = None if attachment is not None else self._miss()

    def send(self, body: bytes) -> None:
        """Through this thread's channel; what cannot be sent at once is a miss."""
        attachment = self._attachment
        if attachment is not None:
            with attachment.exchange():
                self._channel = self._session.channel(attachment)
                if self._channel is not None:
                    self._request_id = self._channel.post(body, _sink_of(weakref.ref(self), self._session, attachment))
        if self._request_id is None and self._result is None:
            self._result = self._miss()

    def poll(self, *, moment: bool = False) -> Lookup | None:
        """The answer, or None = not yet.  ``moment``: wait for it, but no longer than about a millisecond.
        Raises RuntimeError in a fork."""
        self._session.check_process()
        result = self._result
        if result is not None:
            return result
        attachment, channel = self._attachment, self._channel
        if attachment is None or channel is None or not attachment.alive:
            return self._give_up()
        with attachment.exchange():
            if moment:
                channel.wait_a_moment()
            else:
                channel.drain()
        if self._result is None and time.monotonic() >= self._deadline:
            if not self._heard:
                self._session.late(attachment, "a LOOKUP", self._deadline_s)
            return self._give_up()
        return self._result

    def wait(self, deadline_s: float = 1.0) -> Lookup:
        """Wait for the answer.  After ``deadline_s`` the lookup is cancelled, and is a miss.  Raises RuntimeError in a
        fork."""
        self._session.check_process()
        until = min(self._deadline, time.monotonic() + seconds("deadline_s", deadline_s))
        if self._result is None and self._channel is not None:
            with self._channel.attachment.exchange():
                self._channel.wait(lambda: self._result is not None, until)
        return self.poll() or self._give_up()

    def cancel(self) -> None:
        """Not wanted any more: whatever comes, or came, is given back."""
        if self._result is None:
            self._give_up()
        else:
            self._result.release()

    def _give_up(self) -> Lookup:
        channel, request_id = self._channel, self._request_id
        if channel is not None and request_id is not None:
            with channel.attachment.exchange():
                self._request_id = None
                if self._handle:
                    channel.sinks.pop(request_id, None)
                    self._release_handle()
                else:
                    channel.forget(request_id)
                    self._session.wake()
        if self._result is None:  # the answer may have come in between, in another thread
            self._result = self._miss()
        return self._result

    def _release_handle(self) -> None:
        attachment = self._attachment
        if attachment is not None:
            self._session.returns.give_back(attachment, m.Release(attachment.lease, attachment.epoch, self._handle))

    def _receive(self, reply: m.AnyReply) -> bool:
        """What the channel's sink does."""
        attachment = self._attachment
        self._heard = True
        if attachment is None or self._result is not None:
            self._session.returns.give_back_reply(self._channel.attachment, reply)  # type: ignore[union-attr]
            return True
        if self._session.examine(attachment, reply) is None or not isinstance(reply, m.LookupReply | m.LookupDone):
            if isinstance(reply, m.Error):
                self._session.refusal(reply)
            self._result = self._miss()
            return True
        if isinstance(reply, m.LookupReply) and reply.pending:
            self._handle, self._at_once = reply.handle, max(reply.ready, 0)
            return False
        ready = max(reply.ready, 0)
        self._result = Lookup(
            self._session, attachment, reply.handle, ready, self._confirmations, at_once=self._at_once
        )
        return True

    def _miss(self) -> Lookup:
        return Lookup(self._session, self._attachment, 0, 0, 0)

    def __del__(self) -> None:
        if self._request_id is not None and self._result is None:
            try:
                self._give_up()
            except Exception:  # interpreter shutdown
                pass
            except BaseException:
                if self._attachment is not None:
                    self._attachment.end(INTERRUPTED)
                raise


def _sink_of(reference: weakref.ref[PendingLookup], session: Session, attachment: Attachment) -> Sink:
    """The channel must not keep a lookup that nobody else keeps: it would hold what comes, and never be cancelled."""

    def take(reply: m.AnyReply) -> bool:
        pending = reference()
        if pending is not None:
            return pending._receive(reply)
        session.returns.give_back_reply(attachment, reply)
        return not (isinstance(reply, m.LookupReply) and reply.pending and not reply.handle)  # else more follows

    return take


class Reading:
    """Extents of one shard of a range of chunks of a lookup's handle."""

    _confirmed = True  # for the finalizer of one whose making was interrupted

    def __init__(
        self,
        session: Session,
        attachment: Attachment,
        arena: Arena,
        request: m.Retrieve,
        length: int,
        where: tuple[U64, U32, U32, U64 | None],
        *,
        lookup: Lookup | None,
        verify: bool,
    ) -> None:
        self.start, self.count, self.shard, self.handle = request.start, request.count, request.shard, request.handle
        self.length = length
        self._session, self._attachment, self._arena, self._lookup = session, attachment, arena, lookup
        self._offsets = where[0].tolist()
        self._entries, self._generations, self._checksums = where[1:]
        self._verify = verify and self._checksums is not None
        self._views: list[Bytes] | None = None
        self._confirmed = False

    @property
    def revoked(self) -> bool:
        """The daemon is gone, or another one: no copy may start any more."""
        return self._arena.guard.revoked

    @property
    def offsets(self) -> list[int]:
        """In the data segment, one per chunk: for a process that maps it by itself, under the same rules."""
        return list(self._offsets)

    @property
    def views(self) -> list[Bytes]:
        """Read-only, one per chunk.  See the module's docstring for the two rules."""
        if self._views is None:
            data, length = self._arena.readonly, self.length
            self._views = [data[offset : offset + length] for offset in self._offsets]
        return self._views

    def copying(self) -> contextlib.AbstractContextManager[bool]:
        """``with reading.copying() as allowed``: if not allowed, do not touch the views.  Raises RuntimeError in a
        fork, whose copy nobody would wait for."""
        self._session.check_process()
        return self._arena.guard.copying()

    def read(self, i: int, target: Buffer) -> bool:
        """Copy chunk ``start + i``.  True = exactly its bytes are in ``target``; False = a miss, with any content."""
        flat = as_bytes(target, writable=True)
        if flat.size != self.length:
            raise ValueError(f"the target has {flat.size} bytes, the shard has {self.length}")
        with self.copying() as allowed:
            if not allowed or self._confirmed:
                return False
            source = self._arena.data[self._offsets[i] : self._offsets[i] + self.length]
            copy_all([(flat, source)], self._session.options.copy_threads)
        return self._good(i, flat)

    def read_all(self, targets: list[Bytes]) -> list[bool]:
        """Copy the first ``len(targets)`` chunks, validate them all at once."""
        length, data, count = self.length, self._arena.data, len(targets)
        with self.copying() as allowed:
            if not allowed or self._confirmed:
                return [False] * count
            pairs = [(target, data[at : at + length]) for at, target in zip(self._offsets, targets, strict=False)]
            copy_all(pairs, self._session.options.copy_threads)
        good = self._arena.valid(self._entries[:count], self._generations[:count]).tolist()
        if self._verify:
            good = [ok and self._sum_fits(i, target) for i, (ok, target) in enumerate(zip(good, targets, strict=True))]
        result: list[bool] = good
        return result

    def validate(self) -> list[bool]:
        """After copying from `views`: whose bytes were right during the whole copy."""
        good: list[bool] = self._arena.valid(self._entries, self._generations).tolist()
        return good

    def _good(self, i: int, copy: Bytes) -> bool:
        one = slice(i, i + 1)
        return bool(self._arena.valid(self._entries[one], self._generations[one])[0]) and (
            not self._verify or self._sum_fits(i, copy)
        )

    def _sum_fits(self, i: int, copy: Bytes) -> bool:
        wanted = int(self._checksums[i]) if self._checksums is not None else 0
        return not wanted or xxhash.xxh3_64_intdigest(copy.data) == wanted

    def confirm(self, *, wait: bool = True) -> None:
        """This reader of this shard is done.  ``wait=False`` leaves the sending to the background."""
        if self._confirmed:
            return
        attachment = self._attachment
        request = m.Confirm(attachment.lease, attachment.epoch, self.handle, self.shard)
        with attachment.exchange():  # a second CONFIRM would be another reader's; the end of the attachment is one
            self._confirmed = True
            if self._lookup is not None:
                self._lookup.confirmed()
            if wait:
                self._session.settle(attachment, request, RELEASE_DEADLINE_S)
            else:
                self._session.returns.give_back(attachment, request)

    def leave(self) -> None:
        """Done with these chunks, but not with the handle: other chunks of it will be read, and confirmed."""
        self._confirmed = True

    def __len__(self) -> int:
        return self.count

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.confirm()

    def __del__(self) -> None:
        if not self._confirmed:
            try:
                self.confirm(wait=False)
            except Exception:  # interpreter shutdown
                pass
            except BaseException:
                self._attachment.end(INTERRUPTED)
                raise


def open_reading(
    session: Session, attachment: Attachment, request: m.Retrieve, deadline_s: float, **options: Any
) -> Reading | None:
    """RETRIEVE, and every field of its answer checked before anything is touched.  None = cannot be read."""
    arena = attachment.arena
    if not attachment.mapped:
        raise ValueError("this client was attached with arena=False; it cannot read chunks")
    with attachment.exchange():
        reply = session.call(attachment, request, deadline_s)
        if isinstance(reply, m.Error):
            session.refusal(reply)
        if not isinstance(reply, m.Extents) or arena is None:
            return None
        where = _extents(arena, reply, request.count)
        if where is not None:
            return Reading(session, attachment, arena, request, reply.length, where, **options)
        session.counters["protocol_errors"] += 1
        confirmation = m.Confirm(attachment.lease, attachment.epoch, request.handle, request.shard)
        session.returns.give_back(attachment, confirmation)
        return None


def _extents(arena: Arena, reply: m.Extents, count: int) -> tuple[U64, U32, U32, U64 | None] | None:
    """Offsets, entries, generations and checksums; None = they cannot be right."""
    sizes = (len(reply.offsets), len(reply.entries), len(reply.generations))
    if sizes != (8 * count, 4 * count, 4 * count) or len(reply.checksums) not in (0, 8 * count):
        return None
    offsets, entries = np.frombuffer(reply.offsets, "<u8"), np.frombuffer(reply.entries, "<u4")
    if not (arena.inside(offsets, reply.length) and arena.known(entries)):
        return None
    checksums = np.frombuffer(reply.checksums, "<u8") if reply.checksums else None
    return offsets, entries, np.frombuffer(reply.generations, "<u4"), checksums
