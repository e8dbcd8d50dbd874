"""A mover that hangs while it is given work: lookups of L1 are answered, and nothing grows.  What it costs in time is
measured by `measure_hung_mover`, not judged here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.daemon.l2_helpers import Make, adapter, at_rest, attach, chain, read, register, row, store
from tests.faults.measure_hung_mover import LENGTH, SIZE, Pressure, measure, prepare
from tests.faults.test_l2_soak import memory_of
from tests.ipc.conftest import eventually

MIB = 1 << 20


def test_a_hung_mover_delays_nobody_and_nothing_piles_up(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(adapter(type="fs", base_path=str(tmp_path), capacity_gb=0.25), l1_mib=32)
    with attach(daemon) as kv:
        prepare(daemon, kv)
        ns, keys = register(kv, SIZE), chain(1, LENGTH)
        pressure = Pressure(daemon)
        eventually(lambda: pressure.rounds > 20)
        before, pid, rounds = memory_of(daemon), row(kv)["pid"], pressure.rounds
        os.kill(pid, signal.SIGSTOP)
        answered = 0
        while row(kv)["pid"] in (0, pid) or row(kv)["phase"] != "serving":  # until its heartbeat is missed
            store(kv, ns, keys, SIZE)
            with kv.lookup(ns, keys) as found:
                assert found.ready == LENGTH
            about = kv.stats()
            assert about["l2"][0]["jobs"] < 100
            assert about["l2"][0]["bytes_queued"] <= about["l1"]["bytes_total"] // 4
            assert about["l2"][0]["bytes_storing"] <= about["l1"]["bytes_total"] // 4
            answered += 1
        assert answered > 10
        assert pressure.rounds > rounds, "the other client works on"
        pressure.end()
        assert memory_of(daemon) - before < 16 * MIB
        eventually(lambda: row(kv)["jobs"] == row(kv)["bytes_queued"] == 0 and row(kv)["breaker"] == "closed", 60)
        assert read(kv, ns, chain(500, LENGTH), size=SIZE) == LENGTH, "L2 works again"
        at_rest(kv)


def test_the_measurement_measures(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(adapter(type="fs", base_path=str(tmp_path), capacity_gb=0.25))
    found = measure(daemon, 1, 0.5)
    assert set(found["us"]) == {"working", "stopped"}  # type: ignore[call-overload]
    assert found["ratio_p99"]
