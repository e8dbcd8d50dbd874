"""The codec of a mover: encodes what is stored by the configured chain, decodes what was fetched by its header.

Called by several worker threads at once.  Memory: while an object is encoded or decoded, up to two more copies of it
beside its input and its output; what the mover keeps at a time is the mover's business (see mover.py).
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from kvkeep.l2.adapter import MISS, OK, AdapterError, Encoding, Fetched, Item, Key, Outcome, Result
from kvkeep.l2.record import MAX_SERDES, SERDE_PARAM_BYTES, payload_checksum
from kvkeep.l2.serde import (
    MAX_GROWTH,
    Buffer,
    Context,
    Serde,
    Step,
    Undecodable,
    Unfit,
    Unreadable,
    framed,
    serde_with,
    steps_of,
)
from kvkeep.l2.serde_layout import UNKNOWN, Layout, layout_of

MAX_LAYOUTS = 1 << 16  # namespaces that are remembered
MAX_UNREADABLE = 1 << 16  # objects that are known to be unreadable
_MAX_COMPLAINTS = 64

log = logging.getLogger("kvkeep.l2.serde")


class NotEncoded(Exception):
    """The object must not be stored; carries the result for it."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.detail)
        self.result = result


class Codec:
    """See the module."""

    def __init__(self, chain: Sequence[Serde] = ()) -> None:
        self.chain = list(chain)
        self.counters: Counter[str] = Counter()
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()
        self._others: dict[int, Serde | str] = {}  # of other configurations, by number; or why there is none
        self._unreadable: OrderedDict[Key, None] = OrderedDict()
        self._complaints: set[str] = set()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Raises AdapterError: a package is missing, a key file cannot be used."""
        for serde in self.chain:
            serde.open()

    def learn(self, namespace: bytes, manifest: bytes) -> None:
        """Before the first object of a namespace is encoded.  Never raises for what the manifest says."""
        layout = layout_of(manifest)
        with self._lock:
            self._layouts[namespace] = layout
            while len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counters["serde_" + name] += by

    def _complain(self, text: str) -> None:
        """Once; what repeats is in the counters."""
        with self._lock:
            if text in self._complaints or len(self._complaints) >= _MAX_COMPLAINTS:
                return
            self._complaints.add(text)
        log.warning("%s", text)

    # ---- store -------------------------------------------------------------------------------------------------------

    def encode(self, item: Item) -> Item:
        """``item`` is plain; what comes back has memory of its own, or is ``item`` if no serde wanted it.

        Raises NotEncoded if a serde failed (nothing of this object may be stored then: it might have to be secret), or
        if the payload is not the one that its checksum was computed of."""
        if item.checksum and payload_checksum(item.payload) != item.checksum:
            self._count("changed")
            raise NotEncoded(Result(Outcome.CORRUPT, detail="the payload changed in L1 before it was stored"))
        original = len(item.payload)
        context = Context(item.key, original, self._layouts.get(item.key.namespace, UNKNOWN), b"")
        data: Buffer = item.payload
        ids: list[int] = []
        params = b""
        for serde in self.chain:
            try:
                encoded = serde.encode(memoryview(data), context)
                frame, before = framed(serde.id, len(data), encoded.params)
                if len(params + frame) > SERDE_PARAM_BYTES or len(encoded.data) > len(data) + MAX_GROWTH:
                    raise ValueError("more bytes than a serde may add")
            except Unfit:
                self._count(f"{serde.name}_passed_over")
                continue
            except Exception as error:
                self._count("failed")
                self._complain(f"serde {serde.name} failed: {type(error).__name__}: {error}")
                detail = f"serde {serde.name} failed: {type(error).__name__}"
                raise NotEncoded(Result(Outcome.UNAVAILABLE, detail=detail)) from error
            data, params = encoded.data, params + frame
            ids.append(serde.id)
            context = context._replace(before=context.before + before)
        self._count("bytes_in", original)
        self._count("bytes_out", len(data))
        if not ids:
            return item
        self._count("encoded")
        return Item(item.key, _aligned(data), 0, Encoding(original, tuple(ids), params))

    # ---- load --------------------------------------------------------------------------------------------------------

    @staticmethod
    def most_stored(original: int) -> int:
        """The most bytes that an object of ``original`` bytes can have at rest."""
        return original + MAX_SERDES * MAX_GROWTH

    def decode(self, key: Key, fetched: Fetched, into: memoryview) -> Result:
        """Fill ``into``.  CORRUPT: the caller removes the object.  MISS: it stays."""
        if fetched.outcome != Outcome.OK:
            return fetched.result
        encoding = fetched.encoding
        if encoding is None:
            if len(fetched.payload) != len(into):
                return Result(Outcome.MISS, detail=f"{len(fetched.payload)} bytes are stored, {len(into)} wanted")
            into[:] = fetched.payload
            return OK
        if encoding.original_bytes != len(into):
            return Result(Outcome.MISS, detail=f"{encoding.original_bytes} bytes were stored, {len(into)} are wanted")
        try:
            data = fetched.payload
            for step in reversed(steps_of(encoding)):
                target = np.empty(step.length, np.uint8).data if step.before else into
                self._undo(step, data, target, Context(key, encoding.original_bytes, UNKNOWN, step.before))
                data = target
        except Unreadable as reason:
            self._count("unreadable")
            with self._lock:
                self._unreadable[key] = None
                if len(self._unreadable) > MAX_UNREADABLE:
                    self._unreadable.popitem(last=False)
            self._complain(f"objects that this configuration cannot read, and keeps: {reason}")
            return MISS._replace(detail=str(reason))
        except Undecodable as reason:
            self._count("undecodable")
            return Result(Outcome.CORRUPT, detail=f"the object does not decode and is removed: {reason}")
        except Exception as error:  # a serde's own fault: the object may be good
            self._count("failed")
            self._complain(f"a serde failed to decode: {type(error).__name__}: {error}")
            return MISS._replace(detail=f"a serde failed: {type(error).__name__}")
        self._count("decoded")
        return OK

    def cannot_read(self, key: Key) -> bool:
        """`decode` found that before: it is of no use to load it again."""
        return key in self._unreadable

    def stored(self, keys: Sequence[Key]) -> None:
        """These may be others now."""
        if self._unreadable:
            with self._lock:
                for key in keys:
                    self._unreadable.pop(key, None)

    def _undo(self, step: Step, data: memoryview, into: memoryview, context: Context) -> None:
        """By the first of the configured serdes of this number that can; else by one without options."""
        missing: Unreadable | None = None
        for serde in self.chain:
            if serde.id == step.serde:
                try:
                    return serde.decode(data, step.params, into, context)
                except Unreadable as reason:
                    missing = reason
        if missing is not None:
            raise missing
        self._other(step.serde).decode(data, step.params, into, context)

    def _other(self, number: int) -> Serde:
        found = self._others.get(number)
        if found is None:
            try:
                serde = serde_with(number)
                if serde is not None:
                    serde.open()
                found = serde or f"no serde here has the number {number}"
            except AdapterError as reason:
                found = f"serde number {number} is not configured: {reason}"
            with self._lock:
                if len(self._others) < _MAX_COMPLAINTS:
                    found = self._others.setdefault(number, found)
        if isinstance(found, str):
            raise Unreadable(found)
        return found


def _aligned(data: Buffer) -> memoryview:
    """A copy on pages of its own, so that it goes to the medium as the arena's payloads do."""
    memory = memoryview(mmap.mmap(-1, max(1, len(data)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    view = memory[: len(data)]
    view[:] = data
    return view
