"""With --log-level debug, one chunk can be followed from L1 to L2 and back by a grep for its hash."""

from __future__ import annotations

import re
from pathlib import Path

from tests.daemon.l2_helpers import Make, attach, chain, fs, read, register, store, stored
from tests.ipc.conftest import eventually


def test_a_grep_for_a_chunk_tells_its_whole_way(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path), "--log-level=debug", l1_mib=16)
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 10)
        store(kv, ns, keys)
        stored(kv, 10)
        for i in range(2, 9):
            store(kv, ns, chain(i, 40))
        eventually(lambda: kv.lookup(ns, keys, readers=0).ready == 0)
        assert read(kv, ns, keys) == 10
        eventually(lambda: kv.lookup(ns, keys, readers=0).ready == 0)
        kv.delete(ns, keys)
    text = keys[4].hex()[:12]
    lines = [line.split(f" {text}")[0] for line in daemon.output().splitlines() if text in line]
    way = "\n".join(lines)
    steps = (
        r"sealed: 10 chunks.*put l2-0/(\d+): .*stored by l2-0/\1: .*evicted: .*"
        r"asked l2-0/(\d+) for lookup (\d+): .*found in l2-0 for lookup \3: .*get l2-0/(\d+) for lookup \3: .*"
        r"loaded by l2-0/\4 for lookup \3: .*sealed: .*left with its last reader: .*forget "
    )
    found = re.search(steps, way, re.DOTALL)
    assert found, way
    job = found[1]
    assert re.search(rf"l2-0/{job}: put of \d+ took [0-9.]+ ms", daemon.output()), "the mover says so too"


def test_without_debug_no_chunk_is_named(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path))
    with attach(daemon) as kv:
        ns, keys = register(kv), chain(1, 5)
        store(kv, ns, keys)
        stored(kv, 5)
        kv.clear()
    assert keys[0].hex()[:12] not in daemon.output()
