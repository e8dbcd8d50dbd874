"""What a client held goes when it has gone: piece by piece, with right books in between, and nobody waits for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvkeep.daemon.engine import LEAVE_STEP
from kvkeep.daemon.sessions import Session
from kvkeep.ipc import messages as m
from tests.daemon.inside import Inside, work_of
from tests.shm.helpers import chain

HANDLES = 2000


@pytest.fixture
def inside() -> Inside:
    return Inside(units=64, capacity=4096)


def hold(inside: Inside, session: Session, namespace: int, keys: bytes, times: int) -> list[int]:
    return [inside.call(session, m.Lookup, namespace, keys, 1, 0).handle for _ in range(times)]


def rounds(inside: Inside, most: int = 1000) -> Iterator[int]:
    """Each round of the control loop until nothing is left to do, and the books after it."""
    for number in range(most):
        more = inside.engine.step()
        assert inside.admin.integrity_problem() == ""
        if not more:
            return
        yield number
    raise AssertionError("it does not end")


def test_the_end_of_a_client_with_many_handles_costs_a_bounded_amount_a_round(inside: Inside) -> None:
    leaving, staying = inside.attach(), inside.attach()
    namespaces = [inside.register(session) for session in (leaving, staying)]
    inside.store(staying, namespaces[1], chain("a", 3))
    hold(inside, leaving, namespaces[0], chain("a", 3).tobytes(), 1)
    one = work_of(lambda: inside.call(leaving, m.Lookup, namespaces[0], chain("a", 3).tobytes(), 1, 0))
    hold(inside, leaving, namespaces[0], chain("a", 3).tobytes(), HANDLES)
    assert leaving.references == inside.arena.references_owned == 3 * (HANDLES + 2)
    assert work_of(lambda: inside.engine.close_session(leaving)) < one
    assert inside.call(leaving, m.Ping).code == "unknown_lease"
    held = inside.arena.references_owned
    for _ in rounds(inside):
        assert held - inside.arena.references_owned <= 3 * LEAVE_STEP
        held = inside.arena.references_owned
        handle = inside.call(staying, m.Lookup, namespaces[1], chain("a", 3).tobytes(), 1, 0)
        assert handle.ready == 3
        assert isinstance(inside.call(staying, m.Release, handle.handle, 0), m.Ok)
    assert (inside.arena.references_owned, leaving.references, leaving.held_chunks) == (0, 0, 0)
    assert inside.engine.lookups == {}


def test_what_the_status_costs_does_not_grow_with_the_handles(inside: Inside) -> None:
    session = inside.attach()
    namespace = inside.register(session)
    inside.store(session, namespace, chain("a", 2))
    packed = chain("a", 2).tobytes()

    def hold_and_pin(times: int) -> None:
        hold(inside, session, namespace, packed, times)
        for _ in range(times):
            inside.call(session, m.Pin, namespace, packed, 60.0)
            inside.call(session, m.Store, namespace, 0, packed + chain(("b", times), 3).tobytes(), 0)

    hold_and_pin(1)
    cost = work_of(inside.admin.document)
    hold_and_pin(100)
    assert work_of(inside.admin.document) == cost
    document = inside.admin.document()
    references, _ = inside.engine.held()
    pinned = 2 * len(inside.admin.pins)
    assert document["l1"]["references"] == references.total() + pinned
    assert document["clients"][0]["references"] == references.total()
    assert document["clients"][0]["reserved_bytes"] == document["l1"]["reserved_bytes"] == 6 * 4096


def test_what_a_dead_writer_had_reserved_rests_and_those_who_wait_for_it_are_answered(inside: Inside) -> None:
    writer, waiter = inside.attach(), inside.attach()
    namespaces = [inside.register(session) for session in (writer, waiter)]
    keys = chain("long", 4 * LEAVE_STEP)
    assert len(inside.call(writer, m.Store, namespaces[0], 0, keys.tobytes(), 0).offsets) == 8 * len(keys)
    assert inside.call(waiter, m.Lookup, namespaces[1], keys.tobytes(), 1, 60_000).pending
    inside.engine.close_session(writer)
    reserved = inside.arena.bytes_reserved
    for _ in rounds(inside):
        assert reserved - inside.arena.bytes_reserved <= LEAVE_STEP * 4096
        reserved = inside.arena.bytes_reserved
    assert (inside.arena.bytes_reserved, writer.reserved_bytes, writer.held_chunks) == (0, 0, 0)
    assert inside.arena.resting.bytes == len(keys) * 4096
    assert [type(reply) for _, _, reply in inside.replies] == [m.LookupDone]
    assert inside.engine.waiting.count == 0


def test_others_read_on_by_the_handle_of_a_client_that_is_leaving(inside: Inside) -> None:
    leaving, reader = inside.attach(), inside.attach()
    namespaces = [inside.register(session) for session in (leaving, reader)]
    inside.store(leaving, namespaces[0], chain("a", 3))
    handles = hold(inside, leaving, namespaces[0], chain("a", 3).tobytes(), HANDLES)
    first, last, before = handles[0], handles[-1], handles[-2]
    assert isinstance(inside.call(reader, m.Retrieve, first, 0, 0, 3), m.Extents)
    inside.engine.close_session(leaving)
    assert inside.engine.step()
    assert isinstance(inside.call(reader, m.Retrieve, last, 0, 0, 3), m.Extents)
    assert isinstance(inside.call(reader, m.Retrieve, before, 0, 0, 3), m.Extents)
    assert inside.call(reader, m.Confirm, before, 0).count == 3, "its turn has not come, and it is over"
    assert list(rounds(inside))
    assert set(inside.engine.lookups) == {first, last}
    for handle in (first, last):
        assert inside.call(reader, m.Confirm, handle, 0).count == 3
    assert inside.arena.references_owned == 0
    assert inside.admin.integrity_problem() == ""


def test_clients_that_leave_in_any_state_leave_nothing(inside: Inside, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        sessions = [inside.attach() for _ in range(6)]
        namespaces = {session.token: inside.register(session) for session in sessions}
        handles: list[int] = []
        for _ in range(400):
            session = rng.choice(sessions)
            namespace, keys = namespaces[session.token], chain(rng.randrange(20), rng.randrange(1, 40)).tobytes()
            kind = rng.choice((m.Lookup, m.Store, m.Retrieve, m.Confirm, m.Commit))
            if kind is m.Lookup:
                reply = inside.call(session, m.Lookup, namespace, keys, rng.randrange(1, 3), rng.choice((0, 60_000)))
                handles.append(reply.handle)
            elif kind is m.Store:
                inside.call(session, m.Store, namespace, 0, keys, 0)
            elif kind is m.Commit and session.stores:
                store = rng.choice(list(session.stores.values()))
                inside.call(session, m.Commit, store.id, bytes(rng.choices((0, 1), (1, 9), k=len(store.granted))), b"")
            elif handles:
                handle = rng.choice(handles)
                inside.call(session, *((m.Retrieve, handle, 0, 0, 1) if kind is m.Retrieve else (m.Confirm, handle, 0)))
        for session in rng.sample(sessions, len(sessions)):
            inside.engine.close_session(session)
            inside.engine.step()
            assert inside.admin.integrity_problem() == ""
        list(rounds(inside))
        assert (inside.engine.lookups, inside.engine.stores) == ({}, {})
        assert (inside.arena.references_owned, inside.arena.bytes_reserved, inside.engine.waiting.count) == (0, 0, 0)
    assert inside.engine.broken == ""
