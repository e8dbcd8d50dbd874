"""`kvkeep migrate lmcache`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.daemon.cli_migrate import migrate
from kvkeep.daemon.config import load
from kvkeep.daemon.lmcache import _EXACT, instead

LINE = (
    "lmcache server --host localhost --port 6555 --l1-size-gb 2 --eviction-policy LRU --chunk-size 256 "
    "--shm-name pool --no-l1-use-lazy --supported-transfer-mode engine_driven --http-port 9000"
)


def run(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep.daemon.cli", "migrate", "lmcache", *words], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_command_line_becomes_one_that_kvkeepd_takes() -> None:
    found = migrate(LINE)
    assert found["refused"] == []
    config = load(found["command"][1:], {}).config
    assert (config.port, config.http_port, config.chunk_size, config.l1_bytes) == (6555, 9000, 256, 2 << 30)
    assert sum("changes nothing here" in note for note in found["notes"]) == 3


def test_the_same_line_starts_kvkeepd_as_it_is() -> None:
    config = load(shlex.split(LINE)[2:], {}).config
    assert (config.port, config.http_port) == (6555, 9000)


def test_their_defaults_are_said() -> None:
    found = migrate("lmcache server --l1-size-gb 2 --eviction-policy LRU")
    config = load(found["command"][1:], {}).config
    assert (config.port, config.http_port) == (5555, 8080)
    assert any("watermark" in note for note in found["notes"])


def test_what_cannot_be_carried_over_is_said_and_is_status_1() -> None:
    status, said = run(f"{LINE} --p2p-advertise-url x --supported-transfer-mode=lmcache_driven --l1-sise 3 --json")
    assert status == 1
    assert "--p2p-advertise-url" in said
    assert "engine_driven" in said
    assert "--l1-sise: neither lmcache server nor kvkeepd has it" in said


def test_json_and_what_cannot_be_read() -> None:
    status, said = run(LINE, "--json")
    assert status == 0
    assert json.loads(said)["command"][0] == "kvkeepd"
    assert run("lmcache server --chunk-size 1.5")[0] == 2
    assert run("lmcache server --chunk-size 16 stray")[0] == 2


def test_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "server.yaml"
    path.write_text("l1_size_gb: 2\nport: 6555\nl1_use_lazy: false\nl2_adapter:\n  - {type: fs, base_path: /x}\n")
    found = migrate(str(path))
    assert found["refused"] == []
    config = load(found["command"][1:], {}).config
    assert config.port == 6555
    assert len(config.l2_adapter) == 1


def test_every_hint_is_one_sentence() -> None:
    for name in _EXACT:
        hint = instead(name)
        assert hint
        assert "\n" not in hint
