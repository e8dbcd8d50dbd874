"""Pins: many of them cost nobody anything, and each ends once."""

from __future__ import annotations

import time
from collections import Counter

from kvkeep.daemon.pins import END_STEP, Pins
from kvkeep.daemon.sessions import References
from kvkeep.ipc import messages as m
from tests.daemon.inside import Inside, work_of
from tests.shm.helpers import Memory, chain, check, store


def test_what_a_pin_and_a_round_cost_does_not_grow_with_the_pins() -> None:
    inside = Inside()
    session = inside.attach()
    namespace = inside.register(session)
    inside.store(session, namespace, chain("a", 1))
    packed = chain("a", 1).tobytes()

    def pin() -> None:
        assert inside.call(session, m.Pin, namespace, packed, 3600.0).count == 1

    def one_round() -> None:
        inside.admin.pins.next_end()
        inside.admin.pins.end(time.monotonic())

    pin()
    cost = work_of(pin), work_of(one_round)
    for _ in range(400):
        pin()
    assert (work_of(pin), work_of(one_round)) == cost


def test_pins_that_end_or_are_unpinned_leave_no_reference_no_bytes_and_no_deadline() -> None:
    arena = Memory().arena()
    ns = arena.namespaces.add(1, b"{}", 1, 4096)
    store(arena, ns, chain("a", 4))
    entries = arena.prefix(ns, chain("a", 4)).entries
    pins = Pins()
    ids = [pins.add(References(arena, entries), 4 * 4096, float(at)) for at in range(5000)]
    assert pins.nbytes == 5000 * 4 * 4096
    check(arena, Counter({int(e): 5000 for e in entries}))
    for pin in ids[1::2]:
        assert pins.remove(pin) == 4
        assert pins.remove(pin) is None
    again = [pins.add(References(arena, entries), 4 * 4096, 1e9) for _ in range(2000)]
    rounds = 0
    while (end := pins.next_end()) is not None and end < 1e9:
        pins.end(1e8)
        rounds += 1
        assert rounds <= 5000 / END_STEP + 1, "what was unpinned is not kept for ever"
    assert rounds > 1, "a bounded number in each round"
    assert len(pins) == len(again)
    for pin in again:
        pins.remove(pin)
    assert (len(pins), pins.nbytes) == (0, 0)
    check(arena)


def test_no_more_than_its_share_of_l1_can_be_pinned_and_unpinning_makes_room() -> None:
    inside = Inside(units=8)
    session = inside.attach()
    namespace = inside.register(session, shard_bytes=1 << 16)
    inside.store(session, namespace, chain("a", 4))
    packed = chain("a", 4).tobytes()
    first = inside.call(session, m.Pin, namespace, packed, 60.0)
    second = inside.call(session, m.Pin, namespace, packed[:64], 60.0)
    refused = inside.call(session, m.Pin, namespace, packed[:32], 60.0)
    assert refused.code == "limit"
    assert f"{6 << 16} bytes are pinned and {1 << 16} would be added" in refused.message
    inside.call(session, m.Unpin, second.pin)
    assert inside.call(session, m.Pin, namespace, packed[:32], 60.0).count == 1
    assert inside.call(session, m.Unpin, first.pin).count == 4
    assert inside.admin.integrity_problem() == ""
