from __future__ import annotations

import random

import numpy as np
import pytest

from kvkeep.shm.layout import ENTRY, ENTRY_BYTES, State
from tests.shm.helpers import Memory, chain, check, prefix_length, store


def filled(memory: Memory):  # type: ignore[no-untyped-def]
    arena = memory.arena()
    ns = arena.namespaces.add(1, b'{"model":"m"}', 1, 5000)
    for name in "abcde":
        store(arena, ns, chain(name, 10))
    return arena, ns


def test_every_sealed_entry_comes_back_in_the_same_order() -> None:
    memory = Memory()
    arena, ns = filled(memory)
    arena.touch(ns, arena.prefix(ns, chain("b", 10)).entries)
    adopted, result, _ = memory.crash()
    assert (result.kept, result.dropped, result.unfinished) == (50, 0, 0)
    again = adopted.namespaces.find(ns.digest)
    assert all(prefix_length(adopted, again, chain(name, 12)) == 10 for name in "abcde")
    old = [o.members().tolist() for o in arena.orders]
    new = [o.members().tolist() for o in adopted.orders]
    assert old == new
    check(adopted)


def test_what_was_being_written_is_not_readable_and_its_memory_comes_back() -> None:
    memory = Memory(units=1)
    arena, ns = filled(Memory(units=1))
    arena = memory.arena()
    ns = arena.namespaces.add(1, b"{}", 1, 4096)
    store(arena, ns, chain("a", 4))
    arena.reserve(ns, chain("a", 12), 4, 0)
    adopted, result, _ = memory.crash()
    assert (result.kept, result.unfinished) == (4, 8)
    assert adopted.resting.bytes == 8 * 4096
    check(adopted)
    ns = adopted.namespaces.find(ns.digest)
    assert prefix_length(adopted, ns, chain("a", 12)) == 4
    adopted.now += 2
    adopted.resting.end_quarantine(adopted.now)
    assert store(adopted, ns, chain("b", 12)) == 12
    check(adopted)


@pytest.mark.parametrize(
    "field",
    ["key", "namespace", "generation", "offset", "extent_bytes", "shard_bytes", "shards", "checksums", "record_sum"],
)
def test_an_entry_with_any_flipped_bit_is_dropped_and_the_others_are_kept(field: str, seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory()
    filled(memory)
    victim = rng.randrange(50)
    at, size = ENTRY.fields[field][1], ENTRY.fields[field][0].itemsize
    byte = victim * ENTRY_BYTES + at + rng.randrange(size)
    memory.entries[byte] ^= 1 << rng.randrange(8)
    adopted, result, _ = memory.crash()
    assert (result.kept, result.dropped) == (49, 1)
    check(adopted)


def test_two_entries_that_claim_one_extent_are_both_dropped() -> None:
    memory = Memory()
    filled(memory)
    rows = memory.entries.view(ENTRY)
    twin = rows[3].copy()
    twin["key"] = chain("z", 1)[0]
    from kvkeep.shm.layout import SUMMED_WORDS
    from kvkeep.shm.records import word_sums

    twin["record_sum"] = word_sums(np.frombuffer(twin.tobytes(), np.uint64)[:SUMMED_WORDS].reshape(1, -1))[0]
    rows[100] = twin
    adopted, result, _ = memory.crash()
    assert (result.kept, result.dropped) == (49, 2)
    check(adopted)


def test_random_damage_never_raises_and_never_invents_an_entry(seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory()
    filled(memory)
    known = {k.tobytes() for name in "abcde" for k in chain(name, 10)}
    for _ in range(40):
        _, _, copy = memory.crash()
        for part in (copy.entries, copy.slabs.view(np.uint8), copy.namespaces):
            for _ in range(rng.randint(0, 30)):
                at = rng.randrange(min(len(part), 60 * ENTRY_BYTES))
                part[at] = rng.randrange(256)
        adopted, _, _ = copy.crash()
        adopted.release_all()
        check(adopted)
        used = adopted.table.used()
        assert {k.tobytes() for k in adopted.table.keys[used]} <= known
        assert (adopted.table.state[used] == State.SEALED).all()


def test_a_namespace_that_does_not_verify_takes_its_entries_with_it() -> None:
    memory = Memory()
    filled(memory)
    memory.namespaces[70] ^= 1  # in the manifest
    adopted, result, _ = memory.crash()
    assert (result.kept, result.dropped) == (0, 50)
    assert len(adopted.namespaces) == 0
    check(adopted)


def test_what_a_living_client_may_be_writing_is_not_reused_even_after_a_second_crash() -> None:
    memory = Memory(units=1)
    arena = memory.arena()
    ns = arena.namespaces.add(1, b"{}", 1, 4096)
    store(arena, ns, chain("a", 4))
    arena.reserve(ns, chain("a", 12), 4, 0)
    _, result, second = memory.crash(ghosts=True)
    assert (result.kept, result.unfinished) == (4, 8)
    adopted, result, _ = second.crash(ghosts=True)
    assert (result.kept, result.unfinished) == (4, 8)
    assert adopted.resting.bytes == 8 * 4096
    ns = adopted.namespaces.find(ns.digest)
    check(adopted)
    assert prefix_length(adopted, ns, chain("a", 12)) == 4
    assert store(adopted, ns, chain("a", 12)) == 4, "only the extents that nobody may be writing"
    check(adopted)
    adopted.now += 3600
    adopted.resting.end_quarantine(adopted.now)
    assert adopted.resting.bytes == 8 * 4096
    adopted.resting.bury_zombies()
    assert adopted.resting.bytes == 0
    assert store(adopted, ns, chain("a", 12)) == 4
    check(adopted)
