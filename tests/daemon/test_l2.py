"""L2 through a real daemon, a real mover and a real client: what was stored outlives L1, and comes back right."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvkeep.ipc.errors import ProtocolError
from tests.daemon.l2_helpers import (
    MIB,
    SIZE,
    Make,
    adapter,
    at_rest,
    attach,
    chain,
    fs,
    payload,
    raw,
    read,
    register,
    row,
    store,
    stored,
)
from tests.ipc.conftest import eventually


@pytest.mark.parametrize("medium", [fs, raw])
def test_what_l1_forgot_is_loaded_from_l2(make_daemon: Make, tmp_path: Path, medium: Callable[[Path], str]) -> None:
    daemon = make_daemon(medium(tmp_path))
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 40)
        assert store(kv, ns, keys) == 40
        stored(kv, 40)
        assert kv.clear(l1_only=True) == 40
        assert kv.lookup(ns, keys).ready == 0, "a lookup that does not wait sees L1 only"
        assert read(kv, ns, keys) == 40
        assert read(kv, ns, [*keys, *chain(2, 3)]) == 40, "and no more than was stored"
        at_rest(kv)
        assert row(kv)["failures"] == {}


@pytest.mark.parametrize("medium", [fs, raw])
def test_a_new_arena_finds_what_an_earlier_daemon_stored(
    make_daemon: Make, tmp_path: Path, medium: Callable[[Path], str]
) -> None:
    daemon = make_daemon(medium(tmp_path))
    with attach(daemon) as kv:
        keys = chain(1, 20)
        store(kv, register(kv), keys)
        stored(kv, 20)
    daemon.kill()
    daemon.start("--forget")
    with attach(daemon) as kv:
        assert read(kv, register(kv), keys) == 20
        at_rest(kv)


@pytest.mark.parametrize("shards", [2, 9])
def test_chunks_of_several_shards_come_back_whole(make_daemon: Make, tmp_path: Path, shards: int) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, keys = register(kv, 5000, shards), chain(1, 6)
        store(kv, ns, keys, 5000, shards)
        stored(kv, 6)
        kv.clear(l1_only=True)
        assert read(kv, ns, keys, size=5000, shards=shards) == 6
        at_rest(kv)


def test_a_chain_of_many_windows_is_loaded_whole(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, keys = register(kv, 4096), chain(1, 1500)
        for start in range(0, 1500, 500):
            kv.store(ns, keys[: start + 500], [payload(k, 4096) for k in keys[start : start + 500]], start=start)
        stored(kv, 1500)
        kv.clear(l1_only=True)
        assert read(kv, ns, keys, size=4096) == 1500
        at_rest(kv)


def test_a_chain_larger_than_the_promotion_budget_comes_in_pieces(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path), "--l2-prefetch-policy=retain", l1_mib=16)
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 150)
        store(kv, ns, keys)
        stored(kv, 150)
        kv.clear(l1_only=True)
        assert read(kv, ns, keys) == 150, "9 MiB of chunks through a budget of 4 MiB"
        at_rest(kv)


def test_many_who_ask_at_once_share_one_load(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, keys = register(kv), chain(1, 30)
        store(kv, ns, keys)
        stored(kv, 30)
        kv.clear(l1_only=True)
        pending = [kv.begin_lookup(ns, keys, wait_s=10) for _ in range(20)]
        found = [p.wait(15) for p in pending]
        assert [f.ready for f in found] == [30] * 20
        assert row(kv)["chunks_loaded"] == 30
        for f in found:
            f.release()
        at_rest(kv)


def test_only_what_l1_lacks_is_asked_of_l2(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, keys = register(kv), chain(1, 30)
        store(kv, ns, keys)
        stored(kv, 30)
        assert read(kv, ns, keys) == 30
        assert row(kv)["finds"] == 0
        kv.delete(ns, keys[20:], l1_only=True)
        assert read(kv, ns, keys) == 30
        assert row(kv)["chunks_loaded"] == 10
        at_rest(kv)


def test_temporaries_vanish_with_their_last_reader_and_stay_under_retain(make_daemon: Make, tmp_path: Path) -> None:
    for policy, left in (("default", 0), ("retain", 10)):
        daemon = make_daemon(fs(tmp_path / policy), f"--l2-prefetch-policy={policy}")
        with attach(daemon) as kv:
            ns, keys = register(kv), chain(1, 10)
            store(kv, ns, keys)
            stored(kv, 10)
            kv.clear(l1_only=True)
            first = kv.lookup(ns, keys, wait_s=10, deadline_s=15)
            second = kv.lookup(ns, keys, wait_s=10, deadline_s=15)
            assert (first.ready, second.ready) == (10, 10)
            first.release()
            assert kv.stats()["l1"]["entries"] == 10, "somebody still reads them"
            second.release()
            eventually(lambda kv=kv, left=left: kv.stats()["l1"]["entries"] == left)
            at_rest(kv)


def test_temporaries_that_a_store_builds_on_stay_for_it(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, keys = register(kv), chain(1, 12)
        store(kv, ns, keys[:10])
        stored(kv, 10)
        kv.clear(l1_only=True)
        with kv.lookup(ns, keys, wait_s=10, deadline_s=15) as found:
            assert found.ready == 10
            assert kv.store(ns, keys, [payload(k) for k in keys[10:]], start=10).stored == 2
        assert kv.lookup(ns, keys, readers=0).ready == 12
        at_rest(kv)


def files(path: Path) -> dict[str, int]:
    """Chunks on the medium, by file: one that is written again has another inode."""
    return {str(f): f.stat().st_ino for f in path.rglob("*") if f.is_file() and f.stat().st_size > SIZE}


def test_replaying_the_same_prompts_writes_nothing_more(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, prompts = register(kv), [chain(i, 15) for i in range(4)]
        for keys in prompts:
            store(kv, ns, keys)
        stored(kv, 60)
        written = files(tmp_path)
        assert len(written) == 60
        for _ in range(3):
            kv.clear(l1_only=True)
            for keys in prompts:
                assert read(kv, ns, keys) == 15
            assert row(kv)["chunks_stored"] == 60, "what came from L2 is not given to it again"
        for keys in prompts:
            store(kv, ns, keys)  # and who computes it all the same
        stored(kv, 120)
        assert files(tmp_path) == written
        at_rest(kv)


def test_the_second_adapter_answers_for_what_the_first_lacks(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(adapter(type="mock"), fs(tmp_path))
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 20)
        store(kv, ns, keys)
        stored(kv, 20, 0)
        stored(kv, 20, 1)
        daemon.restart()  # the mock forgets
        eventually(lambda: kv.attached and kv.epoch == 2)
        eventually(lambda: all(r["phase"] == "serving" for r in kv.stats()["l2"]))
        stored(kv, 20, 0)  # ... and is given again what L1 still has
        kv.clear(l1_only=True)
        assert read(kv, ns, keys) == 20
        assert row(kv, 0)["chunks_loaded"] == 20
        assert row(kv, 1)["chunks_loaded"] == 0
        at_rest(kv)


def test_what_was_sealed_but_not_stored_is_stored_after_a_restart(make_daemon: Make, tmp_path: Path) -> None:
    slow = {"type": "fault_inject", "inner": {"type": "fs", "base_path": str(tmp_path), "capacity_gb": 0.5}}
    stall = [{"operation": "store", "fault": "stall", "seconds": 60}]
    daemon = make_daemon(adapter(**slow, faults=stall), start=False)
    with attach(daemon.start()) as kv:
        ns, keys = register(kv), chain(1, 30)
        store(kv, ns, keys)
        eventually(lambda: row(kv)["jobs"] > 0)
    daemon.kill()
    daemon.flags[-1] = adapter(**slow)  # the same medium, now without the fault
    daemon.start()
    with attach(daemon) as kv:
        stored(kv, 30)
        kv.clear(l1_only=True)
        assert read(kv, register(kv), keys) == 30
        at_rest(kv)


def test_an_orderly_stop_stores_what_is_left(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path))
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 100)
        store(kv, ns, keys)
    assert daemon.stop() == 0
    daemon.start("--forget")
    with attach(daemon) as kv:
        assert read(kv, register(kv), keys) == 100
        at_rest(kv)


def test_a_stop_does_not_wait_for_a_stuck_medium_beyond_its_limit(make_daemon: Make, tmp_path: Path) -> None:
    stuck = adapter(
        type="fault_inject", inner={"type": "mock"}, faults=[{"operation": "store", "fault": "stall", "seconds": 60}]
    )
    daemon = make_daemon(stuck, "--l2-drain-seconds=0.5")
    with attach(daemon) as kv:
        store(kv, register(kv), chain(1, 10))
        eventually(lambda: row(kv)["jobs"] > 0)
    assert daemon.stop(15) == 0


def test_skip_l1_makes_l1_a_buffer_that_never_fills(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path), "--l2-store-policy=skip_l1", "--eviction-policy=noop", l1_mib=16)
    with attach(daemon) as kv:
        ns = register(kv)
        chains = [chain(i, 40) for i in range(20)]  # 50 MiB through 16
        for keys in chains:
            for start in (0, 20):  # the second half is stored when the first may have left L1 already
                part = [payload(k) for k in keys[start : start + 20]]
                eventually(lambda: kv.stats()["l1"]["bytes_used"] < 10 * MIB, 20)
                assert kv.store(ns, keys[: start + 20], part, start=start).stored == 20
        eventually(lambda: kv.stats()["l1"]["entries"] == 0, 20)
        for keys in chains:
            assert read(kv, ns, keys) == 40
        at_rest(kv)
        assert kv.stats()["l1"]["entries"] == 0


def test_a_lookup_whose_deadline_passes_gets_what_is_ready(make_daemon: Make) -> None:
    slow = adapter(
        type="fault_inject", inner={"type": "mock"}, faults=[{"operation": "load", "fault": "stall", "seconds": 1}]
    )
    with attach(make_daemon(slow)) as kv:
        ns, keys = register(kv), chain(1, 10)
        store(kv, ns, keys)
        stored(kv, 10)
        kv.delete(ns, keys[4:], l1_only=True)
        began = time.monotonic()
        with kv.lookup(ns, keys, wait_s=0.3, deadline_s=5) as found:
            assert found.ready == 4
            assert time.monotonic() - began < 2
        at_rest(kv)


def test_a_loaded_chunk_needs_room_and_takes_it_from_what_can_go(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path), l1_mib=16)) as kv:
        ns, wanted = register(kv), chain(1, 100)
        store(kv, ns, wanted)
        stored(kv, 100)
        for i in range(2, 6):
            store(kv, ns, chain(i, 100))
        assert kv.lookup(ns, wanted, readers=0).ready < 100, "L1 is full of others"
        assert read(kv, ns, wanted) == 100
        at_rest(kv)


def test_pins_leave_room_for_loads(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path), l1_mib=16)) as kv:
        ns, wanted = register(kv), chain(1, 30)
        store(kv, ns, wanted)
        stored(kv, 30)
        kv.delete(ns, wanted, l1_only=True)
        pinned, refusals = 0, []
        for i in range(2, 8):
            keys = chain(i, 30)
            store(kv, ns, keys)
            try:
                pinned += kv.pin(ns, b"".join(keys))[1]
            except ProtocolError as refused:
                refusals.append(str(refused))
        assert all("75% of L1" in refusal for refusal in refusals)
        assert pinned >= 150
        assert read(kv, ns, wanted) == 30
        assert kv.check()["ok"]


def test_everything_at_once_is_right(make_daemon: Make, tmp_path: Path) -> None:
    """Three times what L1 holds, stored and read in turn: each chunk is a hit with its own bytes."""
    with attach(make_daemon(fs(tmp_path), l1_mib=16)) as kv:
        ns, rng = register(kv), np.random.default_rng(5)
        chains = [chain(i, 30) for i in range(25)]
        for keys in chains:
            store(kv, ns, keys)
        eventually(lambda: row(kv)["bytes_queued"] == 0 and row(kv)["jobs"] == 0, 20)
        for i in rng.permutation(25):
            assert read(kv, ns, chains[i]) in range(31)
        at_rest(kv)
        assert SIZE * 30 * 25 > 3 * 15 * MIB
