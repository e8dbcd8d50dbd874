"""Two ``vllm serve`` share one daemon, and one dies under load; then one of two data-parallel replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.vllm.api_server import ApiServer
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_same_outputs
from tests.vllm.test_l2 import until
from tests.vllm.tiny_model import prompt

CHUNK = 64
CLIENTS = 3  # of each server, one request at a time
MakeServer = Callable[..., ApiServer]


@pytest.fixture(scope="module")
def make_server(model: Path, folder: Path, shared_daemon: Daemon) -> Iterator[MakeServer]:
    servers: list[ApiServer] = []

    def make(*flags: str) -> ApiServer:
        servers.append(ApiServer(folder / f"server-{len(servers)}.log", model, shared_daemon, *flags))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def servers(make_server: MakeServer) -> tuple[ApiServer, ApiServer]:
    first, second = make_server("--enable-prompt-tokens-details"), make_server("--enable-prompt-tokens-details")
    return first.ready(), second.ready()


def stored_chunks(daemon: Daemon) -> int:
    with Client.attach(daemon.run_dir, arena=False) as client:
        level = client.stats()["l1"]
        return int(level["entries"]) if level["reserved_bytes"] == 0 else 0


def wait_stored(daemon: Daemon, chunks: int) -> None:
    until("the chunks being stored", lambda: stored_chunks(daemon) >= chunks)


def test_what_one_server_stored_the_other_is_served(
    servers: tuple[ApiServer, ApiServer], reference: Engine, shared_daemon: Daemon
) -> None:
    prompts = [prompt(100 + n, (2 + n) * CHUNK + 9 * n) for n in range(4)]
    wanted = reference.generate(prompts)
    before = stored_chunks(shared_daemon)
    assert_same_outputs([servers[0].complete(one) for one in prompts], wanted)
    wait_stored(shared_daemon, before + sum(len(one) // CHUNK for one in prompts))
    answers = [servers[1].complete(one) for one in prompts]
    assert_same_outputs(answers, wanted)
    hits = [len(one) // CHUNK * CHUNK for one in prompts]
    assert servers[1].external_hits() == sum(hits)
    assert servers[1].metric("vllm:kvkeep_loaded_tokens_total") == sum(hits)
    assert servers[0].external_hits() == 0
    assert [answer["cached"] for answer in answers] == hits


def test_one_server_killed_under_load_leaves_the_other_and_the_daemon_as_they_were(
    servers: tuple[ApiServer, ApiServer], reference: Engine, shared_daemon: Daemon
) -> None:
    prompts = [prompt(1000 + n, 2 * CHUNK + 21 * n) for n in range(36)]
    wanted = reference.generate(prompts)
    victim, other = servers
    kept = [prompt(1500 + n, 3 * CHUNK + n) for n in range(3)]
    kept_wanted, before = reference.generate(kept), stored_chunks(shared_daemon)
    assert_same_outputs([victim.complete(one) for one in kept], kept_wanted)
    wait_stored(shared_daemon, before + 3 * len(kept))
    answered = {victim.port: 0, other.port: 0}
    wrong: list[str] = []
    killed = threading.Event()

    def ask(server: ApiServer, share: int) -> None:
        for number in list(range(share, len(prompts), CLIENTS)) * 2:
            try:
                answer = server.complete(prompts[number], max_tokens=8)
                assert_same_outputs([answer], [wanted[number]])
                answered[server.port] += 1
            except (OSError, ValueError) as error:
                if server is victim and killed.is_set():
                    return
                wrong.append(f"{number}: {error}")
            except AssertionError as error:
                wrong.append(f"{number}: {error}")

    threads = [threading.Thread(target=ask, args=(server, n)) for server in servers for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    until("the victim being under way", lambda: answered[victim.port] >= 9 or wrong)
    killed.set()
    victim.kill()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []
    assert answered[victim.port] < 2 * len(prompts) == answered[other.port]

    with Client.attach(shared_daemon.run_dir) as client:
        until("the dead server's references coming back", lambda: client.stats()["l1"]["references"] == 0)
        until("its reservations coming back", lambda: client.stats()["l1"]["reserved_bytes"] == 0)
        assert client.check() == {"ok": True, "problem": ""}
    hits = other.external_hits()
    assert_same_outputs([other.complete(one) for one in kept], kept_wanted)
    assert other.external_hits() - hits == len(kept) * 3 * CHUNK
    other.kill()


def test_data_parallel_replicas_share_what_they_store(
    make_server: MakeServer, reference: Engine, shared_daemon: Daemon
) -> None:
    server = make_server("--data-parallel-size", "2", "--enable-prompt-tokens-details").ready()
    prompts = [prompt(3000 + n, (2 + n) * CHUNK + 5) for n in range(4)]
    wanted = reference.generate(prompts)
    before = stored_chunks(shared_daemon)
    assert_same_outputs([server.complete(one, rank=0) for one in prompts], wanted)
    wait_stored(shared_daemon, before + sum(len(one) // CHUNK for one in prompts))
    assert_same_outputs([server.complete(one, rank=1) for one in prompts], wanted)
    assert server.external_hits(engine="0") == 0
    assert server.external_hits(engine="1") == sum(len(one) // CHUNK * CHUNK for one in prompts)
    server.kill()
    with Client.attach(shared_daemon.run_dir) as client:
        until("the references coming back", lambda: client.stats()["l1"]["references"] == 0)
