"""LMCache's own engine and memory with kvkeep as its storage: what comes back, and what never reaches LMCache."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("lmcache")
torch = pytest.importorskip("torch")

from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

from kvkeep.ipc.lmcache.storage import KVKeepStorageBackend  # noqa: E402
from tests.conftest import Daemon  # noqa: E402

MODULE = "kvkeep.ipc.lmcache.storage"
CHUNK = 16
SHAPE = (4, 2, CHUNK, 2, 64)  # layers, kv, chunk, heads, width


def config_of(daemon: Daemon, **options: Any) -> Any:
    settings = {"module_path": MODULE, "class_name": "KVKeepStorageBackend", "run_dir": str(daemon.run_dir), **options}
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_cpu=True,
        max_local_cpu_size=0.01,
        storage_plugins=["kvkeep"],
        extra_config={f"storage_plugin.kvkeep.{name}": value for name, value in settings.items()},
    )


def metadata_of(role: str = "worker") -> Any:
    return LMCacheMetadata("m/tiny", 1, 1, 0, 0, torch.bfloat16, SHAPE, role=role, chunk_size=CHUNK)


class Rig:
    """A backend beside the CPU backend that it loads into, as LMCache makes them."""

    def __init__(self, daemon: Daemon, **options: Any) -> None:
        config, metadata = config_of(daemon, **options), metadata_of()
        self.cpu = LocalCPUBackend(config, metadata, "cpu")
        self.cpu.use_hot = False
        self.backend = KVKeepStorageBackend(config, "cpu", metadata, self.cpu, None)

    def chunk(self, i: int, tokens: int = CHUNK, fmt: Any = MemoryFormat.KV_2LTD, shape: Any = None) -> Any:
        obj = self.cpu.allocate(torch.Size(shape or (2, 4, tokens, 128)), torch.bfloat16, fmt, busy_loop=False)
        obj.tensor.copy_(torch.randn(obj.tensor.shape, generator=torch.Generator().manual_seed(i)))
        return obj

    def put(self, keys: list[Any], objs: list[Any]) -> list[Any]:
        """As StorageManager does; returns the keys that were called back."""
        done: list[Any] = []
        self.backend.batched_submit_put_task(keys, objs, on_complete_callback=done.append)
        for obj in objs:
            obj.ref_count_down()
        eventually(lambda: len(done) == len(keys))
        return done

    @property
    def allocated(self) -> int:
        return int(self.cpu.memory_allocator.pin_allocator.total_allocated_size)


def key(i: int) -> Any:
    return CacheEngineKey("m/tiny", 1, 0, 0xABC0 + i, torch.bfloat16)


def eventually(condition: Callable[[], object], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def rig(daemon: Daemon) -> Iterator[Rig]:
    rig = Rig(daemon, lookup_deadline_ms=60_000, transfer_deadline_s=60)
    eventually(lambda: rig.backend._client.attached)
    yield rig
    rig.cpu.close()
    assert rig.backend._closed.is_set()


def equal(obj: Any, i: int) -> bool:
    wanted = torch.randn(obj.tensor.shape, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)
    return bool(torch.equal(obj.tensor, wanted))


def test_chunks_come_back_as_they_were_also_the_last_partial_one(rig: Rig) -> None:
    keys = [key(i) for i in range(3)]
    assert rig.put(keys, [rig.chunk(0), rig.chunk(1), rig.chunk(2, tokens=5)]) == keys
    assert rig.allocated == 0
    assert rig.backend.batched_contains([*keys, key(9)]) == 3
    objs = rig.backend.batched_get_blocking([*keys, key(9), keys[0]])
    assert objs[3] is None
    assert objs[4] is objs[0]
    for i, obj in enumerate(objs[:3]):
        assert equal(obj, i)
        assert obj.get_memory_format() == MemoryFormat.KV_2LTD
        assert obj.get_dtype() == torch.bfloat16
    assert tuple(objs[2].get_shape()) == (2, 4, 5, 128)
    assert [obj.get_ref_count() for obj in objs[:3]] == [2, 1, 1]
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()
    assert rig.allocated == 0


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        (MemoryFormat.KV_T2D, (CHUNK, 2, 128)),
        (MemoryFormat.KV_2TD, (2, CHUNK, 128)),
        (MemoryFormat.KV_MLA_FMT, (1, 4, CHUNK, 128)),
    ],
)
def test_memory_formats_are_kept(rig: Rig, fmt: Any, shape: tuple[int, ...]) -> None:
    rig.put([key(0)], [rig.chunk(0, fmt=fmt, shape=shape)])
    obj = rig.backend.get_blocking(key(0))
    assert obj.get_memory_format() == fmt
    assert tuple(obj.get_shape()) == shape
    assert equal(obj, 0)
    obj.ref_count_down()


def test_what_cannot_be_kept_is_refused_and_given_back(rig: Rig) -> None:
    two = rig.cpu.allocate([torch.Size((2, 1, 4, 8))] * 2, [torch.bfloat16] * 2, MemoryFormat.KV_2LTD)
    assert rig.put([key(0), key(1)], [two, rig.chunk(1, fmt=MemoryFormat.EC_TD, shape=(CHUNK, 8))]) == [key(0), key(1)]
    assert rig.backend.counters["refused"] == 2
    assert not rig.backend.contains(key(0))
    assert rig.allocated == 0


def test_pins_are_counted_and_keep_a_chunk_unless_removal_is_forced(rig: Rig) -> None:
    rig.put([key(0), key(1)], [rig.chunk(0), rig.chunk(1)])
    assert rig.backend.batched_contains([key(0), key(1), key(2)], pin=True) == 2
    assert rig.backend.pin(key(0))
    assert not rig.backend.remove(key(0), force=False)
    assert rig.backend.unpin(key(0))
    assert rig.backend.unpin(key(0))
    assert not rig.backend.unpin(key(0))
    assert rig.backend.remove(key(0))
    assert not rig.backend.contains(key(0))
    assert rig.backend.batched_remove([key(0), key(1)]) == 1
    assert rig.backend._store.pinned == 0


def test_the_asynchronous_load_ends_at_the_first_miss_and_ends_its_pins(rig: Rig) -> None:
    rig.put([key(0), key(2)], [rig.chunk(0), rig.chunk(2)])

    async def load() -> list[Any]:
        assert await rig.backend.batched_async_contains("a", [key(0), key(1)], True) == 1
        assert rig.backend._store.pinned == 1
        objs: list[Any] = await rig.backend.batched_get_non_blocking("a", [key(0), key(1), key(2)])
        return objs

    (obj,) = asyncio.run(load())
    assert equal(obj, 0)
    assert rig.backend._store.pinned == 0
    obj.ref_count_down()
    future = rig.backend.get_non_blocking(key(2))
    assert future is not None
    assert rig.backend.get_non_blocking(key(1)) is None
    future.result(30).ref_count_down()
    assert rig.allocated == 0


def test_a_load_without_memory_is_a_miss_and_no_hang(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.ipc.lmcache.storage.ALLOCATE_WAIT_S", 0.0)
    rig.put([key(0)], [rig.chunk(0)])
    held = []
    while (obj := rig.cpu.allocate(torch.Size((2, 4, CHUNK, 128)), torch.bfloat16, busy_loop=False)) is not None:
        held.append(obj)
    assert rig.backend.get_blocking(key(0)) is None
    assert rig.backend.counters["no_memory"] == 1
    for obj in held:
        obj.ref_count_down()
    assert rig.allocated == 0


def test_clear_drops_all(rig: Rig) -> None:
    rig.put([key(0), key(1)], [rig.chunk(0), rig.chunk(1)])
    assert rig.backend.clear() == 2 * CHUNK
    assert rig.backend.batched_contains([key(0)]) == 0


@pytest.mark.parametrize("fault", ["absent", "killed", "hung"])
def test_without_a_daemon_all_is_a_miss_and_nothing_is_held(make_daemon: Callable[..., Daemon], fault: str) -> None:
    daemon = make_daemon(start=fault != "absent")
    rig = Rig(daemon, lookup_deadline_ms=200, transfer_deadline_s=0.5)
    if fault != "absent":
        eventually(lambda: rig.backend._client.attached)
    if fault == "killed":
        daemon.kill()
    if fault == "hung":
        os.kill(daemon.pid, signal.SIGSTOP)
    try:
        assert rig.put([key(0), key(1)], [rig.chunk(0), rig.chunk(1)]) == [key(0), key(1)]
        assert not rig.backend.exists_in_put_tasks(key(0))
        assert rig.allocated == 0
        assert rig.backend.batched_contains([key(0)], pin=True) == 0
        assert not rig.backend.contains(key(0))
        assert rig.backend.get_blocking(key(0)) is None
        assert rig.backend.get_non_blocking(key(0)) is None
        assert not rig.backend.pin(key(0))
        assert not rig.backend.unpin(key(0))
        assert not rig.backend.remove(key(0))
        assert asyncio.run(rig.backend.batched_get_non_blocking("a", [key(0)])) == []
        assert rig.backend.clear() == 0
        assert rig.backend.counters["unreachable"] >= 5
        assert rig.backend.counters["failures"] == 0
    finally:
        if fault == "hung":
            os.kill(daemon.pid, signal.SIGCONT)
        rig.cpu.close()


def test_lmcache_may_close_its_memory_first(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(daemon)
    eventually(lambda: rig.backend._client.attached)
    freed, began, go = threading.Event(), threading.Event(), threading.Event()
    inner = rig.backend._store.batched_put

    def slow(*args: Any, **kwargs: Any) -> Any:
        began.set()
        go.wait(30)
        assert not freed.is_set()
        return inner(*args, **kwargs)

    monkeypatch.setattr(rig.backend._store, "batched_put", slow)
    free = rig.cpu.memory_allocator.close
    monkeypatch.setattr(rig.cpu.memory_allocator, "close", lambda: (freed.set(), free()))
    obj = rig.chunk(0)
    rig.backend.batched_submit_put_task([key(0)], [obj])
    obj.ref_count_down()
    assert began.wait(30)
    closing = threading.Thread(target=rig.cpu.close)
    closing.start()
    go.set()
    closing.join(30)
    assert freed.is_set()
    assert rig.backend.counters["failures"] == 0
    assert rig.backend.counters["stored"] == 1
    assert rig.backend.get_blocking(key(0)) is None
    assert rig.backend.batched_contains([key(0)]) == 0
    rig.backend.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"lookup_dedline_ms": 5},
            "unknown option 'storage_plugin.kvkeep.lookup_dedline_ms' in LMCache's extra_config",
        ),
        ({"copy_threads": 0}, "storage_plugin.kvkeep.copy_threads is 0: it must be between 1 and 64"),
        ({"run_dir": 5}, "storage_plugin.kvkeep.run_dir is 5: it must be of type str"),
    ],
)
def test_a_wrong_option_is_one_sentence(daemon: Daemon, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        KVKeepStorageBackend(config_of(daemon, **options), "cpu", metadata_of("scheduler"), None, None)


def test_layers_one_by_one_and_no_memory_to_load_into_are_refused(daemon: Daemon) -> None:
    config = config_of(daemon)
    with pytest.raises(ValueError, match="max_local_cpu_size"):
        KVKeepStorageBackend(config, "cpu", metadata_of(), None, None)
    config.use_layerwise = True
    with pytest.raises(ValueError, match="use_layerwise"):
        KVKeepStorageBackend(config, "cpu", metadata_of("scheduler"), None, None)


def test_the_scheduler_finds_what_a_worker_stored(daemon: Daemon, rig: Rig) -> None:
    rig.put([key(0)], [rig.chunk(0)])
    scheduler = KVKeepStorageBackend(config_of(daemon), "cpu", metadata_of("scheduler"), None, None)
    eventually(lambda: scheduler._client.attached)
    eventually(lambda: scheduler.contains(key(0)))
    assert scheduler.get_blocking(key(0)) is None
    scheduler.close()
