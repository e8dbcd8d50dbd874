"""Policies of third parties: the examples of docs/policies.md, as a package would install them, and bad ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvkeep.daemon.config import ConfigError, load
from tests.daemon.l2_helpers import Make, adapter, at_rest, attach, chain, payload, read, register, row, store, stored
from tests.ipc.conftest import eventually

DOCUMENT = Path(__file__).parents[2] / "docs" / "policies.md"
ENTRY_POINTS = """
[kvkeep.store_policies]
only_production = my_policies:OnlyProduction
[kvkeep.prefetch_policies]
second_time = my_policies:SecondTime
[kvkeep.eviction_policies]
popular = my_policies:Popular
"""
BAD = """
from kvkeep.daemon.l2_policies import PrefetchPolicy, StorePolicy
from kvkeep.shm.recency import LruOrder

class Store(StorePolicy):
    name = "bad_store"
    def select(self, chunks):
        raise RuntimeError("as asked")

class Prefetch(PrefetchPolicy):
    name = "bad_prefetch"
    def keep(self, chunks):
        return "everything"

class Raises(LruOrder):
    name = "raises"
    def pop(self, want, evictable, before=(1 << 63) - 1):
        super().pop(want, evictable)
        raise RuntimeError("as asked")

class Lies(LruOrder):
    name = "lies"
    def pop(self, want, evictable, before=(1 << 63) - 1):
        return self.members()[-want:]

class Forgets(LruOrder):
    name = "forgets"
    def touch(self, chain, stamps, *, read=True, tenant=0):
        pass

class NotOne:
    pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with the document's examples as an installed package, and with bad policies."""
    folder = tmp_path / "site"
    info = folder / "my_policies-1.0.dist-info"
    info.mkdir(parents=True)
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 3
    assert max(block.count("\n") for block in blocks) <= 26
    (folder / "my_policies.py").write_text("\n\n".join(blocks))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "bad_policies.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_examples_decide_when_they_are_named_by_their_entry_points(make_daemon: Make, installed: Path) -> None:
    daemon = make_daemon(
        adapter(type="mock"), "--l2-store-policy=only_production", "--l2-prefetch-policy=second_time", l1_mib=16
    )
    with attach(daemon) as kv:
        ours = kv.register({"model": "m", "environment": "production"}, shard_bytes=65536)
        theirs, keys = register(kv), chain(1, 10)
        store(kv, ours, keys)
        store(kv, theirs, keys)
        eventually(lambda: kv.stats()["counters"]["l2_stores_not_wanted"] == 10)
        stored(kv, 10)
        eventually(lambda: row(kv)["objects"] == 10)
        kv.clear(l1_only=True)
        for loads in (1, 2, 2):  # the second time it stays
            assert read(kv, ours, keys) == 10
            assert row(kv)["chunks_loaded"] == 10 * loads
        assert kv.stats()["health"] == "ok"
        at_rest(kv)


@pytest.mark.parametrize("name", ["popular", "my_policies:Popular"])
def test_an_eviction_policy_of_ones_own_evicts(make_daemon: Make, installed: Path, name: str) -> None:
    daemon = make_daemon(f"--eviction-policy={name}", l1_mib=16)
    with attach(daemon) as kv:
        ns, popular = register(kv), chain(1, 20)
        store(kv, ns, popular)
        for _ in range(4):
            assert read(kv, ns, popular, wait_s=0) == 20
        for i in range(2, 12):
            store(kv, ns, chain(i, 60))
        assert kv.lookup(ns, popular, readers=0).ready == 20, "LRU would have evicted it"
        assert kv.stats()["counters"]["entries_evicted"] > 100
        assert kv.stats()["health"] == "ok"
        assert kv.check()["ok"]
    daemon.restart()
    with attach(daemon) as kv:
        assert kv.lookup(register(kv), popular, readers=0).ready == 20
        assert kv.check()["ok"]


@pytest.mark.parametrize("name", ["Raises", "Lies", "Forgets"])
def test_a_bad_eviction_policy_costs_no_more_than_its_decisions(make_daemon: Make, installed: Path, name: str) -> None:
    with attach(make_daemon(f"--eviction-policy=bad_policies:{name}", l1_mib=16)) as kv:
        ns = register(kv)
        other = kv.register({"model": "small"}, shard_bytes=8192)
        for i in range(12):
            keys = chain(i, 40)
            assert store(kv, ns, keys) == 40
            kv.store(other, keys, [payload(key, 8192) for key in keys])
            assert read(kv, ns, keys, wait_s=0) == 40
            assert kv.check() == {"ok": True, "problem": ""}
        (reason,) = kv.stats()["reasons"]
        assert reason.startswith(f"eviction policy {name.lower()}: ")
        assert "LRU decides" in reason
        assert kv.check()["ok"]


def test_bad_store_and_prefetch_policies_leave_it_to_the_default(make_daemon: Make, installed: Path) -> None:
    flags = ("--l2-store-policy=bad_policies:Store", "--l2-prefetch-policy=bad_policies:Prefetch")
    with attach(make_daemon(adapter(type="mock"), *flags)) as kv:
        ns, keys = register(kv), chain(1, 20)
        store(kv, ns, keys)
        stored(kv, 20)
        kv.clear(l1_only=True)
        assert read(kv, ns, keys) == 20
        reasons = sorted(kv.stats()["reasons"])
        assert reasons[0].startswith("prefetch policy bad_prefetch: TypeError: it answered 'everything' for")
        assert reasons[1].startswith("store policy bad_store: RuntimeError: as asked; the default policy decides")
        eventually(lambda: kv.stats()["l1"]["entries"] == 0)
        at_rest(kv)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--eviction-policy=LFU", "'LFU' is not one of Adaptive, ARC, S3FIFO, LRU, IsolatedLRU, noop, popular"),
        ("--l2-store-policy=never", "'never' is not one of default, skip_l1, only_production"),
        ("--l2-prefetch-policy=never", "'never' is not one of default, retain, second_time"),
        ("--l2-store-policy=bad_policies:NotOne", "not a class derived from kvkeep.daemon.l2_policies.StorePolicy"),
        ("--l2-store-policy=no_such:Policy", "does not load: ModuleNotFoundError"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_there_are(installed: Path, flag: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load([flag], {})
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("flag --" if "NotOne" not in flag else "--")


def test_built_in_names_import_nothing_more() -> None:
    code = (
        "import sys; from kvkeep.daemon.config import load; load(['--l2-store-policy', 'SKIP_L1'], {}); "
        "sys.exit('numpy' in sys.modules or 'kvkeep.shm.policies' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_fence_is_no_wider_than_needed() -> None:
    from kvkeep.shm.guard import Guarded
    from kvkeep.shm.recency import Clock, LruOrder

    recency = np.zeros(100, dtype=np.uint64)
    told: list[str] = []
    order = Guarded(
        LruOrder,
        recency,
        recency,
        members=lambda: np.arange(10),
        belongs=lambda entries: entries < 10,
        tell=told.append,
    )
    clock = Clock()
    order.touch(np.arange(10), clock.stamps(10))
    assert order.pop(3, lambda entries: np.ones(len(entries), bool)).tolist() == [9, 8, 7]
    assert told == []
