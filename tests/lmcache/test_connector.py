"""Unchanged vLLM and LMCache: `LMCacheMPConnector`, engine-driven, against kvkeepd and against `lmcache server`.

What holds for both tests the right thing; what holds for kvkeepd only says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if not all(importlib.util.find_spec(name) for name in ("vllm", "lmcache")):
    pytest.skip("needs vllm and lmcache: make test-lmcache", allow_module_level=True)

from kvkeep.bench.engine_process import LMCacheServer
from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.lmcache.peer import url_of
from tests.vllm import tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 256  # of both, by default
SERVERS = ("kvkeepd", "lmcache server")
L1_MIB = 256


@dataclass
class Stand:
    engine: Engine
    reference: Engine
    daemon: Daemon | None
    port: int

    def hits(self) -> int:
        return int(self.engine.ask("metrics").get("vllm:external_prefix_cache_hits", 0))

    def forget_local(self) -> None:
        """Until the blocks that are being stored are free."""
        until = time.monotonic() + 30
        while not self.engine.ask("reset_prefix_cache"):
            assert time.monotonic() < until
            time.sleep(0.05)

    def settled(self) -> None:
        if self.daemon is not None:
            until = time.monotonic() + 30
            with Client.attach(self.daemon.run_dir, arena=False) as kv:
                while (l1 := kv.stats()["l1"])["references"] or l1["reserved_bytes"]:
                    assert time.monotonic() < until, l1
                    time.sleep(0.05)

    def run(self, prompts: list[list[int]], aborts: list[int | None] | None = None, **arguments: Any) -> Any:
        """To the end of what LMCache does after the last answer: it keeps blocks until it has stored them."""
        aborts = aborts or [None] * len(prompts)
        return self.engine.ask("generate_and_abort", prompts=prompts, aborts=aborts, wait_s=300, **arguments)

    def same(self, prompts: list[list[int]]) -> None:
        assert_same_outputs(self.run(prompts), self.reference.generate(prompts))


def connect(folder: Path, model: Path, port: int, **more: Any) -> Engine:
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": port,
        "lmcache.mp.heartbeat_interval": 2,
        "lmcache.mp.mq_timeout": 30,
    }
    return Engine(
        folder / f"{unique_name('engine')}.log",
        model,
        connector_class={"kv_connector": "LMCacheMPConnector"},
        options=extra,
        environment={"LMCACHE_TRACK_USAGE": "false"},
        **more,
    )


@pytest.fixture(scope="module", params=SERVERS)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("lmcache")
    model = tiny_model.build(folder / "model")
    with contextlib.ExitStack() as stack:
        daemon, port = None, 0
        if request.param == "kvkeepd":
            name = unique_name("lmcache")
            daemon = Daemon(folder / name, name, "--port=0", f"--chunk-size={CHUNK}", l1_mib=L1_MIB)
            stack.callback(daemon.remove)
            daemon.start()
            port = int(url_of(daemon).rpartition(":")[2])
            daemon.flags[1] = f"--port={port}"
        else:
            server = stack.enter_context(LMCacheServer(sys.executable, folder, L1_MIB << 20))
            port = server.ready().port
        engine = connect(folder, model, port)
        stack.callback(engine.close)
        reference = Engine(folder / "reference.log", model, connector=False)
        stack.callback(reference.close)
        yield Stand(engine.ready(), reference.ready(), daemon, port)


def test_cold_and_warm_say_what_an_engine_without_a_cache_says(stand: Stand) -> None:
    prompts = [prompt(100 + n, (2 + n) * CHUNK + 40 * n + 1) for n in range(4)]
    before = stand.hits()
    stand.same(prompts)
    assert stand.hits() == before
    stand.forget_local()
    stand.same(prompts)
    assert stand.hits() - before == sum(len(one) // CHUNK * CHUNK for one in prompts)
    stand.settled()


def test_a_longer_prompt_hits_its_beginning(stand: Stand) -> None:
    head = prompt(200, 3 * CHUNK)
    stand.same([head + prompt(201, 30)])
    stand.forget_local()
    before = stand.hits()
    stand.same([head + prompt(202, 2 * CHUNK + 5)])
    assert stand.hits() - before == 3 * CHUNK
    stand.settled()


def test_chunked_prefill(stand: Stand) -> None:
    said = prompt(300, 6 * CHUNK + 17)
    stand.engine.ask("step_tokens", count=96)
    try:
        stand.same([said])
        stand.forget_local()
        before = stand.hits()
        stand.same([said])
    finally:
        stand.engine.ask("step_tokens", count=0)
    assert stand.hits() - before == 6 * CHUNK
    stand.settled()


def test_preemption(stand: Stand) -> None:
    prompts = [prompt(400 + n, 2 * CHUNK + 20 * n + 3) for n in range(5)]
    wanted = stand.reference.generate(prompts, max_tokens=24)
    before = stand.engine.ask("preemptions")
    for _ in range(2):
        stand.engine.ask("leave_blocks", count=60)
        try:
            assert_same_outputs(stand.run(prompts, max_tokens=24, preempt=3), wanted)
        finally:
            stand.engine.ask("leave_blocks", count=0)
        stand.forget_local()
    assert stand.engine.ask("preemptions") > before
    stand.settled()


def test_an_abort_storm_leaves_no_lock(stand: Stand, seed: int) -> None:
    source = random.Random(seed)
    prompts = [prompt(500 + n, 2 * CHUNK + 10 + n) for n in range(6)]
    wanted = stand.reference.generate(prompts)
    stand.same(prompts)
    for _ in range(5):
        stand.forget_local()
        aborts = [source.randrange(6) if source.random() < 0.6 else None for _ in prompts]
        got = stand.run(prompts, aborts)
        pairs = [(one, other) for one, other in zip(got, wanted, strict=True) if one is not None]
        assert_same_outputs([one for one, _ in pairs], [other for _, other in pairs])
    stand.settled()


def test_the_daemon_is_killed_and_the_engine_goes_on_and_hits_what_was_stored(stand: Stand) -> None:
    """`lmcache server` loses all of it."""
    if stand.daemon is None:
        pytest.skip("a promise of kvkeepd")
    prompts = [prompt(600 + n, 3 * CHUNK + 9) for n in range(3)]
    stand.same(prompts)
    stand.settled()
    stand.daemon.kill()
    stand.daemon.start()
    assert url_of(stand.daemon).endswith(str(stand.port))
    stand.forget_local()
    before = stand.hits()
    until = time.monotonic() + 60
    while stand.hits() - before < 9 * CHUNK:
        stand.same(prompts)
        stand.forget_local()
        assert time.monotonic() < until
    fresh = prompt(650, 2 * CHUNK + 1)
    until = time.monotonic() + 60
    before = stand.hits()
    while stand.hits() == before:  # what it stores now is found, too
        stand.same([fresh])
        stand.forget_local()
        assert time.monotonic() < until
    stand.settled()
