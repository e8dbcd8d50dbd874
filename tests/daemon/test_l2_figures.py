"""What `kvkeep status` says of adapters is so: failures are failures, and usage follows what was stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon import l2_helpers as h
from tests.ipc.conftest import eventually


@pytest.mark.parametrize("medium", ["raw_block", "fs"])
def test_a_medium_that_works_has_no_failures(make_daemon: h.Make, tmp_path: Path, medium: str) -> None:
    """The end of a delete looks for what is to be stored, while 60 chunks are with the mover."""
    raw = {"type": "raw_block", "path": str(tmp_path / "raw"), "size_gb": 0.25}
    inner = raw if medium == "raw_block" else {"type": "fs", "base_path": str(tmp_path / "kv"), "capacity_gb": 0.25}
    slow = {"operation": "store", "fault": "stall", "seconds": 0.03, "every": 1}
    daemon = make_daemon(h.adapter(type="fault_inject", inner=inner, faults=[slow]))
    with h.attach(daemon) as kv:
        ns = h.register(kv)
        h.store(kv, ns, h.chain(1, 60))
        for n in range(3):
            kv.delete(ns, h.chain(99 + n, 1))
        h.stored(kv, 60, deadline_s=90)
        eventually(lambda: h.row(kv)["jobs"] == h.row(kv)["bytes_queued"] == 0)
        about = kv.stats()
        assert about["l2"][0]["failures"] == {}
        assert about["l2"][0]["chunks_stored"] == 60, "each is given to it once"
        assert about["counters"]["l2_store_failures"] == 0


def test_usage_follows_the_last_store(make_daemon: h.Make, tmp_path: Path) -> None:
    """Also one that takes longer than the measurement that was asked for meanwhile."""
    slow = {"operation": "store", "fault": "stall", "seconds": 1.0, "every": 1}
    inner = {"type": "mock"}
    daemon = make_daemon(h.adapter(type="fault_inject", inner=inner, faults=[slow]))
    with h.attach(daemon) as kv:
        h.store(kv, h.register(kv), h.chain(1, 5))
        h.stored(kv, 5)
        eventually(lambda: h.row(kv)["objects"] == 5, 10)
