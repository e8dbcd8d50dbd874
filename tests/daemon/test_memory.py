"""Whose memory it is, and what is done about it: the guard over a process that is made up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from kvkeep.daemon.memory import BUSY_CUTS, BUSY_LOOKS, LOOK_S, ROOM_BYTES, TELL_S, MemoryGuard, OwnMemory

MIB = 1 << 20


@dataclass
class Process:
    """What takes memory in it, in bytes; a cut frees what busy or quiet peers hold."""

    own: int = 40 * MIB
    books: int = 0  # what they explain
    books_take: int = 0  # what they really take
    busy: int = 0
    quiet: int = 0
    malloc: int = 0  # freed, but kept
    cuts: list[str] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    now: float = 100.0
    looks: int = 0

    def __post_init__(self) -> None:
        self.guard = MemoryGuard(
            explained=lambda: self.books,
            note_busy=self._note_busy,
            cut=self._cut,
            counters=self.counters,
            measure=lambda: self.own + self.books_take + self.busy + self.quiet + self.malloc,
            give_back=self._give_back,
        )

    def _note_busy(self) -> None:
        self.looks += 1

    def _cut(self, only_busy: bool) -> int:
        assert self.looks >= BUSY_LOOKS or not only_busy
        self.looks = 0
        self.cuts.append("busy" if only_busy else "all")
        ended = bool(self.busy) + (not only_busy)
        self.malloc += self.busy
        self.busy = 0
        if not only_busy:
            self.malloc += self.quiet
            self.quiet = 0
        return ended

    def _give_back(self) -> None:
        self.malloc = 0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.guard.look(self.now)
            self.now = max(self.guard.next_look(), math.nextafter(self.now, math.inf))


def test_own_memory_is_what_only_this_process_has() -> None:
    own_memory = OwnMemory()
    before = own_memory()
    taken = bytearray(b"x") * (64 * MIB)
    assert 60 * MIB < own_memory() - before < 80 * MIB
    del taken


def test_what_the_books_explain_is_nobodys_fault() -> None:
    process = Process()
    for _ in range(20):
        process.books += 100 * MIB
        process.books_take += 90 * MIB
        process.run(2 * LOOK_S)
    process.books = process.books_take = 0
    process.malloc = 500 * MIB  # handles that ended; Python keeps their memory
    process.run(10)
    assert process.cuts == []
    assert process.guard.reason == ""


def test_what_malloc_merely_kept_is_given_back_before_anybody_is_cut() -> None:
    process = Process(malloc=0)
    process.malloc = 2 * ROOM_BYTES
    process.run(2 * LOOK_S)
    assert (process.malloc, process.cuts) == (0, [])


def test_a_busy_peer_that_fills_the_memory_is_cut_and_the_quiet_ones_are_not() -> None:
    process = Process(quiet=MIB)
    process.busy = 2 * ROOM_BYTES
    process.run(5)
    assert (process.cuts, process.quiet) == (["busy"], MIB)
    assert process.counters["rpc_connections_cut"] == 1
    assert "RPC connections were cut" in process.guard.reason
    process.run(TELL_S + 1)
    assert process.guard.reason == ""


def test_peers_that_are_never_seen_busy_are_cut_with_all_others() -> None:
    process = Process()
    process.quiet = 2 * ROOM_BYTES
    process.run(5)
    assert process.cuts == ["busy"] * BUSY_CUTS + ["all"]
    assert process.quiet == 0


def test_memory_that_no_connection_holds_is_accepted_and_does_not_cut_them_again_and_again() -> None:
    process = Process()
    process.own += 2 * ROOM_BYTES
    process.run(60)
    assert process.cuts == ["busy"] * BUSY_CUTS + ["all"]
    process.own -= 2 * ROOM_BYTES
    process.run(5)
    process.busy = 2 * ROOM_BYTES
    process.run(5)
    assert process.busy == 0, "what was accepted once is no allowance for later"


def test_an_attacker_that_comes_back_at_once_gains_nothing() -> None:
    process = Process()
    for _ in range(2000):
        process.busy += MIB
        process.run(0.001)
        assert process.busy + process.malloc < 4 * ROOM_BYTES
