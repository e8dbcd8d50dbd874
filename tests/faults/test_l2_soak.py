"""L2 for long: the same prompts again and again, three times what fits, a node that reboots.

Short forms in the normal run; the long ones are marked `soak`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvkeep.ipc.client import Client, Namespace
from tests.conftest import Daemon
from tests.daemon.l2_helpers import Make, adapter, at_rest, attach, chain, payload, read, register
from tests.faults.l2_truth import Truth, Watch, fs_bytes, fs_truth, raw_truth
from tests.ipc.conftest import eventually
from tests.l2.serdes import KEY_A, config_of, key_file, kv, within_bound

MIB = 1 << 20
SIZE = 50_000
LENGTH = 10


def fs(path: Path, mib: float, **more: Any) -> str:
    return adapter(type="fs", base_path=str(path / "fs"), capacity_gb=mib / 1024, **more)


def raw(path: Path, mib: float, **more: Any) -> str:
    return adapter(type="raw_block", path=str(path / "raw"), size_gb=mib / 1024, durability="none", **more)


def quiet(kv_: Client) -> bool:
    """Nothing is being stored, or will be."""
    return all(row["jobs"] == row["bytes_queued"] == 0 for row in kv_.stats()["l2"])


# ---- the same prompts ------------------------------------------------------------------------------------------------


def replay(daemon: Daemon, path: Path, rng: random.Random, passes: int) -> dict[str, Any]:
    """What an engine does with a prompt, again and again: look up, load, store what was missing.  After the first pass
    nothing is written to a medium: not by a replay, nor after L1 was emptied, nor by a daemon that comes back without
    its L1."""
    daemon.flags += [fs(path, 128), raw(path, 64)]
    daemon.start()
    prompts = [chain(number, LENGTH) for number in range(12)]
    total = len(prompts) * LENGTH
    first: list[Truth] = []
    stored = [0, 0]
    missed = 0
    for number in range(passes):
        if number in (passes // 3, 2 * passes // 3):
            daemon.kill()
            daemon.start(*(["--forget"] if number == 2 * passes // 3 else []))
            stored = [0, 0]  # of this daemon
        with attach(daemon) as client:
            ns = register(client, SIZE)
            for keys in rng.sample(prompts, len(prompts)):
                good = read(client, ns, keys, size=SIZE)
                missed += LENGTH - good
                if good < LENGTH:
                    client.store(ns, keys, [payload(key, SIZE) for key in keys[good:]], start=good)
            if not number:
                eventually(lambda client=client: all(r["chunks_stored"] == total for r in client.stats()["l2"]), 60)
                eventually(lambda client=client: quiet(client))
                first = [fs_truth(path / "fs"), raw_truth(path / "raw")]
                stored = [total, total]
            assert [row["chunks_stored"] for row in client.stats()["l2"]] == stored, f"written in pass {number}"
            if rng.random() < 0.3:
                client.clear(l1_only=True)
            at_rest(client)
    assert daemon.stop() == 0
    assert missed == total, "all of it is found after the first pass"
    now = [fs_truth(path / "fs"), raw_truth(path / "raw")]
    assert [truth.objects for truth in now] == [truth.objects for truth in first], "objects, headers or payloads"
    assert [truth.nbytes for truth in now] == [truth.nbytes for truth in first]
    return {"passes": passes, "objects": [len(truth.objects) for truth in first]}


def test_the_same_prompts_again_write_nothing(make_daemon: Make, tmp_path: Path, seed: int) -> None:
    print(replay(make_daemon(start=False), tmp_path, random.Random(seed), 9))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_same_prompts_a_hundred_times_write_nothing(make_daemon: Make, tmp_path: Path, seed: int) -> None:
    print(json.dumps(replay(make_daemon(start=False), tmp_path, random.Random(seed), 100)))


# ---- three times what fits -------------------------------------------------------------------------------------------


def memory_of(daemon: Daemon) -> int:
    """Bytes of control's own memory: not of the arena, which it maps."""
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def evict_for(daemon: Daemon, path: Path, rng: random.Random, seconds: float, growth: int) -> dict[str, Any]:
    """A working set of three times L1 and both media together, with a hot part, for so long."""
    fs_mib, raw_mib, l1_mib = 24, 24, 16
    daemon.flags += [fs(path, fs_mib), raw(path, raw_mib), "--l2-prefetch-policy=retain"]
    daemon.start()
    limits = [
        ("fs", lambda: fs_bytes(path / "fs" / "objects"), fs_mib * MIB),
        ("raw", lambda: (path / "raw").stat().st_blocks * 512 if (path / "raw").exists() else 0, raw_mib * MIB + 65536),
    ]
    watch = Watch(daemon, lambda: [(name, measure(), limit) for name, measure, limit in limits], 0.1)
    count = 3 * (fs_mib + raw_mib + l1_mib) * MIB // (LENGTH * SIZE)
    hits = asked = 0
    began, at_first = time.monotonic(), 0
    memory = []
    with attach(daemon) as client:
        ns = register(client, SIZE)
        while (now := time.monotonic()) < began + seconds:
            if now >= began + seconds / 4 and not at_first:
                at_first = memory_of(daemon)  # everything has been full and evicted by now
            keys = chain(min(rng.randrange(count), rng.randrange(count)), LENGTH)
            good = read(client, ns, keys, wait_s=0.5, size=SIZE)
            hits, asked = hits + good, asked + LENGTH
            if good < LENGTH:
                client.store(ns, keys, [payload(key, SIZE) for key in keys[good:]], start=good)
            memory.append(memory_of(daemon))
        eventually(lambda: quiet(client), 120)
        at_rest(client)
        rows = client.stats()["l2"]
        assert all(row["failures"].keys() <= {"expired", "busy", "miss"} for row in rows), [
            row["failures"] for row in rows
        ]
        last = memory_of(daemon)
    highest = watch.end()
    daemon.kill()
    truth = fs_truth(path / "fs")
    daemon.start()
    with attach(daemon) as client:
        row = client.stats()["l2"][0]
        assert (row["objects"], row["bytes_used"]) == (len(truth.objects), truth.nbytes)
    assert last - at_first < growth, f"control grew from {at_first} to {last} bytes"
    return {
        "seconds": round(seconds), "chunks": asked, "hits": hits, "samples": watch.samples, "highest": highest,
        "memory_first": at_first, "memory_last": last, "memory_most": max(memory),
    }  # fmt: skip


def test_both_levels_stay_within_their_limits_under_three_times_what_fits(
    make_daemon: Make, tmp_path: Path, seed: int
) -> None:
    print(evict_for(make_daemon(l1_mib=16, start=False), tmp_path, random.Random(seed), 20, 32 * MIB))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_both_levels_stay_within_their_limits_for_a_quarter_of_an_hour(
    make_daemon: Make, tmp_path: Path, seed: int
) -> None:
    daemon = make_daemon(l1_mib=16, start=False)
    print(json.dumps(evict_for(daemon, tmp_path, random.Random(seed), 900, 8 * MIB)))


# ---- a node reboots --------------------------------------------------------------------------------------------------

CHUNK = 1 << 20
_POOL: list[npt.NDArray[np.uint8]] = []


def kv_like(key: bytes) -> npt.NDArray[np.uint8]:
    """bytes = f(key): KV as models have it, turned by a number of tokens that the key says."""
    if not _POOL:
        _POOL.extend(np.frombuffer(kv(bytes([i] * 32), CHUNK), np.uint8) for i in range(16))
    return np.roll(_POOL[key[0] % 16], 128 * (int.from_bytes(key[1:5], "little") % (CHUNK // 128)))


def load_all(client: Client, ns: Namespace, chains: list[list[bytes]], *, lossy: bool) -> int:
    good = 0
    for keys in chains:
        with client.lookup(ns, keys, wait_s=60, deadline_s=90) as found:
            target = np.zeros((max(found.ready, 1), CHUNK), np.uint8)
            if not found.ready:
                continue
            assert all(client.retrieve(found, target[: found.ready]))
            for key, back in zip(keys, target, strict=False):
                plain = kv_like(key)
                right = within_bound(plain.tobytes(), back.tobytes()) if lossy else np.array_equal(plain, back)
                assert right, "wrong bytes"
            good += found.ready
    return good


def reboot(daemon: Daemon, flags: list[str], chunks: int, *, lossy: bool, lose: Callable[[], None]) -> dict[str, Any]:
    """Store, lose L1 (and what ``lose`` takes), and have everything again."""
    daemon.flags += flags
    daemon.start()
    chains = [chain(number, 16) for number in range(chunks // 16)]
    total = 16 * len(chains)
    began = time.monotonic()
    with attach(daemon) as client:
        ns = client.register({"model": "m", "kv_dtype": "bfloat16"}, shard_bytes=CHUNK)
        for number, keys in enumerate(chains):
            done = number * 16 - 32  # L1 need not hold all of it: what is stored is followed closely
            eventually(lambda done=done: all(r["chunks_stored"] >= done for r in client.stats()["l2"]), 120)
            assert client.store(ns, keys, [kv_like(key) for key in keys]).stored == 16
        eventually(lambda: all(r["chunks_stored"] == total for r in client.stats()["l2"]), 120)
    stored_s = time.monotonic() - began
    daemon.kill()
    lose()
    daemon.start("--forget")
    began = time.monotonic()
    with attach(daemon) as client:
        assert client.stats()["l1"]["entries"] == 0
        ns = client.register({"model": "m", "kv_dtype": "bfloat16"}, shard_bytes=CHUNK)
        assert load_all(client, ns, chains, lossy=lossy) == total
        rows = client.stats()["l2"]
        assert all(row["failures"] == {} for row in rows)
        at_rest(client)
    return {
        "GB": round(total * CHUNK / 1e9, 2), "store_s": round(stored_s), "load_s": round(time.monotonic() - began),
        "loaded": [row["chunks_loaded"] for row in rows], "used": [row["bytes_used"] for row in rows],
    }  # fmt: skip


def half_of_the_files(path: Path) -> Callable[[], None]:
    def lose() -> None:
        for file in list((path / "fs" / "objects").glob("*/*"))[::2]:
            file.unlink()

    return lose


SERDES = [[], ["zstd"], ["fp8"], ["aesgcm"], ["zstd", "aesgcm"], ["fp8", "zstd", "aesgcm"]]


def reboots(daemon: Daemon, path: Path, medium: str, serde: list[str], chunks: int) -> dict[str, Any]:
    more = {"serde": config_of(serde, key_file(path, KEY_A))} if serde else {}
    mib = chunks * 1.3 + 64
    flags = {"fs": [fs(path, mib, **more)], "raw": [raw(path, mib, **more)]}
    flags["both"] = flags["fs"] + flags["raw"]
    lose = half_of_the_files(path) if medium == "both" else (lambda: None)
    return reboot(daemon, flags[medium], chunks, lossy="fp8" in serde, lose=lose)


@pytest.mark.parametrize("serde", [[], ["fp8", "zstd", "aesgcm"]], ids=lambda s: "+".join(s) or "plain")
@pytest.mark.parametrize("medium", ["fs", "raw", "both"])
def test_a_node_reboots_and_has_everything(make_daemon: Make, tmp_path: Path, medium: str, serde: list[str]) -> None:
    print(reboots(make_daemon(l1_mib=64, start=False), tmp_path, medium, serde, 48))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("serde", SERDES, ids=lambda s: "+".join(s) or "plain")
@pytest.mark.parametrize("medium", ["fs", "raw", "both"])
def test_a_node_with_two_gigabytes_reboots(make_daemon: Make, tmp_path: Path, medium: str, serde: list[str]) -> None:
    print(json.dumps(reboots(make_daemon(l1_mib=384, start=False), tmp_path, medium, serde, 1920)))
