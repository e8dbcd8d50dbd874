"""SGLang's storage backend against SGLang's own files: its abstract class, its factory, its config.

They are not installed with kvkeep.  An unpacked wheel on PYTHONPATH, in an environment with torch, is enough:

    pip download sglang --no-deps && unzip sglang-*.whl -d /tmp/sglang
    PYTHONPATH=/tmp/sglang python -m pytest tests/ipc/test_sglang.py tests/ipc/test_sglang_interface.py
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from typing import Any

import pytest

from tests.conftest import Daemon
from tests.ipc.conftest import eventually
from tests.ipc.sglang_engine import ABSTRACT, REAL, Config, Engine, HostPool, KVKeepStorage, keys

pytestmark = pytest.mark.skipif(not REAL, reason="SGLang's files are not on the path")


def real() -> Any:
    return importlib.import_module(ABSTRACT)


def test_every_method_is_there_with_the_same_parameters() -> None:
    base = real().HiCacheStorage
    assert issubclass(KVKeepStorage, base)
    assert not KVKeepStorage.__abstractmethods__
    for name, method in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_"):
            continue
        assert name in vars(KVKeepStorage), f"{name} is inherited"
        assert list(inspect.signature(method).parameters) == list(
            inspect.signature(getattr(KVKeepStorage, name)).parameters
        ), name


def test_the_tests_know_the_fields_of_its_config() -> None:
    assert {field.name for field in fields(Config)} == {field.name for field in fields(real().HiCacheStorageConfig)}


def test_its_factory_makes_the_backend_and_its_types_go_in_and_out(daemon: Daemon) -> None:
    torch = pytest.importorskip("torch")
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    module, one = real(), Engine(daemon, HostPool("page_first", 1))
    config = module.HiCacheStorageConfig(
        **{field.name: getattr(Config(), field.name) for field in fields(Config)} | {"extra_config": one.extra}
    )
    backend = factory.create_backend("dynamic", config, one.pool)
    assert type(backend) is KVKeepStorage
    eventually(lambda: backend._client.attached)
    backend.register_mem_pool_host(one.pool)
    backend.on_host_pools_registered()
    backend.register_mem_host_pool_v2(one.pool, module.PoolName.KV)
    backend.register_mem_host_pool_v2(HostPool("page_first", 2), module.PoolName.MAMBA)
    indices = torch.arange(2 * one.pool.page_size)
    assert backend.batch_set_v1(keys(2), indices, module.HiCacheStorageExtraInfo(prefix_keys=[])) == [True, True]
    state = module.PoolTransfer(
        module.PoolName.MAMBA, indices[:16], keys=keys(2)[1:], hit_policy=module.PoolHitPolicy.TRAILING_PAGES
    )
    assert backend.batch_set_v2([state]) == {module.PoolName.MAMBA: [True]}
    found = backend.batch_exists_v2(keys(3), [state])
    assert isinstance(found, module.PoolTransferResult)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
    assert found.extra_pool_hit_pages == {module.PoolName.KV: 2, module.PoolName.MAMBA: 2}
    got = backend.batch_get_v2([module.PoolTransfer(module.PoolName.KV, indices + 64, keys=keys(2)), state])
    assert module.count_pool_hits(got) == {module.PoolName.KV: 2, module.PoolName.MAMBA: 1}
    assert one.bytes_of(5) == one.bytes_of(1)
    backend.close()
    one.close()
    with pytest.raises(ValueError, match=r"unknown option 'kvkeep\.typo'"):
        factory.create_backend("dynamic", module.HiCacheStorageConfig(**vars(config) | _typo(one.extra)), one.pool)


def _typo(extra: dict[str, Any]) -> dict[str, Any]:
    return {"extra_config": {**extra, "kvkeep.typo": 1}}
