"""Storing values: one `Putting` is one window of a `batched_put`.

Two round trips, however many values: all STOREs at once, copies, all COMMITs at once.  Each value has a STORE of its
own: chunks of one STORE wait for each other, and are given up together.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from kvkeep.ipc import messages as m
from kvkeep.ipc.buffers import Bytes
from kvkeep.ipc.client_rpc import Attachment
from kvkeep.ipc.client_store import Reservation, reservation_of
from kvkeep.ipc.client_wave import ask_all
from kvkeep.ipc.copying import Pair, copy_all
from kvkeep.ipc.formats import HEADER_BYTES, Header, encode
from kvkeep.ipc.kvstore_pages import Name, Pages, Until
from kvkeep.ipc.messages import HASH_BYTES, Outcome, Verdict


class Put(enum.Enum):
    """What became of a `put`.  True if the key has a value now."""

    STORED = "stored"
    PRESENT = "present"  # it had one already, which stays
    BUSY = "busy"  # somebody else is putting one
    FULL = "full"  # no room even after eviction
    UNAVAILABLE = "unavailable"  # no daemon, no answer in time, or it restarted in between

    def __bool__(self) -> bool:
        return self in (Put.STORED, Put.PRESENT)


class Outgoing(NamedTuple):
    """A value on its way in."""

    name: Name
    header: Header
    flat: Bytes
    chain: bytes  # `Pages.chain`


class Putting:
    def __init__(self, pages: Pages, until: Until) -> None:
        self._pages, self._until = pages, until
        self._session = pages.client._session

    def store(self, window: Sequence[Outgoing]) -> list[Put]:
        bound = self._pages.client._bound(self._pages.namespace)
        if bound is None:
            return [Put.UNAVAILABLE] * len(window)
        attachment, namespace_id = bound
        requests = [m.Store(attachment.lease, attachment.epoch, namespace_id, 0, one.chain, 0) for one in window]
        reservations: list[Reservation] = []
        try:
            with attachment.exchange():
                answers = ask_all(self._session, attachment, requests, self._until.left)
                for one, answer in zip(window, answers, strict=True):
                    reservations.append(self._reservation(attachment, one, answer.reply))
            return self._fill(attachment, window, reservations)
        finally:
            for reservation in reservations:
                reservation.abort()

    def _fill(
        self, attachment: Attachment, window: Sequence[Outgoing], reservations: Sequence[Reservation]
    ) -> list[Put]:
        results: list[Put] = []
        commits: list[tuple[int, Reservation, m.Commit]] = []
        for i, (one, reservation) in enumerate(zip(window, reservations, strict=True)):
            verdict = self._judge(one, reservation)
            request = reservation.commit_request() if verdict is Put.STORED and self._write(one, reservation) else None
            if request is not None:
                commits.append((i, reservation, request))
            else:
                verdict = Put.UNAVAILABLE if verdict is Put.STORED else verdict
                reservation.abort()
            results.append(verdict)
        answers = ask_all(self._session, attachment, [request for _, _, request in commits], self._until.left)
        for (i, reservation, _), answer in zip(commits, answers, strict=True):
            if any(outcome is not Outcome.SEALED for outcome in reservation.committed(answer)):
                results[i] = Put.UNAVAILABLE
        return results

    def _reservation(self, attachment: Attachment, one: Outgoing, reply: m.AnyReply | None) -> Reservation:
        if not isinstance(reply, m.StoreReply):
            self._pages.client._unexpected(attachment, reply)
            return Reservation(self._session)
        length = self._pages.namespace.shard_bytes
        chunks = len(one.chain) // HASH_BYTES
        return reservation_of(self._session, attachment, reply, chunks=chunks, start=0, length=length, checksums=False)

    def _judge(self, one: Outgoing, reservation: Reservation) -> Put:
        """STORED = write what was granted, and commit."""
        if not reservation.available:
            return Put.UNAVAILABLE
        *further, first = reservation.verdicts
        if first is Verdict.PRESENT:
            # Pages of the same content that were lost are put back; those of another content would belong to nobody.
            lost = Verdict.GRANTED in further and set(further) <= {Verdict.GRANTED, Verdict.PRESENT}
            return Put.STORED if lost and self._same_content(one) else Put.PRESENT
        verdicts = set(reservation.verdicts)
        return Put.FULL if Verdict.FULL in verdicts else Put.BUSY if Verdict.BUSY in verdicts else Put.STORED

    def _same_content(self, one: Outgoing) -> bool:
        header = self._pages.find_header(one.name, self._until)
        return header is not None and (header.digest, header.nbytes) == (one.header.digest, one.header.nbytes)

    def _write(self, one: Outgoing, reservation: Reservation) -> bool:
        """Fill the granted pages, and what is left of them with zeros: no byte of an earlier owner stays in them."""
        page, shard = self._pages.page_bytes, self._pages.namespace.shard_bytes
        last = len(one.chain) // HASH_BYTES - 1
        with reservation.copying() as allowed:
            if not allowed:
                return False
            pairs: list[Pair] = []
            for position, view in zip(reservation.granted, reservation.views, strict=True):
                if position == last:
                    pairs.append((view[:HEADER_BYTES], encode(one.header)))
                    payload, room = one.flat[:page], view[HEADER_BYTES:]
                else:
                    at = page + position * shard
                    payload, room = one.flat[at : at + shard], view
                pairs.append((room[: payload.size], payload))
                room[payload.size :] = 0
            copy_all(pairs, self._session.options.copy_threads)
        return True
