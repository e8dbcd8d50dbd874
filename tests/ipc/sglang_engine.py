"""SGLang as far as a storage backend sees it: abstract class, config, host pools with random KV, and what the cache
controller does with a backend.

Where SGLang's files can be found (``PYTHONPATH`` of an unpacked wheel is enough, with torch), its own abstract class is
used; elsewhere one with the same methods.  Pools are numpy arrays in the layouts of SGLang 0.5.23.
"""

from __future__ import annotations

import abc
import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.conftest import Daemon
from tests.ipc.conftest import eventually

ABSTRACT = "sglang.srt.mem_cache.hicache_storage"


def _install() -> bool:
    """Whether it is the real one.  Only the folders of its packages are known: their `__init__` want all of SGLang."""
    spec = importlib.util.find_spec("sglang")
    real = spec is not None and spec.origin is not None and importlib.util.find_spec("torch") is not None
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        package = ModuleType(name)
        folder = Path(spec.origin).parent.joinpath(*name.split(".")[1:]) if real and spec and spec.origin else None
        package.__path__ = [str(folder)] if folder is not None else []
        sys.modules[name] = package
    if not real:
        sys.modules[ABSTRACT] = _stand_in()
    return real


def _stand_in() -> ModuleType:
    class HiCacheStorage(abc.ABC):
        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            self.mem_pool_host = mem_pool_host

        @abc.abstractmethod
        def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

        @abc.abstractmethod
        def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

        @abc.abstractmethod
        def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

        @abc.abstractmethod
        def batch_set(
            self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
        ) -> bool: ...

        @abc.abstractmethod
        def exists(self, key: str) -> bool: ...

    @dataclass
    class PoolTransferResult:
        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]
        restorable_prefix_pages: list[int] | None = None

        @classmethod
        def empty(cls) -> Any:
            return cls(0, {})

    module = ModuleType(ABSTRACT)
    module.HiCacheStorage, module.PoolTransferResult = HiCacheStorage, PoolTransferResult  # type: ignore[attr-defined]
    return module


REAL = _install()

from kvkeep.ipc.sglang.backend import KVKeepStorage  # noqa: E402


@dataclass
class Config:
    """The fields of SGLang's HiCacheStorageConfig."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = "org/model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = field(default_factory=dict)
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class Transfer:
    """The fields of SGLang's PoolTransfer that a backend sees."""

    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: str = "all_pages"


@dataclass
class ExtraInfo:
    prefix_keys: list[str] | None = None


class HostPool:
    """K and V of ``pages`` pages, in one of SGLang's layouts, filled at random."""

    layer_num, head_num, head_dim = 3, 2, 64
    device, start_layer = "cpu", 0

    def __init__(self, layout: str, seed: int, *, pages: int = 12, page_size: int = 16, dtype: Any = np.uint16) -> None:
        self.layout, self.page_size, self.dtype, self.pages = layout, page_size, np.dtype(dtype), pages
        self.end_layer = self.layer_num
        shape = self.shape()
        rng = np.random.default_rng(seed)
        self.kv_buffer = rng.integers(0, 256, (*shape[:-1], shape[-1] * self.dtype.itemsize), np.uint8).view(self.dtype)

    def shape(self) -> tuple[int, ...]:
        tokens, page, layers, heads = self.pages * self.page_size, self.page_size, self.layer_num, self.head_num
        return {
            "layer_first": (2, layers, tokens, heads, self.head_dim),
            "page_first": (2, tokens, layers, heads, self.head_dim),
            "page_first_direct": (2, self.pages, layers, page, heads, self.head_dim),
            "page_head": (2, self.pages, heads, page, layers, self.head_dim),
        }[self.layout]

    def view(self, page: int) -> np.ndarray[Any, Any]:
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, tokens]
        if self.layout == "page_first":
            return self.kv_buffer[:, tokens]
        return self.kv_buffer[:, page]

    def runs(self, page: int) -> list[np.ndarray[Any, Any]]:
        view = self.view(page)
        if self.layout == "layer_first":
            return [view[part, layer] for layer in range(self.layer_num) for part in range(2)]
        return [view[0], view[1]]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        firsts = indices.tolist()[:: self.page_size]
        runs = [run for first in firsts for run in self.runs(first // self.page_size)]
        assert all(run.flags.c_contiguous for run in runs)
        return [run.ctypes.data for run in runs], [run.nbytes for run in runs]

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        return self.view(index // self.page_size).flatten()

    def get_dummy_flat_data_page(self) -> Any:
        return np.zeros(self.view(0).size, self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        view = self.view(index // self.page_size)
        view[...] = data_page.reshape(view.shape)


class MLATokenToKVPoolHost(HostPool):
    """One latent vector per token and layer."""

    def shape(self) -> tuple[int, ...]:
        tokens, page, layers, width = self.pages * self.page_size, self.page_size, self.layer_num, 96
        return {
            "layer_first": (layers, tokens, 1, width),
            "page_first": (tokens, layers, 1, width),
            "page_first_direct": (self.pages, layers, page, 1, width),
        }[self.layout]

    def view(self, page: int) -> np.ndarray[Any, Any]:
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, tokens]
        return self.kv_buffer[tokens] if self.layout == "page_first" else self.kv_buffer[page]

    def runs(self, page: int) -> list[np.ndarray[Any, Any]]:
        return list(self.view(page)) if self.layout == "layer_first" else [self.view(page)]


class WholePagePool(HostPool):
    """One that gives no addresses, as recurrent state with parts of its own does."""

    def get_page_buffer_meta(self, indices: Any) -> Any:
        raise NotImplementedError("this layout has no buffers")


class AnchorPool(HostPool):
    """Has slots and no bytes."""

    def get_page_buffer_meta(self, indices: Any) -> Any:
        return None


class Engine:
    """One rank with its host pool and its backend, and the calls of SGLang's cache controller."""

    def __init__(self, daemon: Daemon | Path, pool: Any, *, wait: bool = True, v1: bool = True, **config: Any) -> None:
        run_dir = daemon.run_dir if isinstance(daemon, Daemon) else daemon
        self.extra = {
            "backend_name": "kvkeep",
            "module_path": "kvkeep.ipc.sglang.backend",
            "class_name": "KVKeepStorage",
            "kvkeep.run_dir": str(run_dir),
            "kvkeep.identity": "test",
            "kvkeep.lookup_deadline_ms": 60_000,
            "kvkeep.transfer_deadline_s": 60,
            **({"interface_v1": 1} if v1 else {}),
            **config.pop("extra", {}),
        }
        self.pool = pool
        self.v1 = v1
        self.backend = KVKeepStorage(replace(Config(**config), extra_config=self.extra), {})
        if wait:
            eventually(lambda: self.client.attached)
            eventually(lambda: self.client.stats()["l1"]["bytes_ready"] == self.client.stats()["l1"]["bytes_total"])
        self.backend.register_mem_pool_host(pool)
        self.backend.on_host_pools_registered()

    @property
    def client(self) -> Any:
        return self.backend._client

    def indices(self, pages: Sequence[int]) -> Any:
        size = self.pool.page_size
        return np.concatenate([np.arange(page * size, (page + 1) * size) for page in pages] or [np.arange(0)])

    def store(self, keys: list[str], pages: Sequence[int], **more: Any) -> bool:
        if self.v1:
            return all(self.backend.batch_set_v1(keys, self.indices(pages), **more))
        data = [self.pool.get_data_page(page * self.pool.page_size) for page in pages]
        return bool(self.backend.batch_set(keys, data))

    def load(self, keys: list[str], pages: Sequence[int], **more: Any) -> int:
        """How many of the first pages came."""
        if self.v1:
            good = self.backend.batch_get_v1(keys, self.indices(pages), **more)
            return next((i for i, ok in enumerate(good) if not ok), len(good))
        data = self.backend.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
        for i, page in enumerate(data):
            if page is None:
                return i
            self.pool.set_from_flat_data_page(pages[i] * self.pool.page_size, page)
        return len(keys)

    def bytes_of(self, page: int) -> bytes:
        return bytes(self.pool.view(page).tobytes())

    def close(self) -> None:
        self.backend.close()


def keys(count: int, salt: int = 0) -> list[str]:
    """A chain of SGLang's keys."""
    chain, digest = [], hashlib.sha256(b"%d" % salt)
    for i in range(count):
        digest = hashlib.sha256(digest.digest() + b"%d" % i)
        chain.append(digest.hexdigest())
    return chain
