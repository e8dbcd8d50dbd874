"""Engines and daemons of different versions: the engine runs without the cache and says why once; the daemon serves on.

There is one protocol version so far, so the one before it is a number that nobody speaks any more.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvkeep.ipc.client import Client
from kvkeep.ipc.errors import AttachRefused
from kvkeep.ipc.messages import PROTOCOL_VERSION, SUPPORTED_VERSIONS
from kvkeep.shm.layout import ABI_VERSION
from tests.conftest import Daemon, unique_name
from tests.vllm.engines import HERE, Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
PATIENCE_S = 60.0  # a bound for a loaded machine, not a target
BACKOFF_S = 0.2  # after a refusal; else 10 s
OLDER, NEWER, NEWER_ABI = PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, ABI_VERSION + 1
REFUSED = "refused this client: "


def protocol(client: int, daemon: int, side: str) -> str:
    return f"the client speaks protocol {client}, this daemon {daemon}; upgrade the {side}"


def arena(client: int, daemon: int) -> str:
    return f"the client reads arena format {client}, this daemon writes {daemon}; install the same kvkeep version"


def until(what: str, happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE_S:g} s"
        time.sleep(0.02)


class Pair:
    def __init__(self, engine: Engine, daemon: Daemon) -> None:
        self.engine, self.daemon = engine, daemon

    def speak(self, versions: Sequence[int], abi: int = ABI_VERSION) -> None:
        self.engine.ask("speak", versions=versions, abi=abi, refused_backoff_s=BACKOFF_S)

    def restart(self, versions: Sequence[int] = SUPPORTED_VERSIONS, abi: int = ABI_VERSION) -> None:
        """Into a daemon of that version."""
        self.daemon.kill()
        other = (tuple(versions), abi) != (SUPPORTED_VERSIONS, ABI_VERSION)
        skew = [str(HERE / "skew.py"), json.dumps({"versions": versions, "abi": abi})]
        self.daemon.program = skew if other else ["-m", "kvkeep.daemon.main"]
        self.daemon.start()

    def on(self) -> bool:
        return bool(self.engine.ask("report")["on"])

    def refusals(self) -> list[str]:
        return [line for line in self.engine.log.read_text().splitlines() if REFUSED in line]

    def works_without(self, reference: Engine, seed: int) -> None:
        """Right answers, and not one message for them."""
        before = self.engine.ask("report")["sent"]
        prompts = [prompt(seed + n, 3 * CHUNK + 5) for n in range(3)]
        wanted = reference.generate(prompts)
        for _ in range(2):
            assert self.engine.ask("forget_local")
            assert_same_outputs(self.engine.generate(prompts), wanted)
        report = self.engine.ask("settle")
        assert (report["on"], report["sent"], report["guard"]) == (False, before, {})
        assert_nothing_held(report)

    def works_with(self, reference: Engine, seed: int) -> None:
        until("the engine attaching by itself", self.on)
        prompts = [prompt(seed + n, 3 * CHUNK + 5) for n in range(3)]
        wanted = reference.generate(prompts)
        self.engine.generate(prompts)
        assert self.engine.ask("forget_local")
        before = self.engine.external_hits()
        assert_same_outputs(self.engine.generate(prompts), wanted)
        assert self.engine.external_hits() - before == 3 * 3 * CHUNK


@pytest.fixture(scope="module")
def pair(make_engine: Callable[..., Engine], folder: Path) -> Iterator[Pair]:
    """The engine has started as one of a version that this daemon does not know."""
    name = unique_name("skew")
    daemon = Daemon(folder / name, name, l1_mib=64)
    skew = {"versions": [NEWER], "abi": NEWER_ABI, "refused_backoff_s": BACKOFF_S}
    engine = make_engine(daemon=daemon.start(), skew=skew)
    yield Pair(engine.ready(), daemon)
    daemon.remove()


def daemon_serves_others(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as client:
        namespace = client.register({"model": "of a client of this version"}, shard_bytes=4096)
        chain = [os.urandom(32) for _ in range(3)]
        assert client.store(namespace, chain, [bytes([n]) * 4096 for n in range(3)]).stored == 3
        with client.lookup(namespace, chain) as found:
            assert found.ready == 3
        assert client.check() == {"ok": True, "problem": ""}
        stats = client.stats()
        assert stats["counters"]["attach_refused"] > 0
        assert (stats["clients_total"], stats["l1"]["references"], stats["l1"]["reserved_bytes"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("versions", "abi", "sentence"),
    [
        ([NEWER], NEWER_ABI, protocol(NEWER, PROTOCOL_VERSION, "daemon")),
        ([OLDER], ABI_VERSION, protocol(OLDER, PROTOCOL_VERSION, "client")),
        (SUPPORTED_VERSIONS, NEWER_ABI, arena(NEWER_ABI, ABI_VERSION)),
    ],
    ids=["unknown newer", "older", "another arena"],
)
def test_a_client_of_another_version_runs_without_the_cache_and_says_so_once(
    pair: Pair, reference: Engine, versions: list[int], abi: int, sentence: str
) -> None:
    if versions != [NEWER]:  # as it was started
        pair.speak(versions, abi)
        pair.restart()
    until("the refusal in the engine's log", lambda: sentence in pair.engine.log.read_text())
    pair.works_without(reference, 100 * abi + versions[0])
    daemon_serves_others(pair.daemon)
    assert f"attach refused: {sentence}" in pair.daemon.output()
    time.sleep(3 * BACKOFF_S)  # it has been refused again since
    assert pair.engine.log.read_text().count(sentence) == 1
    assert all(line.startswith("kvkeep: ") or " kvkeep: " in line for line in pair.refusals())
    assert "Traceback" not in pair.engine.log.read_text()
    pair.speak(SUPPORTED_VERSIONS)  # it was upgraded, or the daemon was
    pair.works_with(reference, 500 + 100 * abi + versions[0])


@pytest.mark.parametrize(
    ("versions", "abi", "sentence"),
    [
        ([NEWER], ABI_VERSION, protocol(PROTOCOL_VERSION, NEWER, "client")),
        ([OLDER], ABI_VERSION, protocol(PROTOCOL_VERSION, OLDER, "daemon")),
        (SUPPORTED_VERSIONS, NEWER_ABI, arena(ABI_VERSION, NEWER_ABI)),
    ],
    ids=["unknown newer", "older", "another arena"],
)
def test_a_daemon_that_comes_back_in_another_version_ends_the_cache_and_not_the_engine(
    pair: Pair, reference: Engine, versions: list[int], abi: int, sentence: str
) -> None:
    pair.speak(SUPPORTED_VERSIONS)
    pair.restart()
    pair.works_with(reference, 2000 + 100 * abi + versions[0])
    before = pair.engine.log.read_text().count(sentence)
    pair.restart(versions, abi)
    until("the refusal in the engine's log", lambda: pair.engine.log.read_text().count(sentence) > before)
    pair.works_without(reference, 3000 + 100 * abi + versions[0])
    with pytest.raises(AttachRefused, match=r"upgrade|install the same"):
        Client.attach(pair.daemon.run_dir)
    pair.restart()
    pair.works_with(reference, 4000 + 100 * abi + versions[0])
    assert pair.engine.log.read_text().count(sentence) == before + 1
    assert "Traceback" not in pair.engine.log.read_text()


def test_an_engine_and_a_daemon_of_one_other_version_understand_each_other(pair: Pair, reference: Engine) -> None:
    """Nothing but the numbers decides."""
    pair.speak([NEWER], NEWER_ABI)
    pair.restart([PROTOCOL_VERSION, NEWER], NEWER_ABI)
    pair.works_with(reference, 5000)
