"""SGLang's storage backend against real daemons: what comes back, what never does, and what is left behind."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvkeep.ipc import messages as m
from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import Denied
from tests.conftest import Daemon
from tests.daemon.l2_helpers import fs, stored
from tests.ipc.conftest import at_epoch, eventually
from tests.ipc.sglang_engine import (
    AnchorPool,
    Config,
    Engine,
    ExtraInfo,
    HostPool,
    KVKeepStorage,
    MLATokenToKVPoolHost,
    Transfer,
    WholePagePool,
    keys,
)

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
POOLS = [*((HostPool, layout) for layout in (*LAYOUTS, "page_head")), *((MLATokenToKVPoolHost, x) for x in LAYOUTS)]


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[..., Engine]]:
    """engine(pool, **config) -> Engine, closed at the end."""
    with ExitStack() as stack:

        def make(pool: Any, **config: Any) -> Engine:
            return stack.enter_context(closing(Engine(daemon, pool, **config)))

        yield make


def at_rest(run_dir: Path) -> None:
    with Client.attach(run_dir) as kv:

        def held() -> tuple[int, int]:
            l1 = kv.stats()["l1"]
            return l1["references"], l1["reserved_bytes"]

        eventually(lambda: held() == (0, 0))
        assert kv.check() == {"ok": True, "problem": ""}


# ---- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "flat"])
@pytest.mark.parametrize(("kind", "layout"), POOLS, ids=lambda x: getattr(x, "__name__", x))
def test_pages_come_back_in_another_engine(
    engine: Callable[..., Engine], daemon: Daemon, kind: Any, layout: str, v1: bool, seed: int
) -> None:
    mla = kind is MLATokenToKVPoolHost
    writer = engine(kind(layout, seed), v1=v1, is_mla_model=mla)
    reader = engine(kind(layout, seed + 1), v1=v1, is_mla_model=mla)
    chain, here, there = keys(6), [4, 0, 9, 1, 2, 7], [3, 11, 0, 5, 8, 1]
    before = {page: reader.bytes_of(page) for page in range(12)}
    assert reader.backend.batch_exists(chain) == 0
    assert reader.load(chain, there) == 0
    assert writer.store(chain, here)
    assert reader.backend.batch_exists([*chain, *keys(2, 1)]) == 6
    assert reader.backend.exists(chain[3])
    assert reader.load(chain, there) == 6
    for mine, theirs in zip(here, there, strict=True):
        assert reader.bytes_of(theirs) == writer.bytes_of(mine)
    for page in set(range(12)) - set(there):
        assert reader.bytes_of(page) == before[page], "neighbours stay as they were"
    assert writer.store(chain, here), "what is there already is no failure"
    at_rest(daemon.run_dir)


def test_one_copy_between_the_pool_and_the_arena(engine: Callable[..., Engine], monkeypatch: Any) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a page was copied to be passed on")

    pool = HostPool("layer_first", 1)
    one = engine(pool)
    for name in ("get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"):
        monkeypatch.setattr(pool, name, never)
    assert one.store(keys(3), [0, 1, 2])
    assert one.load(keys(3), [3, 4, 5]) == 3
    assert one.bytes_of(5) == one.bytes_of(2)


def test_a_pool_that_gives_no_addresses_takes_whole_pages(engine: Callable[..., Engine], seed: int) -> None:
    one, other = (engine(WholePagePool("layer_first", seed + i)) for i in range(2))
    assert one.store(keys(4), range(4))
    assert other.load(keys(4), range(4, 8)) == 4
    assert [other.bytes_of(page) for page in range(4, 8)] == [one.bytes_of(page) for page in range(4)]


def test_a_pool_without_bytes_knows_what_is_there(engine: Callable[..., Engine]) -> None:
    one, other = (engine(AnchorPool("page_first", i)) for i in range(2))
    assert one.store(keys(4), range(4))
    assert other.backend.batch_exists(keys(5)) == 4
    assert other.load(keys(5), range(5)) == 4


def test_tensors_in_and_out(engine: Callable[..., Engine]) -> None:
    torch = pytest.importorskip("torch")

    class TorchPool(HostPool):
        def get_dummy_flat_data_page(self) -> Any:
            return torch.zeros(self.view(0).size, dtype=torch.bfloat16)

    one = engine(TorchPool("page_first", 1), v1=False)
    page = torch.randn(one.pool.view(0).size).to(torch.bfloat16)
    assert one.backend.set(keys(1)[0], page)
    target = torch.zeros_like(page)
    assert one.backend.get(keys(1)[0], target) is target
    assert torch.equal(target, page)
    assert torch.equal(one.backend.get(keys(1)[0]), page)
    assert one.backend.get(keys(2)[1], target) is None


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "flat"])
def test_a_part_of_a_batch_is_its_leading_hits(engine: Callable[..., Engine], v1: bool) -> None:
    one = engine(HostPool("page_first", 1), v1=v1)
    chain = keys(6)
    assert one.store(chain[:2], [0, 1])
    assert one.store(chain[3:5], [3, 4])
    assert one.backend.batch_exists(chain) == 2
    assert one.load(chain, range(6, 12)) == 2
    assert [one.bytes_of(6), one.bytes_of(7)] == [one.bytes_of(0), one.bytes_of(1)]
    assert one.backend.batch_exists(chain[3:]) == 2, "each batch stands for itself"
    assert one.load(chain[3:], [9, 10, 11]) == 2
    assert one.store(chain, range(6)), "what is missing is filled in"
    assert one.backend.batch_exists(chain) == 6
    assert one.load(chain, range(6, 12)) == 6


def test_keys_of_another_form_are_keys_too(engine: Callable[..., Engine]) -> None:
    one = engine(HostPool("page_first", 1))
    odd = ["", "k", "k" * 64, "AB" * 32, "ab" * 32, "ab " * 21 + "a", "é" * 32, "long" * 100]
    assert one.store(odd, range(len(odd)))
    for i, key in enumerate(odd):
        assert one.load([key], [11]) == 1
        assert one.bytes_of(11) == one.bytes_of(i)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_a_page_is_there_when_all_ranks_have_stored_their_part(engine: Callable[..., Engine], daemon: Daemon) -> None:
    ranks = [engine(HostPool("page_first", rank), tp_rank=rank, tp_size=2) for rank in range(2)]
    assert ranks[0].store(keys(4), range(4))
    assert [rank.backend.batch_exists(keys(4)) for rank in ranks] == [0, 0]
    assert ranks[0].load(keys(4), range(4, 8)) == 0
    assert ranks[1].store(keys(3), range(3))
    for rank in ranks:
        assert rank.backend.batch_exists(keys(4)) == 3
        assert rank.load(keys(4), range(4, 8)) == 3
        assert [rank.bytes_of(page) for page in range(4, 7)] == [rank.bytes_of(page) for page in range(3)]
    assert ranks[0].bytes_of(4) != ranks[1].bytes_of(4)
    assert ranks[1].store(keys(4)[3:], [3])
    assert ranks[0].backend.batch_exists(keys(4)) == 4
    at_rest(daemon.run_dir)


def test_mla_is_written_once_and_read_by_all(engine: Callable[..., Engine]) -> None:
    first, second = (
        engine(MLATokenToKVPoolHost("page_first", rank), tp_rank=rank, tp_size=2, is_mla_model=True)
        for rank in range(2)
    )
    assert second.store(keys(3), range(3)), "another rank does it"
    assert second.backend.batch_exists(keys(3)) == 0
    assert first.store(keys(3), range(3))
    assert second.load(keys(3), range(3, 6)) == 3
    assert [second.bytes_of(page) for page in range(3, 6)] == [first.bytes_of(page) for page in range(3)]


def test_context_parallel_ranks_are_parts_too(engine: Callable[..., Engine]) -> None:
    ranks = [
        engine(MLATokenToKVPoolHost("page_first", rank), attn_cp_rank=rank, attn_cp_size=2, is_mla_model=True)
        for rank in range(2)
    ]
    assert ranks[0].store(keys(2), range(2))
    assert ranks[1].backend.batch_exists(keys(2)) == 0
    assert ranks[1].store(keys(2), range(2))
    for rank in ranks:
        assert rank.load(keys(2), range(2, 4)) == 2
        assert rank.bytes_of(2) == rank.bytes_of(0)


def test_replicas_share(engine: Callable[..., Engine]) -> None:
    one, other = (engine(HostPool("page_first", rank), dp_rank=rank) for rank in range(2))
    assert one.store(keys(2), range(2))
    assert other.load(keys(2), range(2)) == 2


# ---- identity --------------------------------------------------------------------------------------------------------


class WiderPool(HostPool):
    head_dim = 128


class NarrowerPool(HostPool):
    """As many bytes, of another form."""

    head_dim, head_num = 32, 4


class OtherPool(HostPool):
    pass


class LaterLayersPool(HostPool):
    start_layer = 3


@pytest.mark.parametrize(
    ("pool", "config"),
    [
        (HostPool, {"model_name": "org/other"}),
        (HostPool, {"extra": {"kvkeep.identity": "other weights"}}),
        (HostPool, {"pp_size": 2}),
        (HostPool, {"pp_size": 2, "pp_rank": 1}),
        (HostPool, {"is_mla_model": True}),
        (HostPool, {"v1": False}),
        (HostPool, {"layout": "page_first_direct"}),
        (HostPool, {"layout": "layer_first"}),
        (HostPool, {"page_size": 32}),
        (HostPool, {"dtype": np.int16}),
        (HostPool, {"dtype": np.uint8}),
        (WiderPool, {}),
        (NarrowerPool, {}),
        (OtherPool, {}),
        (LaterLayersPool, {}),
        (WholePagePool, {}),
    ],
    ids=str,
)
def test_another_identity_is_a_miss(engine: Callable[..., Engine], pool: Any, config: dict[str, Any]) -> None:
    config = dict(config)
    form = {name: config.pop(name) for name in ("page_size", "dtype") if name in config}
    one = engine(HostPool("page_first", 1))
    other = engine(pool(config.pop("layout", "page_first"), 2, **form), **config)
    assert one.store(keys(2), range(2))
    assert other.backend.batch_exists(keys(2)) == 0
    assert other.load(keys(2), range(2)) == 0
    assert other.store(keys(2), range(2))
    assert one.load(keys(2), [5, 6]) == 2
    assert one.bytes_of(5) == one.bytes_of(0)


def test_tp_sizes_do_not_mix(engine: Callable[..., Engine]) -> None:
    one = engine(HostPool("page_first", 1))
    assert one.store(keys(2), range(2))
    for size in (2, 4):
        assert engine(HostPool("page_first", 2), tp_size=size).backend.batch_exists(keys(2)) == 0


def test_an_unknown_option_is_one_sentence() -> None:
    for extra, sentence in (
        ({"kvkeep.rundir": "/x"}, "unknown option 'kvkeep.rundir'.*kvkeep.run_dir, kvkeep.identity"),
        ({"kvkeep.l2_wait_ms": -1}, "kvkeep.l2_wait_ms is -1.0: it must be between 0 and 60000"),
        ({"kvkeep.run_dir": 3}, "kvkeep.run_dir is 3: it must be of type str"),
        ({"kvkeep.copy_threads": True}, "kvkeep.copy_threads is True: it must be of type int"),
    ):
        with pytest.raises(ValueError, match=sentence):
            KVKeepStorage(Config(extra_config=extra), {})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"extra_config": None, "model_name": None},
            "cannot be read: set kvkeep.identity",
        ),
        ({"extra_config": {"kvkeep.identity": "x"}, "dcp_size": 2}, "dcp_size is 2: this version supports 1"),
        ({"extra_config": {"kvkeep.identity": "x"}, "tp_size": 128}, "tp_size 128 x attn_cp_size 1 ranks, at most 64"),
    ],
)
def test_an_engine_that_is_refused_runs_without(config: Any, sentence: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "kvkeep.sglang"):
        backend = KVKeepStorage(Config(**config), {})
    assert sentence in caplog.text
    backend.register_mem_pool_host(HostPool("page_first", 1))
    all_miss(backend)
    backend.clear()
    backend.close()


def settings(monkeypatch: Any, **changed: Any) -> None:
    """What SGLang has resolved of its flags, as far as we read it."""
    model = {
        "model_path": "/none",
        "revision": None,
        "load_format": "auto",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
    }
    spec = {"speculative_algorithm": None, "speculative_draft_model_path": None}
    for known in (model, spec):
        known.update({name: changed[name] for name in known if name in changed})
    module = ModuleType("sglang.srt.runtime_context")
    module.get_model, module.get_spec = (lambda: SimpleNamespace(**model)), (lambda: SimpleNamespace(**spec))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.bin").write_bytes(b"a" * 5000)
    return str(tmp_path / "model")


def test_weights_are_told_apart_by_their_content(engine: Callable[..., Engine], weights: str, monkeypatch: Any) -> None:
    named: dict[str, Any] = {"extra": {"kvkeep.identity": ""}}
    settings(monkeypatch, model_path=weights)
    assert engine(HostPool("page_first", 1), **named).store(keys(2), range(2))
    assert engine(HostPool("page_first", 2), **named).backend.batch_exists(keys(2)) == 2
    Path(weights, "model.bin").write_bytes(b"b" * 5000)
    assert engine(HostPool("page_first", 2), **named).backend.batch_exists(keys(2)) == 0
    Path(weights, "model.bin").write_bytes(b"a" * 5000)
    assert engine(HostPool("page_first", 2), **named).backend.batch_exists(keys(2)) == 2


@pytest.mark.parametrize(
    "changed", [{"kv_cache_dtype": "fp8_e5m2"}, {"dtype": "float16"}, {"speculative_algorithm": "EAGLE"}], ids=str
)
def test_other_settings_are_another_identity(
    engine: Callable[..., Engine], changed: dict[str, str], monkeypatch: Any
) -> None:
    settings(monkeypatch)
    one = engine(HostPool("page_first", 1))
    assert one.store(keys(2), range(2))
    settings(monkeypatch, **changed)
    assert engine(HostPool("page_first", 2)).backend.batch_exists(keys(2)) == 0


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model_path": "/nonexistent"}, "or set kvkeep.identity to a text that is another for other weights"),
        ({"load_format": "dummy"}, "nothing tells the weights apart from others (dummy weights of '/none')"),
        ({"speculative_draft_model_path": "/nonexistent"}, "or set kvkeep.identity"),
    ],
)
def test_weights_without_a_fingerprint_are_not_cached(
    changed: dict[str, str], sentence: str, monkeypatch: Any, caplog: Any
) -> None:
    settings(monkeypatch, **changed)
    with caplog.at_level(logging.WARNING, "kvkeep.sglang"):
        backend = KVKeepStorage(Config(extra_config={}), {})
    assert sentence in caplog.text
    all_miss(backend)


def test_keys_without_adapter_and_salt_are_not_cached(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.utils", ModuleType("sglang.srt.mem_cache.utils"))
    with caplog.at_level(logging.WARNING, "kvkeep.sglang"):
        backend = KVKeepStorage(Config(extra_config={"kvkeep.identity": "x"}), {})
    assert "do not name adapter and salt; use 0.5.23 or newer" in caplog.text
    all_miss(backend)


# ---- daemons that come and go ----------------------------------------------------------------------------------------


def all_miss(backend: Any) -> None:
    page, indices = np.zeros(16 * 2 * 3 * 2 * 64, np.uint16), np.arange(32)
    transfers = [Transfer("kv", indices, keys(2)), Transfer("mamba", indices, keys(2), "trailing_pages")]
    assert backend.exists("k") is False
    assert backend.batch_exists(keys(3)) == 0
    assert backend.batch_exists_v2(keys(3), transfers).kv_hit_pages == 0
    assert backend.batch_get_v1(keys(2), indices) == [False, False]
    assert backend.batch_set_v1(keys(2), indices) == [False, False]
    assert backend.batch_get_v2(transfers) == {"kv": [False, False], "mamba": [False, False]}
    assert backend.batch_set_v2(transfers) == {"kv": [False, False], "mamba": [False, False]}
    assert backend.get("k", page) is None
    assert backend.batch_get(keys(2), [page, page]) == [None, None]
    assert backend.set("k", page) is False
    assert backend.batch_set(keys(2), [page, page]) is False
    assert backend.get_stats() is None


def test_without_a_daemon_all_is_a_miss_and_with_one_it_works(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    for v1 in (True, False):
        one = Engine(daemon, HostPool("page_first", 1), wait=False, v1=v1)
        all_miss(one.backend)
        daemon.start()
        eventually(lambda one=one: one.store(keys(3), range(3)))
        assert one.load(keys(3), range(3, 6)) == 3
        assert one.bytes_of(4) == one.bytes_of(1)
        one.close()
        all_miss(one.backend)
        at_rest(daemon.run_dir)
        daemon.stop()


def test_a_killed_daemon_is_a_miss_and_the_next_one_has_the_pages(
    engine: Callable[..., Engine], daemon: Daemon
) -> None:
    one = engine(HostPool("layer_first", 1))
    assert one.store(keys(4), range(4))
    for epoch in (2, 3):
        daemon.kill()
        eventually(lambda: not one.client.attached)
        all_miss(one.backend)
        daemon.start()
        at_epoch(one.client, epoch)
        assert one.backend.batch_exists(keys(4)) == 4
        assert one.load(keys(4), range(4, 8)) == 4
        assert one.bytes_of(6) == one.bytes_of(2)
    assert one.store(keys(6), range(6))
    at_rest(daemon.run_dir)


def test_a_stopped_daemon_costs_the_deadline_once(engine: Callable[..., Engine], daemon: Daemon) -> None:
    one = engine(HostPool("page_first", 1), extra={"kvkeep.lookup_deadline_ms": 100, "kvkeep.transfer_deadline_s": 0.1})
    eventually(lambda: one.store(keys(4), range(4)))
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        assert one.store(keys(3, 1), range(3)) is False
        eventually(lambda: one.client.hung)
        all_miss(one.backend)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: not one.client.hung)
    eventually(lambda: one.load(keys(4), range(4, 8)) == 4)
    eventually(lambda: one.store(keys(3, 1), range(3)))
    at_rest(daemon.run_dir)


def test_kills_under_load_from_many_threads_give_no_error_and_no_wrong_byte(
    make_daemon: Callable[..., Daemon], seed: int
) -> None:
    daemon = make_daemon(l1_mib=8)  # less than is stored: eviction goes on all the time
    ranks = [Engine(daemon, HostPool("layer_first", seed + rank, pages=64), tp_rank=rank, tp_size=2) for rank in (0, 1)]
    chains, wrong, hits, stop = [keys(8, salt) for salt in range(24)], [], [0], threading.Event()

    def work(number: int) -> None:
        rng, slots = random.Random(seed + number), number * 16
        try:
            while not stop.is_set():
                salt = rng.randrange(24)
                for rank in ranks:  # the content oracle: bytes = f(chain, page, rank)
                    content = np.random.default_rng([salt, rank.backend._config.tp_rank])
                    for i in range(8):
                        view = rank.pool.view(slots + i)
                        view[...] = content.integers(0, 60000, view.shape)
                    rank.store(chains[salt], range(slots, slots + 8))
                for rank in ranks:
                    if rng.random() < 0.02:
                        rank.backend.clear()
                    rank.backend.batch_exists(chains[salt])
                    got = rank.load(chains[salt], range(slots + 8, slots + 16))
                    hits[0] += got
                    wrong.extend(
                        (salt, i) for i in range(got) if rank.bytes_of(slots + 8 + i) != rank.bytes_of(slots + i)
                    )
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for epoch in range(2, 5):
        time.sleep(0.4)
        daemon.restart()
        for rank in ranks:
            at_epoch(rank.client, epoch)
    before = hits[0]
    eventually(lambda: wrong or hits[0] > before)
    stop.set()
    for thread in threads:
        thread.join(60)
    for rank in ranks:
        assert set(rank.backend._noted) <= {"clear: RuntimeError"}
        rank.close()
    assert wrong == []
    with Client.attach(daemon.run_dir) as kv:
        eventually(lambda: kv.stats()["l1"]["references"] == 0)
        assert kv.check() == {"ok": True, "problem": ""}


CHILD = """
import sys
from pathlib import Path
from tests.ipc.sglang_engine import Engine, HostPool, keys
one = Engine(Path(sys.argv[1]), HostPool("page_first", 7))
names = [bytes.fromhex(key) for key in keys(6)]
namespace = one.backend._pools["kv"].shelf.namespace
got = one.load(keys(3), range(6, 9))
found, granted = one.client.lookup(namespace, names), one.client.reserve(namespace, names)
print(got, one.bytes_of(6).hex()[:32], found.ready, len(granted), flush=True)
sys.stdin.read()
"""


def test_a_killed_engine_holds_nothing(engine: Callable[..., Engine], daemon: Daemon) -> None:
    one = engine(HostPool("page_first", 1))
    assert one.store(keys(3), range(3))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(daemon.run_dir)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().split() == ["3", one.bytes_of(0).hex()[:32], "3", "3"]
        assert one.client.stats()["l1"]["references"] > 0
        child.kill()
    at_rest(daemon.run_dir)
    assert one.store(keys(6), range(6))
    assert one.backend.batch_exists(keys(6)) == 6


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_wrong_sizes_are_misses(engine: Callable[..., Engine], daemon: Daemon) -> None:
    one = engine(HostPool("page_first", 1))
    assert one.store(keys(2), range(2))
    for indices in (np.arange(15), np.arange(33), np.arange(0), None, "what"):
        assert one.backend.batch_set_v1(keys(2, 1), indices) == [False, False]
        assert one.backend.batch_get_v1(keys(2), indices) == [False, False]
    assert one.backend.batch_get_v1([], np.arange(0)) == []
    assert one.backend.batch_set_v1([], np.arange(0)) == []
    assert one.backend.batch_exists([]) == 0
    assert one.backend.batch_set_v1([keys(1)[0]] * 2, np.arange(32)) == [False, False], "not a chain"
    assert one.backend.batch_exists([None, 3]) == 0  # type: ignore[list-item]
    assert one.backend.batch_get(keys(1), [np.zeros(5, np.uint8)]) == [None]
    flat = engine(HostPool("page_first", 1), v1=False)
    page = flat.pool.get_data_page(0)
    for bad in (page[:-1], np.concatenate((page, page)), page[::2], None, 7, b""):
        assert flat.backend.set("k", bad) is False
        assert flat.backend.batch_set(["k"], [bad]) is False
    assert flat.backend.batch_set(["k", "l"], [page]) is False
    assert flat.backend.set("k", page) is True
    locked = np.zeros_like(page)
    locked.flags.writeable = False
    for bad in (page[:-1], locked, 7):
        assert flat.backend.get("k", bad) is None
        assert flat.backend.batch_get(["k"], [bad]) == [None]
    assert flat.backend.batch_get(["k", "l"], [page]) == [None, None]
    at_rest(daemon.run_dir)


def test_a_pool_that_changes_its_mind_is_a_miss(engine: Callable[..., Engine], daemon: Daemon) -> None:
    pool = HostPool("page_first", 1)
    one = engine(pool)
    assert one.store(keys(2), range(2))
    pool.head_dim = 32
    pool.kv_buffer = pool.kv_buffer[..., :32].copy()
    assert one.store(keys(2, 1), range(2)) is False
    assert one.load(keys(2), range(2)) == 0
    at_rest(daemon.run_dir)


def test_a_full_arena_is_no_error(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(l1_mib=8)
    one = Engine(daemon, HostPool("page_first", 1, pages=16, page_size=1024))
    good = one.backend.batch_set_v1(keys(16), one.indices(range(16)))
    assert 0 < sum(good) < 16
    assert good == sorted(good, reverse=True), "the first pages are the ones that matter"
    eventually(lambda: one.backend.batch_exists(keys(16)) == sum(good))
    one.close()
    at_rest(daemon.run_dir)
    too_large = Engine(daemon, HostPool("page_first", 1, pages=2, page_size=16384))
    all_miss(too_large.backend)
    assert "pool 'kv' is not kept: ProtocolError" in too_large.backend._noted
    too_large.close()


def test_a_pool_elsewhere_is_not_kept(engine: Callable[..., Engine]) -> None:
    class FarPool(HostPool):
        device = "cuda:0"

    one = engine(FarPool("page_first", 1))
    all_miss(one.backend)
    assert "pool 'kv' is not kept: ValueError" in one.backend._noted


# ---- clear -----------------------------------------------------------------------------------------------------------


def test_clear_drops_everything_of_this_identity(engine: Callable[..., Engine]) -> None:
    one, neighbour = engine(HostPool("page_first", 1)), engine(HostPool("page_first", 2), model_name="other")
    assert one.store(keys(4), range(4))
    assert neighbour.store(keys(4), range(4))
    one.backend.clear()
    assert one.backend.batch_exists(keys(4)) == 0
    assert neighbour.backend.batch_exists(keys(4)) == 4
    assert one.store(keys(4), range(4, 8))
    assert one.load(keys(4), range(8, 12)) == 4
    assert one.bytes_of(8) == one.bytes_of(4), "the keys have other bytes now"


def test_clear_holds_although_the_daemon_is_away(engine: Callable[..., Engine], daemon: Daemon) -> None:
    one = engine(HostPool("page_first", 1))
    assert one.store(keys(4), range(4))
    daemon.kill()
    eventually(lambda: not one.client.attached)
    one.backend.clear()
    daemon.start()
    at_epoch(one.client, 2)
    assert one.backend.batch_exists(keys(4)) == 0, "the arena has them still"
    eventually(lambda: one.store(keys(4), range(4, 8)))
    assert one.load(keys(4), range(8, 12)) == 4
    assert one.bytes_of(8) == one.bytes_of(4)


def test_what_others_read_is_not_served_after_clear(
    engine: Callable[..., Engine], daemon: Daemon, monkeypatch: Any
) -> None:
    monkeypatch.setattr("kvkeep.ipc.sglang.shelf.CLEAR_S", 0.2)
    monkeypatch.setattr("kvkeep.ipc.sglang.backend.CLEAR_AGAIN_S", 0.01)
    one = engine(HostPool("page_first", 1))
    assert one.store(keys(4), range(4))
    shelf = one.backend._pools["kv"].shelf
    with one.client.lookup(shelf.namespace, [bytes.fromhex(key) for key in keys(4)]) as held:
        assert held.ready == 4
        one.backend.clear()
        assert one.backend.batch_exists(keys(4)) == 0
        assert one.load(keys(4), range(4)) == 0
        assert one.store(keys(4), range(4)) is False
        assert "clear: RuntimeError" in one.backend._noted
    eventually(lambda: one.store(keys(4), range(4, 8)))
    assert one.load(keys(4), range(8, 12)) == 4
    assert one.bytes_of(8) == one.bytes_of(4)


def test_who_may_not_clear_is_served_nothing_more(engine: Callable[..., Engine], monkeypatch: Any) -> None:
    one = engine(HostPool("page_first", 1))
    assert one.store(keys(4), range(4))
    ask = one.client.management.ask

    def denied(expected: Any, kind: Any, *fields: Any, **options: Any) -> Any:
        if kind is m.Clear:
            raise Denied("uid 7 may not")
        return ask(expected, kind, *fields, **options)

    monkeypatch.setattr(one.client.management, "ask", denied)
    one.backend.clear()
    all_miss(one.backend)


def test_a_store_that_was_under_way_does_not_outlive_clear(engine: Callable[..., Engine], monkeypatch: Any) -> None:
    monkeypatch.setattr("kvkeep.ipc.sglang.backend.CLEAR_AGAIN_S", 0.0)
    one = engine(HostPool("page_first", 1))
    shelf = one.backend._pools["kv"].shelf
    write = shelf.write

    def late(*arguments: Any) -> Any:
        one.backend.clear()
        return write(*arguments)

    monkeypatch.setattr(shelf, "write", late)
    one.store(keys(2), range(2))
    monkeypatch.setattr(shelf, "write", write)
    assert one.backend.batch_exists(keys(2)) == 0
    assert one.store(keys(2), range(2))
    assert one.backend.batch_exists(keys(2)) == 2


# ---- several pools ---------------------------------------------------------------------------------------------------


def test_a_hit_is_what_all_pools_have(engine: Callable[..., Engine], seed: int) -> None:
    one, other = (engine(HostPool("page_first", seed + i)) for i in range(2))
    pools = [{"indexer": HostPool("page_first", seed + 2), "mamba": WholePagePool("layer_first", seed + 3)}, {}]
    pools[1] = {"indexer": HostPool("page_first", seed + 4), "mamba": WholePagePool("layer_first", seed + 5)}
    for i, extra in enumerate(pools):
        extra["swa"] = HostPool("page_first", seed + 6 + i)
    for rank, extra in zip((one, other), pools, strict=True):
        rank.backend.register_mem_host_pool_v2(rank.pool, "kv")
        for name, pool in extra.items():
            rank.backend.register_mem_host_pool_v2(pool, name)
    chain = keys(8)
    assert one.store(chain[:7], range(7))
    indexer = Transfer("indexer", one.indices(range(6)), chain[:6])
    states = Transfer("mamba", one.indices([2, 5]), [chain[2], chain[4]], "trailing_pages")
    assert one.backend.batch_set_v2([indexer, states]) == {"indexer": [True] * 6, "mamba": [True] * 2}
    window = Transfer("swa", one.indices([0, 1, 2]), chain[1:4], "trailing_pages")
    assert one.backend.batch_set_v2([window]) == {"swa": [True] * 3}

    def ask(*transfers: Transfer) -> tuple[int, Any, Any]:
        found = other.backend.batch_exists_v2(chain, list(transfers))
        return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

    every, last = Transfer("indexer"), Transfer("mamba", keys=[chain[-1]], hit_policy="trailing_pages")
    assert ask() == (7, {"kv": 7}, [1, 2, 3, 4, 5, 6, 7])
    assert ask(every) == (6, {"kv": 7, "indexer": 6}, [1, 2, 3, 4, 5, 6])
    assert ask(every, last) == (5, {"kv": 7, "indexer": 6, "mamba": 5}, [3, 5])
    two = Transfer("swa", keys=chain[:2], hit_policy="trailing_pages")
    assert ask(two) == (4, {"kv": 7, "swa": 4}, [3, 4])
    assert ask(last, two) == (3, {"kv": 7, "mamba": 5, "swa": 4}, [3])
    assert ask(last, Transfer("unknown")) == (0, {"kv": 7, "mamba": 5}, [])
    assert ask(Transfer("unknown", hit_policy="block_groups")) == (7, {"kv": 7}, [1, 2, 3, 4, 5, 6, 7])
    got = other.backend.batch_get_v2(
        [
            Transfer("kv", other.indices(range(5)), chain[:5]),
            Transfer("indexer", other.indices(range(5)), chain[:5]),
            Transfer("mamba", other.indices([9]), [chain[4]]),
            Transfer("unknown", other.indices([9]), [chain[4]]),
            Transfer("indexer2", None, None),
        ]
    )
    assert got == {"kv": [True] * 5, "indexer": [True] * 5, "mamba": [True], "unknown": [False], "indexer2": []}
    assert other.bytes_of(4) == one.bytes_of(4)
    for name, theirs, mine in (("indexer", 4, 4), ("mamba", 9, 5)):
        assert pools[1][name].view(theirs).tobytes() == pools[0][name].view(mine).tobytes()


def test_state_is_each_ranks_own_also_where_kv_is_not(engine: Callable[..., Engine]) -> None:
    ranks, states = [], []
    for rank in range(2):
        pool = MLATokenToKVPoolHost("page_first", rank)
        ranks.append(engine(pool, tp_rank=rank, tp_size=2, is_mla_model=True))
        states.append(HostPool("page_first", 10 + rank))
        ranks[-1].backend.register_mem_host_pool_v2(states[-1], "mamba")
        ranks[-1].backend.register_mem_host_pool_v2(HostPool("page_first", 20), "draft")
    for rank in ranks:
        assert rank.backend.batch_set_v2([Transfer("mamba", rank.indices([0]), keys(1))]) == {"mamba": [True]}
        assert rank.backend.batch_set_v2([Transfer("draft", rank.indices([0]), keys(1))]) == {"draft": [False]}
    for rank, state in zip(ranks, states, strict=True):
        assert rank.backend.batch_get_v2([Transfer("mamba", rank.indices([1]), keys(1))]) == {"mamba": [True]}
        assert state.view(1).tobytes() == state.view(0).tobytes()


# ---- chains, L2, metrics ---------------------------------------------------------------------------------------------


def test_with_prefix_keys_a_batch_hangs_on_what_is_before_it(engine: Callable[..., Engine], daemon: Daemon) -> None:
    one = engine(HostPool("page_first", 1))
    chain = keys(8)
    after = ExtraInfo(prefix_keys=chain[:4])
    assert one.store(chain[4:], range(4, 8), extra_info=after), "also where the prefix is not there"
    assert one.load(chain[4:], range(8, 12), extra_info=after) == 4
    assert one.bytes_of(8) == one.bytes_of(4)
    assert one.store(chain[:4], range(4), extra_info=ExtraInfo(prefix_keys=[]))
    more = keys(10)[8:]
    assert one.store(more, [10, 11], extra_info=ExtraInfo(prefix_keys=chain))
    assert one.load(more, [2, 3], extra_info=ExtraInfo(prefix_keys=chain)) == 2
    assert one.bytes_of(3) == one.bytes_of(11)
    assert one.load(keys(2, 9), [2, 3], extra_info=ExtraInfo(prefix_keys=chain)) == 0
    at_rest(daemon.run_dir)


def test_chains_longer_than_a_message(engine: Callable[..., Engine], monkeypatch: Any) -> None:
    monkeypatch.setattr("kvkeep.ipc.sglang.shelf.MAX_CHUNKS", 4)
    one = engine(HostPool("page_first", 1))
    chain = keys(9)
    for at in range(0, 9, 3):
        assert one.store(chain[at : at + 3], range(at, at + 3), extra_info=ExtraInfo(prefix_keys=chain[:at]))
    assert one.backend.batch_exists(chain) == 9
    assert one.load(chain[6:], [9, 10, 11], extra_info=ExtraInfo(prefix_keys=chain[:6])) == 3
    assert one.bytes_of(9) == one.bytes_of(6)


def test_heads_stay_younger_than_tails(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(l1_mib=8)
    one = Engine(daemon, HostPool("page_first", 1, pages=8, page_size=256))
    chain = keys(16)
    for at in range(0, 16, 8):
        assert one.store(chain[at : at + 8], range(8), extra_info=ExtraInfo(prefix_keys=chain[:at]))
    other = keys(8, 1)
    assert one.store(other, range(8))
    there = one.backend.batch_exists(chain)
    assert 8 < there < 16
    assert not any(one.backend.exists(key) for key in chain[there:]), "what was evicted is the end"
    one.close()


def test_what_l1_forgot_is_found_and_held_until_it_is_read(
    make_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("kvkeep.ipc.sglang.shelf.HOLD_S", 600.0)
    daemon = make_daemon(fs(tmp_path))
    one = Engine(daemon, HostPool("page_first", 1), extra={"kvkeep.l2_wait_ms": 20_000})
    eventually(lambda: all(row["phase"] == "serving" for row in one.client.stats()["l2"]))
    assert one.store(keys(4), range(4))
    stored(one.client, 4)
    daemon.kill()
    eventually(lambda: not one.client.attached)
    daemon.start("--forget")
    eventually(lambda: one.client.attached)
    eventually(lambda: all(row["phase"] == "serving" for row in one.client.stats()["l2"]))
    assert one.load(keys(4), range(4, 8)) == 0, "a load does not wait"
    assert one.backend.batch_exists(keys(6)) == 4
    assert one.client.stats()["l1"]["references"] == 4, "held for the load that follows"
    assert one.load(keys(4), range(4, 8)) == 4
    assert one.bytes_of(6) == one.bytes_of(2)
    at_rest(daemon.run_dir)
    assert one.backend.batch_exists(keys(4)) == 4
    one.close()
    at_rest(daemon.run_dir)


def test_what_was_found_in_l2_is_not_held_for_ever(
    make_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("kvkeep.ipc.sglang.shelf.HOLD_S", 0.1)
    daemon = make_daemon(fs(tmp_path))
    one = Engine(daemon, HostPool("page_first", 1), extra={"kvkeep.l2_wait_ms": 20_000})
    eventually(lambda: all(row["phase"] == "serving" for row in one.client.stats()["l2"]))
    assert one.store(keys(4), range(4))
    stored(one.client, 4)
    one.client.management.ask(m.Ok, m.Clear, one.backend._pools["kv"].shelf.namespace.id, True, b"")
    assert one.backend.batch_exists(keys(4)) == 4
    at_rest(daemon.run_dir)
    one.close()
    eventually(lambda: "kvkeep-pins" not in {thread.name for thread in threading.enumerate()})


def test_what_sglang_measures(engine: Callable[..., Engine], monkeypatch: Any) -> None:
    @dataclass
    class StorageMetrics:
        prefetch_pgs: list[int] = field(default_factory=list)
        backup_pgs: list[int] = field(default_factory=list)
        prefetch_bandwidth: list[float] = field(default_factory=list)
        backup_bandwidth: list[float] = field(default_factory=list)

    module = ModuleType("sglang.srt.observability.metrics_collector")
    module.StorageMetrics = StorageMetrics  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.observability", ModuleType("sglang.srt.observability"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    one = engine(HostPool("page_first", 1), enable_storage_metrics=True)
    assert one.store(keys(4), range(4))
    assert one.load(keys(5), range(4, 9)) == 4
    stats = one.backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
    assert stats.backup_bandwidth[0] > 0
    assert one.backend.get_stats() == StorageMetrics(), "since the last time"


def test_the_launch_flags_of_the_document_name_this_class() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    start = text.index("'{") + 1
    config = json.loads(text[start : text.index("}'", start) + 1])
    assert (config["module_path"], config["class_name"]) == (KVKeepStorage.__module__, KVKeepStorage.__name__)
    assert config["interface_v1"] == 1
