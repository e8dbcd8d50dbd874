"""What the L2 tests share: daemons with adapters, and chains whose bytes follow from their hashes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.ipc.client import Client, Namespace
from tests.conftest import Daemon
from tests.ipc.conftest import eventually

SIZE = 65536
MIB = 1 << 20


def adapter(**config: Any) -> str:
    return f"--l2-adapter={json.dumps(config)}"


def fs(path: Path, **more: Any) -> str:
    return adapter(type="fs", base_path=str(path), capacity_gb=0.5, fsync="none", **more)


def raw(path: Path, size_gb: float = 0.1, **more: Any) -> str:
    return adapter(type="raw_block", path=str(path / "raw"), size_gb=size_gb, durability="none", **more)


def attach(daemon: Daemon, *, serving: bool = True) -> Client:
    """All of L1 is reserved, and (``serving``) all adapters serve."""
    kv = Client.attach(daemon.run_dir)
    eventually(lambda: kv.stats()["l1"]["bytes_ready"] == kv.stats()["l1"]["bytes_total"])
    if serving:
        eventually(lambda: all(row["phase"] == "serving" for row in kv.stats()["l2"]))
    return kv


def register(kv: Client, size: int = SIZE, shards: int = 1) -> Namespace:
    return kv.register({"model": "m", "test": "l2"}, shard_bytes=size, shards=shards)


def chain(seed: int, n: int) -> list[bytes]:
    return [random.Random((seed << 20) + i).randbytes(32) for i in range(n)]


def payload(key: bytes, size: int = SIZE, shard: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The content oracle: bytes = f(key, shard)."""
    seed = int.from_bytes(key[:8], "little") + shard
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def store(kv: Client, ns: Namespace, keys: list[bytes], size: int = SIZE, shards: int = 1) -> int:
    stored = 0
    for shard in range(shards):
        stored = kv.store(ns, keys, [payload(key, size, shard) for key in keys], shard=shard).stored
    return stored


def read(
    kv: Client, ns: Namespace, keys: list[bytes], *, wait_s: float = 10.0, size: int = SIZE, shards: int = 1
) -> int:
    """Look up with L2, copy, compare with the oracle.  Returns how many chunks were there; fails on a wrong byte."""
    with kv.lookup(ns, keys, wait_s=wait_s, deadline_s=wait_s + 5) as found:
        good = 0
        for shard in range(shards):
            target = np.zeros((max(found.ready, 1), size), np.uint8)
            if not found.ready:
                return 0
            results = kv.retrieve(found, target[: found.ready], shard=shard)
            good = sum(results)
            for i, ok in enumerate(results):
                assert not ok or (target[i] == payload(keys[i], size, shard)).all(), f"wrong bytes in chunk {i}"
        return good


def row(kv: Client, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = kv.stats()["l2"][index]
    return found


def stored(kv: Client, count: int, index: int = 0, deadline_s: float = 20.0) -> None:
    """Wait until this adapter was given so many chunks."""
    eventually(lambda: row(kv, index)["chunks_stored"] >= count, deadline_s)


def at_rest(kv: Client) -> None:
    """Nothing is held, nothing is written, everything adds up."""

    def still() -> bool:
        document = kv.stats()
        l1 = document["l1"]
        return (l1["references"], l1["reserved_bytes"], l1["lookups_waiting"], l1["bytes_loading"]) == (0, 0, 0, 0)

    eventually(still, 20)
    assert kv.check() == {"ok": True, "problem": ""}


Make = Callable[..., Daemon]
