"""The client's surface without a daemon: one store in this process, shared by all clients made from it.

It keeps the daemon's rules that the connector depends on: references per handle, chains (a tail without its head is an
ORPHAN), PRESENT and BUSY, and counts every message, so that a test can say that a step sent none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvkeep.ipc.messages import HASH_BYTES, Outcome, Verdict


@dataclass
class Space:
    digest: bytes
    shard_bytes: int
    chunks: dict[bytes, np.ndarray] = field(default_factory=dict)
    writing: set[bytes] = field(default_factory=set)


class FakeDaemon:
    def __init__(self, capacity_chunks: int = 1 << 30) -> None:
        self.lock = threading.Lock()
        self.spaces: dict[bytes, Space] = {}
        self.handles: dict[int, tuple[Space, list[bytes]]] = {}
        self.messages: Counter[str] = Counter()
        self.capacity = capacity_chunks
        self.up = True
        self.answer_lookups = True  # False: lookups stay unanswered
        self.next_handle = 1

    def count(self, what: str) -> None:
        with self.lock:
            self.messages[what] += 1

    def attach(self, options: object, label: str) -> FakeClient:
        return FakeClient(self)

    def references(self) -> int:
        return len(self.handles)

    def stored(self) -> int:
        return sum(len(space.chunks) for space in self.spaces.values())


class FakeClient:
    hung = False
    has_l2 = False
    epoch = 1

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.closed = False

    @property
    def attached(self) -> bool:
        return self.daemon.up and not self.closed

    def close(self) -> None:
        self.closed = True

    def register(self, manifest: dict[str, object], *, shard_bytes: int, shards: int = 1) -> Space:
        self.daemon.count("REGISTER")
        digest = msgspec.json.encode([manifest, shard_bytes, shards], order="sorted")
        with self.daemon.lock:
            return self.daemon.spaces.setdefault(digest, Space(digest, shard_bytes))

    def begin_lookup(self, ns: Space, hashes: bytes, *, readers: int = 1, wait_s: float = 0.0) -> FakePending:
        self.daemon.count("LOOKUP")
        return FakePending(self.daemon, ns, _split(hashes))

    def open_read(
        self, handle: int, shard: int, start: int, count: int, *, deadline_s: float = 1.0
    ) -> FakeReading | None:
        self.daemon.count("RETRIEVE")
        if not self.attached or handle not in self.daemon.handles:
            return None
        space, hashes = self.daemon.handles[handle]
        return FakeReading(self.daemon, handle, [space.chunks[value] for value in hashes[start : start + count]])

    def reserve(
        self, ns: Space, hashes: bytes, *, start: int = 0, shard: int = 0, deadline_s: float = 1.0
    ) -> FakeReservation:
        self.daemon.count("STORE")
        return FakeReservation(self.daemon, ns, _split(hashes), start, self.attached)


class FakePending:
    def __init__(self, daemon: FakeDaemon, space: Space, hashes: list[bytes]) -> None:
        self.daemon, self.space, self.hashes = daemon, space, hashes
        self.answer: FakeLookup | None = None
        self.cancelled = False

    def poll(self, *, moment: bool = False) -> FakeLookup | None:
        if moment and not self.daemon.answer_lookups:
            time.sleep(0.001)
        if self.cancelled or not self.daemon.answer_lookups:
            return None
        if self.answer is None:
            with self.daemon.lock:
                ready = 0
                while ready < len(self.hashes) and self.hashes[ready] in self.space.chunks:
                    ready += 1
                handle = 0
                if ready and self.daemon.up:
                    handle = self.daemon.next_handle
                    self.daemon.next_handle += 1
                    self.daemon.handles[handle] = (self.space, self.hashes[:ready])
                self.answer = FakeLookup(self.daemon, handle, ready if handle else 0)
        return self.answer

    def wait(self, deadline_s: float) -> FakeLookup | None:
        return self.poll()

    def cancel(self) -> None:
        self.cancelled = True
        if self.answer is not None:
            self.answer.release()


class FakeLookup:
    def __init__(self, daemon: FakeDaemon, handle: int, ready: int) -> None:
        self.daemon, self.handle, self.ready = daemon, handle, ready
        self.at_once = ready

    @property
    def alive(self) -> bool:
        return self.handle in self.daemon.handles and self.daemon.up

    def release(self) -> None:
        if self.handle:
            self.daemon.count("RELEASE")
            self.daemon.handles.pop(self.hand_over(), None)

    def hand_over(self) -> int:
        handle, self.handle = self.handle, 0
        return handle

    def __del__(self) -> None:
        self.release()


class FakeReading:
    def __init__(self, daemon: FakeDaemon, handle: int, views: list[np.ndarray]) -> None:
        self.daemon, self.handle, self.views = daemon, handle, views

    def validate(self) -> list[bool]:
        return [True] * len(self.views)

    def copying(self) -> nullcontext[bool]:
        return nullcontext(self.daemon.up)

    def confirm(self, *, wait: bool = True) -> None:
        self.daemon.count("CONFIRM")
        self.daemon.handles.pop(self.handle, None)


class FakeReservation:
    def __init__(self, daemon: FakeDaemon, space: Space, hashes: list[bytes], start: int, attached: bool) -> None:
        self.daemon, self.space = daemon, space
        self.granted: list[int] = []
        self.verdicts: list[Verdict] = []
        self.views: list[np.ndarray] = []
        self.missing = -1
        self.hashes = hashes
        self.ended = False
        if not attached:
            return
        with daemon.lock:
            for position, value in enumerate(hashes[:start]):
                if value not in space.chunks and value not in space.writing:
                    self.missing = position
                    self.verdicts = [Verdict.ORPHAN] * (len(hashes) - start)
                    return
            room = daemon.capacity - daemon.stored()
            for position in range(start, len(hashes)):
                value = hashes[position]
                if value in space.chunks:
                    self.verdicts.append(Verdict.PRESENT)
                elif value in space.writing:
                    self.verdicts.append(Verdict.BUSY)
                elif room <= 0:
                    self.verdicts.append(Verdict.FULL)
                else:
                    room -= 1
                    space.writing.add(value)
                    self.verdicts.append(Verdict.GRANTED)
                    self.granted.append(position)
                    self.views.append(np.zeros(space.shard_bytes, np.uint8))

    def commit(self, ok: list[bool] | None = None) -> list[Outcome]:
        self.daemon.count("COMMIT")
        self.ended = True
        outcomes = []
        with self.daemon.lock:
            for position, view, fine in zip(self.granted, self.views, ok or [True] * len(self.granted), strict=True):
                self.space.writing.discard(self.hashes[position])
                if fine:
                    self.space.chunks[self.hashes[position]] = view
                outcomes.append(Outcome.SEALED if fine else Outcome.ABORTED)
        return outcomes

    def copying(self) -> nullcontext[bool]:
        return nullcontext(self.daemon.up)

    def abort(self) -> None:
        if not self.ended:
            self.commit([False] * len(self.granted))

    def __enter__(self) -> FakeReservation:
        return self

    def __exit__(self, *_: object) -> None:
        if self.granted:
            self.abort()


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
