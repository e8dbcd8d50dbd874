"""IsolatedLRU with quotas per tenant, from the client to the eviction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvkeep.daemon.config import ConfigError, load
from kvkeep.ipc.client import Client, Namespace
from tests.daemon.l2_helpers import MIB, SIZE, Make, adapter, at_rest, attach, chain, read, row, store, stored
from tests.daemon.test_l2_manage import ask, kvkeep
from tests.ipc.conftest import eventually

QUOTAS = ("--eviction-policy=IsolatedLRU", '--tenant-quotas={"scanner": 0.00390625, "chat": 0.0078125}')  # 4 and 8 MiB


def test_a_scan_of_one_tenant_does_not_cost_another_his_chunks(make_daemon: Make) -> None:
    daemon = make_daemon(*QUOTAS, l1_mib=16)
    with attach(daemon) as kv:
        chat, scanner, nobody = (
            kv.register({"model": "m"}, shard_bytes=SIZE, tenant=tenant) for tenant in ("chat", "scanner", "")
        )
        assert len({chat.id, scanner.id, nobody.id}) == 3, "tenants share no chunk"
        keys = chain(1, 100)
        store(kv, chat, keys)
        for i in range(2, 12):
            store(kv, scanner, chain(i, 40))
        assert kv.lookup(chat, keys, readers=0).ready == 100
        assert kv.lookup(scanner, keys, readers=0).ready == 0

        def held(namespace: int) -> int:
            return sum(int(one["bytes"]) for one in kv.stats()["namespaces"] if one["id"] == namespace)

        eventually(lambda: held(scanner.id) <= 4 * MIB, 10)
        store(kv, nobody, chain(20, 30))
        assert read(kv, chat, keys, wait_s=0) == 100
        assert kv.check() == {"ok": True, "problem": ""}
    daemon.restart()  # the manifests say whose the adopted chunks are
    with attach(daemon) as kv:
        chat = kv.register({"model": "m"}, shard_bytes=SIZE, tenant="chat")
        scanner = kv.register({"model": "m"}, shard_bytes=SIZE, tenant="scanner")
        for i in range(30, 36):
            store(kv, scanner, chain(i, 40))
        assert kv.lookup(chat, keys, readers=0).ready == 100
        assert kv.check() == {"ok": True, "problem": ""}


@pytest.mark.parametrize("kind", ["fs", "raw_block"])
def test_a_flood_costs_another_tenant_nothing_on_either_level(make_daemon: Make, tmp_path: Path, kind: str) -> None:
    gib = 1 << 30
    config = {"type": kind, "eviction": {
        "eviction_policy": "IsolatedLRU", "tenant_quotas": {"scanner": 8 * MIB / gib, "chat": 16 * MIB / gib},
    }}  # fmt: skip
    if kind == "fs":
        config |= {"base_path": str(tmp_path / "medium"), "capacity_gb": 40 * MIB / gib}
    else:
        config |= {"path": str(tmp_path / "medium"), "size_gb": 64 * MIB / gib, "durability": "none"}
    daemon = make_daemon(*QUOTAS, adapter(**config), l1_mib=16)
    keys = chain(1, 100)

    def tenants(kv: Client) -> list[Namespace]:
        return [kv.register({"model": "m"}, shard_bytes=SIZE, tenant=tenant) for tenant in ("chat", "scanner")]

    def flood(kv: Client, scanner: Namespace, first: int) -> None:
        for i in range(first, first + 20):
            given = row(kv)["chunks_stored"]
            assert store(kv, scanner, chain(i, 40)) == 40
            stored(kv, given + 40)

    def held() -> dict[str, int]:
        found = ask(daemon, "l2", "stat")["adapters"][0]["tenants"]
        return {name: use["bytes"] for name, use in found.items()}

    with attach(daemon) as kv:
        chat, scanner = tenants(kv)
        store(kv, chat, keys)
        stored(kv, 100)
        flood(kv, scanner, 2)  # 50 MiB
        assert kv.lookup(chat, keys, readers=0).ready == 100, "L1"
        assert 6 * MIB < held()["scanner"] <= 8 * MIB
        assert 6 * MIB < held()["chat"] <= 16 * MIB
        at_rest(kv)
    daemon.stop()  # L1 is forgotten, and with it whose anything was
    offline = kvkeep("l2", "--adapter", json.dumps(config), "ls")
    assert offline.returncode == 0, offline.stderr
    assert "tenant=chat" in offline.stdout
    assert "its manifest is not known" not in offline.stdout
    assert "tenant scanner" in kvkeep("l2", "--adapter", json.dumps(config), "stat").stdout
    daemon.start("--forget")
    with attach(daemon) as kv:
        assert 6 * MIB < held()["chat"] <= 16 * MIB, "before anybody registered"
        chat, scanner = tenants(kv)
        flood(kv, scanner, 30)
        assert read(kv, chat, keys) == 100, "L2"
        assert held()["scanner"] <= 8 * MIB
        assert "quota of 16.0 MiB" in kvkeep("--run-dir", str(daemon.run_dir), "l2", "stat").stdout
        at_rest(kv)


def test_a_manifest_with_a_strange_tenant_belongs_to_nobody(make_daemon: Make) -> None:
    with attach(make_daemon(*QUOTAS, l1_mib=16)) as kv:
        for tenant in (7, ["x"], {"a": 1}, None, "x" * 1000):
            ns = kv.register({"model": "m", "tenant": tenant}, shard_bytes=SIZE)
            assert store(kv, ns, chain(1, 5)) == 5
        assert kv.check() == {"ok": True, "problem": ""}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (['--tenant-quotas={"a": 1}'], "needs --eviction-policy IsolatedLRU, which is LRU"),
        (["--tenant-quotas=7"], "not an object"),
        (['--tenant-quotas={"a": -1}'], "the quota of 'a' is -1: give 0 to 4096 GiB"),
    ],
)
def test_quotas_that_make_no_sense_are_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(flags, {})
