"""Media that are sick, hung or slow when they load: the others, and whoever waits long enough, get the chunks."""

from __future__ import annotations

import threading
from typing import Any

from kvkeep.daemon.breaker import FAILURES, Breaker
from tests.daemon import l2_helpers as h
from tests.ipc.conftest import eventually

EIO = {"operation": "load", "fault": "EIO"}


def faulty(*faults: dict[str, Any], **more: Any) -> str:
    return h.adapter(type="fault_inject", inner={"type": "mock"}, faults=list(faults), **more)


def stall(seconds: float, **more: Any) -> dict[str, Any]:
    return {"operation": "load", "fault": "stall", "seconds": seconds, **more}


def filled(daemon: Any, kv: Any, chains: list[list[bytes]]) -> Any:
    """All of them are in every adapter, and not in L1."""
    ns = h.register(kv)
    for keys in chains:
        assert h.store(kv, ns, keys) == len(keys)
    for row in kv.stats()["l2"]:
        h.stored(kv, sum(map(len, chains)), int(row["name"].removeprefix("l2-")))
    kv.clear(l1_only=True)
    return ns


# ---- sick ------------------------------------------------------------------------------------------------------------


def test_lookups_that_work_do_not_hide_loads_that_fail() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        assert not breaker.failure("load", 0.0)
        breaker.success("find")
    assert breaker.failure("load", 0.0)
    assert not breaker.closed


def test_a_load_that_works_ends_a_row_of_failures() -> None:
    breaker = Breaker()
    for _ in range(3 * FAILURES):
        assert not breaker.failure("load", 0.0)
        breaker.success("load")


def test_an_adapter_whose_loads_fail_is_left_alone(make_daemon: h.Make) -> None:
    daemon = make_daemon(faulty(EIO))
    with h.attach(daemon) as kv:
        chains = [h.chain(n, 4) for n in range(FAILURES + 1)]
        ns = filled(daemon, kv, chains)
        assert [h.read(kv, ns, keys) for keys in chains] == [0] * len(chains)
        assert h.row(kv)["breaker_opened"] == 1
        h.at_rest(kv)


def test_what_an_adapter_fails_to_load_comes_from_the_next(make_daemon: h.Make) -> None:
    """Also before the first is left alone, and if it loads some chunks of the chain and some not."""
    daemon = make_daemon(faulty({**EIO, "every": 3}), h.adapter(type="mock"))
    with h.attach(daemon) as kv:
        chains = [h.chain(n, 50) for n in range(4)]
        ns = filled(daemon, kv, chains)
        assert [h.read(kv, ns, keys) for keys in chains] == [50] * 4
        counters = kv.stats()["counters"]
        assert (counters["l2_load_failures"], counters["l2_chunks_loaded"]) == (0, 200)
        assert h.row(kv, 0)["failures"]["io_error"] > 0
        h.at_rest(kv)


def test_what_no_adapter_can_load_is_missing_and_what_hangs_on_it_too(make_daemon: h.Make) -> None:
    daemon = make_daemon(faulty({**EIO, "every": 2}), faulty({**EIO, "every": 2}))
    with h.attach(daemon) as kv:
        ns = filled(daemon, kv, [h.chain(1, 40)])
        assert h.read(kv, ns, h.chain(1, 40)) < 40
        assert kv.stats()["counters"]["l2_load_failures"] > 0
        h.at_rest(kv)


# ---- hung ------------------------------------------------------------------------------------------------------------


def test_a_medium_that_hangs_takes_no_room_for_loads_from_the_others(make_daemon: h.Make) -> None:
    """Who asked it wants more than all loads together have room for."""
    daemon = make_daemon(faulty(stall(600), name="hung"), h.adapter(type="mock"))
    with h.attach(daemon) as kv:
        ns = filled(daemon, kv, [h.chain(1, 300)])
        h.read(kv, ns, h.chain(1, 300), wait_s=1.5)
        eventually(lambda: h.row(kv)["breaker"] != "closed")
        assert 0 < kv.stats()["l1"]["bytes_loading"] <= 8 * h.MIB, "half of 25 % of L1"
        fresh = h.chain(99, 100)
        assert h.store(kv, ns, fresh) == 100
        h.stored(kv, 300 + 100, 1)
        kv.clear(l1_only=True)
        assert h.read(kv, ns, fresh) == 100


def test_one_load_that_hangs_and_fills_the_room_of_its_adapter_does_not_starve_the_next(make_daemon: h.Make) -> None:
    """It is one failure; the adapter is not left alone for it."""
    daemon = make_daemon(faulty(stall(600, until=1)), h.adapter(type="mock"))
    size = 10 * h.MIB
    with h.attach(daemon) as kv:
        ns = h.register(kv, size)
        one, two = h.chain(1, 1), h.chain(2, 1)
        for keys in (one, two):
            assert h.store(kv, ns, keys, size) == 1
        for index in (0, 1):
            h.stored(kv, 2, index)
        kv.clear(l1_only=True)
        assert h.read(kv, ns, one, size=size, wait_s=0.5) == 0
        assert h.read(kv, ns, two, size=size, wait_s=5) == 1
        row = h.row(kv)
        assert (row["jobs_late"], row["breaker"]) == (1, "closed")


# ---- slow ------------------------------------------------------------------------------------------------------------


def in_turn(kv: Any, other: Any, keys: list[bytes], first_wait_s: float, joined: Any) -> int:
    """One lookup that waits so long, then one that waits 20 s, as soon as ``joined``.  Returns what that got."""
    ns, others = h.register(kv), h.register(other)
    first = threading.Thread(target=lambda: h.read(kv, ns, keys, wait_s=first_wait_s))
    first.start()
    eventually(joined)
    got = h.read(other, others, keys, wait_s=20)
    first.join()
    return got


def test_who_waits_longer_gets_what_comes_too_late_for_the_first(make_daemon: h.Make) -> None:
    daemon = make_daemon(faulty(stall(2.0, until=1)))
    with h.attach(daemon) as kv, h.attach(daemon) as other, h.attach(daemon) as third:
        keys = h.chain(1, 16)
        filled(daemon, kv, [keys])
        assert in_turn(kv, other, keys, 0.5, lambda: third.stats()["l1"]["bytes_loading"]) == 16
        h.at_rest(kv)


def test_a_lookup_that_expired_for_the_first_is_asked_again_for_the_next(make_daemon: h.Make) -> None:
    """All threads of the mover are busy when the first asks, until after its deadline."""
    daemon = make_daemon(faulty(stall(2.0, until=4), threads=4))
    with h.attach(daemon) as kv, h.attach(daemon) as other, h.attach(daemon) as third:
        keys, busy = h.chain(1, 16), [h.chain(n, 1) for n in range(2, 6)]
        filled(daemon, kv, [keys, *busy])
        ns = h.register(third)
        threads = [threading.Thread(target=lambda one=one: h.read(third, ns, one, wait_s=20)) for one in busy]
        for thread in threads:
            thread.start()
        eventually(lambda: kv.stats()["l1"]["bytes_loading"] == 4 * h.SIZE)
        assert in_turn(kv, other, keys, 0.3, lambda: kv.stats()["l1"]["prefetches"] == 5) == 16
        for thread in threads:
            thread.join()
