"""Clear and delete reach L2: what was cleared is served from nowhere, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from kvkeep.ipc.client import Client, Namespace
from tests.daemon.l2_helpers import (
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


def mock(_: Path) -> str:
    return adapter(type="mock")


def faulty(path: Path, *faults: dict[str, object]) -> str:
    inner = {"type": "fs", "base_path": str(path), "capacity_gb": 0.5}
    return adapter(type="fault_inject", inner=inner, faults=list(faults))


def served(kv: Client, ns: Namespace, keys: list[bytes]) -> int:
    return read(kv, ns, keys, wait_s=2.0)


@pytest.mark.parametrize("medium", [fs, raw, mock, faulty])
def test_what_was_cleared_is_served_from_nowhere(
    make_daemon: Make, tmp_path: Path, medium: Callable[[Path], str]
) -> None:
    with attach(make_daemon(medium(tmp_path))) as kv:
        ns, keys = register(kv), chain(1, 40)
        store(kv, ns, keys)
        stored(kv, 40)
        dropped = kv.clear()
        assert (dropped, dropped.in_use) == (40, 0)
        assert [(one["state"], one["removed"]) for one in dropped.l2] == [("removed", 40)]
        assert served(kv, ns, keys) == 0
        assert row(kv)["objects"] == 0
        assert store(kv, ns, keys) == 40, "and may come again"
        stored(kv, 80)
        kv.clear(l1_only=True)
        assert served(kv, ns, keys) == 40
        at_rest(kv)


@pytest.mark.parametrize("medium", [fs, raw])
def test_clearing_one_namespace_keeps_the_others(
    make_daemon: Make, tmp_path: Path, medium: Callable[[Path], str]
) -> None:
    with attach(make_daemon(medium(tmp_path))) as kv:
        spaces = [kv.register({"model": name}, shard_bytes=SIZE) for name in ("a", "b")]
        chains = [chain(1, 30), chain(2, 30)]
        for ns, keys in zip(spaces, chains, strict=True):
            store(kv, ns, keys)
        stored(kv, 60)
        assert kv.clear(spaces[0]) == 30
        kv.clear(l1_only=True)
        assert [served(kv, ns, keys) for ns, keys in zip(spaces, chains, strict=True)] == [0, 30]
        assert kv.clear(digest=spaces[1].digest).l2[0]["removed"] == 30, "also by digest"
        assert served(kv, spaces[1], chains[1]) == 0
        at_rest(kv)


def test_deleted_chunks_go_from_both_levels_and_the_rest_stays(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path / "fs"), raw(tmp_path))) as kv:
        ns, keys = register(kv), chain(1, 30)
        store(kv, ns, keys)
        stored(kv, 30, 0)
        stored(kv, 30, 1)
        dropped = kv.delete(ns, keys[20:])
        assert (dropped, [one["removed"] for one in dropped.l2]) == (10, [10, 10])
        assert served(kv, ns, keys) == 20
        kv.clear(l1_only=True)
        assert served(kv, ns, keys) == 20
        at_rest(kv)


def test_a_chunk_in_use_stays_in_l1_and_goes_to_l2_no_more(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, keys = register(kv), chain(1, 10)
        store(kv, ns, keys)
        stored(kv, 10)
        with kv.lookup(ns, keys[:4]):
            dropped = kv.clear()
            assert (dropped, dropped.in_use) == (6, 4)
        assert served(kv, ns, keys) == 4
        time.sleep(1.5)  # longer than the store controller's next look
        assert row(kv)["objects"] == 0
        kv.clear(l1_only=True)
        assert served(kv, ns, keys) == 0
        at_rest(kv)


@pytest.mark.parametrize("what", ["a new mover", "another adapter"])
def test_a_chunk_that_was_in_use_is_given_to_no_medium_that_comes_empty(
    make_daemon: Make, tmp_path: Path, what: str
) -> None:
    """What is known of who has which chunks is thrown away then; not so what was cleared."""
    daemon = make_daemon(fs(tmp_path / "kv"))
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 10)
        store(kv, ns, keys)
        stored(kv, 10)
        with kv.lookup(ns, keys[:4]):
            assert kv.clear().in_use == 4
        if what == "a new mover":
            pid = row(kv)["pid"]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: row(kv)["pid"] not in (0, pid) and row(kv)["phase"] == "serving")
    if what == "another adapter":
        daemon.kill()
        daemon.flags = [daemon.flags[0], fs(tmp_path / "other")]
        daemon.start()
    with attach(daemon) as kv:
        ns = register(kv)
        store(kv, ns, chain(2, 3))  # a sign that the store controller has looked
        stored(kv, 3)
        time.sleep(1.5)  # longer than its next look
        assert row(kv)["chunks_stored"] == (13 if what == "a new mover" else 3)
        assert served(kv, ns, keys) == 4, "L1 has them"
        at_rest(kv)


def test_a_medium_that_lost_everything_but_manifests_is_given_it_again(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path))
    with attach(daemon) as kv:
        store(kv, register(kv), chain(1, 10))
        stored(kv, 10)
    daemon.kill()
    objects = [file for file in tmp_path.glob("objects/*/*") if file.stat().st_size > SIZE]
    assert len(objects) == 10
    for file in objects:
        file.unlink()
    daemon.start()
    with attach(daemon) as kv:
        stored(kv, 10)
        at_rest(kv)


def test_stores_that_are_under_way_do_not_bring_it_back(make_daemon: Make, tmp_path: Path) -> None:
    slow = faulty(tmp_path, {"operation": "store", "fault": "stall", "seconds": 0.02})
    with attach(make_daemon(slow)) as kv:
        ns, keys = register(kv), chain(1, 120)
        store(kv, ns, keys)
        eventually(lambda: row(kv)["chunks_stored"] > 0 and row(kv)["jobs"] > 0)
        dropped = kv.clear()
        assert dropped == 120
        assert dropped.l2[0]["state"] == "removed"
        assert served(kv, ns, keys) == 0
        eventually(lambda: row(kv)["jobs"] == 0 and row(kv)["bytes_queued"] == 0)
        assert served(kv, ns, keys) == 0
        assert row(kv)["objects"] == 0
        at_rest(kv)


def test_a_mover_that_is_killed_in_the_middle_goes_on_where_it_has_to(make_daemon: Make, tmp_path: Path) -> None:
    slow = faulty(tmp_path, {"operation": "delete", "fault": "stall", "seconds": 0.01})
    with attach(make_daemon(slow)) as kv:
        ns, keys = register(kv), chain(1, 300)
        store(kv, ns, keys)
        stored(kv, 300)
        pid = row(kv)["pid"]
        killer = Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        dropped = kv.clear()
        killer.join()
        assert dropped == 300
        assert served(kv, ns, keys) == 0
        eventually(lambda: row(kv)["phase"] == "serving" and row(kv)["removals_pending"] == 0, 30)
        assert row(kv)["pid"] != pid, "the kill came in the middle"
        eventually(lambda: row(kv)["objects"] == 0)
        assert served(kv, ns, keys) == 0
        at_rest(kv)


def test_what_an_adapter_that_is_away_still_has_is_told_and_removed_when_it_is_back(
    make_daemon: Make, tmp_path: Path
) -> None:
    daemon = make_daemon(fs(tmp_path))
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 20)
        store(kv, ns, keys)
        stored(kv, 20)
        (tmp_path / "objects").chmod(0o000)
        os.chmod(tmp_path, 0o777)  # refused at its next start
        os.kill(row(kv)["pid"], signal.SIGKILL)
        eventually(lambda: row(kv)["phase"] == "starting" and bool(kv.stats()["reasons"]))
        eventually(lambda: any("0700" in reason for reason in kv.stats()["reasons"]), 20)
        dropped = kv.clear()
        assert dropped == 20
        assert dropped.l2[0]["state"] == "remembered"
        assert "0700" in dropped.l2[0]["why"]
        assert any("still to be done" in reason for reason in kv.stats()["reasons"])
    daemon.kill()
    os.chmod(tmp_path, 0o700)
    (tmp_path / "objects").chmod(0o700)
    daemon.start("--forget")  # neither the kill nor the loss of L1 makes it forget
    with attach(daemon) as kv:
        ns = register(kv)
        assert served(kv, ns, keys) == 0
        eventually(lambda: row(kv)["removals_pending"] == 0, 20)
        assert row(kv)["objects"] == 0
        eventually(lambda: kv.stats()["reasons"] == [])
        assert not (daemon.run_dir / "l2-removals").exists()
        at_rest(kv)


def test_what_cannot_be_removed_is_tried_again_and_not_served(make_daemon: Make, tmp_path: Path) -> None:
    stubborn = faulty(tmp_path, {"operation": "delete", "fault": "EIO", "rate": 0.5})
    with attach(make_daemon(stubborn)) as kv:
        ns, keys = register(kv), chain(1, 20)
        store(kv, ns, keys)
        stored(kv, 20)
        dropped = kv.delete(ns, keys)
        assert dropped.l2[0]["state"] == "remembered"
        assert "could not be removed" in dropped.l2[0]["why"]
        assert served(kv, ns, keys) == 0
        # one object is left, the catalogue's
        eventually(lambda: row(kv)["objects"] == 1 and row(kv)["removals_pending"] == 0, 60)
        at_rest(kv)


def test_a_head_that_is_deleted_leaves_a_state_that_holds(make_daemon: Make, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with attach(make_daemon(fs(tmp_path), "--l2-prefetch-policy=retain")) as kv:
        ns, keys = register(kv), chain(1, 12)
        for _ in range(15):
            store(kv, ns, keys)
            cut = int(rng.integers(0, 12))
            with kv.lookup(ns, keys[: int(rng.integers(1, 13))], wait_s=0.2 * int(rng.integers(0, 2))):
                kv.delete(ns, [keys[cut]], l1_only=bool(rng.integers(0, 2)))
                assert kv.check() == {"ok": True, "problem": ""}
            kv.delete(ns, [keys[0]])
            assert served(kv, ns, keys) == 0, "no tail without its head"
            part = int(rng.integers(1, 13))
            assert kv.store(ns, keys[:part], [payload(key) for key in keys[:part]]).missing < 0
            assert read(kv, ns, keys[:part]) == part
            assert kv.check() == {"ok": True, "problem": ""}
        at_rest(kv)


def test_a_clear_beside_a_hung_mover_ends_loads_that_it_has(make_daemon: Make, tmp_path: Path) -> None:
    with attach(make_daemon(fs(tmp_path))) as kv:
        ns, keys = register(kv), chain(1, 20)
        store(kv, ns, keys)
        stored(kv, 20)
        kv.clear(l1_only=True)
        pid = row(kv)["pid"]
        os.kill(pid, signal.SIGSTOP)
        pending = kv.begin_lookup(ns, keys, wait_s=30)
        eventually(lambda: row(kv)["jobs"] > 0)
        dropped = kv.clear()  # the hung mover is killed meanwhile, and the next one does it
        assert dropped.l2[0]["state"] == "removed"
        found = pending.wait(30)
        assert found.ready == 0
        assert served(kv, ns, keys) == 0
        at_rest(kv)


def test_whatever_happens_what_was_cleared_stays_away(make_daemon: Make, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    daemon = make_daemon(fs(tmp_path / "fs"), raw(tmp_path), l1_mib=16)
    with attach(daemon) as kv:
        ns, gone = register(kv), [chain(1000, 5)]
        for turn in range(8):
            kept = chain(2 * turn, int(rng.integers(5, 60)))
            going = chain(2 * turn + 1, int(rng.integers(5, 60)))
            store(kv, ns, kept)
            store(kv, ns, going)
            time.sleep(float(rng.uniform(0, 0.3)))
            if rng.random() < 0.4:
                os.kill(row(kv, int(rng.integers(0, 2)))["pid"], signal.SIGKILL)
            if rng.random() < 0.5:
                kv.delete(ns, going)
            else:
                kv.clear(ns)
                gone.append(kept)
            gone.append(going)
            if rng.random() < 0.4:
                daemon.kill()
                daemon.start(*(["--forget"] if rng.random() < 0.5 else []))
                eventually(lambda: kv.attached and kv.stats()["epoch"] == kv.epoch)
                ns = register(kv)
            for keys in gone[-4:]:
                assert read(kv, ns, keys, wait_s=1.0) == 0
        eventually(
            lambda: all(one["phase"] == "serving" and not one["removals_pending"] for one in kv.stats()["l2"]), 30
        )
        for keys in gone:
            assert read(kv, ns, keys, wait_s=1.0) == 0
        at_rest(kv)
