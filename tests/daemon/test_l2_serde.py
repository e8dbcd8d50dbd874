"""Serdes through a real daemon, mover and client: what comes back, and what a changed configuration does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.daemon.options import BY_KEY
from kvkeep.ipc.client import Client, Namespace
from tests.daemon.l2_helpers import Make, adapter, at_rest, attach, chain, fs, raw, row, stored
from tests.ipc.conftest import eventually
from tests.l2.serdes import KEY_A, KEY_B, config_of, key_file, kv, within_bound

SIZE = 128 << 10


def register(kv_: Client, dtype: str = "bfloat16", **more: Any) -> Namespace:
    return kv_.register({"model": "m", "kv_dtype": dtype, **more}, shard_bytes=SIZE)


def put(client: Client, ns: Namespace, keys: list[bytes]) -> None:
    given = [np.frombuffer(kv(key, SIZE), np.uint8) for key in keys]
    assert client.store(ns, keys, given).stored == len(keys)


def read(client: Client, ns: Namespace, keys: list[bytes], *, lossy: bool = False) -> int:
    """How many chunks were there; fails on a byte that may not be."""
    with client.lookup(ns, keys, wait_s=10, deadline_s=15) as found:
        if not found.ready:
            return 0
        target = np.zeros((found.ready, SIZE), np.uint8)
        assert all(client.retrieve(found, target))
        for i in range(found.ready):
            plain, back = kv(keys[i], SIZE), target[i].tobytes()
            assert within_bound(plain, back) if lossy else plain == back, f"wrong bytes in chunk {i}"
        return found.ready


@pytest.mark.parametrize("medium", [fs, raw])
@pytest.mark.parametrize("serdes", [["zstd"], ["fp8"], ["aesgcm"], ["fp8", "zstd", "aesgcm"]], ids="+".join)
def test_a_node_reboots_and_everything_comes_back(
    make_daemon: Make, tmp_path: Path, medium: Callable[..., str], serdes: list[str]
) -> None:
    daemon = make_daemon(medium(tmp_path, serde=config_of(serdes, key_file(tmp_path))))
    keys = chain(1, 24)
    with attach(daemon) as client:
        put(client, register(client), keys)
        stored(client, 24)
        eventually(lambda: row(client)["objects"] == 24 + 1)  # the namespace's manifest
        if serdes != ["aesgcm"]:
            assert row(client)["bytes_used"] < 24 * SIZE * 0.9, "what is used is what is stored"
    daemon.kill()
    daemon.start("--forget")
    with attach(daemon) as client:
        assert read(client, register(client), keys, lossy="fp8" in serdes) == 24
        at_rest(client)
        assert row(client)["failures"] == {}


@pytest.mark.soak
@pytest.mark.parametrize("medium", [fs, raw])
@pytest.mark.parametrize("serdes", [["zstd"], ["fp8"], ["aesgcm"], ["fp8", "zstd", "aesgcm"]], ids="+".join)
def test_two_gigabytes_come_back_after_a_reboot(
    make_daemon: Make, tmp_path: Path, medium: Callable[..., str], serdes: list[str]
) -> None:
    size, count, step = 4 << 20, 512, 16
    serde = config_of(serdes, key_file(tmp_path))
    on_files = adapter(type="fs", base_path=str(tmp_path), capacity_gb=3, serde=serde)
    daemon = make_daemon(on_files if medium is fs else raw(tmp_path, 3, serde=serde), l1_mib=384)
    keys, base = chain(1, count), np.frombuffer(kv(b"base", size), np.uint8)

    def content(key: bytes) -> np.ndarray[Any, Any]:
        """Another one for each key, and cheap to make: the same numbers, turned."""
        return np.roll(base, 2 * int.from_bytes(key[:4], "little"))

    with attach(daemon) as client:
        ns = client.register({"model": "m", "kv_dtype": "bfloat16"}, shard_bytes=size)
        for start in range(0, count, step):
            fresh = keys[start : start + step]  # a chain of its own: of one long chain eviction would take the newest
            assert client.store(ns, fresh, [content(key) for key in fresh], deadline_s=60).stored == step
            stored(client, start + step, deadline_s=120)
    daemon.kill()
    daemon.start("--forget")
    with attach(daemon) as client:
        ns = client.register({"model": "m", "kv_dtype": "bfloat16"}, shard_bytes=size)
        target = np.zeros((step, size), np.uint8)
        for start in range(0, count, step):
            wanted = keys[start : start + step]
            with client.lookup(ns, wanted, wait_s=30, deadline_s=40) as found:
                assert found.ready == step
                assert all(client.retrieve(found, target))
            for key, back in zip(wanted, target, strict=True):
                plain = content(key)
                same = within_bound(plain.tobytes(), back.tobytes()) if "fp8" in serdes else (plain == back).all()
                assert same, "wrong bytes"
        at_rest(client)
        assert row(client)["failures"] == {}


def test_two_adapters_with_two_chains_cascade(make_daemon: Make, tmp_path: Path) -> None:
    keys, file = chain(1, 16), key_file(tmp_path)
    flags = [fs(tmp_path / "fs", serde="zstd"), raw(tmp_path, serde=config_of(["zstd", "aesgcm"], file))]
    daemon = make_daemon(*flags)
    with attach(daemon) as client:
        put(client, register(client), keys)
        stored(client, 16, 0)
        stored(client, 16, 1)
    daemon.stop()
    files = [path for path in (tmp_path / "fs" / "objects").glob("*/*") if path.stat().st_size > 8192]  # no manifest
    for path in files[:9]:
        path.unlink()
    daemon.start("--forget")
    with attach(daemon) as client:
        assert read(client, register(client), keys) == 16
        assert (row(client, 0)["chunks_loaded"], row(client, 1)["chunks_loaded"]) == (7, 9)
        at_rest(client)


def test_a_changed_configuration_reads_what_it_can_and_keeps_the_rest(make_daemon: Make, tmp_path: Path) -> None:
    """none, zstd, a key, the key rotated, the key gone, and back: nothing is read wrongly, and nothing is lost."""
    file = key_file(tmp_path, KEY_A)
    secret = config_of(["zstd", "aesgcm"], file)
    chains: dict[str, list[bytes]] = {}

    def run(serde: Any, name: str, reads: set[str]) -> None:
        daemon = make_daemon(fs(tmp_path / "fs", serde=serde) if serde else fs(tmp_path / "fs"))
        with attach(daemon) as client:
            ns = register(client)
            for other, keys in chains.items():
                assert read(client, ns, keys) == (5 if other in reads else 0), f"{other} in {name}"
            chains[name] = chain(100 + len(chains), 5)
            put(client, ns, chains[name])
            eventually(lambda: row(client)["objects"] == 5 * len(chains) + 1)  # the namespace's manifest
            at_rest(client)
        daemon.stop()

    run(None, "plain", set())
    run("zstd", "zstd", {"plain"})
    run(secret, "key a", {"plain", "zstd"})
    key_file(tmp_path, KEY_B, KEY_A)
    run(secret, "key b", {"plain", "zstd", "key a"})
    key_file(tmp_path, KEY_B)
    run(secret, "key a gone", {"plain", "zstd", "key b"})
    run(None, "no key at all", {"plain", "zstd"})
    key_file(tmp_path, KEY_A, KEY_B)
    run(secret, "both again", set(chains))


def test_a_key_file_that_others_can_read_is_a_reason_and_a_repaired_one_serves(
    make_daemon: Make, tmp_path: Path
) -> None:
    file = key_file(tmp_path, KEY_A, mode=0o644)
    daemon = make_daemon(fs(tmp_path / "fs", serde=config_of(["aesgcm"], file)))
    with attach(daemon, serving=False) as client:
        eventually(lambda: any("mode 0644" in str(reason) for reason in client.stats()["reasons"]))
        assert client.stats()["health"] == "degraded"
        os.chmod(file, 0o600)
        eventually(lambda: client.stats()["health"] == "ok", 30)
        keys = chain(1, 3)
        put(client, register(client), keys)
        stored(client, 3)
        client.clear(l1_only=True)
        assert read(client, register(client), keys) == 3
        said = json.dumps(client.stats()) + daemon.output()
        assert "0f0f" not in said.lower()
        assert b"0f0f" not in Path(f"/proc/{row(client)['pid']}/cmdline").read_bytes().lower()


def test_a_mover_that_was_killed_is_told_again_what_the_bytes_are(make_daemon: Make, tmp_path: Path) -> None:
    """Also with the largest manifest that there can be."""
    daemon = make_daemon(fs(tmp_path / "fs", serde="fp8"))
    with attach(daemon) as client:
        ns = register(client, extras={"long": "x" * 16_000})
        put(client, ns, chain(1, 4))
        stored(client, 4)
        pid = row(client)["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: row(client)["pid"] not in (0, pid) and row(client)["phase"] == "serving", 30)
        put(client, ns, chain(2, 4))
        stored(client, 8)
        eventually(lambda: row(client)["adapter"].get("serde_encoded") == 4)
        assert "serde_fp8_passed_over" not in row(client)["adapter"]
        client.clear(l1_only=True)
        assert read(client, ns, [*chain(1, 4)], lossy=True) == 4


def test_what_is_no_16_bit_float_is_stored_without_fp8_and_counted(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path / "fs", serde="fp8"))
    with attach(daemon) as client:
        ns = register(client, "uint8")
        put(client, ns, chain(1, 4))
        stored(client, 4)
        client.clear(l1_only=True)
        assert read(client, ns, chain(1, 4)) == 4
        eventually(lambda: row(client)["adapter"].get("serde_fp8_passed_over") == 4)


def test_a_bit_that_flips_in_an_encoded_payload_is_a_miss(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(fs(tmp_path / "fs", serde=config_of(["zstd", "aesgcm"], key_file(tmp_path))))
    with attach(daemon) as client:
        ns, keys = register(client), chain(1, 6)
        put(client, ns, keys)
        stored(client, 6)
        client.clear(l1_only=True)
        for path in (tmp_path / "fs" / "objects").glob("*/*"):
            with path.open("r+b") as file:
                file.seek(5000)
                byte = file.read(1)[0]
                file.seek(5000)
                file.write(bytes([byte ^ 8]))
        assert read(client, ns, keys) == 0
        eventually(lambda: row(client)["objects"] < 6 + 1)
        at_rest(client)


def test_a_medium_that_fails_with_a_serde_fails_as_it_does_without(make_daemon: Make, tmp_path: Path) -> None:
    inner = {"type": "fs", "base_path": str(tmp_path / "fs"), "capacity_gb": 0.1}
    faults = [{"operation": "load", "fault": "bit_flip", "at": [0]}, {"operation": "store", "fault": "EIO", "at": [1]}]
    daemon = make_daemon(adapter(type="fault_inject", inner=inner, faults=faults, seed=1, serde=["zstd"]))
    with attach(daemon) as client:
        ns, keys = register(client), chain(1, 8)
        put(client, ns, keys)
        stored(client, 8)
        client.clear(l1_only=True)
        assert read(client, ns, keys) in range(8)
        assert sum(read(client, ns, [key]) for key in keys) == 7, "one was damaged on the way, and is gone"
        at_rest(client)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"type": "mock", "serde": "zsdt"}, "did you mean 'zstd'"),
        ({"type": "plugin", "module_path": "x", "class_name": "Y", "serde": "zsdt"}, "did you mean 'zstd'"),
        ({"type": "mock", "serde": {"type": "zstd", "speed": 1}}, "no option 'speed'"),
        ({"type": "fault_inject", "inner": {"type": "mock", "serde": "zstd"}}, "give it beside 'inner'"),
    ],
)
def test_a_wrong_chain_is_refused_at_the_start(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BY_KEY["l2_adapter"].parse([config])


def test_an_adapter_that_keeps_plain_bytes_only_says_so(make_daemon: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    plugin = {"type": "plugin", "module_path": "tests.l2.slow_adapter", "class_name": "SlowAdapter"}
    daemon = make_daemon(adapter(**plugin, folder=str(tmp_path), serde="zstd"))
    with attach(daemon, serving=False) as client:
        eventually(lambda: any("keeps plain bytes only" in str(reason) for reason in client.stats()["reasons"]))
